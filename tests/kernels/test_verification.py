"""verify_tree decides as the exact oracle does, in numbers that are hard for floats, and refuses bad input.

What the oracle's rules emit is the target's law: test_verification_oracle.py.
"""

from itertools import product

import pytest
import torch
import verification_oracle as oracle
from devices import DEVICE, placed, run_on
from verification_laws import check_decisions
from verification_oracle import GROWTHS, Drawn, Filtered, Language, by_the_first_token, drawn, static

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import EITHER_DRAW, sibling_order
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree

PLAIN = Filters()
RULES = {  # the oracle's verifier of a method, and whether children are independent draws
    **{(name, False): getattr(oracle, name) for name in EITHER_DRAW},
    **{(name, True): getattr(oracle, name) for name in EITHER_DRAW},
    ("without_replacement", False): oracle.rejection,
    ("with_replacement", True): oracle.rejection,
    ("kseq", True): oracle.k_seq,
}
each_rule = pytest.mark.parametrize(("method", "replacement"), RULES)


def check(method, replacement, language, growth, fill=False, sources=(), **options) -> int:
    trees = [tree for tree, _ in drawn(language, growth, (), replacement, fill, sources)]
    verifier = RULES[method, replacement]
    return check_decisions(verifier, language, trees, method=method, replacement=replacement, **options)


@pytest.mark.budget(3.6)
@each_rule
@pytest.mark.parametrize("name", GROWTHS)
def test_every_walk_ends_where_the_oracle_says(name, method, replacement):
    for seed, zeros in enumerate((0.0, 0.4)):
        for fill in (False, True)[: 2 - replacement]:
            assert check(method, replacement, Language(3, seed, zeros), GROWTHS[name], fill) > 1


@pytest.mark.slow
@each_rule
def test_every_walk_in_every_tree_of_five_nodes_ends_where_the_oracle_says(method, replacement):
    for seed, parents in enumerate(product([0], [0, 1], [0, 1, 2], [0, 1, 2, 3])):
        check(method, replacement, Language(3, seed, 0.1), static([-1, *parents]))


@each_rule
def test_larger_vocabularies_shallow_walks_and_trees_that_grow(method, replacement):
    assert check(method, replacement, Language(5, 1, 0.2), static([-1, 0, 0, 0])) > 10
    for depth in (0, 1, 2):
        check(method, replacement, Language(3, 2), GROWTHS["three levels"], max_depth=depth)
    check(method, replacement, Language(3, 3, 0.2), by_the_first_token)


EVERY_FILTER = Filters(0.5, 3, 0.9, 0.2), Filters(0.5, 3, 0.95, 0.05)
ONE_FILTER = [
    (Filters(0.5), PLAIN), (PLAIN, Filters(0.5)), (Filters(top_k=2), Filters(top_k=3)), (PLAIN, Filters(top_k=1)),
    (Filters(top_p=0.7), Filters(top_p=0.9)), (Filters(min_p=0.4), Filters(min_p=0.1)),
]  # fmt: skip


@pytest.mark.parametrize(("method", "replacement", "target", "draft"), [
    *((*rule, *EVERY_FILTER) for rule in RULES), *(("without_replacement", False, *filters) for filters in ONE_FILTER),
    *(("kseq", True, PLAIN, draft) for draft in (Filters(0.5), Filters(top_k=1))),  # which asks for all of Q
])  # fmt: skip
def test_filters_of_both_sides_act_as_the_oracles(method, replacement, target, draft):
    for fill in (False, True)[: 2 - replacement]:
        check(method, replacement, Filtered(Language(4, 7, most=97), target, draft), static([-1, 0, 0, 1]), fill)


@pytest.mark.parametrize("method", [*EITHER_DRAW, "without_replacement", "with_replacement"])
def test_the_drafts_likeliest_tokens_are_point_masses(method):
    """The oracle draws each from a law of its own. To `held` there is nothing to gain: it is rejection."""
    for seed in range(4):
        language = Filtered(Language(4, seed, most=97), Filters(0.5), Filters(0.0))
        sources = [0, 0, 1, 2, 0, 1, 0]
        trees = [tree for tree, _ in drawn(language, static([-1, 0, 0, 0, 1, 1, 2]), (), True, False, sources)]
        rule = oracle.rejection if method == "held" else RULES[method, method == "with_replacement"]
        check_decisions(rule, language, trees, method=method, replacement=True)


@each_rule
def test_a_child_that_its_draft_could_not_have_drawn_is_skipped(method, replacement):
    """Even one that the target is sure of; and it takes nothing away from the next one."""
    language, some = Language(3, 0), oracle.whole([1, 2, 0])
    language._known = {("target", ()): oracle.whole([1, 1, 4]), ("draft", ()): some}
    for tokens in ((2, 0, 1), (2, 2, 0), (0, 2, 1)):
        tree = Drawn((-1, 0, 0, 0), (-1, *tokens), (0, 0, 0, 0))
        check_decisions(RULES[method, replacement], language, [tree], method=method, replacement=replacement)


