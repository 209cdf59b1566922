"""Prompt lookup's kernel against a search through lists, in texts of several blocks, and in any schedule."""

import math
import random

import pytest
import torch
from devices import DEVICE, PLACES, moved
from drafted_cases import followed
from hypothesis import given, settings
from hypothesis import strategies as st

from heavypath.kernels.retrieval.latest import latest_logprobs
from heavypath.kernels.retrieval.ranges import Appended, store_tokens
from heavypath.speculative import PromptLookup

VOCAB = 4
IMPLS = ["torch", "triton"] if DEVICE == "cpu" else ["triton"]
tokens = st.integers(0, VOCAB - 1)


def cache_of(texts, longest, room):
    """Keys and values of texts, the last two tokens of which are not written yet: these rows have another token."""
    width = max(map(len, texts))
    keys = torch.full((len(texts), 1, width + room, longest), -1)
    values = keys.clone()
    for b, text in enumerate(texts):
        if len(text) > 2:
            store_tokens(torch.tensor([text[:-2]]), keys[b : b + 1, 0], values[b : b + 1, 0])
        for field in (keys, values):
            field[b, 0, max(len(text) - 2, 0) :] = 1
    return keys, values


def last_two(texts):
    """A step's first two nodes: in a text of one token both are the root."""
    rows = torch.tensor([[max(len(text) - 2, 0), len(text) - 1] for text in texts])
    fed = torch.tensor([[text[row] for row in own] for text, own in zip(texts, rows.tolist(), strict=True)])
    return Appended(fed, rows, rows - 1)


def levels_of(texts, levels, longest, shortest, vocab, impl):
    """Log Q after the roots, and after the nodes of some levels, all children of the level's last node; and the cache.

    levels: for each level and text, the nodes' tokens
    """
    device = PLACES[impl]
    keys, values = moved(cache_of(texts, longest, 20), device)
    lengths = torch.tensor([len(text) - 1 for text in texts], device=device)
    options = {"shortest": shortest, "vocab_size": vocab, "impl": impl}
    found = [latest_logprobs(moved(last_two(texts), device), lengths, keys, values, is_chain=True, **options)]
    above = lengths[:, None]
    for level in levels:
        fed = torch.tensor(level, device=device)
        rows = above + 1 + torch.arange(fed.shape[1], device=device)
        nodes = Appended(fed, rows, above.expand_as(rows))
        found.append(latest_logprobs(nodes, lengths, keys, values, is_chain=False, **options))
        above = rows[:, -1:]
    return moved([*found, keys, values], "cpu")


@pytest.mark.parametrize("impl", IMPLS)
def test_a_text_by_hand(impl):
    """After 2 1 came 3 and, later, 0; after 2 1 3 only 2 came; 1 1 never stood there, 1 alone twice."""
    root, below, *_ = levels_of([[2, 1, 3, 2, 1, 0, 2, 1]], [[[3, 1]]], 3, 1, VOCAB, impl)
    law = torch.cat([root, below], 1).exp()[0]
    assert law.flatten().tolist() == pytest.approx([0.5, 0, 0, 0.25, 0, 0, 0.5, 0, 0.5, 0, 0, 0.25])


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.lists(tokens, min_size=1, max_size=24), min_size=1, max_size=3),
    branch=st.lists(tokens, min_size=1, max_size=3), longest=st.integers(1, 4), shortest=st.integers(1, 2),
)  # fmt: skip
def test_it_finds_what_a_search_finds(impl, texts, branch, longest, shortest):
    options = PromptLookup(max(longest, shortest), shortest)
    levels = [[[token]] * len(texts) for token in branch]
    found = levels_of(texts, levels, options.max_ngram, shortest, VOCAB, impl)
    for depth, logprobs in enumerate(found[:-2]):
        for b, text in enumerate(texts):
            expected = followed(text, text + branch[:depth], options, VOCAB)
            assert logprobs[b, 0].exp().tolist() == pytest.approx(expected, abs=1e-6)
            assert (logprobs[b, 0] == -math.inf).tolist() == [chance == 0 for chance in expected]


@pytest.mark.parametrize("impl", IMPLS)
def test_only_the_latest_places_count(impl):
    """Before token 0 stand forty others, each once: the latest 32 are proposed."""
    text = [token for other in range(1, 41) for token in (0, other)] + [0]
    root, *_ = levels_of([text], [], 1, 1, 41, impl)
    expected = [0.0] * 9 + [2.0 ** (other - 41) for other in range(9, 41)]
    assert root.exp()[0, 0].tolist() == pytest.approx(expected, rel=1e-5, abs=0)


def texts_of_blocks(seed, size):
    """Texts of about `size` tokens: at random, all alike, and one whose last tokens stood at its very beginning."""
    generator = random.Random(seed)
    at_random, far = ([generator.randrange(1 + one, 7) for _ in range(size - one)] for one in (0, 1))
    far[:4] = far[-4:] = [1, 0, 0, 1]
    return [at_random, far, [5] * (size // 2), [5]]


@pytest.mark.parametrize(("seed", "size"), [(0, 2500), (1, 1025), (2, 1024)])
def test_both_implementations_give_the_same_numbers(seed, size):
    generator = random.Random(seed)
    texts = texts_of_blocks(seed, size)
    levels = [[[generator.randrange(7) for _ in range(3)] for _ in texts] for _ in range(2)]
    for longest, shortest in ((3, 1), (4, 4), (1, 1), (9, 2)):
        ways = [levels_of(texts, levels, longest, shortest, 7, impl) for impl in PLACES]
        for ours, theirs in zip(*ways, strict=True):
            assert torch.allclose(ours.double(), theirs.double(), atol=1e-6, rtol=1e-6)


def test_the_kernel_refuses_rows_that_do_not_lie_side_by_side():
    nodes = Appended(*torch.zeros(3, 1, 1, dtype=torch.long, device=DEVICE))
    keys = torch.zeros(1, 1, 4, 3, dtype=torch.long, device=DEVICE)[..., :2]
    with pytest.raises(ValueError, match=r"rows side by side, got \(12, 12, 3, 1\)"):
        latest_logprobs(
            nodes, nodes.tokens[0], keys, keys.clone(), shortest=1, is_chain=False, vocab_size=4, impl="triton"
        )


def test_places_are_right_in_any_schedule(adversary):
    test_both_implementations_give_the_same_numbers(adversary.seed, 1100)
    test_only_the_latest_places_count("triton")
    adversary.met("_latest_kernel")
