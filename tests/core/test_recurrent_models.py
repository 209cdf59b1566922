"""Models with recurrent layers are decoded by trees: as transformers' generate writes them, and by their law."""

from copy import deepcopy
from functools import lru_cache

import pytest
import torch
from families import tiny
from played_steps import Tape
from profile_cases import REJECTION
from recurrent_families import FOUR, RECURRENT, recurrent
from rounding import SMALL_MODEL, bound_of_sums
from texts_with_rules import left_padded
from tiny_models import exact_law, tiny_llama, transformers_greedy
from torch.nn.utils.parametrizations import weight_norm
from tree_policies import Scripted

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    Cascade,
    EarlyExit,
    Merge,
    Mixture,
    Pard,
    PromptLookup,
    SpeculativeDecoder,
    TokenTree,
    goodness_of_fit,
)
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.recurrent import probe
from heavypath.speculative.models.recurrent.cache import HybridCache
from heavypath.speculative.models.recurrent.forward import RecurrentForward
from heavypath.speculative.trees.tree import ROOT
from heavypath.speculative.walking import Extent, walk

PROMPTS = ([3, 17, 4, 41, 6, 2, 22, 50, 3, 6, 11], [6, 29, 7], [9, 1, 12, 7, 4, 44])
BATCH = left_padded([[*prompt] for prompt in PROMPTS])
EVERY = [pytest.param(kind, marks=[] if kind in FOUR else pytest.mark.slow) for kind in RECURRENT]


@lru_cache
def expected_texts(model, new_tokens=16):
    """transformers' own greedy texts of the prompts. Shorter ones are their beginnings; no test changes the model."""
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    return [transformers_greedy(model, ids, new_tokens)[0, ids.shape[1] :].tolist() for ids in prompts]


def expected_of(model, new_tokens):
    return [text[:new_tokens] for text in expected_texts(model, max(new_tokens, 16))]


DENSE = tiny_llama(5, 61)


def texts(decoder, new_tokens, **options):
    out = decoder.generate(**BATCH, max_new_tokens=new_tokens, pad_token_id=0, **options)
    width = BATCH["input_ids"].shape[1]
    return [
        row[width:][:count].tolist() for row, count in zip(out.sequences, out.stats.tokens_of.tolist(), strict=True)
    ]


def check_states(decoder):
    """The states after a generation are those of a prefill of the same texts. Returns how many were compared.

    A state is a sum over the text of what at most five layers compute, each of at most 300 terms.
    """
    cache, compared = decoder.runner.kept[-1], 0
    for forward in decoder._models:
        own = cache._rows_of(forward)
        if own is None or not hasattr(own.cache, "states"):
            continue
        for text, slot in zip(cache.tokens, cache._slots, strict=True):
            length = int(own.cache.states.position[slot])
            assert len(text) - 2 <= length <= len(text)
            again = HybridCache(forward._layout, 1, length + 1, forward.like)
            with torch.inference_mode():
                forward.prefill(text[None, :length], again)
            for found, expected in zip(own.cache.states.tensors()[1:], again.states.tensors()[1:], strict=True):
                rounding = bound_of_sums(5 * 300 + length, expected.abs().max())
                assert (found[slot] - expected[0]).abs().max() < rounding
                compared += 1
            for found, expected in ((own.cache.keys, again.keys), (own.cache.values, again.values)):
                torch.testing.assert_close(found[slot, :, :length], expected[0, :, :length], rtol=1e-3, atol=1e-4)
    return compared


def largest(found, expected):
    """The largest differences of logits [.., V] from those expected, in the standard deviations of these."""
    return (found - expected).abs().amax(-1) / expected.std(-1)


