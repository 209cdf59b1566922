"""Several drafts that draft sequences of their own: what they draft, the law of the text, and what takes no merge."""

from itertools import product

import pytest
import torch
from drafted_cases import assert_drafts_as_said, assert_later_turns_agree, small_draft, steps_of
from head_cases import head_of
from medusa_checkpoints import heads_of
from own_drafts import Bigrams
from tiny_models import tiny_llama, transformers_greedy
from verification_oracle import Language, drawn, rejecting, static

from heavypath.kernels.nodes import Nodes
from heavypath.speculative import (
    METHODS,
    Cascade,
    Lookahead,
    Merge,
    Mixture,
    PromptLookup,
    SpeculativeDecoder,
    TokenTree,
    calibrate,
    goodness_of_fit,
    joint_law,
    read_trace,
)
from heavypath.speculative.drafts.kinds import describe, draft_parameter_count
from heavypath.speculative.drafts.merge import MergeVerifier
from heavypath.speculative.loading import load_draft

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
# Four children, the first of them wide.
TREE = TokenTree([-1, 0, 1, 1, 3, 0, 5, 0, 7, 0], [0, 0, 0, 1, 0, 1, 0, 2, 0, 3])
DEEP = TokenTree([-1, 0, 1, 1, 3, 0, 5, 5, 7, 0], [0, 0, 0, 1, 0, 1, 0, 1, 0, 2])


@pytest.fixture(scope="module")
def small():
    return [small_draft(5), small_draft(6)]


@pytest.fixture(scope="module")
def three(target, small):
    """A head, a model and a cascade."""
    return Merge([head_of(target), small[0], Cascade([small[1], PromptLookup(2)], [1, 2])])


@pytest.mark.parametrize("count", [2, 3])
def test_each_node_is_drawn_from_what_its_own_draft_says_of_the_whole_text(count, target, small, three):
    """In ragged batches, over steps that accept nodes of one draft, which the others must know in the next step."""
    merge = three if count == 3 else Merge([small[0], PromptLookup(2)])
    decoder = SpeculativeDecoder(target, merge, "specinfer", tree=TREE)
    nodes = assert_drafts_as_said(decoder, merge, 20)
    assert {node.first % count for node in nodes} == {*range(count)}


def test_greedy_children_are_the_likeliest_tokens_of_one_draft_after_the_other(target, small):
    _, steps = steps_of(SpeculativeDecoder(target, Merge(small), "specinfer", tree=TREE), PROMPT, max_new_tokens=6)
    drafted = steps[0][1]
    first = [int(drafted.tokens[0, node]) for node in range(len(TREE)) if drafted.parents[node] == 0]
    order = [int(drafted.ranks[node]) for node in range(len(TREE)) if drafted.parents[node] == 0]
    likeliest = [model(PROMPT).logits[0, -1].topk(2).indices.tolist() for model in small]
    assert dict(zip(order, first, strict=True)) == {
        0: likeliest[0][0], 1: likeliest[1][0], 2: likeliest[0][1], 3: likeliest[1][1],
    }  # fmt: skip


@pytest.mark.parametrize(("method", "options"), [
    ("specinfer", {"tree": DEEP}), ("specinfer", {"tree": DEEP, "verifier": "rejection"}),
    ("sequoia", {"tree": DEEP}), ("rsd-c", {"branching": [3, 2], "verifier": "traversal"}),
    ("spectr", {"width": 3, "tree_size": 7}), ("ersd", {"tree": DEEP}),
])  # fmt: skip
def test_any_method_with_static_trees_takes_a_merge_and_keeps_the_law(method, options):
    """Filters leave tokens out, so that children of all kinds are absent."""
    target, prompt, filters = tiny_llama(1), torch.tensor([3, 1, 4, 3, 1]), {"temperature": 0.9, "top_k": 5}
    merge = Merge([Bigrams(2 * torch.randn(7, 7, generator=torch.Generator().manual_seed(seed))) for seed in (1, 2)])
    decoder = SpeculativeDecoder(target, merge, method, **options)
    out = decoder.generate(prompt.expand(10_000, -1), max_new_tokens=3, seed=4, **filters)
    assert goodness_of_fit(out.sequences[:, 5:], joint_law(target, prompt, 3, **filters)).is_lossless()
    assert out.stats.tokens_per_step > 1.3


@pytest.mark.parametrize("replacement", [True, False])
def test_over_all_draws_the_first_token_has_exactly_the_targets_law(replacement):
    """And of independent draws each child has the oracle's chance."""
    for seed, (drafts, children) in product(range(3), ((1, 2), (2, 2), (2, 3), (3, 3))):
        language = Language(3, seed, zeros=0.3)
        sources = [child % drafts for child in range(children)]
        growth = static([-1, *[0] * children])
        if replacement:
            every = drawn(language, growth, replacement=True, sources=[0, *sources])
            trees = [(each.tokens[1:], chance) for each, chance in every]
        else:
            trees = draws_without_replacement([language.draft((), source) for source in range(drafts)], children)
        tokens = torch.tensor([[0, *each] for each, _ in trees])
        nodes = Nodes(tokens, torch.tensor([-1, *[0] * children]), torch.tensor([0, *range(children)])).per_sequence()
        laws = torch.tensor([[*map(float, language.draft((), source))] for source in range(drafts)])
        target = torch.tensor([*map(float, language.target(()))])
        shares, left = MergeVerifier("held", replacement, drafts).decided(
            nodes, target.double().log().expand(len(trees), -1), laws.double().log().expand(len(trees), -1, -1), 1
        )
        law = shares[:, :1] * left
        law.scatter_add_(1, tokens[:, 1:].clamp(min=0), shares[:, 1:])
        chances = torch.tensor([float(chance) for _, chance in trees]).double()
        torch.testing.assert_close(chances @ law, target.double(), atol=1e-7, rtol=0)
        for (drawn_tokens, _), mine in zip(trees if replacement else (), shares.tolist(), strict=False):
            given = [language.draft((), source) for source in sources]
            expected, _ = rejecting(language.target(()), given, drawn_tokens, True)
            assert mine[1:] == pytest.approx([*map(float, expected)], abs=1e-6)


