"""Try a forward pass on a small tree: its logits must be those that the model's own forward pass gives for each path.

A model's type does not show what it computes. Its attention may be patched, its layers quantised, adapted or hooked, or
it may ignore the mask, the positions or the cache that it is called with. So a tree is run after a prefix, and the
logits after its nodes are compared with those that the model's own forward pass gives for each path as a plain
sequence.
"""

from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heavypath.speculative.models.forward import Forward, TreeMask

LONGEST = 1024  # tokens of the longest trial
_SETTINGS = (bool, int, float, str, type(None))  # types of attributes that distinguish two layers


@torch.no_grad()
def gap(forward: Forward, model: nn.Module, prefix: int = 3, chain: int = 6) -> float:
    """The largest distance between a small tree's logits and those of its paths, in standard deviations of the latter.

    model:  the model that the forward pass replaces, which may be a wrapper around `forward.model`
    prefix: the tokens before the tree; a second sequence has one less
    chain:  the number of nodes of the tree's first path, whose rows come before those of the second path

    Raises ValueError for logits of another shape than the vocabulary's, and for a model whose own logits are NaN or
    infinite. Errors of the model are passed on.
    """
    device = forward.device
    count = chain + 2  # N
    width = prefix + count
    noise = torch.Generator().manual_seed(0)  # torch's own is the caller's
    drawn = torch.randint(forward.vocab_size, (2, width), generator=noise, device="cpu")
    before, nodes = drawn.to(device).split([prefix, count], 1)  # [2, prefix], [2, N]
    lengths = torch.tensor([prefix, prefix - 1], device=device)
    # The tree is a chain, then a second path of two nodes below its root, in later rows.
    paths = torch.tensor([[0, 1, 2], [0, chain, chain + 1]], device=device)  # the nodes whose logits are compared
    expected = _expected_logits(model, before, lengths, nodes[:, paths])
    check_own_logits(forward, expected)

    depths = torch.tensor([*range(chain), 1, 2], device=device)
    below_root = [chain] * (chain - 1)
    ends = torch.tensor([count, *below_root, count, count], device=device)
    cache = forward.new_cache(2, width)
    forward.prefill(before, cache)
    roots = lengths[:, None]
    positions = roots + depths
    cache_rows = roots + torch.arange(count, device=device)
    mask = TreeMask(prefix_length=lengths, visible_rows=width, subtree_end=ends)
    logits = forward(nodes, positions, cache_rows, cache, mask)  # [2, N, V]
    needed = [2, count, forward.vocab_size]
    if [*logits.shape] != needed:
        raise ValueError(f"expected logits {needed} from its vocabulary, got {[*logits.shape]}")
    differences = logits[:, paths] - expected  # [2, 2, 3, V]
    distances = differences.square().mean(-1).sqrt()
    relative = distances / expected.std(-1)  # [2, 2, 3]
    found = float(relative.max())
    if forward.ranks is not None:  # all ranks decide alike
        found = max(forward.ranks.exchange(found))
    return found


def _expected_logits(model: nn.Module, before: Tensor, lengths: Tensor, paths: Tensor) -> Tensor:
    """A model's own logits [2, 2, 3, V], fp32, after each node of two paths of each sequence.

    before:  LongTensor[2, T], right-padded prefixes with this number of tokens: `lengths`, LongTensor[2], T or T - 1
    paths:   LongTensor[2, 2, 3], the tokens of two paths of each sequence; the first of each path is the root
    """
    positions = lengths[:, None, None] + torch.arange(3, device=before.device)
    positions = positions.expand(2, 2, 3)
    texts = before[:, None].repeat(1, 2, 1)  # each path as a plain sequence after its prefix
    texts = torch.cat([texts, paths], 2)  # [2, 2, T + 3]
    texts.scatter_(2, positions, paths)
    last = _last_logits(model, texts.flatten(0, 1))
    last = last.unflatten(0, (2, 2))  # [2, 2, 4, V]
    first_of_last = before.shape[1] - 1
    among_last = positions[..., None] - first_of_last
    among_last = among_last.expand(-1, -1, -1, last.shape[-1])
    return last.gather(2, among_last)


def lengths_to_try(forward: Any) -> list[int | None]:
    """The sequence lengths to try a `TransformersForward` with; None for the shortest trial, the default of `gap`.

    A user's own function may treat long sequences in another way, such as an attention with a window. A difference that
    only begins beyond the longest of these lengths is not found.
    """
    if not forward.strange:
        return [None]
    longest = min(LONGEST, forward.max_positions)
    lengths = {min(length, longest) for length in (64, 256, LONGEST)}
    return [None, *sorted(length for length in lengths if length >= 32)]


class NotFiniteError(ValueError):
    """Raised if a model's own logits are NaN or infinite, so that nothing can be compared with them."""


def check_own_logits(forward: Forward, logits: Tensor) -> None:
    """Raise NotFiniteError if a model's own logits are NaN or infinite, or ValueError if its weights are."""
    if logits.isfinite().all():
        return
    forward.check_weights()
    others = [str(each) for each in (torch.bfloat16, torch.float32) if each != forward.dtype]
    larger = " or ".join(others)
    raise NotFiniteError(
        f"{forward.name}'s own logits are NaN or infinite in {forward.dtype}, by transformers' own forward pass, too: "
        f"load it with dtype={larger}, whose numbers may be larger, or look at its layers"
    )


def _last_logits(model: nn.Module, texts: Tensor) -> Tensor:
    """A model's own logits [B, 4, V], fp32, after the last four tokens of sequences LongTensor[B, T]."""
    base: Any = model
    if hasattr(model, "get_base_model"):  # an adapter's wrapper
        base = base.get_base_model()
    few = {}
    if "logits_to_keep" in signature(base.forward).parameters:
        few["logits_to_keep"] = 4
    logits = model(input_ids=texts, use_cache=False, **few).logits
    return logits[:, -4:].float()


def with_a_layer_of_each_kind(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model over the same weights, with one layer of each kind, which is enough for a trial.

    Layers are of the same kind if they have the same modules and settings, and weights of the same types and shapes.
    """
    inner: Any = copy(model.model)
    by_kind: dict[tuple[Any, ...], nn.Module] = {}
    for layer in inner.layers:
        kind = _kind(layer)
        by_kind.setdefault(kind, layer)
    layers = nn.ModuleList(by_kind.values())
    inner._modules = inner._modules | {"layers": layers}
    short = copy(model)
    short._modules = short._modules | {"model": inner}
    return short


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    kind: list[Any] = []
    for name, module in layer.named_modules():
        kind += [name, type(module)]
        for key, value in vars(module).items():
            if key != "layer_idx" and isinstance(value, _SETTINGS):
                kind.append((key, value))
    for name, weight in layer.named_parameters():
        kind.append((name, type(weight), weight.dtype, weight.shape))
    return tuple(kind)
