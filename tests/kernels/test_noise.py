"""Philox against its published answers; noise that depends on nothing but its key."""

import numpy as np
import torch
import triton
import triton.language as tl
from devices import DEVICE
from statistical import SIGNIFICANCE, chi_square_p_value
from triton.runtime.interpreter import InterpretedFunction

from heavypath.kernels.noise import Stream, coins, gumbel, gumbel_noise, noise_bits, philox, philox_words


def test_philox_gives_the_known_answers_of_random123():
    def words(seed: int, *counter: int) -> list[int]:
        return philox(seed, *counter).tolist()

    assert words(0, 0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(2**64 - 1, *[2**32 - 1] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    key = 0xA4093822 | (0x299F31D0 << 32)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert words(key, *counter) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@triton.jit
def words_kernel(words_ptr, counters_ptr, seed_low, seed_high):
    place = tl.arange(0, 8)
    counters = tl.load(counters_ptr + place).to(tl.uint32, bitcast=True)
    fixed = tl.load(counters_ptr).to(tl.uint32, bitcast=True)
    low, high = seed_low + tl.full([], 0, tl.int32), seed_high + tl.full([], 0, tl.int32)
    words = philox_words(low, high, counters, fixed, counters * 3, counters + 1)
    for word in tl.static_range(4):
        tl.store(words_ptr + 8 * word + place, words[word].to(tl.int64))


def test_words_of_a_kernel_are_those_of_the_reference(monkeypatch):
    """By the kernel's own operations, too, which tests/support/interpreting.py otherwise puts the reference in for."""
    counters = torch.randint(-(2**31), 2**31, (8,), dtype=torch.int32)
    given = counters.numpy().view(np.uint32).astype(np.int64)
    for seed in (0, -5, 3 + (7 << 40)):
        low, high = (int(np.uint32(word).view(np.int32)) for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
        expected = philox(seed, given, given[0], given * 3, given + 1)
        for _ in range(2):
            words = torch.zeros(4, 8, dtype=torch.long, device=DEVICE)
            words_kernel[(1,)](words, counters.to(DEVICE), low, high)
            assert torch.equal(words.T.cpu(), torch.from_numpy(expected.astype(np.int64)))
            monkeypatch.delitem(InterpretedFunction.rewritten_fn, philox_words.fn, raising=False)
        monkeypatch.undo()


def test_token_v_takes_word_v_mod_4_of_counter_v_div_4():
    row = (5 << 32) + 7
    bits = noise_bits(11, Stream.TARGET, np.array([row]), 10)[0]
    for token in range(10):
        assert bits[token] == philox(11, token // 4, 7, 5, int(Stream.TARGET))[token % 4]


def test_noise_of_a_row_does_not_depend_on_batch_or_vocabulary():
    rows = torch.tensor([3, 900, 1 << 40])
    whole = gumbel_noise(5, Stream.DRAFT, rows, 101)
    for index, row in enumerate(rows):
        assert torch.equal(gumbel_noise(5, Stream.DRAFT, row[None], 60)[0], whole[index, :60])


def test_seeds_streams_rows_and_draws_are_different():
    rows = np.array([0, 1, 1 << 32])
    seen = [noise_bits(seed, stream, rows, 64, draws=2) for seed in (0, 1, 1 << 32, -1) for stream in Stream]
    assert len(np.unique(seen)) > 0.999 * len(seen) * 3 * 2 * 64


def test_gumbels_are_gumbel_and_coins_uniform():
    rows = torch.arange(2_000)
    quantile = -torch.expm1(-(-gumbel_noise(1, Stream.DRAFT, rows, 100)).exp()).flatten()
    flips = torch.from_numpy(coins(1, *np.broadcast_arrays(np.arange(2_000)[:, None], np.arange(100)))).flatten()
    for uniform in (quantile, flips):
        counts = (uniform * 64).long().clamp(max=63).bincount(minlength=64)
        assert chi_square_p_value(counts, torch.full((64,), 1 / 64)) > SIGNIFICANCE


def test_noise_is_finite_and_the_tail_that_lets_improbable_tokens_win_is_resolved():
    """A token 18 logits down wins where u is about 2 ** -26: 24-bit uniforms would have no such values."""
    noise = gumbel(np.array([0, 1, 2**31, 2**32 - 129, 2**32 - 2, 2**32 - 1], dtype=np.uint32))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    bits = np.arange(4096, dtype=np.uint32)
    np.testing.assert_allclose(gumbel(bits), -np.log(-np.log1p(-(bits + 0.5) * 2.0**-32)), rtol=0, atol=4e-6)


def test_a_coin_is_word_rank_mod_4_of_counter_rank_div_4():
    rows, ranks = np.array([[7, 7, 9]]), np.array([[0, 6, 6]])
    words = noise_bits(3, Stream.ACCEPT, np.array([7, 9]), 8)
    assert (coins(3, rows, ranks)[0] == (words[[0, 0, 1], [0, 6, 6]] >> 8) / 2**24).all()
