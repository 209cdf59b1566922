"""A method of one's own, from a rule for one node to the text; and what breaks the rule, or is around it, is found.

The rule is that of docs/examples/own_method.py. The oracle runs the example's own lines, so the code is what is
proved.
"""

import own_method
import pytest
import torch
import verification_oracle as oracle
from own_method import weigh_the_last
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import exact_law
from verification_cases import Problem
from verification_oracle import GROWTHS, Language, by_law, by_the_first_token, static

from heavypath.kernels import verification
from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.nodes import Nodes
from heavypath.kernels.noise import Noise
from heavypath.kernels.verifying import top_down as module
from heavypath.kernels.verifying.top_down import children_of
from heavypath.speculative import METHODS, Method, SpeculativeDecoder, TokenTree, top_down

PROMPT = torch.tensor([3, 1, 4])
TREE = TokenTree([-1, 0, 0, 1, 1, 1, 2, 3], [0, 1, 0, 0, 2, 1, 0, 0])  # siblings out of index order


@pytest.fixture
def mine(monkeypatch):
    monkeypatch.setitem(METHODS, "mine", Method("without_replacement", "without_replacement", own_method.binary))
    return "mine"


def keeps_the_law(rule, growth, language, length=3, **ways) -> bool:
    return oracle.keeps_the_law(oracle.top_down(by_law(rule)), language, growth, length, **ways)


@pytest.mark.parametrize("name", GROWTHS)
def test_the_rule_of_the_example_emits_the_targets_law_exactly(name):
    for seed, zeros in enumerate((0.0, 0.4)):
        assert keeps_the_law(weigh_the_last, GROWTHS[name], Language(3, seed, zeros, most=4))


def test_two_steps_of_it_emit_the_targets_law_exactly():
    assert keeps_the_law(weigh_the_last, static([-1, 0, 0, 2]), Language(3, 1, most=4), 4, steps=2)


def test_a_broken_rule_and_a_draw_that_the_rule_is_not_for_are_found():
    def not_left_out(log_target, log_draft, children):
        """Weighs the last child by Q, as though its elder siblings could have been drawn again."""
        last = children.gather(-1, (children >= 0).sum(-1, keepdim=True) - 1)
        return weigh_the_last(log_target, log_draft, torch.cat([last, torch.full_like(children, -1)], -1))

    languages = [Language(3, seed, most=4) for seed in range(4)]
    pair = static([-1, 0, 0])
    assert not all(keeps_the_law(not_left_out, pair, each) for each in languages)
    assert not all(keeps_the_law(weigh_the_last, pair, each, replacement=True) for each in languages)
    assert not all(keeps_the_law(weigh_the_last, by_the_first_token, each) for each in languages)  # a tree that grows


def test_the_joint_law_of_three_tokens_is_the_targets(mine, tiny_pair):
    shape, options = {"tree": TREE, "draft_temperature": 0.9, "draft_top_k": 2}, {"temperature": 1.2, "top_k": 5}
    decoder = SpeculativeDecoder(*tiny_pair, mine, verifier=top_down(weigh_the_last), **shape)
    out = decoder.generate(PROMPT.expand(6_000, -1), max_new_tokens=3, seed=11, **options)
    law = exact_law(tiny_pair[0], PROMPT, Filters(**options), 3)
    assert chi_square_p_value(joint_counts(out.sequences[:, 3:], 7), law) > SIGNIFICANCE
    assert out.stats.acceptance_by_depth[0] > 0.3


