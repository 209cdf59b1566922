"""Try a forward pass over tree nodes on a small tree: it must give the logits that the model gives for each path.

A model's type does not tell what it computes. Its attention may be patched, its layers quantised, adapted or hooked, or
it may not follow the mask, the positions and the cache that it is called with. So a tree is put after a prefix. The
logits after its nodes are compared with those after the same tokens as plain texts, by the model's own forward pass.
"""

from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from heavypath.speculative.models.forward import Forward, TreeMask


@torch.no_grad()
def gap(forward: Forward, model: nn.Module) -> float:
    """The largest distance of a small tree's logits from those of its paths as texts, in their standard deviations.

    model: the model that the forward pass stands for, which may be a wrapper around `forward.model`

    Raises ValueError for logits of another shape than the vocabulary's, and any error of the model.
    """
    device, vocab_size = forward.device, forward.vocab_size
    noise = torch.Generator().manual_seed(0)  # torch's own is the caller's
    prefix, nodes = torch.randint(vocab_size, (2, 11), generator=noise, device="cpu").to(device).split([3, 8], 1)
    lengths, depths, ends, paths = (  # a chain of six nodes, and below its root two more, in rows far after it
        torch.tensor(numbers, device=device)
        for numbers in ([3, 2], [0, 1, 2, 3, 4, 5, 1, 2], [8, 6, 6, 6, 6, 6, 8, 8], [[0, 1, 2], [0, 6, 7]])
    )
    places = (lengths[:, None, None] + torch.arange(3, device=device)).expand(2, 2, 3)
    texts = torch.cat([prefix, nodes[:, :3]], 1)[:, None].repeat(1, 2, 1).scatter_(2, places, nodes[:, paths])
    expected = model(input_ids=texts.flatten(0, 1), use_cache=False).logits.float()
    expected = expected.view(2, 2, 6, -1).gather(2, places[..., None].expand(-1, -1, -1, expected.shape[-1]))

    cache = forward.new_cache(2, 11)
    forward.prefill(prefix, cache)
    cache_rows = lengths[:, None] + torch.arange(8, device=device)
    mask = TreeMask(prefix_length=lengths, visible_rows=11, subtree_end=ends)
    logits = forward(nodes, lengths[:, None] + depths, cache_rows, cache, mask)
    if logits.shape != (2, 8, vocab_size):
        raise ValueError(f"expected logits {[2, 8, vocab_size]} from its vocabulary, got {[*logits.shape]}")
    distance = (logits[:, paths] - expected).square().mean(-1).sqrt()
    found = float((distance / expected.std(-1)).max())
    return found if forward.ranks is None else max(forward.ranks.told(found))  # for all to choose alike


def with_a_layer_of_each_kind(model: PreTrainedModel) -> PreTrainedModel:
    """The model, over the same weights, with one layer of each kind that it has: what is right for that is for all.

    Layers are of a kind that have the same modules, settings, and types and shapes of weights.
    """
    kinds: dict[tuple[Any, ...], nn.Module] = {}
    inner: Any = copy(model.model)
    for layer in inner.layers:
        kinds.setdefault(_kind(layer), layer)
    inner._modules = inner._modules | {"layers": nn.ModuleList(kinds.values())}
    short = copy(model)
    short._modules = short._modules | {"model": inner}
    return short


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    modules = [
        (name, type(module), *((key, value) for key, value in vars(module).items() if _is_setting(key, value)))
        for name, module in layer.named_modules()
    ]
    weights = [(name, type(weight), weight.dtype, weight.shape) for name, weight in layer.named_parameters()]
    return *modules, *weights


def _is_setting(name: str, value: object) -> bool:
    return name != "layer_idx" and isinstance(value, (bool, int, float, str, type(None)))
