"""Two hundred generations in one process: memory and live tensors stay where the first ones brought them."""

import gc
import random
import resource
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_llama

from heavypath.speculative import METHODS, SpeculativeDecoder

pytestmark = pytest.mark.slow
METHOD_NAMES = list(METHODS)
ROUND = 2 * len(METHOD_NAMES)  # each method greedily and sampled
WARM_UP, ROUNDS = 2, 9
NOISE = 30e6  # bytes; 2 to 3 MB were measured, and a leak of 1 MB a generation is 168 MB


def growth(target, draft, rounds, after=lambda: None):
    """Resident bytes and live tensors gained after warm-up, at most, by texts of every method and of new lengths."""
    # With default trees each number of sequences has its own, and the first step with it makes tensors that are kept.
    trees = {name: {} if name == "autoregressive" else {"tree_size": 5} for name in METHODS}
    decoders = {name: SpeculativeDecoder(target, draft, name, **tree) for name, tree in trees.items()}
    chosen, measured = random.Random(0), []

    def generate(number, new_tokens):
        batch, longest = 1 + number % 4, chosen.randint(8, 160)
        generator = torch.Generator().manual_seed(number)
        lengths = torch.tensor([longest, *(chosen.randint(1, longest) for _ in range(batch - 1))])
        decoders[METHOD_NAMES[number % len(METHODS)]].generate(
            torch.randint(1, target.config.vocab_size, (batch, longest), generator=generator),
            max_new_tokens=new_tokens or chosen.randint(8, 64),
            attention_mask=(torch.arange(longest) >= longest - lengths[:, None]).long(),
            temperature=0.8 * (number // len(METHODS) % 2),
            seed=number,
        )

    for new_tokens in range(1, 7):  # each depth of tree that a text can end with
        for number in range(ROUND):
            generate(number, new_tokens)
    for _ in range(rounds):
        for number in range(ROUND):
            generate(number, None)
            after()
        for decoder in decoders.values():
            decoder.runner.kept.clear()  # the last texts of each, which have random lengths
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        measured.append((resident, sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())))
    (memory, tensors), later = measured[WARM_UP - 1], measured[WARM_UP:]
    return max(each for each, _ in later) - memory, max(each for _, each in later) - tensors


def test_memory_is_flat_over_two_hundred_generations(demo_pair):
    assert ROUNDS * ROUND >= 200
    memory, tensors = growth(demo_pair.target, demo_pair.draft, ROUNDS)
    assert tensors == 0
    assert memory < NOISE


def test_a_megabyte_kept_by_each_generation_is_found():
    """The measure's own test, with models so small that it is quick."""
    kept, models = [], [tiny_llama(seed, 31, 1, max_position_embeddings=2048) for seed in (1, 2)]
    memory, tensors = growth(*models, WARM_UP + 2, lambda: kept.append(torch.ones(1 << 18)))
    assert tensors == 2 * ROUND
    assert memory > NOISE