@pytest.mark.parametrize("kind", EVERY)
def test_logits_over_trees_are_those_of_transformers_token_by_token(kind, monkeypatch):
    """By the probe that each model passes when a decoder is made; here to the rounding of fp32.

    The largest single logit is at most three times as far off as transformers' own two ways are from each other.
    """
    model, ours, theirs_ = recurrent.__wrapped__(kind), [], []  # one that was not tried before
    before = model(torch.tensor([PROMPTS[0]])).logits
    after, distance = probe._after, probe._distance

    def single_tokens(forward, model, texts, prompt):
        found = after(forward, model, texts, prompt)
        theirs_.append(largest(found, model(texts, use_cache=False).logits[:, prompt - 1 :]).max())
        return found

    def noted(found, expected):
        ours.extend(each[: len(path)].max() for each, path in zip(largest(found, expected), probe.PATHS, strict=False))
        return distance(found, expected)

    monkeypatch.setattr(probe, "_after", single_tokens)
    monkeypatch.setattr(probe, "_distance", noted)
    forward = forward_of(model, "target")
    assert isinstance(forward, RecurrentForward)
    assert forward.gap(model) < 1.2e-5  # of bailing_hybrid; of all others it is below 1e-5
    assert max(ours) <= max(1e-5, 3 * max(theirs_))
    assert torch.equal(model(torch.tensor([PROMPTS[0]])).logits, before)
    assert not [module for module in model.modules() if "forward" in vars(module)]  # the model itself is untouched


def nearly(model):
    """A draft that is often right: the model with another head."""
    draft = deepcopy(model)
    torch.manual_seed(4)
    with torch.no_grad():
        draft.get_output_embeddings().weight.add_(0.1 * torch.randn_like(draft.get_output_embeddings().weight))
    return draft


@pytest.mark.parametrize("kind", EVERY)
def test_greedy_texts_are_those_of_transformers_generate(kind):
    """In a batch with left padding in which one text ends early, and alone."""
    model, count = recurrent(kind, 5), 14
    draft, expected = nearly(model), expected_of(model, count)
    stop = next(token for token in expected[1][4:] if token not in expected[0] + expected[2][:9])
    cut = [text[: text.index(stop) + 1] if stop in text else text for text in expected]
    for options in ({"tree": TokenTree.from_branching([3, 2, 1, 1])}, {"tree": TokenTree.chain(3)}):
        decoder = SpeculativeDecoder(model, draft, "sequoia", **options)
        assert texts(decoder, count) == expected
        assert check_states(decoder) > 0
        assert texts(decoder, count, eos_token_id=stop) == cut
        assert check_states(decoder) > 0
    alone = decoder.generate(torch.tensor([PROMPTS[1]]), count).sequences[0, 3:].tolist()
    assert alone == expected[1]


@pytest.mark.parametrize(("kind", "small"), [
    ("lfm2", None), *(pytest.param(kind, kind, marks=pytest.mark.slow) for kind in RECURRENT),
])  # fmt: skip
def test_steps_are_captured_as_graphs_and_write_the_same_texts(kind, small, as_on_a_gpu, caplog):
    """A capture runs nothing and asks nothing, and each replay moves the states on from where they are."""
    model, prompt = recurrent(kind, 5), torch.tensor([PROMPTS[1]])
    expected = expected_of(model, 4)[1]
    as_on_a_gpu()
    draft = PromptLookup() if small is None else recurrent(small, 6)
    decoder = SpeculativeDecoder(
        model, draft, "sequoia", tree=TokenTree.from_branching([1] if small is None else [2, 1])
    )
    assert decoder.generate(prompt, 4).sequences[0, 3:].tolist() == expected
    assert len(decoder.runner.idle.launcher.graphs) == 1
    assert Tape.replays > 0
    assert check_states(decoder) > 0
    assert "captured" not in caplog.text


