"""The losslessness kit: exact laws, chi-square and its power by hand, right samplers pass, and bugs are named."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import tiny_llama

from heavypath.speculative import (
    SpeculativeDecoder,
    check_losslessness,
    detectable_total_variation,
    goodness_of_fit,
    joint_law,
)
from heavypath.speculative.losslessness.chi_square import chi_square_p_value, expected_total_variation

PROMPT = torch.tensor([3, 1, 4])


class Table:
    """A model of which token follows which: logits [V, V]."""

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, input_ids, use_cache):
        assert use_cache is False
        return SimpleNamespace(logits=self.logits[input_ids])


COIN = Table(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log())


def test_a_joint_law_by_hand_which_after_the_end_of_a_text_is_certain():
    law = joint_law(COIN, torch.tensor([1, 0]), 2)
    assert law.tolist() == pytest.approx(np.array([[9 / 16, 3 / 16], [1 / 8, 1 / 8]]))
    assert joint_law(COIN, torch.tensor([0]), 1).tolist() == pytest.approx([0.75, 0.25])
    assert joint_law(COIN, torch.tensor([0]), 1, temperature=0.5).tolist() == pytest.approx([0.9, 0.1])
    for only_one in ({"top_p": 0.6}, {"top_k": 1}, {"min_p": 0.5}, {"temperature": 0}):
        assert joint_law(COIN, torch.tensor([0]), 2, **only_one).tolist() == [[1, 0], [0, 0]]
    law = joint_law(COIN, torch.tensor([1, 0]), 3, eos_token_id=1)
    assert law[0].tolist() == pytest.approx(np.array([[27 / 64, 9 / 64], [0, 3 / 16]]))
    assert law[1].tolist() == pytest.approx(np.array([[0, 0], [0, 1 / 4]]))
    law = joint_law(COIN, torch.tensor([0]), 2, eos_token_id=[1, 0])
    assert law.tolist() == pytest.approx(np.array([[0, 0.75], [0, 0.25]]))
    target = tiny_llama(1, 5)  # which sees the whole text
    law = joint_law(target, PROMPT, 3)
    assert law.sum() == pytest.approx(1)
    for text in ([0, 0, 0], [4, 2, 1], [3, 3, 4]):
        steps = target(torch.tensor([[3, 1, 4, *text]])).logits[0, 2:5].detach().double().softmax(-1)
        assert float(law[tuple(text)]) == pytest.approx(float(steps[range(3), text].prod()), rel=1e-5)


def test_chi_square_by_hand():
    """60 throws of a die: statistic (25 + 4 + 1 + 4 + 0 + 100) / 10, with 5 degrees of freedom."""
    throws = torch.tensor([5, 8, 9, 8, 10, 20])
    assert chi_square_p_value(throws, torch.full((6,), 1 / 6)) == pytest.approx(stats.chi2.sf(13.4, 5))
    # Those that expect 4 + 3 are one cell; those that expect 2 + 1 count in the least likely other one.
    law = torch.tensor([50, 43, 4, 3]) / 100
    assert chi_square_p_value(torch.tensor([44, 43, 8, 5]), law) == pytest.approx(stats.chi2.sf(36 / 50 + 36 / 7, 2))
    law = torch.tensor([50, 47, 2, 1]) / 100
    assert chi_square_p_value(torch.tensor([40, 47, 8, 5]), law) == pytest.approx(stats.chi2.sf(2 + 2, 1))
    assert chi_square_p_value(torch.tensor([99, 1]), torch.tensor([1.0, 0.0])) == 0
    assert chi_square_p_value(torch.tensor([99, 0]), torch.tensor([1.0, 0.0])) == 1


def test_what_sampling_alone_gives_is_the_mean_over_all_samples():
    law = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).double()
    mean = 0.0
    for sample in product(range(5), repeat=4):
        share = torch.tensor(sample).bincount(minlength=5) / 4
        mean += float(law[list(sample)].prod() * (share - law).abs().sum() / 2)
    assert expected_total_variation(law, 4) == pytest.approx(mean)


@pytest.mark.parametrize("sequences", [2_000, 20_000])
def test_the_detectable_departure_is_found_99_times_of_100(sequences):
    """For the law at that total variation that moves chi-square least; and one of half of it is often missed."""
    law = torch.full((8, 8), 1 / 64).double()
    distance, signs = detectable_total_variation(law, sequences), torch.tensor([1.0, -1.0]).repeat(32).view(8, 8)
    generator, found = np.random.default_rng(1), {}
    for share in (1, 0.5):
        other = law * (1 + 2 * share * distance * signs)
        assert float((other - law).abs().sum() / 2) == pytest.approx(share * distance)
        counts = torch.tensor(generator.multinomial(sequences, other.flatten().numpy(), size=400))
        found[share] = sum(chi_square_p_value(row, law) < 0.5e-6 for row in counts) / 400
    assert found[1] >= 0.99
    assert found[0.5] < 0.3
    assert detectable_total_variation(law, 4 * sequences) == pytest.approx(distance / 2)
    assert detectable_total_variation(law, sequences, power=0.5) < distance


def repeated(texts):
    return torch.cat([torch.tensor([text]).repeat(count, 1) for text, count in texts.items()])


def test_departures_by_hand():
    """Of 400 texts of two fair coins each first token comes 200 times, but after 0 comes 1 in 180 of 200."""
    fit = goodness_of_fit(repeated({(0, 0): 20, (0, 1): 180, (1, 0): 100, (1, 1): 100}), torch.full((2, 2), 0.25))
    named = fit.tokens[0]
    assert (named.prefix, named.observed, named.expected) == ((0,), 180 if named.tokens == (1,) else 20, 100)
    assert named.deviation == pytest.approx(50**0.5)
    assert abs(named.residual) == pytest.approx(80 / 50**0.5)
    assert named.p_value == pytest.approx(2 * 6 * 2**-200 / (0.9**180 * 0.1**20))  # of 6 questions
    assert {one.prefix for one in fit.tokens} == {(0,)}  # the others are as expected
    assert [one.tokens for one in fit.texts[:2]] == [(0, 0), (0, 1)]
    assert fit.total_variation == pytest.approx(0.2)
    assert chi_square_p_value(torch.tensor([20, 180, 100, 100]), torch.full((4,), 0.25)) == pytest.approx(
        stats.chi2.sf(80**2 / 100 + 80**2 / 100, 3)
    )
    assert fit.p_value == 2 * named.p_value  # of two tests; chi-square is the milder one
    assert not fit.is_lossless()
    lines = str(fit).splitlines()
    assert lines[0] == f"departs from the distribution: p = {fit.p_value:.3g}, 400 sequences"
    assert lines[1].startswith("total variation 0.2000, by sampling alone 0.0345; ")
    assert "  position 2, after (0,): token 1 came 180 times, expected 100.0 +- 7.1 (+11.3 deviations)" in lines
    assert "  text (0, 0) came 20 times, expected 100.0 +- 8.7 (-9.2 deviations)" in lines


def test_what_the_law_excludes_is_found_in_one_text():
    law = torch.zeros(3, 3)
    law[:2, :2] = 0.25
    right = {(a, b): 500 for a in (0, 1) for b in (0, 1)}
    assert goodness_of_fit(repeated(right), law).is_lossless()
    fit = goodness_of_fit(repeated(right | {(1, 2): 1}), law)
    assert fit.p_value == 0
    assert (fit.tokens[0].prefix, fit.tokens[0].tokens, fit.tokens[0].residual) == ((1,), (2,), float("inf"))
    fit = goodness_of_fit(repeated(right | {(2, 2): 1}), law)
    assert (fit.tokens[0].prefix, fit.tokens[0].tokens) == ((), (2,)), "what follows it says nothing more"


def test_a_rare_token_that_is_common_is_found_though_it_shares_a_cell():
    law = torch.tensor([0.5, 0.499999, 1e-6])
    fit = goodness_of_fit(repeated({(0,): 5000, (1,): 4990, (2,): 10}), law)
    assert chi_square_p_value(torch.tensor([5000, 4990, 10]), law) > 0.5
    assert fit.tokens[0].tokens == (2,)
    assert not fit.is_lossless()
    assert "text" not in str(fit), "of one token they are no news"


@pytest.mark.parametrize("of", ["the decoder", "transformers"])
def test_texts_of_one_prompt_are_lossless(of, tiny_pair):
    decoder, eos = SpeculativeDecoder(*tiny_pair, "sequoia", tree_size=5), 2
    ends = {"eos_token_id": eos, "pad_token_id": eos}

    def sample(prompts, seed):
        if of == "the decoder":
            return decoder.generate(prompts, 3, temperature=0.9, seed=seed, **ends).sequences[:, 3:]
        torch.manual_seed(seed)
        options = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.9, "top_k": 0, **ends}
        return tiny_pair[0].generate(prompts, attention_mask=torch.ones_like(prompts), **options)[:, 3:]

    law = joint_law(tiny_pair[0], PROMPT, 3, temperature=0.9, eos_token_id=eos)
    fit = check_losslessness(sample, law, PROMPT, sequences=6_000, batch_size=3_000)
    assert fit.is_lossless()
    assert fit.sequences == 6_000
    assert str(fit).startswith("no departure from the distribution: p = ")


def test_greedy_text_is_lossless(tiny_pair):
    decoder, law = SpeculativeDecoder(*tiny_pair), joint_law(tiny_pair[0], PROMPT, 4, temperature=0.0)
    options = {"sequences": 30, "batch_size": 30}
    fit = check_losslessness(lambda ids, seed: decoder.generate(ids, 4).sequences[:, 3:], law, PROMPT, **options)
    assert (fit.p_value, fit.total_variation, fit.expected_total_variation) == (1, 0, 0)
    assert fit.detectable_total_variation == pytest.approx(1 - 0.01 ** (1 / 30))
    fit = check_losslessness(lambda ids, seed: decoder.generate(ids, 5).sequences[:, 4:], law, PROMPT, **options)
    assert (fit.p_value, fit.total_variation) == (0, 1)


def test_a_sampler_is_asked_with_prompts_and_seeds():
    asked, law = [], torch.full((2, 2), 0.25)

    def sample(prompts, seed):
        asked.append((prompts.tolist(), seed))
        prompts.zero_()  # the sampler's own
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, [*prompts.shape[:-1], 2], generator=generator)

    check_losslessness(sample, law, torch.tensor([7, 8]), sequences=20, seed=5)
    assert asked == [([7, 8], seed) for seed in range(5, 25)]
    asked.clear()
    check_losslessness(sample, law, torch.tensor([7, 8]), sequences=20, seed=5, batch_size=8)
    assert asked == [([[7, 8]] * rows, seed) for rows, seed in ((8, 5), (8, 6), (4, 7))]


FAIR, ZERO = torch.full((2, 2), 0.25), torch.tensor([0])


def checked(answer=None, *, law=FAIR, prompt=ZERO, **options):
    """With a sampler that answers so, or that is not asked."""

    def sample(prompt, seed):
        return pytest.fail("asked") if answer is None else answer

    return check_losslessness(sample, law, prompt, **({"sequences": 50} | options))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: joint_law(tiny_llama(1), PROMPT, 8), r"7 \*\* 8 = 5764801 outputs are too many to list, at most 1048576"),
    (lambda: joint_law(tiny_llama(1).train(), PROMPT, 2), r"training mode.*call model.eval\(\) first"),
    (lambda: joint_law(COIN, PROMPT[None], 2), r"prompt must be a LongTensor \[P\] .*, got torch.int64 \[1, 3\]"),
    (lambda: joint_law(COIN, [1], 2), r"prompt must be a LongTensor \[P\] .*, got list"),
    (lambda: joint_law(COIN, ZERO, 0), "length must be at least 1, got 0"),
    (lambda: joint_law(COIN, ZERO, 1, eos_token_id=2), "eos_token_id must be in 0 .. 1, got 2"),
    (lambda: joint_law(COIN, ZERO, 1, top_p=1.5), "top_p must be .* got 1.5"),
    (lambda: checked([0, 1]), r"sample must return a LongTensor \[2\], got list: wrap it in torch.tensor"),
    (lambda: checked(torch.ones(2)), r"sample must return a LongTensor \[2\], got torch.float32 \[2\]"),
    (lambda: checked(torch.tensor([1, 0, 1, 1])), r"the 2 new tokens \[2\], without the prompt .*, got \[4\]"),
    (lambda: checked(torch.tensor([0, 2])), r"tokens must be in 0 .. 1, got 0 .. 2"),
    (lambda: checked(torch.tensor([-1, 0])), r"tokens must be in 0 .. 1, got -1 .. 0"),
    (lambda: checked(prompt=[0]), r"prompt must be a LongTensor \[P\], got list"),
    (lambda: checked(batch_size=0), "batch_size must be None or at least 1, got 0"),
    (lambda: checked(sequences=9), "9 sequences are too few, as no two kinds of texts are expected 5 times each: take"),
    (lambda: checked(law=[0.5, 0.5]), r"law must be probabilities \[V, ..., V\] with a dimension for each token, got"),
    (lambda: checked(law=torch.full((2, 3), 1 / 6)), r"law must be probabilities .*, got torch.float32 \[2, 3\]"),
    (lambda: checked(law=torch.tensor([1, 0])), r"law must be probabilities .*, got torch.int64 \[2\]"),
    (lambda: checked(law=FAIR.log()), "law must be at least 0 everywhere and sum to 1, got a sum of -5.5"),
    (lambda: checked(law=FAIR * torch.nan), "law must be at least 0 everywhere and sum to 1, got a sum of nan"),
    (lambda: goodness_of_fit([[0, 1]], FAIR), r"texts must be a LongTensor \[N, T\], got list"),
    (lambda: goodness_of_fit(torch.zeros(100, 3).long(), FAIR), "texts must have the law's 2 tokens, got 3"),
    (lambda: goodness_of_fit(torch.zeros(0, 2).long(), FAIR), "0 sequences are too few"),
])  # fmt: skip
def test_what_has_no_law_or_cannot_be_counted_is_refused_before_anything_is_sampled(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
