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
    vocab_size = forward.vocab_size
    noise = torch.Generator().manual_seed(0)  # torch's own is the caller's
    count = chain + 2
    tokens = torch.randint(vocab_size, (2, prefix + count), generator=noise, device="cpu").to(device)
    before, nodes = tokens.split([prefix, count], 1)
    lengths = torch.tensor([prefix, prefix - 1], device=device)
    # The tree is a chain, then a second path of two nodes below its root, in later rows.
    depths = torch.tensor([*range(chain), 1, 2], device=device)
    ends = torch.tensor([count, *[chain] * (chain - 1), count, count], device=device)
    paths = torch.tensor([[0, 1, 2], [0, chain, chain + 1]], device=device)  # the nodes whose logits are compared

    # The model's own logits: each path of each sequence, [2, 2, 3], as a plain sequence after its prefix.
    positions = lengths[:, None, None] + torch.arange(3, device=device)
    positions = positions.expand(2, 2, 3)
    texts = torch.cat([before, nodes[:, :3]], 1)[:, None].repeat(1, 2, 1)
    texts.scatter_(2, positions, nodes[:, paths])
    last = _last_logits(model, texts.flatten(0, 1)).unflatten(0, (2, 2))  # [2, 2, 4, V]
    among_last = positions[..., None] - (prefix - 1)
    expected = last.gather(2, among_last.expand(-1, -1, -1, last.shape[-1]))  # [2, 2, 3, V]
    check_own_logits(forward, expected)

    cache = forward.new_cache(2, prefix + count)
    forward.prefill(before, cache)
    cache_rows = lengths[:, None] + torch.arange(count, device=device)
    mask = TreeMask(prefix_length=lengths, visible_rows=prefix + count, subtree_end=ends)
    logits = forward(nodes, lengths[:, None] + depths, cache_rows, cache, mask)  # [2, N, V]
    if logits.shape != (2, count, vocab_size):
        raise ValueError(f"expected logits {[2, count, vocab_size]} from its vocabulary, got {[*logits.shape]}")
    distance = (logits[:, paths] - expected).square().mean(-1).sqrt()  # [2, 2, 3]
    found = float((distance / expected.std(-1)).max())
    if forward.ranks is not None:  # all ranks decide alike
        found = max(forward.ranks.exchange(found))
    return found


def lengths_to_try(forward: Any) -> list[int | None]:
    """The sequence lengths to try a `TransformersForward` with; None for the shortest trial, the default of `gap`.

    A user's own function may treat long sequences in another way, such as an attention with a window. A difference that
    only begins beyond the longest of these lengths is not found.
    """
    longest = min(LONGEST, forward.max_positions) if forward.strange else 0
    return [None, *sorted({min(length, longest) for length in (64, 256, LONGEST)} - {*range(32)})]


class NotFiniteError(ValueError):
    """Raised if a model's own logits are NaN or infinite, so that nothing can be compared with them."""


def check_own_logits(forward: Forward, logits: Tensor) -> None:
    """Raise NotFiniteError if a model's own logits are NaN or infinite, or ValueError if its weights are."""
    if logits.isfinite().all():
        return
    forward.check_weights()
    others = [each for each in (torch.bfloat16, torch.float32) if each != forward.dtype]
    raise NotFiniteError(
        f"{forward.name}'s own logits are NaN or infinite in {forward.dtype}, by transformers' own forward pass, too: "
        f"load it with dtype={' or '.join(map(str, others))}, whose numbers may be larger, or look at its layers"
    )


def _last_logits(model: nn.Module, texts: Tensor) -> Tensor:
    """A model's own logits [B, 4, V], fp32, after the last four tokens of sequences LongTensor[B, T]."""
    base: Any = getattr(model, "get_base_model", lambda: model)()  # inside an adapter's wrapper
    keeps_few = "logits_to_keep" in signature(base.forward).parameters
    few = {"logits_to_keep": 4} if keeps_few else {}
    logits = model(input_ids=texts, use_cache=False, **few).logits
    return logits[:, -4:].float()


def with_a_layer_of_each_kind(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model over the same weights, with one layer of each kind, which is enough for a trial.

    Layers are of the same kind if they have the same modules and settings, and weights of the same types and shapes.
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
    kind: list[Any] = []
    for name, module in layer.named_modules():
        settings = [(key, value) for key, value in vars(module).items() if _is_setting(key, value)]
        kind.append((name, type(module), *settings))
    for name, weight in layer.named_parameters():
        kind.append((name, type(weight), weight.dtype, weight.shape))
    return tuple(kind)


def _is_setting(name: str, value: object) -> bool:
    return name != "layer_idx" and isinstance(value, (bool, int, float, str, type(None)))
