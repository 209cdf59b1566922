"""Check the sizes of a model's sliding windows, at a cost that does not grow with the window.

The window of each layer is read from the model's config, and not every model follows its config. A sequence longer than
a window of 4,096 tokens would show a difference, but running it is expensive. Instead, this trial runs three tokens
after an artificial prefix. All keys are zero, so all rows get equal weight. All values are zero except those of the few
rows that enter or leave the window of the three tokens; these values are as large as the window is long. So one row too
many or too few changes the logits as much as a token does. All layers share these rows.
"""

import torch
from torch import Tensor

from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.models.text_cache import cache_argument

_NODES = 3
_LARGEST = 1 << 14  # limit of the artificial values, which must fit into fp16


@torch.no_grad()
def check_windows(forward: Forward, limit: float) -> None:
    """Raise ValueError if a model's sliding windows are not those of its config, which `forward` follows.

    limit: how far logits of `forward` and of transformers' own pass may differ, in their standard deviations
    """
    for window in forward.windows:
        if window is None or window >= forward.max_positions:  # no text is longer
            continue
        gap = _gap(forward, window)
        if not gap <= limit:
            raise ValueError(
                f"{forward.name} of type {forward.config.model_type!r} has sliding_window={window} in its config, but "
                f"its own forward pass sees farther or less far: at the window's edge its logits differ by {gap:.2g} "
                f"standard deviations, expected at most {limit}; correct the config, or set sliding_window=None there"
            )


def _gap(forward: Forward, window: int) -> float:
    """How far logits of `forward` and of transformers' own pass differ at the window's edge, in standard deviations."""
    noise = torch.Generator().manual_seed(0)  # torch's own is the caller's
    nodes = torch.randint(forward.vocab_size, (1, _NODES), generator=noise, device="cpu").to(forward.device)
    positions = torch.arange(_NODES, device=forward.device)[None]
    cache = _edge_cache(forward, window, noise)
    rows = positions + window
    visible_rows = window + _NODES
    seen = {cache_argument(forward.model): cache.at(rows, visible_rows)}
    expected = forward.model(input_ids=nodes, position_ids=positions, use_cache=True, **seen).logits.float()
    mask = TreeMask(
        prefix_length=torch.full((), window, device=forward.device),
        visible_rows=visible_rows,
        subtree_end=torch.full((_NODES,), _NODES, device=forward.device),
    )
    logits = forward(nodes, positions, rows, cache, mask)
    return float(((logits - expected).square().mean(-1).sqrt() / expected.std(-1)).max())


def _edge_cache(forward: Forward, window: int, noise: torch.Generator) -> KeyValueCache:
    """A cache with an artificial prefix as long as the window, of which the three nodes see all but the first 1, 2, 3.

    noise: for the signs of values
    """
    usual = forward.new_cache(1, _NODES)
    cache = _SharedRows(
        batch=1,
        layers=1,
        kv_heads=usual.keys.shape[1] // forward.layers,
        rows=window + _NODES,
        head_dim=usual.keys.shape[3],
        like=usual.keys,
        rotary=usual.rotary,
    )
    edge = cache.values[:, :, : min(window, _NODES + 1)]
    signs = torch.randint(2, edge.shape, generator=noise, device="cpu") * 2 - 1
    edge.copy_(signs.to(edge) * min(window, _LARGEST))
    return cache


class _SharedRows(KeyValueCache):
    """A cache whose layers share one layer's rows: each layer reads its new rows before the next one writes."""

    def write(self, layer: int, key: Tensor, value: Tensor, cache_rows: Tensor) -> None:
        super().write(0, key, value, cache_rows)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return super().read(0)
