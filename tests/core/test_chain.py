"""The plain chain of demo/chain.py writes the target's law, as the decoder's `chain` does, and the same greedy text."""

from types import SimpleNamespace

import pytest
import torch
from mutations import mutated
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import assert_same_text, exact_law, tiny_llama, transformers_greedy

from heavypath.kernels.filtering import Filters
from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import chain, demo_prompts

PROMPT, LENGTH, VOCAB_SIZE = torch.tensor([3, 1, 2]), 4, 4


class Remembered:
    """A model that answers a text seen before from memory: there are few texts, and each is asked for often."""

    def __init__(self, model):
        self.model, self._answers = model, {}

    def __call__(self, ids):
        text = tuple(ids[0].tolist())
        if text not in self._answers:
            self._answers[text] = self.model(ids).logits
        return SimpleNamespace(logits=self._answers[text])


class Counted(Remembered):
    forwards = 0

    def __call__(self, ids):
        self.forwards += 1
        return super().__call__(ids)


@pytest.fixture(scope="module")
def tiny_pair():
    return tuple(Remembered(tiny_llama(seed, VOCAB_SIZE, layers=3 - seed)) for seed in (1, 2))


def texts(pair, sequences, decode=chain.chain_decode, **options):
    """LongTensor[sequences, LENGTH], drawn one after the other from one generator."""
    generator = torch.Generator().manual_seed(5)
    drawn = [decode(*pair, PROMPT[None], LENGTH, generator=generator, **options) for _ in range(sequences)]
    return torch.cat(drawn)[:, len(PROMPT) :]


