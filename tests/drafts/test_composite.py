"""Drafts made of drafts: their logits are those of their parts over the whole text, and nothing else changes."""

from pathlib import Path

import pytest
import torch
from composite_cases import followed, law_of, logits_of
from draft_checks import (
    assert_a_batch_is_each_alone,
    assert_greedy_text_is_that_of_transformers,
    assert_races_are_plain_sampling,
)
from head_cases import head_of, inner_nodes, steps_of
from lookup_cases import VOCAB as LOOKED_UP
from lookup_cases import searched
from own_drafts import Bigrams
from retrieval_cases import TEXTS
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import exact_law, tiny_llama

from heavypath.kernels.commit import StateField
from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    LOSSLESS_METHODS,
    METHODS,
    Cascade,
    EarlyExit,
    Lookahead,
    Mixture,
    PromptLookup,
    Retrieval,
    SpeculativeDecoder,
    calibrate,
    load_demo_head,
)
from heavypath.speculative.drafts import parts_of
from heavypath.speculative.drafts.lookahead import LookaheadCache
from heavypath.speculative.profile import describe, draft_parameter_count

DRAFTED = [name for name in METHODS if name != "autoregressive"]
QUICK = ("sequoia", "specinfer")
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "layers": 1, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, max_position_embeddings=256).double()


@pytest.fixture(scope="module")
def small():
    return tiny_llama(5, **SMALL).double()


def expected_of(draft, target, text, path):
    """What a cascade or a mixture of simple drafts is to say."""
    if isinstance(draft, Cascade):
        ends = torch.tensor(draft.levels).cumsum(0)
        stage = min(int((len(path) >= ends).sum()), len(draft.drafts) - 1)
        return law_of(logits_of(draft.drafts[stage], target, text, path))
    probs = torch.zeros(7)
    for part, weight in zip(draft.drafts, draft.weights or [0.9, 0.05, 0.05], strict=True):
        probs += weight * law_of(logits_of(part, target, text, path))
    return probs / probs.sum().clamp(min=1e-30)


def composites(target, small):
    head, lookup = head_of(target), PromptLookup(2)
    return {
        "model above lookup": Cascade([small, lookup], levels=[1, 3]),
        "model above model": Cascade([small, tiny_llama(6, **SMALL).double()], levels=[2, 1]),
        "head above lookup": Cascade([head, lookup], levels=[2, 2]),
        "lookup above head": Cascade([lookup, head], levels=[1, 2]),
        "three": Cascade([small, head, lookup], levels=[1, 1, 1]),
        "model beside lookup": Mixture([small, lookup], weights=[0.7, 0.3]),
        "head beside model beside lookup": Mixture([head, small, lookup]),
    }


NAMES = [
    "model above lookup", "model above model", "head above lookup", "lookup above head", "three",
    "model beside lookup", "head beside model beside lookup",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["chain", "sequoia", "dyspec"])
def test_what_is_drafted_is_what_the_parts_say_of_the_whole_text(name, method, target, small):
    draft, new = composites(target, small)[name], 14
    prompts = [torch.tensor([3, 1, 4, 1, 5, 2]), torch.tensor([2, 6, 5])]
    padded = torch.stack([prompts[0], torch.cat([torch.zeros(3, dtype=torch.long), prompts[1]])])
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    decoder = SpeculativeDecoder(target, draft, method, tree_size=7, max_depth=None if method == "chain" else 3)
    out, steps = steps_of(decoder, padded, attention_mask=mask, max_new_tokens=new, temperature=1.0)
    depths = []
    for before, drafted in steps:
        if drafted.logits is None:
            continue
        for slot in range(before.shape[1]):
            member, length = (int(before[field, slot]) for field in (StateField.MEMBER, StateField.LENGTHS))
            text = torch.cat([prompts[member], out.sequences[member, 6:]])[: length + 1]
            for node, path in inner_nodes(before, drafted, slot):
                if -1 in path:
                    continue  # below a node for which nothing was proposed
                expected, drew = expected_of(draft, target, text, path), law_of(drafted.logits[slot, node])
                torch.testing.assert_close(drew, expected, atol=3e-4, rtol=1e-3)
                depths.append(len(path))
    assert max(depths) > 0, "there were only roots"
    assert out.stats.tokens_per_step > 1.05, "nothing is shown of rows behind accepted nodes"


def test_the_search_of_this_file_is_that_of_the_other_tests():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        text = torch.randint(0, LOOKED_UP, (12,), generator=generator).tolist()
        options = PromptLookup(3)
        assert followed(text, text, options, LOOKED_UP) == searched(text, text, options)


