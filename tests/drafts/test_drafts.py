"""What drafts: prompt lookup against a search by hand, early exits against a cut model, padded vocabularies."""

import copy

import pytest
import torch
from drafted_cases import followed
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import SMALL_MODEL
from statistical import SIGNIFICANCE, chi_square_p_value
from tiny_models import exact_law, tiny_llama, transformers_greedy

from heavypath.kernels.filtering import Filters
from heavypath.speculative import EarlyExit, PromptLookup, SpeculativeDecoder, choose_layers
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.kinds import draft_parameter_count
from heavypath.speculative.drafts.lookup import LookupDraft
from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.forward_of import forward_of

VOCAB = 4


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=24), min_size=1, max_size=3),
    branch=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
    longest=st.integers(1, 4), shortest=st.integers(1, 2), commit=st.booleans(),
)  # fmt: skip
def test_prompt_lookup_finds_what_a_search_finds(texts, branch, longest, shortest, commit):
    options = PromptLookup(max(longest, shortest), shortest)
    draft = LookupDraft(options, VOCAB, torch.device("cpu"))
    width, batch = max(map(len, texts)), len(texts)
    prompt = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    lengths = torch.tensor([len(text) - 1 for text in texts])  # the last token is the root
    cache = draft.new_cache(batch, width + len(branch) + 1)
    draft.prefill(prompt, cache)
    if commit:  # rows of the last two tokens as drafting left them: nothing of them may be read
        for b, length in enumerate(lengths.tolist()):
            for field in (cache.keys, cache.values):
                field[b, :, length - 1 :] = 3

    rows = torch.stack([lengths - 1, lengths], 1)
    tokens = prompt.gather(1, rows)
    ones = torch.ones(1, 1, dtype=torch.bool)
    logits = draft(Feed(tokens, rows, rows, rows - 1, lengths, int(lengths.max()) + 1, ones), cache)[:, -1:]
    for depth in range(len(branch) + 1):
        for b, text in enumerate(texts):
            expected = followed(text, text + branch[:depth], options, VOCAB)
            assert logits[b, 0].exp().tolist() == pytest.approx(expected, abs=2e-4)
        if depth < len(branch):
            here = (lengths + depth + 1)[:, None]
            fed = torch.full((batch, 1), branch[depth])
            logits = draft(Feed(fed, here, here, here - 1, lengths, int(here.max()) + 1, ones), cache)


@torch.inference_mode()
@pytest.mark.parametrize("layers", [2, [0, 2], [1]])
def test_an_early_exit_is_the_model_of_its_layers_alone(layers):
    whole, exits = tiny_llama(1, layers=3), EarlyExit(layers)
    tokens = torch.randint(0, 7, (2, 9))
    forward = forward_of(whole, "draft", layers=exits.indices)
    rows = torch.arange(9).expand(2, -1)
    mask = TreeMask(prefix_length=torch.tensor(0), visible_rows=9, subtree_end=torch.full((9,), 9))
    ours = forward(tokens, rows, rows, forward.new_cache(2, 9), mask)
    cut = only(whole, exits.indices)
    assert torch.allclose(ours, cut(tokens).logits, atol=SMALL_MODEL)
    assert draft_parameter_count(exits, whole) == sum(weight.numel() for weight in cut.parameters())


def only(model, layers):
    """A copy of a model with some of its layers."""
    cut = copy.deepcopy(model)
    cut.model.layers = torch.nn.ModuleList(cut.model.layers[index] for index in layers)
    for index, layer in enumerate(cut.model.layers):
        layer.self_attn.layer_idx = index
    return cut


@pytest.mark.parametrize(("layers", "message"), [
    ([0, 1, 2], "must leave 1 .. 2 layers, got 3"), ([], "must leave 1 .. 2 layers, got 0"), (0, "got 0"),
    ([1, 0], r"must rise within 0 .. 2, got \[1, 0\]"), ([0, 3], r"got \[0, 3\]"), ([1, 1], r"got \[1, 1\]"),
])  # fmt: skip
def test_layers_that_are_no_early_exit_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(tiny_llama(1, layers=3), EarlyExit(layers))