METHODS = {
    "chain": {"tree_size": 4}, "sequoia": {"tree_size": 9}, "dyspec": {"tree_size": 9}, "ersd": {"tree_size": 9},
    "rsd-s": {"width": 3, "max_depth": 3}, "eagle-2": {"width": 3, "max_depth": 3}, "specinfer": {"width": 2},
    "rsd-c": {"branching": [2, 2]}, "naive": {"tree_size": 7}, "autoregressive": {}, "spectr": {"width": 2},
    "top-k": {"tree_size": 7}, "naive-distinct": {"tree_size": 7},
}  # fmt: skip
CROSSED = [  # each method with one family; nightly with all, and longer texts
    *((method, FOUR[-place % 4], 12) for place, method in enumerate(METHODS)),
    *(pytest.param(method, kind, 200, marks=pytest.mark.slow) for method in METHODS for kind in RECURRENT),
]


def some(*often):
    """The four families, all but some of which only nightly."""
    return pytest.mark.parametrize("kind", [
        pytest.param(kind, marks=[] if kind in often else pytest.mark.slow) for kind in FOUR
    ])  # fmt: skip


@pytest.mark.parametrize(("method", "kind", "count"), CROSSED)
def test_every_method_writes_the_targets_text(method, kind, count):
    """With a draft of recurrent layers; a static and a growing tree with a dense target or draft, too.

    Dense drafts of recurrent targets are in rows of tests/conformance, with each method.
    """
    model = recurrent(kind, 5)
    pairs = [(model, None if method == "autoregressive" else nearly(model))]
    if count == 12 and method in ("sequoia", "dyspec"):
        pairs += [(model, DENSE), (DENSE, recurrent(kind, 6))]
    for target, draft in pairs:
        decoder = SpeculativeDecoder(target, draft, method, **METHODS[method])
        assert texts(decoder, count) == expected_of(target, count)
        assert check_states(decoder) > 0
        sampled = {"temperature": 0.6, "seed": 3}
        found = texts(decoder, count, **sampled)
        assert check_states(decoder) > 0
        if method == "ersd":
            assert found == texts(SpeculativeDecoder(target, None, "autoregressive"), count, **sampled)


@pytest.mark.parametrize("kind", FOUR)
@pytest.mark.parametrize(("method", "options"), [
    ("sequoia", {"tree": TokenTree.from_branching([2, 2])}), ("specinfer", {"tree": TokenTree.independent(2, 2)}),
])  # fmt: skip
def test_the_joint_law_of_three_tokens_is_the_targets(kind, method, options):
    target, draft = recurrent(kind, 1, vocab_size=6), recurrent(kind, 2, vocab_size=6)
    prompt, count = torch.tensor([3, 1, 4]), 3000
    out = SpeculativeDecoder(target, draft, method, **options).generate(
        prompt.expand(count, -1), 3, temperature=0.9, eos_token_id=None, seed=5
    )
    law = exact_law(target, prompt, Filters(0.9), 3).view(6, 6, 6)
    fit = goodness_of_fit(out.sequences[:, 3:], law)
    assert fit.is_lossless(), str(fit)


@pytest.mark.parametrize("kind", FOUR)
def test_parametrized_layers_are_decoded(kind):
    """PyTorch refuses to copy them, and a model with recurrent layers runs as a copy of itself over its weights."""
    model, changed = recurrent.__wrapped__(kind, 5), 0
    for layer in model.model.layers:
        for module in [*layer.modules()]:
            if isinstance(module, torch.nn.Linear):
                weight_norm(module).parametrizations.weight.original0.data *= 1.3
                changed += 1
    assert changed > 9
    decoder = SpeculativeDecoder(model, model, "sequoia", tree_size=6)
    assert texts(decoder, 16, temperature=0) == expected_texts(model)