@pytest.mark.parametrize("method", ["naive", "naive-distinct", "top-k"])
def test_the_targets_own_law_is_a_sample_of_the_target(method, tiny_pair):
    """Of naive drafting some siblings are equal, whose children are followed together."""
    options = {"max_new_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 6}
    own, built_in = (
        SpeculativeDecoder(*tiny_pair, method, tree_size=8, verifier=verifier).generate(PROMPT[None], **options)
        for verifier in (top_down(lambda log_target, log_draft, children: log_target.exp()), None)
    )
    assert torch.equal(own.sequences, built_in.sequences)
    assert torch.equal(own.stats.accepted, built_in.stats.accepted)


def test_children_are_in_draw_order_and_those_that_are_absent_are_none():
    tokens = torch.tensor([[9, 5, 4, 3, -1, 2], [9, 1, -1, 6, 7, -1]])
    parents, ranks = torch.tensor([-1, 0, 0, 1, 0, 1]), torch.tensor([0, 1, 0, 0, 2, 1])
    expected = torch.full((2, 6, 6), -1)
    expected[0, 0, :2], expected[0, 1, :2] = torch.tensor([4, 5]), torch.tensor([3, 2])
    expected[1, 0, 1:3], expected[1, 1, :1] = torch.tensor([1, 7]), torch.tensor([6])
    assert torch.equal(children_of(Nodes(tokens, parents, ranks).per_sequence()), expected)
    by_index = children_of(Nodes(tokens[:1], parents, None).per_sequence())
    assert by_index[0, 0].tolist() == [5, 4, -1, -1, -1, -1]


FILTERS = Filters(0.9, top_k=3, min_p=0.01), Filters(1.1, top_k=4)


def verify_by(rule, tree, filters, drafted):
    """What a verifier by this rule makes of a tree of given logits; and its problem."""
    problem = Problem(tree, "without_replacement", filters, drafted, batch=2, seed=1)
    nodes = Nodes(problem.tokens, tree.parents, tree.ranks).per_sequence()
    verified = top_down(rule)(
        nodes, problem.target, problem.draft, max_depth=tree.depth, target_filters=filters, draft_filters=drafted,
        noise=Noise(torch.tensor(5), problem.rows),
    )  # fmt: skip
    return verified, problem


def test_a_rule_is_told_of_laws_behind_their_filters_and_leaves_may_say_anything():
    told = []

    def note(*given):
        told.extend(given)
        return weigh_the_last(*given).where((given[2] >= 0).any(-1, keepdim=True), torch.nan)

    _, problem = verify_by(note, TREE, *FILTERS)
    inner = [*range(4)]
    for found, logits, filters in zip(told, (problem.target, problem.draft), FILTERS, strict=False):
        expected = filtered_logprobs(logits[:, inner], filters)
        torch.testing.assert_close(found[:, inner], expected.float(), atol=1e-5, rtol=0)
    assert torch.equal(told[2], children_of(Nodes(problem.tokens, TREE.parents, TREE.ranks).per_sequence()))


@pytest.mark.budget(0.4)
@pytest.mark.parametrize(("rule", "error", "message"), [
    (lambda p, q, x: None, TypeError, r"rule '<lambda>' must return a tensor of probabilities \[1, 3, 7\], got None"),
    (lambda p, q, x: p[..., :2], ValueError, r"must return probabilities \[1, 3, 7\], got torch.float32 \[1, 3, 2\]"),
    (lambda p, q, x: p.exp().long(), ValueError, r"got torch.int64 \[1, 3, 7\]"),
    (lambda p, q, x: 2 * p.exp(), ValueError, r">= 0 that sum to 1 .* got a least of .* and sums of 1.* \.\. [12]\."),
    (lambda p, q, x: p, ValueError, r"got a least of -"),
    (lambda p, q, x: 3 * p.exp() - 2 * p.exp().mean(-1, keepdim=True), ValueError, r"got a least of -0"),
    (lambda p, q, x: p.exp() * torch.nan, ValueError, r"got a least of nan"),
])  # fmt: skip
def test_an_answer_that_is_no_law_is_refused(rule, error, message, tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair, tree=TokenTree.k_ary(2, 1), verifier=top_down(rule))
    with pytest.raises(error, match=message):
        decoder.generate(PROMPT[None], 8, temperature=1.0)


def test_likeliest_tokens_are_refused_where_they_would_be_weighed_as_draws(mine, tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair, mine, verifier=top_down(weigh_the_last), draft_temperature=0.0)
    with pytest.raises(ValueError, match=r"rule 'weigh_the_last' weighs children .* give draft_temperature > 0"):
        decoder.generate(PROMPT[None], 8, temperature=1.0)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("tree", "filters", "drafted"), [
    (TokenTree.k_ary(2, 1), Filters(0.9), Filters(1.1, top_k=3)), pytest.param(TREE, *FILTERS, marks=pytest.mark.slow),
])  # fmt: skip
def test_on_a_gpu_nodes_are_decided_as_on_a_cpu(tree, filters, drafted, monkeypatch):
    expected, _ = verify_by(weigh_the_last, tree, filters, drafted)
    for place in (module, verification):
        monkeypatch.setattr(place, "choose_impl", lambda function, impl, tensor, native=False: "triton")
    found, _ = verify_by(weigh_the_last, tree, filters, drafted)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert expected.length.max() > 0
