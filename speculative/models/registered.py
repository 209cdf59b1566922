"""The forward pass that a user has registered for a type of model, see `forward_of.FORWARDS`."""

import torch
from torch import nn
from transformers import PreTrainedModel

from heavypath.speculative.models.forward import Forward
from heavypath.speculative.models.forward_of import FORWARDS, tolerance_of
from heavypath.speculative.models.probe import LONGEST, NotFiniteError, gap

LENGTHS = (3, 64, 256, LONGEST)  # tokens before the tree in a trial: an attention may treat long sequences differently


def registered_forward(inner: PreTrainedModel, name: str, model: nn.Module) -> Forward:
    """A user's forward pass of a model, tried on small trees against the model's own forward pass.

    inner: the model to run; name: what messages call it; model: the one that is called, which may wrap `inner`

    Raises TypeError for something that is no `Forward`, and for one that lacks `layers` or `windows`. Raises ValueError
    if it fails in a trial, or if its logits are not the model's own.
    """
    kind = inner.config.model_type
    what = f"the forward pass in FORWARDS for {name} of type {kind!r}"
    forward = FORWARDS[kind](inner, name)
    if not isinstance(forward, Forward):
        raise TypeError(f"{what} must be a class that inherits Forward, or return one; got {forward!r}")
    lacking = [attribute for attribute in ("layers", "windows") if not hasattr(forward, attribute)]
    if lacking:
        raise TypeError(f"{what}, a {type(forward).__name__}, must set self.{' and self.'.join(lacking)} in __init__")
    forward.is_foreign = True
    for length in LENGTHS:
        chain = 6 if length == LENGTHS[0] else length // 8
        if length + chain + 2 > forward.max_positions:
            break
        try:
            found = gap(forward, model, length, chain)
        except (NotFiniteError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            problem = f"{what} fails for a tree after {length} tokens: {error or type(error).__name__}"
            raise ValueError(problem) from error
        if not found <= tolerance_of(forward):
            raise ValueError(
                f"{what} gives other logits than the model's own: after {length} tokens they differ by {found:.2g} "
                f"standard deviations, expected at most {tolerance_of(forward)}. Each node must see the prefix and its "
                "ancestors alone, as `mask` says, at its own `positions`, with keys and values in its `cache_rows`"
            )
    return forward
