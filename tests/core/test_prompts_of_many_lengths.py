"""Prompts of many lengths are read at about the cost of their own tokens, and the texts are those of each alone."""

import itertools
import random
from collections import Counter

import pytest
import torch
from head_cases import head_of
from serving_cases import tiny_llama

from heavypath.speculative import Cascade, EarlyExit, Lookahead, Mixture, PromptLookup, SpeculativeDecoder
from heavypath.speculative.decoding.prefill import ROWS_OF_A_PASS, blocks_of

VOCAB, PASS = 31, ROWS_OF_A_PASS["cpu"]
LENGTHS = {
    "one long first": [200, *7 * [10]],
    "one long last": [*7 * [10], 200],
    "two long between": [10, 9, 150, 8, 7, 160, 6],
    "rising": [*range(3, 200, 28)],
    "one of one token": [120, 1, 1, 60],
}
DRAFTS = {
    "none": lambda target: None,
    "model": lambda target: tiny_llama(2, VOCAB),
    "head": lambda target: head_of(target),
    "exit": lambda target: EarlyExit(1),
    "lookup": lambda target: PromptLookup(2),
    "lookahead": lambda target: Lookahead(window=3, ngram=3, pool=8),
    "cascade": lambda target: Cascade([tiny_llama(2, VOCAB), EarlyExit(1)], [1, 2]),
    "mixture": lambda target: Mixture([tiny_llama(2, VOCAB), PromptLookup(2)]),
}


def prompts_of(lengths, seed=0):
    """Prompts with padding on the left, and their mask."""
    made, width = random.Random(seed), max(lengths)
    rows = [[0] * (width - length) + [made.randrange(1, VOCAB) for _ in range(length)] for length in lengths]
    mask = [[0] * (width - length) + [1] * length for length in lengths]
    return torch.tensor(rows), torch.tensor(mask)


def counting(monkeypatch, *models):
    """The rows that each model is given in passes without logits, by its name, from now on."""
    rows = Counter()
    for kind in {type(model) for model in models}:

        def call(model, tokens, *given, needs_logits=True, whole=kind.__call__, **more):
            if not needs_logits and model in models:
                rows[model.name] += tokens.numel()
            return whole(model, tokens, *given, needs_logits=needs_logits, **more)

        monkeypatch.setattr(kind, "__call__", call)
    return rows


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_texts_are_those_of_each_prompt_alone(lengths, draft):
    target = tiny_llama(1, VOCAB)
    decoder = SpeculativeDecoder(target, DRAFTS[draft](target), "autoregressive" if draft == "none" else "ersd")
    prompts, mask = prompts_of(LENGTHS[lengths])
    options = {"max_new_tokens": 12, "temperature": 0.9, "seed": 3, "eos_token_id": [3]}  # so slots close up, too
    together = decoder.generate(prompts, attention_mask=mask, **options).sequences
    for number, length in enumerate(LENGTHS[lengths]):
        alone = decoder.generate(prompts[number : number + 1, -length:], sequence_ids=torch.tensor([number]), **options)
        new = alone.sequences[0, length:]
        assert torch.equal(new, together[number, prompts.shape[1] :][: len(new)]), number


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("attention", ["ours", "sdpa", "eager"])
def test_rows_are_about_as_many_as_tokens(lengths, attention, monkeypatch):
    """Also by transformers' own pass."""
    target = tiny_llama(1, VOCAB)
    if attention != "ours":
        target.model.layers[0].register_forward_hook(lambda *_: None)
        target.set_attn_implementation(attention)
    decoder = SpeculativeDecoder(target, tiny_llama(2, VOCAB), "ersd", tree_size=4)
    assert decoder._target.is_foreign == (attention != "ours")
    rows = counting(monkeypatch, decoder._target, decoder._draft.forward)
    prompts, mask = prompts_of(LENGTHS[lengths])
    out = decoder.generate(prompts, 3, attention_mask=mask, eos_token_id=None)
    tokens = sum(LENGTHS[lengths]) - len(prompts)
    assert out.stats.prefill_tokens == tokens
    passes = len({*LENGTHS[lengths]})
    assert rows.keys() == {"target", "draft"}
    for found in rows.values():
        assert tokens <= found <= tokens + PASS * passes
        assert found < len(prompts) * max(LENGTHS[lengths]) * 0.75


@pytest.mark.parametrize("draft", ["model", "head", "lookup"])
def test_what_a_past_has_is_not_read_again_beside_a_prompt_that_is_new(draft, monkeypatch):
    """A chat's second turn in a batch with a first one."""
    target = tiny_llama(1, VOCAB)
    decoder = SpeculativeDecoder(target, DRAFTS[draft](target), "ersd")
    prompts, mask = prompts_of([5, 180, 40])
    options = {"temperature": 0.9, "eos_token_id": None}
    first = decoder.generate(prompts[1:2], 6, **options)
    further = torch.cat([first.sequences, torch.tensor([[4, 5, 6]])], 1)
    width = further.shape[1]
    batch = torch.nn.functional.pad(prompts[:, -180:], (width - 180, 0))
    mask = torch.nn.functional.pad(mask, (width - 180, 0))
    batch[1], mask[1] = further[0], 1
    expected = decoder.generate(batch, 8, attention_mask=mask, **options).sequences
    rows = counting(monkeypatch, decoder._target)
    out = decoder.generate(batch, 8, attention_mask=mask, past=first.cache, **options)
    assert torch.equal(out.sequences, expected)
    assert out.stats.reused_tokens >= 180
    assert rows["target"] <= 4 + 39 + 8 + 2 * PASS
    assert out.cache.tokens[1].tolist()[:width] == further[0].tolist()
    again = decoder.generate(out.sequences[:1, -20:], 4, past=out.cache, **options).sequences
    assert torch.equal(again, decoder.generate(out.sequences[:1, -20:], 4, **options).sequences)


def test_blocks_by_hand():
    assert [(block.slots, block.width) for block in blocks_of([2999, 9, 9], [0, 0, 0], 16)] == [(3, 9), (1, 2990)]
    assert [(block.slots, block.width) for block in blocks_of([20, 9, 9], [0, 0, 0], 23)] == [(3, 20)]
    assert [block.starts for block in blocks_of([95, 100], [0, 90], 1)] == [[0, 90], [10]]
    assert blocks_of([7, 7], [7, 7], 16) == []
    assert [(block.slots, block.width) for block in blocks_of([50, 40, 3], [0, 0, 0], float("inf"))] == [(3, 50)]


def test_no_other_way_to_part_prompts_is_cheaper():
    """Against all ways, on random lengths."""
    made = random.Random(0)
    for _ in range(40):
        ends = sorted((made.choice([made.randint(1, 40), 300]) for _ in range(made.randint(1, 6))), reverse=True)
        cost = made.randint(1, 60)
        found = sum(block.slots * block.width + cost for block in blocks_of(ends, [0] * len(ends), cost))
        places = sorted({*ends})[:-1]
        every = []
        for chosen in range(1 << len(places)):
            cuts = [0, *(place for bit, place in enumerate(places) if chosen >> bit & 1), max(ends)]
            pairs = itertools.pairwise(cuts)
            every.append(sum(sum(end > first for end in ends) * (last - first) + cost for first, last in pairs))
        assert found == min(every)
