"""Checkpoints of trained heads, of whichever kind: EAGLE heads and Medusa heads are found and loaded alike."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from heavypath.speculative.drafts.heads.checkpoint import is_head, load_head
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.medusa.checkpoint import is_medusa, load_medusa
from heavypath.speculative.drafts.medusa.heads import MedusaHeads

TrainedHead = EagleHead | MedusaHeads


def is_trained_head(path_or_name: str | Path) -> bool:
    """Whether a folder, or a model in the Hugging Face cache, is an EAGLE head or has Medusa heads."""
    return is_medusa(path_or_name) or is_head(path_or_name)


def load_trained_head(
    path_or_name: str | Path, target: PreTrainedModel, dtype: torch.dtype | None = None
) -> TrainedHead:
    """An EAGLE head or Medusa heads for a target; arguments and errors as of `load_head` and `load_medusa`."""
    load = load_medusa if is_medusa(path_or_name) else load_head
    return load(path_or_name, target, dtype=dtype)
