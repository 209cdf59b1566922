"""Helpers of tests/serving/test_serving.py and its neighbours."""

import threading
from contextlib import contextmanager

import torch
from tiny_models import tiny_llama as shorter_llama

VOCAB = 7


def tiny_llama(seed, vocab_size=VOCAB):
    return shorter_llama(seed, vocab_size, max_position_embeddings=256)


def generated(decoder, prompt, settings, name, **more):
    return decoder.generate(torch.tensor([prompt]), **settings, sequence_ids=torch.tensor([name]), **more)


def alone(decoder, prompt, settings, name, **more):
    return generated(decoder, prompt, settings, name, **more).sequences[0, len(prompt) :].tolist()


@contextmanager
def held(service):
    """A service whose thread does not begin a step while the block runs."""
    step, open_again, entered = service._slots._step, threading.Event(), threading.Event()

    def wait(count):
        entered.set()
        assert open_again.wait(30)
        return step(count)

    service._slots._step = wait
    try:
        yield entered
    finally:
        service._slots._step = step
        open_again.set()