def draws_without_replacement(laws, children):
    """Each assignment of tokens to the root's children, -1 where a draft has no token left, and its probability."""
    found = [((), 1)]
    for child in range(children):
        source, further = child % len(laws), []
        for tokens, chance in found:
            left = [0 if v in tokens[source :: len(laws)] else q for v, q in enumerate(laws[source])]
            more = [(v, q / sum(left)) for v, q in enumerate(left) if q] or [(-1, 1)]
            further += [((*tokens, v), chance * q) for v, q in more]
        found = further
    return found


def test_a_later_turn_drafts_the_same_with_and_without_what_is_cached(target, three):
    assert_later_turns_agree(SpeculativeDecoder(target, three, "specinfer", tree=TREE))


def test_lookahead_and_medusa_heads_take_part(target, small, tmp_path):
    """The heads draft one level, and nothing below it."""
    expected = transformers_greedy(target, PROMPT, 30)
    for other in (Lookahead(window=3, ngram=3, pool=8), heads_of(target, tmp_path, heads=1)[0]):
        decoder = SpeculativeDecoder(target, Merge([small[0], other]), "specinfer", tree=TREE)
        assert torch.equal(decoder.generate(PROMPT, 30).sequences, expected)
        assert decoder.generate(PROMPT, 30, temperature=1.0).stats.new_tokens == 30


def test_a_trace_of_a_merge_gives_no_reasons_where_children_are_weighed(target, small, tmp_path):
    for method, fates in (("specinfer", {"refused"}), ("naive", {"other"})):
        decoder = SpeculativeDecoder(target, Merge(small), method, tree=TREE)
        decoder.generate(PROMPT.expand(3, -1), trace=tmp_path / "trace", max_new_tokens=40, temperature=0.9, seed=2)
        header, steps = read_trace(tmp_path / "trace")
        assert header["draft"]["name"] == "model and model"
        assert header["verify"] == ("own" if method == "specinfer" else "target_sample")
        assert fates <= {fate for line in steps for fate in line["fates"]}
        assert {coin for line in steps for coin in line["coins"]} == {None}


def test_a_sequence_has_the_same_text_alone_and_in_a_batch_to_its_last_token(target, small):
    """In a batch the tree is whole until all sequences are near their ends; alone it is cut earlier."""
    decoder = SpeculativeDecoder(target, Merge(small), "sequoia", tree=TokenTree([-1, 0, 1, 0, 3]))
    numbers, options = torch.arange(12), {"temperature": 1.0, "eos_token_id": None, "seed": 3}
    batch = decoder.generate(PROMPT.expand(12, -1), 5, sequence_ids=numbers, **options).sequences
    for number, text in zip(numbers, batch, strict=True):
        alone = decoder.generate(PROMPT, 5, sequence_ids=number[None], **options).sequences[0]
        assert torch.equal(text, alone), number


def test_a_tree_that_grows_is_refused_also_when_it_is_assigned_later(target, small):
    decoder = SpeculativeDecoder(target, Merge(small), "sequoia")
    for size in (2, 6):
        decoder.tree = METHODS["dyspec"].tree_of(size)
        with pytest.raises(ValueError, match="the tree grows, and a Merge needs to know"):
            decoder.generate(PROMPT, 4)


def test_a_merge_in_words_and_numbers_and_by_its_name_on_the_command_line(target, small):
    merge = Merge([small[0], PromptLookup(2)])
    assert describe(merge).startswith("Merge of llama, 1 layers")
    assert draft_parameter_count(merge, target) == small[0].num_parameters()
    named = load_draft("merge:prompt-lookup+early-exit:1", target)
    assert isinstance(named, Merge)
    assert named.drafts[0] == PromptLookup()
    for wrong in ("merge:prompt-lookup", "merge:2*prompt-lookup+1*early-exit:1", "merge:prompt-lookup+"):
        with pytest.raises(ValueError, match=r"expected drafts as in merge:demo-head\+prompt-lookup, got"):
            load_draft(wrong, target)


@pytest.mark.parametrize("method", ["dyspec", "rsd-s", "eagle-2"])
def test_methods_whose_trees_grow_refuse_a_merge_by_name(method, target, small):
    with pytest.raises(ValueError, match=f"trees of method '{method}' grow, and a Merge needs to know"):
        SpeculativeDecoder(target, Merge(small), method)


def test_what_takes_no_merge_says_so(target, small):
    with pytest.raises(ValueError, match=r"Merge needs a list of at least two drafts, got \[LlamaForCausalLM\]$"):
        Merge([target])
    merge = Merge(small)
    for outer in (Mixture([small[0], merge]), Merge([merge, small[0]]), Cascade([merge, small[0]], [1, 1])):
        with pytest.raises(ValueError, match="a Merge has paths of its own, and is no part of a "):
            SpeculativeDecoder(target, outer, "specinfer")
    own = SpeculativeDecoder(target, merge, "specinfer", verifier=lambda *given, **options: None)
    with pytest.raises(ValueError, match="a user's verifier gets one draft distribution for each node"):
        own.generate(PROMPT, 4, temperature=1.0)
    with pytest.raises(ValueError, match="in a Merge the root's first 2 children are drawn from different drafts"):
        calibrate(target, merge)
    assert SpeculativeDecoder(target, merge, "autoregressive").generate(PROMPT, 4).stats.tokens_per_step == 1