def test_rows_of_other_layers_are_not_taken_over():
    target, prompt = tiny_llama(1, layers=3, max_position_embeddings=256), torch.tensor([[1, 2, 3, 4, 5]])
    past = SpeculativeDecoder(target, EarlyExit([0, 1])).generate(prompt, 20, temperature=1.0)
    other, options = SpeculativeDecoder(target, EarlyExit([0, 2])), {"temperature": 1.0, "seed": 3}
    fresh = other.generate(past.sequences, 20, **options)
    again = other.generate(past.sequences, 20, past=past.cache, **options)
    assert again.stats.reused_tokens > 0
    assert torch.equal(again.sequences, fresh.sequences)
    assert torch.equal(again.stats.accepted, fresh.stats.accepted)


def test_layers_are_left_out_in_the_order_in_which_they_are_missed():
    target, temperature, tokens = tiny_llama(2, layers=4, max_position_embeddings=256), 0.8, 12
    prompts = [torch.tensor([[1, 2, 3]]), torch.tensor([[5]])]
    choices = choose_layers(target, prompts, tokens=tokens, temperature=temperature, seed=4)
    writer = SpeculativeDecoder(target, None, "autoregressive")
    texts = [
        writer.generate(prompt, tokens, temperature, seed=5 + index, eos_token_id=None).sequences
        for index, prompt in enumerate(prompts)
    ]

    @torch.no_grad()
    def overlap(layers):
        models, found = (target, only(target, layers)), []
        for text in texts:
            laws = ((model(text[:, :-1]).logits[:, -tokens:] / temperature).softmax(-1) for model in models)
            found.append(float(torch.minimum(*laws).sum(-1).mean()))
        return sum(found) / 2

    kept, expected = (0, 1, 2, 3), {}
    while len(kept) > 1:
        kept = max((tuple(layer for layer in kept if layer != out) for out in kept), key=overlap)
        expected[kept] = overlap(kept)
    assert {choice.layers: pytest.approx(choice.overlap, abs=SMALL_MODEL) for choice in choices} == expected
    assert [choice.speedup for choice in choices] == sorted((choice.speedup for choice in choices), reverse=True)
    for choice in choices:
        a, c = choice.overlap, choice.share
        gains = [(1 - a ** (g + 1)) / (1 - a) / (1 + g * c) for g in range(10)]
        assert choice.speedup == pytest.approx(max(gains))
        assert choice.drafts == gains.index(max(gains))


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"tokens": 0}, {"prompts": []}])
def test_no_layers_are_chosen_by_nothing(bad):
    with pytest.raises(ValueError, match=r"temperature must be above 0|at least one prompt"):
        choose_layers(tiny_llama(1), **{"prompts": [torch.tensor([[1, 2]])]} | bad)


@pytest.mark.parametrize(("method", "draft_size"), [
    ("sequoia", 199), ("specinfer", 202), ("dyspec", 202), ("rsd-s", 199), ("ersd", 202),
])  # fmt: skip
def test_padded_vocabularies_are_masked(method, draft_size):
    target, draft = tiny_llama(1, 200), tiny_llama(2, draft_size, layers=1)
    prompt = torch.tensor([[199, 3, 199]])  # a token that the smaller draft lacks
    decoder = SpeculativeDecoder(target, draft, method, tree_size=6)
    assert torch.equal(decoder.generate(prompt, 16).sequences, transformers_greedy(target, prompt, 16))
    out = decoder.generate(prompt.expand(2000, -1), 2, temperature=1.0, top_k=8)
    law = exact_law(target, prompt[0], Filters(1.0, 8), 2).view(200, 200).sum(0)  # of the second, which was drafted
    counts = torch.bincount(out.sequences[:, 4], minlength=200)
    assert chi_square_p_value(counts, law) > SIGNIFICANCE


def test_a_padded_draft_equal_to_the_target_is_always_accepted():
    target = tiny_llama(1, 200)
    draft = copy.deepcopy(target)
    draft.resize_token_embeddings(202, mean_resizing=False)
    with torch.no_grad():
        draft.lm_head.weight[200:] = draft.lm_head.weight[:200].mean(0)
    out = SpeculativeDecoder(target, draft.eval(), "chain", tree_size=5).generate(torch.tensor([[1, 2]]), 41)
    assert out.stats.acceptance_by_rank == [1.0]


def test_padding_may_differ_by_one_token_in_100_and_128():
    assert SpeculativeDecoder(tiny_llama(1, 32_000), tiny_llama(2, 32_064))  # as Llama's do
    for sizes, message in (
        ((200, 203), "got 200 and 203 tokens; padding may differ by at most 1 in 100 and 128 tokens"),
        ((32_000, 32_200), "got 32000 and 32200 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(tiny_llama(1, sizes[0]), tiny_llama(2, sizes[1]))