@pytest.mark.parametrize("method", ["without_replacement", "with_replacement", "held", "kseq", "traversal"])
def test_a_coin_of_zero_does_not_accept_an_impossible_child(method, monkeypatch):
    monkeypatch.setattr("heavypath.kernels.verification.coins", lambda seed, row, rank: 0.0 * row)
    tokens, parents = torch.tensor([[0, 0]]), torch.tensor([-1, 0])
    target = torch.tensor([-torch.inf, 0.0]).expand(1, 2, 2)
    verified = verify_tree(tokens, parents, target, torch.zeros(1, 2, 2), method=method, impl="torch")
    assert (verified.length.tolist(), verified.next_token.tolist()) == ([0], [1])


@pytest.mark.parametrize("method", ["without_replacement", "held", "traversal", "held_traversal"])
def test_remaining_draft_mass_does_not_cancel(method):
    """Q(0) rounds to 1, yet the second child's conditional probabilities are 1/4 and 3/4, the target's 1/2 and 1/2."""
    draft = torch.tensor([0.0, -1000.0, -1000.0 + torch.log(torch.tensor(3.0))])
    target = torch.tensor([-torch.inf, 0.0, 0.0])
    tokens = torch.tensor([[0, 0, 1], [0, 0, 2]]).repeat(1000, 1)
    given = tokens, torch.tensor([-1, 0, 0]), *(row.expand(2000, 3, 3) for row in (target, draft))
    verified = verify_tree(*given, method=method)
    accepted = verified.length.double()
    assert accepted[::2].mean() == 1
    assert accepted[1::2].mean() == pytest.approx(2 / 3, abs=5 * 0.5 / 1000**0.5)
    if method == "without_replacement":
        few = (each if each.dim() == 1 else each[:4] for each in given)
        by_kernel = run_on(DEVICE, verify_tree, *few, method=method, impl="triton")
        assert torch.equal(by_kernel.length, verified.length[:4])


@pytest.mark.parametrize("method", ["traversal", "held_traversal"])
def test_weights_that_shrink_below_every_number_are_0(method):
    """A chain of tokens that the target hardly ever takes."""
    tokens, parents = torch.ones(1, 12, dtype=torch.long), torch.arange(-1, 11)
    target, draft = torch.tensor([0.0, -80.0]).expand(1, 12, 2), torch.zeros(1, 12, 2)
    for impl in ("torch", "auto"):
        verified = verify_tree(tokens, parents, target, draft, method=method, seed=2, impl=impl)
        assert (verified.length.tolist(), verified.next_token.tolist()) == ([0], [0])


@pytest.mark.parametrize("temperature", [1e-8, 1e-42, 5e-324])
@pytest.mark.parametrize("method", ["without_replacement", "with_replacement", "kseq", "race", "target_sample"])
def test_a_tiny_temperature_is_the_argmax(method, temperature):
    """The child is the draft's argmax, which the target accepts after node 0 only."""
    draft_logits = torch.tensor([50.0, 3.0, 60.0]).expand(1, 3, 3)
    target_logits = torch.stack([draft_logits[0, 0], torch.tensor([-1e38, 3e38, 0.0]), torch.zeros(3)])[None]
    tokens, parents = torch.tensor([[0, 2, 2]]), torch.tensor([-1, 0, 1])
    verified = verify_tree(tokens, parents, target_logits, draft_logits, method=method, temperature=temperature)
    assert verified.path.tolist() == [[0, 1, -1]]
    assert verified.next_token.tolist() == [1]


def test_siblings_are_ordered_by_index_where_no_ranks_are_given():
    parents = torch.tensor([[-1, 0, 1, 0, 1, 3, 0], [-1, 0, 0, 0, 1, 1, 1]])
    assert sibling_order(parents).tolist() == [[0, 0, 0, 1, 1, 0, 2], [0, 0, 1, 2, 0, 1, 2]]


def test_an_empty_batch_gives_an_empty_answer():
    empty = torch.zeros(0, 2, dtype=torch.long)
    verified = verify_tree(empty, torch.tensor([-1, 0]), torch.zeros(0, 2, 3), None, method="race", max_depth=1)
    assert [field.shape for field in verified] == [(0, 2), (0,), (0,)]