@pytest.mark.parametrize("name", ["model above lookup", "head beside model beside lookup"])
@pytest.mark.parametrize("method", [
    each if each in QUICK else pytest.param(each, marks=pytest.mark.slow)
    for each in DRAFTED if each in LOSSLESS_METHODS
])  # fmt: skip
def test_the_joint_law_of_four_tokens_is_exact(name, method):
    target, prompt = tiny_llama(1), torch.tensor([3, 1, 4, 3, 1])
    draft = {
        "model above lookup": Cascade([EarlyExit(1), PromptLookup(2)], levels=[1, 2]),
        "head beside model beside lookup": Mixture([head_of(target), EarlyExit(1), PromptLookup(2)]),
    }[name]
    decoder = SpeculativeDecoder(target, draft, method, tree_size=6)
    out = decoder.generate(prompt.expand(20_000, -1), max_new_tokens=4, temperature=0.9, seed=4)
    law = exact_law(target, prompt, Filters(0.9), 4)
    assert chi_square_p_value(joint_counts(out.sequences[:, 5:], 7), law) > SIGNIFICANCE


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("method", "verifier"), [("chain", "rejection"), ("sequoia", "held_traversal")])
def test_the_joint_law_of_a_cascade_of_two_types_is_exact(method, verifier, order):
    """A model of 16 bits and the text itself, whose logits are fp32: those of a tree lie in one tensor."""
    target, prompt = tiny_llama(1), torch.tensor([3, 1, 4, 3, 1])
    parts = [tiny_llama(5, **SMALL).bfloat16(), PromptLookup(2)][::order]
    decoder = SpeculativeDecoder(target, Cascade(parts, levels=[1, 2]), method, tree_size=5, verifier=verifier)
    out = decoder.generate(prompt.expand(6_000, -1), max_new_tokens=3, temperature=0.9, seed=4)
    law = exact_law(target, prompt, Filters(0.9), 3)
    assert chi_square_p_value(joint_counts(out.sequences[:, 5:], 7), law) > SIGNIFICANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", [
    each if each in (*QUICK, "ersd") else pytest.param(each, marks=pytest.mark.slow) for each in DRAFTED
])  # fmt: skip
def test_greedy_text_is_the_targets_own(name, method, target, small):
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    expected = SpeculativeDecoder(target, None, "autoregressive").generate(prompt, 40).sequences
    out = SpeculativeDecoder(target, composites(target, small)[name], method, tree_size=8).generate(prompt, 40)
    assert torch.equal(out.sequences, expected)


@pytest.mark.slow
def test_greedy_text_with_every_draft_without_weights_of_its_own_is_that_of_transformers(demo_pair):
    target, small, tokenizer = demo_pair
    head, retrieval = load_demo_head(target), Retrieval([Path(__file__)], tokenizer)
    drafts = [
        Lookahead(), retrieval, PromptLookup(), EarlyExit([0, 7]), Mixture([head, retrieval]),
        Cascade([small, Lookahead()], levels=[2, 4]),
    ]  # fmt: skip
    decoders = [SpeculativeDecoder(target, draft, m, tree_size=12) for draft in drafts for m in ("sequoia", "dyspec")]
    assert_greedy_text_is_that_of_transformers(decoders, tokenizer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["sequoia", "dyspec", "ersd"])
def test_a_batch_is_decoded_as_each_alone(name, method, target, small):
    decoder = SpeculativeDecoder(target, composites(target, small)[name], method, tree_size=7)
    assert_a_batch_is_each_alone(decoder)


@pytest.mark.parametrize("name", NAMES)
def test_ersd_writes_what_plain_sampling_writes(name, target, small):
    draft = composites(target, small)[name]
    assert_races_are_plain_sampling(target, draft, torch.tensor([[3, 1, 4, 1, 5]]), temperature=0.7)