@some(FOUR[0])
def test_a_past_is_taken_up_to_a_state_that_there_is(kind):
    """The state of a text's end, or that of its prompt's, where the answer was changed; else nothing is reused."""
    target, draft = recurrent(kind, 5), recurrent(kind, 6)
    decoder = SpeculativeDecoder(target, draft, "sequoia", tree_size=6)
    first = decoder.generate(torch.tensor([PROMPTS[0]]), 14)
    text, past = first.sequences[0].tolist(), first.cache
    changed = [*text[:17], (text[17] + 1) % 61, *text[18:], 9, 9]
    for prompt, reused in (([*text, 5, 6, 7], 24), (changed, 10), (text[:11], 10), ([*text[:9], 60, 60, 60], 0)):
        ids = torch.tensor([prompt])
        out = decoder.generate(ids, 10, past=past)
        assert check_states(decoder) > 0
        assert torch.equal(out.sequences, decoder.generate(ids, 10).sequences)
        assert out.stats.reused_tokens == reused
    ragged = left_padded([[*text, 5], text[:10], [7, 8, 9, 10, 11]])
    both = [
        decoder.generate(**ragged, max_new_tokens=8, pad_token_id=0, **more).sequences for more in ({}, {"past": past})
    ]
    assert torch.equal(both[0], both[1])
    assert check_states(decoder) > 0


@some(FOUR[1])
def test_a_past_gives_a_draft_no_state_that_is_ahead_of_it(kind):
    """Of prompts one shorter, as long, and one longer; the draft is the target, by itself or as another model."""
    target = recurrent(kind, 5)
    for draft in (target, deepcopy(target)):
        decoder = SpeculativeDecoder(target, draft, "chain", tree_size=4)
        first = decoder.generate(torch.tensor([PROMPTS[0]]), 9)
        text, past = first.sequences[0].tolist(), first.cache
        for prompt in (PROMPTS[0][:-1], PROMPTS[0], text[:-1], text, [*text, 4]):
            out = decoder.generate(torch.tensor([prompt]), 12, past=past)
            assert out.stats.acceptance_by_rank[0] == 1.0
            assert check_states(decoder) > 0
    assert out.stats.reused_tokens == len(text) - 1


@some(FOUR[0], FOUR[3])
def test_a_draft_that_rests_reads_later_what_it_missed(kind, monkeypatch):
    """It is the target, so that nothing is rejected as long as its state is that of the text."""
    target, tree = recurrent(kind, 5), TokenTree.chain(2)
    decoder = SpeculativeDecoder(target, target, "ersd")
    sizes = [tree, tree, ROOT, ROOT, ROOT, tree, tree, ROOT, tree] * 9
    decoder.trees = Scripted([ROOT, tree], sizes.pop)
    out = decoder.generate(**BATCH, max_new_tokens=40, temperature=1.2, pad_token_id=0)
    assert out.stats.replans
    assert out.stats.acceptance_by_depth[0] == 1.0
    plain = SpeculativeDecoder(target, None, "autoregressive")
    assert torch.equal(
        out.sequences, plain.generate(**BATCH, max_new_tokens=40, temperature=1.2, pad_token_id=0).sequences
    )


@pytest.mark.parametrize("method", ["chain", "sequoia", "specinfer", "dyspec", "rsd-s"])
@some(FOUR[1])
def test_a_draft_that_is_the_target_is_never_wrong(kind, method):
    """A wrong state hides in a draft, whose text is right all the same: here it would cost acceptance."""
    target = recurrent(kind, 5)
    decoder = SpeculativeDecoder(target, target, method, **METHODS[method])
    out = decoder.generate(**BATCH, max_new_tokens=30, pad_token_id=0)
    assert out.stats.acceptance_by_rank[0] == 1.0
    one = decoder.generate(torch.tensor([[7]]), 20)  # a text of one token has none before its root
    assert one.stats.acceptance_by_rank[0] == 1.0


@some(FOUR[0])
def test_acceptance_is_measured_with_the_states_of_the_texts(kind):
    """The target as its own draft, along ragged texts of its own: each first child is accepted."""
    forward = forward_of(recurrent(kind, 5), "target")
    draft = as_draft(recurrent(kind, 5), forward, recurrent(kind, 5))
    prompts = [torch.tensor(prompt) for prompt in (*PROMPTS, [7])]
    counts = walk(forward, draft, prompts, REJECTION, Filters(1.0), Extent(12, 8, depth=3, children=2), 0)
    assert torch.equal(counts.accepted[:, 0], counts.reached)
    assert int(counts.reached.sum()) > 60


