"""Drafts made of drafts: their logits are those of their parts over the whole text."""

import pytest
import torch
from drafted_cases import assert_drafts_as_said, assert_later_turns_agree, small_draft, steps_of
from head_cases import head_of
from medusa_checkpoints import heads_of
from own_drafts import Bigrams
from profile_cases import REJECTION
from retrieval_cases import TEXTS
from tiny_models import tiny_llama, transformers_greedy

from heavypath.kernels.filtering import Filters
from heavypath.speculative import Cascade, EarlyExit, Lookahead, Mixture, PromptLookup, Retrieval, SpeculativeDecoder
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count
from heavypath.speculative.drafts.lookahead import LookaheadCache
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.walking import Extent, walk

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def composites(target, tmp_path_factory):
    small, head, lookup = small_draft(), head_of(target), PromptLookup(2)
    medusa, _ = heads_of(target, tmp_path_factory.mktemp("medusa"), heads=2)
    return {
        "model above lookup": Cascade([small, lookup], levels=[1, 3]),
        "model above model": Cascade([small, small_draft(6)], levels=[2, 1]),
        "head above lookup": Cascade([head, lookup], levels=[2, 2]),
        "medusa above lookup": Cascade([medusa, lookup], levels=[2, 2]),
        "lookup above head": Cascade([lookup, head], levels=[1, 2]),
        "three": Cascade([small, head, lookup], levels=[1, 1, 1]),
        "model beside lookup": Mixture([small, lookup], weights=[0.7, 0.3]),
        "head beside model beside lookup": Mixture([head, small, lookup]),
        "medusa beside lookup": Mixture([medusa, lookup], weights=[0.7, 0.3]),
    }


@pytest.mark.parametrize(("name", "method"), [
    ("model above lookup", "chain"), ("model above model", "sequoia"), ("head above lookup", "dyspec"),
    ("medusa above lookup", "sequoia"), ("lookup above head", "sequoia"), ("three", "sequoia"),
    ("model beside lookup", "dyspec"), ("head beside model beside lookup", "sequoia"),
    ("medusa beside lookup", "sequoia"),
])  # fmt: skip
def test_what_is_drafted_is_what_the_parts_say_of_the_whole_text(name, method, target, composites):
    draft, depth = composites[name], None if method == "chain" else 3
    decoder = SpeculativeDecoder(target, draft, method, tree_size=7, max_depth=depth)
    assert_drafts_as_said(decoder, draft, 14)


@pytest.mark.parametrize("name", ["three", "head beside model beside lookup"])
def test_a_later_turn_drafts_the_same_with_and_without_what_is_cached(name, target, composites):
    assert_later_turns_agree(SpeculativeDecoder(target, composites[name], "sequoia", tree_size=8))


@pytest.mark.parametrize("order", [1, -1])
def test_logits_of_parts_of_two_types_lie_in_one_tensor_of_fp32(order):
    """A model of 16 bits and the text itself, whose logits are fp32."""
    target = tiny_llama(1)
    parts = [tiny_llama(5, layers=1).bfloat16(), PromptLookup(2)][::order]
    out, steps = steps_of(SpeculativeDecoder(target, Cascade(parts, [1, 2]), tree_size=5), PROMPT, 20)
    assert {drafted.logits.dtype for _, drafted in steps if drafted.logits is not None} == {torch.float32}
    assert torch.equal(out.sequences, transformers_greedy(target, PROMPT, 20))


def test_a_lookahead_takes_part_in_the_pass_of_a_composite(target):
    ahead, prompt = Lookahead(window=3, ngram=3, pool=8), torch.tensor([[3, 1, 4, 1, 5], [2, 2, 6, 0, 1]])
    small, expected = small_draft(), transformers_greedy(target, prompt, 30)
    nested = Cascade([small, Mixture([PromptLookup(), ahead])], levels=[1, 2])
    for draft, method in ((Mixture([small, ahead]), "sequoia"), (nested, "dyspec")):
        decoder = SpeculativeDecoder(target, draft, method, tree_size=8)
        caches, run = [], decoder.runner.run

        def noting(plan, workspace, run=run, caches=caches, **more):
            caches.append(workspace.draft_cache)
            return run(plan, workspace, **more)

        decoder.runner.run = noting
        assert torch.equal(decoder.generate(prompt, 30).sequences, expected)
        found = [part for _, part in decoder._draft.parts(caches[-1]) if isinstance(part, LookaheadCache)]
        assert (found[0].pool >= 0).any(), "the pool got no n-grams"


def test_a_composite_of_composites_and_of_an_own_draft(target):
    small, retrieval = small_draft(), Retrieval(TEXTS, max_ngram=3)
    own = Bigrams(torch.randn(7, 7, generator=torch.Generator().manual_seed(3)))
    draft = Mixture([Cascade([small, retrieval], levels=[1, 2]), own], weights=[3, 1])
    out = SpeculativeDecoder(target, draft, "dyspec").generate(PROMPT, 20)
    assert torch.equal(out.sequences, transformers_greedy(target, PROMPT, 20))
    assert draft_parameter_count(draft, target) == small.num_parameters()
    assert describe(draft).startswith("Mixture of Cascade of llama, 1 layers")


def test_calibration_asks_each_part_at_its_own_depth(target):
    """The target drafts two levels for itself, which are all accepted, and what proposes nothing drafts the rest."""
    draft = Cascade([target, Bigrams(torch.full((7, 7), -torch.inf))], levels=[2, 2])
    forward, extent = forward_of(target, "target"), Extent(tokens=24, sequences=4)
    draft = as_draft(draft, forward, target)
    counted = walk(forward, draft, [PROMPT[0]], REJECTION, Filters(1.0), extent, seed=0)
    accepted = counted.accepted.sum(1)
    assert torch.equal(counted.reached[:2], accepted[:2])
    assert counted.reached[2] > 0 == accepted[2]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Cascade([PromptLookup()], [1]), r"at least two drafts, got \[PromptLookup\]$"),
    (lambda: Mixture([tiny_llama(1)]), r"at least two drafts, got \[LlamaForCausalLM\]$"),
    (lambda: Mixture(tiny_llama(1)), "at least two drafts, got LlamaForCausalLM$"),
    (lambda: Cascade([PromptLookup(), EarlyExit(1)], [1]), "for each of its 2 drafts, got \\[1\\]"),
    (lambda: Cascade([PromptLookup(), EarlyExit(1)], [0, 1]), "at least 1"),
    (lambda: Mixture([PromptLookup(), EarlyExit(1)], [1, -1]), r"weight above 0 .* got \[1, -1\]"),
    (lambda: Mixture([PromptLookup(), EarlyExit(1)], ["a", 1]), "weights must be a number, got 'a'"),
    (lambda: Mixture([PromptLookup(), EarlyExit(1)], [1, True]), "weights must be a number, got True"),
])  # fmt: skip
def test_what_makes_no_composite_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_two_heads_and_foreign_vocabularies_are_refused(target, composites):
    head, medusa = head_of(target), composites["medusa above lookup"].drafts[0]
    for other in (Cascade([head_of(target), PromptLookup()], [1, 1]), medusa):
        with pytest.raises(ValueError, match="can have one trained head among them, got 2"):
            SpeculativeDecoder(target, Mixture([head, other]))
    with pytest.raises(ValueError, match="one lookahead"):
        SpeculativeDecoder(target, Mixture([Lookahead(), Lookahead()]))
    with pytest.raises(TypeError, match="draft must be"):
        SpeculativeDecoder(target, Mixture([PromptLookup(), "gpt2"]))