@pytest.mark.parametrize("name", NAMES)
def test_a_later_turn_drafts_the_same_with_and_without_what_is_cached(name, target, small):
    decoder = SpeculativeDecoder(target, composites(target, small)[name], "sequoia", tree_size=8)
    first = decoder.generate(torch.tensor([[3, 1, 4, 1, 5, 2, 2]]), max_new_tokens=30, temperature=1.0)
    cache = first.cache
    for kept in (37, 20, 3):
        prompt = torch.cat([first.sequences[:, :kept], torch.tensor([[1, 6, 2]])], 1)
        fresh, fresh_steps = steps_of(decoder, prompt, max_new_tokens=20, temperature=1.0)
        again, again_steps = steps_of(decoder, prompt, max_new_tokens=20, temperature=1.0, past=cache)
        assert again.stats.reused_tokens >= kept - 12
        assert torch.equal(fresh.sequences, again.sequences)
        for (_, one), (_, other) in zip(fresh_steps, again_steps, strict=True):
            if one.logits is not None:
                torch.testing.assert_close(one.logits[:, 0], other.logits[:, 0])


@pytest.mark.parametrize("method", ["sequoia", "dyspec"])
def test_a_lookahead_takes_part_in_the_pass_of_a_composite(method, target, small):
    ahead, prompt = Lookahead(window=3, ngram=3, pool=8), torch.tensor([[3, 1, 4, 1, 5], [2, 2, 6, 0, 1]])
    for draft in (Mixture([small, ahead]), Cascade([small, Mixture([PromptLookup(), ahead])], levels=[1, 2])):
        decoder = SpeculativeDecoder(target, draft, method, tree_size=8)
        caches, run = [], decoder.runner.run

        def noting(plan, workspace, run=run, caches=caches, **more):
            caches.append(workspace.draft_cache)
            return run(plan, workspace, **more)

        decoder.runner.run = noting
        expected = SpeculativeDecoder(target, None, "autoregressive").generate(prompt, 30).sequences
        assert torch.equal(decoder.generate(prompt, 30).sequences, expected)
        found = [part for _, part in parts_of(decoder._draft, caches[-1]) if isinstance(part, LookaheadCache)]
        assert (found[0].pool >= 0).any(), "the pool got no n-grams"


def test_a_composite_of_composites_and_of_an_own_draft(target, small):
    retrieval = Retrieval(TEXTS, max_ngram=3)
    own = Bigrams(torch.randn(7, 7, generator=torch.Generator().manual_seed(3)))
    draft = Mixture([Cascade([small, retrieval], levels=[1, 2]), own], weights=[3, 1])
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    expected = SpeculativeDecoder(target, None, "autoregressive").generate(prompt, 20).sequences
    assert torch.equal(SpeculativeDecoder(target, draft, "dyspec").generate(prompt, 20).sequences, expected)
    assert draft_parameter_count(draft, target) == small.num_parameters()
    assert describe(draft).startswith("Mixture of Cascade of llama, 1 layers")


@pytest.mark.usefixtures("any_noise")
def test_calibration_asks_each_part_at_its_own_depth(target):
    """The target drafts two levels for itself, which are all accepted, and what proposes nothing drafts the rest."""
    profile = calibrate(
        target, Cascade([target, Bigrams(torch.full((7, 7), -torch.inf))], levels=[2, 2]),
        prompts=[torch.tensor([3, 1, 4, 1, 5])], temperatures=[1.0], tokens=24, sequences=4, sizes=(1, 4), limit=2,
        batch_sizes=[1],
    )  # fmt: skip
    for entry in profile.acceptance:
        if entry.kind.verification == "without_replacement":
            accepted = [sum(children) for children in entry.accepted]
            assert entry.reached[:2] == accepted[:2]
            assert entry.reached[2] > 0 == accepted[2]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Cascade([PromptLookup()], [1]), "at least two drafts"),
    (lambda: Cascade("ab", [1, 1]), "at least two drafts"),
    (lambda: Cascade([PromptLookup(), EarlyExit(1)], [1]), "for each of its 2 drafts, got \\[1\\]"),
    (lambda: Cascade([PromptLookup(), EarlyExit(1)], [0, 1]), "at least 1"),
    (lambda: Mixture([PromptLookup(), EarlyExit(1)], [1, -1]), "weight above 0"),
    (lambda: Mixture([PromptLookup(), EarlyExit(1)], [1]), "weight above 0"),
])  # fmt: skip
def test_what_makes_no_composite_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_two_heads_and_foreign_vocabularies_are_refused(target):
    with pytest.raises(ValueError, match="one trained head"):
        SpeculativeDecoder(target, Mixture([head_of(target), Cascade([head_of(target), PromptLookup()], [1, 1])]))
    with pytest.raises(ValueError, match="one lookahead"):
        SpeculativeDecoder(target, Mixture([Lookahead(), Lookahead()]))
    with pytest.raises(TypeError, match="draft must be"):
        SpeculativeDecoder(target, Mixture([PromptLookup(), "gpt2"]))
