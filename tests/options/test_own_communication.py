"""Processes that decode together by communication of a user's own, played by threads, write one text, and agree."""

import threading
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from in_time import in_time
from tiny_models import tiny_llama
from torch import nn

from heavypath.speculative import Communication, SpeculativeDecoder

PROMPTS = torch.tensor([[3, 1, 4], [1, 5, 2]])
OPTIONS = {"max_new_tokens": 16, "temperature": 0.8, "eos_token_id": None}


class BetweenThreads(Communication):
    def __init__(self, rank, group):
        self.rank, self.count, self.group = rank, group.count, group

    def exchange(self, what):
        self.group.sent[self.rank] = what
        self.group.barrier.wait(60)
        received = [*self.group.sent]
        self.group.barrier.wait(60)
        return received


class PartOfTheHead(nn.Module):
    """A few rows of the head of a language model; the others are in other ranks."""

    def __init__(self, head, communication):
        super().__init__()
        self.communication = communication
        self.weight = nn.Parameter(head.weight.detach().chunk(communication.count)[communication.rank].clone())

    def forward(self, states):
        return torch.cat(self.communication.exchange(states @ self.weight.T), -1)


def on_ranks(count, work):
    """The results, or the errors, of `work(communication)` in `count` threads."""
    group = SimpleNamespace(count=count, sent=[None] * count, barrier=threading.Barrier(count))
    return in_time(*(partial(work, BetweenThreads(rank, group)) for rank in range(count)))


def split_decoder(target, draft, communication, **options):
    part = deepcopy(target)
    part.lm_head = PartOfTheHead(part.lm_head, communication)
    return SpeculativeDecoder(part, deepcopy(draft), tree_size=5, communication=communication, **options)


@pytest.mark.parametrize("count", [2, 3])
def test_all_ranks_write_the_text_of_one_process(count):
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    expected = SpeculativeDecoder(target, draft, tree_size=5).generate(PROMPTS, **OPTIONS).sequences
    found = on_ranks(count, lambda each: split_decoder(target, draft, each).generate(PROMPTS, **OPTIONS).sequences)
    for sequences in found:
        assert torch.equal(sequences, expected), found


def test_ranks_that_differ_are_found_and_named():
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    another = tiny_llama(3, layers=1)
    found = on_ranks(
        3, lambda each: split_decoder(target, draft, each).generate(PROMPTS, seed=int(each.rank == 1), **OPTIONS)
    )
    assert {str(error).split(";")[0] for error in found} == {
        "rank 1 has another seed than the other ranks before the first step"
    }
    drafts = [draft, draft, another]
    found = on_ranks(3, lambda each: split_decoder(target, drafts[each.rank], each).generate(PROMPTS, **OPTIONS))
    assert {str(error).split(";")[0] for error in found} == {"rank 2 has another draft than the other ranks in step 1"}


def test_what_fails_on_one_rank_ends_all():
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)

    class Streamer:
        def put(self, tokens):
            raise OSError("nobody reads")

        def end(self):
            pass

    def work(communication):
        decoder = split_decoder(target, draft, communication)
        return decoder.generate(PROMPTS[:1], streamer=Streamer(), **OPTIONS)

    first, second = on_ranks(2, work)
    assert (type(first), str(first)) == (OSError, "nobody reads")
    assert (type(second).__name__, str(second)) == ("RankFailedError", "rank 0 has raised OSError: nobody reads")


class Alone(Communication):
    def __init__(self, rank=0, count=1):
        self.rank, self.count = rank, count

    def exchange(self, what):
        return [what]


@pytest.mark.parametrize(("given", "error", "message"), [
    (Alone, TypeError, "communication must be an object of a class that inherits Communication, got <class"),
    (Alone(rank=2, count=2), ValueError, r"with 0 <= rank < count, got \[2, 2\]"),
    (Alone(rank=None), ValueError, r"got \[None, 1\]"),
])  # fmt: skip
def test_what_is_no_communication_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        SpeculativeDecoder(tiny_llama(1), tiny_llama(2), communication=given)


def test_a_service_is_refused():
    decoder = SpeculativeDecoder(tiny_llama(1), tiny_llama(2), communication=Alone())
    with pytest.raises(ValueError, match="serve runs in one process, and this decoder has the option communication"):
        decoder.serve()