DRAFTS = {
    "merge": lambda small: Merge([small, PromptLookup()]),
    "mixture": lambda small: Mixture([small, PromptLookup()]),
    "cascade": lambda small: Cascade([PromptLookup(), small], levels=[1, 3]),
}


@some(FOUR[0])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_part_of_a_draft_may_be_recurrent(draft, kind):
    target, method = recurrent(kind, 5), "specinfer" if draft == "merge" else "sequoia"
    decoder = SpeculativeDecoder(target, DRAFTS[draft](recurrent(kind, 6)), method, tree_size=7)
    assert texts(decoder, 16) == expected_of(target, 16)
    assert check_states(decoder) > 0


@pytest.mark.parametrize("kind", ["nemotron_h", "zamba2"])
def test_time_steps_are_clamped_in_prompts_alone_as_generate_does(kind):
    """Where they are shorter than time_step_min, transformers' one pass and its single tokens differ.

    A prompt ends with the first root, and may be read in pieces of any length.
    """
    model = recurrent(kind, 8)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                weight.fill_(-8.0)  # steps of 3e-4, where time_step_min is 1e-3
    forward = forward_of(model, "target")
    assert forward.gap(model) < 2e-5
    prompt, states = torch.tensor([PROMPTS[0]]), []
    own = model.generate(prompt, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True)
    out = SpeculativeDecoder(model, PromptLookup(), tree_size=4).generate(prompt, 3, output_logits=True)
    for ours, theirs_ in zip(out.logits, own.logits, strict=True):
        assert (ours - theirs_).abs().max() < SMALL_MODEL * theirs_.std()
    for size in (1, 5, 11):
        cache = forward.new_cache(1, 12)
        with torch.inference_mode():
            for begin in range(0, 11, size):
                forward.prefill(prompt[:, begin : begin + size], cache, [begin])
        states.append(cache.states.tensors())
    for others in states[:2]:
        for one, other in zip(states[2], others, strict=True):
            assert (one - other).abs().max() <= SMALL_MODEL * one.abs().max()
    recurrent.cache_clear()


REFUSED = {
    "mamba": (lambda: tiny("mamba", state_size=4), "layer .*mixer, a MambaMixer, keeps a recurrent state by functions"),
    "jamba": (lambda: tiny("jamba", num_hidden_layers=4, num_experts=2), "JambaMambaMixer, keeps a recurrent state by"),
    "rwkv": (lambda: tiny("rwkv"), "type 'rwkv' has a recurrent state, and no layer that asks a cache for it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_is_kept_in_another_way_is_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(make(), None, "autoregressive")


def test_what_needs_attention_layers_alone_says_so():
    hybrid = recurrent(FOUR[0])
    with pytest.raises(ValueError, match="an early exit needs a target of type"):
        SpeculativeDecoder(hybrid, EarlyExit(1))
    with pytest.raises(ValueError, match="in a Cascade before its last draft"):
        SpeculativeDecoder(DENSE, Cascade([hybrid, PromptLookup()], levels=[1, 1]))
    with pytest.raises(ValueError, match="the model of a Pard must have attention layers alone"):
        SpeculativeDecoder(DENSE, Pard(hybrid, mask_token_id=3))
    embeds = hybrid.get_input_embeddings()(torch.tensor([PROMPTS[0]]))
    with pytest.raises(ValueError, match="recurrent layers, and is given tokens alone"):
        SpeculativeDecoder(hybrid, PromptLookup()).generate(
            torch.tensor([PROMPTS[0]]), 4, model_inputs={"inputs_embeds": embeds}
        )
