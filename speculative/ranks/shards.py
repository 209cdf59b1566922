"""Tensor parallelism for Llamas: compute with the parts into which transformers' plan has split the weights.

With n ranks, and the parts of rank r as transformers cuts them:

    q, k, v, gate, up    rows of W        x W_r'                  this rank's heads and channels
    o, down              columns of W     sum_r x_r W_r' + b      one all-reduce each
    embedding            rows, by token   sum_r E_r[t], which is 0 on ranks without t
    lm_head              rows, by token   the logits of rank r's tokens, side by side: one all-gather

A part is an ordinary linear layer over this rank's tensor, so that the fastest product for the device
(`models.linear`, `models.joined`) can use it like a whole layer. transformers computes with DTensor, which needs the
host and cannot be captured in a CUDA graph.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import embedding as look_up

from heavypath.speculative.ranks.group import Ranks, ranks_of
from heavypath.speculative.ranks.peers import WHOLE, Parts, Product, is_split, local_of

_ROWS = (Shard(0),)
_COLUMNS = (Shard(1),)
_LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_parts: "weakref.WeakKeyDictionary[nn.Module, nn.Linear]" = weakref.WeakKeyDictionary()


def is_split_by_transformers(module: nn.Module) -> bool:
    """Whether transformers' tensor parallelism replaced a module's forward, and the module has no other hooks."""
    own = module.__dict__
    source, name = (getattr(own.get("forward"), part, "") for part in ("__module__", "__qualname__"))
    replaced = source == "transformers.distributed.tensor_parallel" and name.endswith(".<locals>.tp_forward")
    return replaced and not (own["_forward_hooks"] or own["_forward_pre_hooks"])


def is_split_as_usual(model: Any) -> bool:
    """Whether a Llama is split as the table at the top of this file says. Embedding and lm_head may be whole."""
    for layer in model.model.layers:
        rows = [layer.get_submodule(name) for name in _LAYER]
        columns = [layer.self_attn.o_proj, layer.mlp.down_proj]
        rest = [layer.input_layernorm, layer.post_attention_layernorm]
        rest += [norm for name in ("q_norm", "k_norm") if (norm := getattr(layer.self_attn, name, None)) is not None]
        if not (all(map(_has_rows, rows)) and all(map(_has_columns, columns))) or any(map(is_split, rest)):
            return False
    ends = [model.model.embed_tokens, model.lm_head]
    return not is_split(model.model.norm) and all(_has_rows(end) or not is_split(end) for end in ends)


def _has_rows(module: Any) -> bool:
    return _placements(module.weight) == _ROWS


def _has_columns(module: Any) -> bool:
    return _placements(module.weight) == _COLUMNS


def _placements(weight: Tensor) -> object:
    return tuple(weight.placements) if isinstance(weight, DTensor) else None


class Shards(Parts):
    """Builds a model's layers from this rank's part of the weights, and from collectives that complete the results."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def knows_hook_of(self, module: nn.Module) -> bool:
        """Whether a module's patch is transformers' tensor parallelism, which this object replaces."""
        return is_split_by_transformers(module)

    def are_usual(self, model: Any) -> bool:
        """Whether a Llama is not split, or split as the table at the top of this file says."""
        return not any(map(is_split, model.modules())) or is_split_as_usual(model)

    def heads(self, count: int) -> int:
        """How many of `count` attention heads each rank has. `check_heads` has checked that ranks can share them."""
        return count // self.ranks.count

    def of(self, module: Any) -> Any:
        """A linear layer with this rank's part of a split layer; the layer itself if it is not split.

        The part has no bias if the bias is added after the sum over ranks. Each module always gets the same object,
        because copies of weights are found by the identity of the weights.
        """
        if not is_split(module):
            return module
        weight = local_of(module.weight)
        bias = None
        if module.bias is not None and not _has_columns(module):
            bias = local_of(module.bias)
        part = _parts.get(module)
        if part is None or part.weight is not weight or part.bias is not bias:
            part = _parts[module] = nn.Linear(1, 1, device="meta")
            part.in_features = weight.shape[1]
            part.out_features = weight.shape[0]
            part._parameters = {"weight": weight, "bias": bias}  # pyright: ignore[reportAttributeAccessIssue]
        return part

    def summed(self, module: Any, product: Product) -> Product:
        """The product of a layer split by columns: one all-reduce after `product`, that of this rank's part; bias last.

        A layer that is not split keeps its product.
        """
        if not is_split(module):
            return product
        bias = None if module.bias is None else local_of(module.bias)
        if bias is None:
            return lambda hidden: self.ranks.add(product(hidden))
        return lambda hidden: self.ranks.add(product(hidden)) + bias

    def joined(self, module: Any, product: Product) -> Product:
        """The product of a layer split by rows: one all-gather after `product`, that of this rank's part.

        A layer that is not split keeps its product.
        """
        if not is_split(module):
            return product
        columns: int = module.weight.shape[0]
        return lambda hidden: self.ranks.joined(product(hidden), columns)

    def embedded(self, module: Any) -> Callable[[Tensor], Tensor]:
        """A function from tokens LongTensor[N] to embeddings [N, H], by a module that may be split by rows."""
        if not is_split(module):
            return module
        rows = local_of(module.weight)
        first = self.ranks.rank * -(-module.weight.shape[0] // self.ranks.count)

        def of_tokens(tokens: Tensor) -> Tensor:
            own = tokens - first
            here = (own >= 0) & (own < len(rows))
            found = look_up(own.where(here, 0), rows)
            return self.ranks.add(found.where(here[:, None], torch.zeros_like(found[:1])))

        return of_tokens


def shards_of(model: nn.Module, name: str) -> Parts:
    """The `Shards` of a model that transformers or FSDP has split over processes; `WHOLE` for any other model.

    name: the model's name for messages

    Raises ValueError if it is split in more than one way, or if ranks would have to share an attention head.
    """
    ranks = ranks_of(model, name)
    if ranks is None:
        return WHOLE
    check_heads(model, name, ranks)
    return Shards(ranks)


def check_heads(model: Any, name: str, ranks: Ranks) -> None:
    """Raise ValueError if ranks would have to share an attention head.

    transformers splits rows of weights without regard to heads, and later fails, or computes something else.
    """
    splits = [
        style == "colwise" and rule.endswith(("k_proj", "qkv_proj", "query_key_value"))
        for rule, style in (getattr(model, "tp_plan", None) or {}).items()
    ]
    if not (any(splits) and any(map(is_split_by_transformers, model.modules()))):
        return
    config = model.config.get_text_config(decoder=True)
    kinds = {"key heads": "num_key_value_heads", "query heads": "num_attention_heads"}
    counts = {kind: count for kind, field in kinds.items() if (count := getattr(config, field, None)) is not None}
    for kind, count in counts.items():
        if count % ranks.count:
            possible = [str(size) for size in range(2, count + 1) if not any(one % size for one in counts.values())]
            raise ValueError(
                f"{name} has {count} {kind}, which cannot be split over {ranks.count} ranks; start "
                f"{' or '.join(possible or ['one process'])}"
            )
