"""Helpers of tests/drafts/test_distil.py and its neighbours."""

import torch
from head_training_cases import random_rows
from transformers import LlamaForCausalLM

from heavypath.speculative import DistilSettings
from heavypath.speculative.training.documents import Document

TINY = DistilSettings(
    epochs=1, length=16, tokens_per_step=128, rate=0.02, written=0.2, prompt_tokens=4, checkpoint_steps=4
)


def silent(line: str) -> None:
    """Nobody is told."""


def texts(count: int = 30) -> list[Document]:
    none = torch.zeros(0, dtype=torch.int32)
    return [Document(tokens.int(), none) for tokens in random_rows(11, count, 48).tokens]


def greedy(target: LlamaForCausalLM, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    return target.generate(ids, max_new_tokens=new_tokens, **options)


def overlaps(record: dict) -> tuple[list[float], list[float]]:
    """Held out, before the training and behind it."""
    held_out = [*record["held_out"].values()]
    return held_out[0]["overlap"], held_out[-1]["overlap"]