def two_sample_p_value(counts, others):
    """Probability that two samples of equal size from one law differ as much; cells of fewer than 10 are pooled."""
    both = torch.stack([counts, others]).double()
    rare = both.sum(0) < 10
    both = torch.cat([both[:, ~rare], both[:, rare].sum(1, keepdim=True)], 1)
    both = both[:, both.sum(0) > 0]
    statistic = ((both[0] - both[1]) ** 2 / both.sum(0)).sum()
    return float(torch.special.gammaincc(torch.tensor((both.shape[1] - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize(("draft_length", "temperature", "sequences"), [(3, 1.0, 6_000), (1, 0.7, 3_000)])
def test_the_law_of_four_tokens_is_the_targets_and_that_of_the_decoder(
    draft_length, temperature, sequences, tiny_pair
):  # fmt: skip
    target, draft = (model.model for model in tiny_pair)
    plain = texts(tiny_pair, sequences, draft_length=draft_length, temperature=temperature)
    decoder = SpeculativeDecoder(target, draft, "chain", tree_size=draft_length + 1)
    prompts = PROMPT.expand(sequences, -1)
    out = decoder.generate(prompts, max_new_tokens=LENGTH, temperature=temperature, seed=3).sequences

    law = exact_law(target, PROMPT, Filters(temperature), LENGTH)
    ours, theirs = (joint_counts(text, VOCAB_SIZE) for text in (plain, out[:, len(PROMPT) :]))
    assert chi_square_p_value(ours, law) > SIGNIFICANCE
    assert two_sample_p_value(ours, theirs) > SIGNIFICANCE


def test_two_samples_of_different_laws_are_told_apart(tiny_pair):
    cool, hot = (joint_counts(texts(tiny_pair, 1_000, temperature=value), VOCAB_SIZE) for value in (0.7, 1.3))
    assert two_sample_p_value(cool, hot) < SIGNIFICANCE


def p_value(pair, decode=chain.chain_decode):
    """Of the law test above, with fewer texts."""
    counts = joint_counts(texts(pair, 1_000, decode, draft_length=2, temperature=0.7), VOCAB_SIZE)
    return chi_square_p_value(counts, exact_law(pair[0].model, PROMPT, Filters(0.7), LENGTH))


def test_the_program_without_a_bug_passes(tiny_pair):
    assert p_value(tiny_pair) > SIGNIFICANCE


@pytest.mark.parametrize(("original", "replacement"), [
    ("target_law[token] / draft_law[token]", "draft_law[token] / target_law[token]"),
    ("(target_law - draft_law).clamp(min=0)", "target_law"),  # the recovered token is drawn from the target
    ("(target_law - draft_law).clamp(min=0)", "(draft_law - target_law).clamp(min=0)"),
    ("last_probs = residual if", "last_probs = last_probs if"),  # no recovered token: the bonus token takes its place
    ("break\n", "continue\n"),  # tokens after a rejection are accepted
    ("last_probs = target_probs[-1]", "last_probs = draft_probs[-1] if draft_probs else target_probs[-1]"),
    ("torch.multinomial(draft_probs[-1]", "torch.multinomial(draft_probs[0]"),  # drawn from an earlier position
    ("len(text) - 1 :", "len(text) - 2 : -1"),  # the target's positions
    ("coin = torch.rand((), generator=generator", "coin = torch.rand((), generator=generator.clone_state()"),
    ("softmax(logits.float() / temperature", "softmax(logits.float()"),
])  # fmt: skip
def test_a_bug_is_found(original, replacement, tiny_pair):
    assert p_value(tiny_pair, mutated(chain, original, replacement).chain_decode) < SIGNIFICANCE


def test_greedy_text_is_that_of_transformers_and_of_the_decoder(demo_pair):
    target, draft, tokenizer = demo_pair
    decoder = SpeculativeDecoder(target, draft, "chain")
    for prompt in demo_prompts()[:3]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        text = chain.chain_decode(target, draft, ids, max_new_tokens=24, temperature=0)
        assert_same_text(target, text, transformers_greedy(target, ids, 24))
        assert_same_text(target, text, decoder.generate(ids, max_new_tokens=24).sequences)


@pytest.mark.parametrize("draft_length", [0, 1, 4])
def test_there_are_exactly_as_many_new_tokens_as_asked_for(draft_length, tiny_pair):
    for max_new_tokens in range(8):
        text = chain.chain_decode(*tiny_pair, PROMPT[None], max_new_tokens, draft_length)
        assert text.shape == (1, len(PROMPT) + max_new_tokens)
        assert torch.equal(text[0, : len(PROMPT)], PROMPT)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_draft_that_is_the_target_is_always_accepted(temperature):
    """5 forwards write 5 tokens each, and a 6th the last 2; the draft writes 4 and then 1 of them."""
    target, draft = Counted(tiny_llama(1)), Counted(tiny_llama(1))
    chain.chain_decode(target, draft, PROMPT[None], 27, draft_length=4, temperature=temperature)
    assert (target.forwards, draft.forwards) == (6, 5 * 4 + 1)


def test_laws_that_differ_by_rounding_alone_leave_a_token_to_recover(monkeypatch):
    """Draft: 1/64 for each token. Target: the drafted token has 1/64 - 2**-29, and the others 1/64 after rounding."""

    def draft(ids):
        return SimpleNamespace(logits=torch.zeros(1, ids.shape[1], 64))

    def target(ids):
        logits = torch.zeros(1, ids.shape[1], 64)
        logits[0, -2, ids[0, -1]] = -(2**-23)
        return SimpleNamespace(logits=logits)

    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1 - 2**-24))  # the largest coin: a rejection
    assert chain.chain_decode(target, draft, PROMPT[None], 2, draft_length=1).shape == (1, len(PROMPT) + 2)
    without = mutated(chain, "residual if residual.any() else target_law", "residual")
    with pytest.raises(RuntimeError):
        without.chain_decode(target, draft, PROMPT[None], 2, draft_length=1)


def test_the_command_prints_the_text_and_how_many_forwards_it_took(capsys):
    chain.main()
    text, count = capsys.readouterr().out.rsplit("\n\n", 1)
    assert text.startswith(demo_prompts()[3])
    assert len(text) > len(demo_prompts()[3]) + 64
    forwards = int(count.split()[3])
    assert count == f"64 tokens in {forwards} target forwards: {64 / forwards:.2f} tokens per forward\n"
    assert 13 <= forwards <= 45