@pytest.mark.parametrize("method", ["without_replacement", "traversal", "target_sample"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_a_distribution_is_refused_where_it_is_read(method, dtype):
    """Nothing hangs below node 2, whose row of the draft is never read; absent nodes have no rows at all."""
    tokens, parents = torch.tensor([[0, 1, 2], [0, 2, 1]]), torch.tensor([-1, 0, 1])
    draft = torch.zeros(2, 3, 3, dtype=dtype)
    draft[:, 2] = torch.nan
    assert verify_tree(tokens, parents, torch.zeros_like(draft), draft, method=method).length.max() <= 2
    for bad in (torch.nan, torch.inf, -torch.inf):
        for side in ("target", "draft")[: 1 if method == "target_sample" else 2]:
            logits = {"target": torch.zeros_like(draft), "draft": draft.clone()}
            logits[side][1, 0] = bad
            with pytest.raises(ValueError, match=rf"{side}_logits must have a finite maximum .* \[1, 0\] has {bad}"):
                verify_tree(tokens, parents, *logits.values(), method=method)
            tokens_without = torch.tensor([[0, 1, 2], [0, -1, 1]])
            if side == "draft":
                assert verify_tree(tokens_without, parents, *logits.values(), method=method).length[1] == 0


GOOD = {
    "tokens": torch.tensor([[0, 1, 1]]),
    "parents": torch.tensor([-1, 0, 0]),
    "target_logits": torch.zeros(1, 3, 3),
    "draft_logits": torch.zeros(1, 3, 3),
    "method": "with_replacement",
}
ELSEWHERE = torch.zeros(1, 3, dtype=torch.long, device="meta")


@pytest.mark.parametrize(("change", "message"), [
    ({"method": "typical"}, "method must be one of without_replacement, .* got 'typical'"),
    ({"replacement": True}, "is for method 'held' or .*'with_replacement' says .* got replacement=True"),
    ({"temperature": 0.0}, "temperature 0 needs method 'greedy'"),
    ({"method": "kseq", "draft_temperature": 0.0}, "'kseq' needs draft_temperature > 0: .*; got 0"),
    ({"top_p": 0.0}, r"top_p must be .*\(0, 1\], got 0.0"),
    ({"draft_top_p": 1.5}, "draft_top_p must be .* got 1.5"),
    ({"impl": "cuda"}, "impl .* got 'cuda'"),
    ({"impl": "triton", "target_logits": torch.zeros(1, 3, 3).double()}, "takes fp32, fp16 or bf16 target_logits, got"),
    ({"tokens": torch.tensor([0, 1])}, r"tokens must be a LongTensor \[B, N\] with N >= 1, got torch.int64 \[2\]"),
    ({"tokens": torch.tensor([[0, 3, 1]])}, r"tokens must be in \[-1, 3\)"),
    ({"parents": torch.tensor([0, 0, 0])}, "parents must hold -1 at node 0"),
    ({"parents": torch.tensor([-1, 0])}, r"parents must be a LongTensor \[3\] or \[1, 3\]"),
    ({"target_logits": torch.zeros(1, 3, 0)}, r"target_logits must be floating point \[1, 3, V\]"),
    ({"target_logits": torch.zeros(1, 2, 3)}, r"target_logits must be floating point \[1, 3, V\]"),
    ({"draft_logits": None}, "'with_replacement' needs draft_logits"),
    ({"draft_logits": torch.zeros(1, 3, 4)}, r"target_logits' shape \[1, 3, 3\], got \[1, 3, 4\]"),
    ({"ranks": torch.tensor([0, 1, 3])}, r"ranks must differ among siblings and be in \[0, 3\)"),
    ({"ranks": torch.tensor([0, 1, 1])}, "ranks must differ among siblings"),
    ({"rows": torch.tensor([[0, 1, -1]])}, "rows must be at least 0, got -1"),
    ({"rows": torch.zeros(3, dtype=torch.long)}, r"rows must be a LongTensor \[1, 3\]"),
    ({"rows": ELSEWHERE}, "rows must be on the device of tokens, cpu, got meta"),
    ({"seed": torch.zeros(2).long()}, "seed must be"),
    ({"max_depth": -1}, "max_depth must be at least 0, got -1"),
])  # fmt: skip
def test_bad_input_is_refused_with_what_was_given_and_expected(change, message):
    with pytest.raises(ValueError, match=message):
        verify_tree(**placed(GOOD | change))


@pytest.mark.parametrize("name", ["gumbel_topk", "greedy"])
def test_torch_func_is_refused_by_name(name):
    def given(logits):
        if name == "gumbel_topk":
            return gumbel_topk(logits, 3).tokens
        return verify_tree(torch.zeros(2, 2).long(), torch.tensor([-1, 0]), logits, None, method=name, temperature=0.0)

    with pytest.raises(TypeError, match=r"cannot be transformed by torch.func .* it takes a batch"):
        torch.vmap(given)(torch.zeros(3, 2, 2, 7))
