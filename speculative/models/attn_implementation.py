"""attn_implementation="heavypath": tree attention for transformers models, and causal attention for all other calls.

A causal model calls its attention for three purposes. Each is a tree in depth-first order after a prefix of cached
rows:

    prefill        a chain of N nodes, without a prefix
    decoding       a chain of one node, or of several, after L rows
    verification   a tree of N nodes after L rows

So a few integers describe which rows are seen, and no mask of N x (L + N) is built. Once a public name is imported,

    model.set_attn_implementation("heavypath")            # or from_pretrained(..., attn_implementation="heavypath")
    model(tokens, position_ids=L + depths, cache=cache, tree_subtree_end=tree.subtree_end)

(before transformers 5.24 the cache is called past_key_values)
patches a loaded model. `set_attn_implementation("sdpa")` removes the patch. A tree is an argument of the call: see
`attention_forward`. Calls that the kernel would not speed up go to transformers' own sdpa: calls that need gradients
or dropout, calls without a tree on a CPU, and calls whose mask is not a prefix and a tree (bidirectional or custom
masks, packed sequences, zeros between ones). A call that neither supports is refused.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function
from transformers.utils import logging

from heavypath.kernels.attention.layouts import MAX_NODES, MOST_HEADS
from heavypath.kernels.attention.masks import PackedAncestors
from heavypath.kernels.tree_attention import chain_attention, tree_attention

logger = logging.get_logger(__name__)

NAME = "heavypath"
_USUAL = {"position_ids", "use_cache", "cache_position"}  # arguments of a call that do not concern attention
# Arguments that request a feature which "heavypath" lacks: the feature, and the implementation that has it.
_SERVED_ELSEWHERE = {
    "position_bias": ("position biases", "sdpa"),
    "s_aux": ("attention sinks", "eager"),
    "sinks": ("attention sinks", "eager"),
    "indices": ("sparse attention", "eager"),
    "block_indices": ("sparse attention", "eager"),
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree_subtree_end: Tensor | None = None,
    tree_ancestor_mask: Tensor | PackedAncestors | None = None,
    tree_prefix_length: int | Tensor | None = None,
    tree_attend: Callable[[Tensor, Tensor, Tensor, float | None, int | None], Tensor] | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """One layer's attention, as transformers calls it. Returns [B, N, Hq, D], and no weights.

    query: [B, Hq, N, D]; key, value: [B, Hkv, S, D], which the cache returned; attention_mask: from `visible_rows`, or
    any other mask that sdpa takes.

    A tree is given to the model's call, `model(tokens, position_ids=..., cache=cache, tree_subtree_end=...)`:

    tree_subtree_end:   int or long tensor [N] or [B, N], the number after each node's last descendant in depth-first
                        order; or
    tree_ancestor_mask: bool [N, N] or [B, N, N], [i, j] true where node j is node i or its ancestor, or that mask
                        packed by `pack_ancestors`. A tree of M nodes whose last N are new has [N, M] or [B, N, M].
    tree_prefix_length: int or LongTensor[B], the cache rows before the tree. The default is right for all caches of
                        transformers. A cache that stores each sequence's tree after its own prefix must give it.

    tree_attend:        instead of all of these, and of attention_mask: a function of query, key, value, scaling and
                        sliding_window that returns the attention's output [B, Hq, N, D]

    The call's position_ids [B, N] must be prefix + depths, where left padding does not count as prefix. Without them
    transformers numbers the nodes one after the other. The call's attention_mask, if any, has a column for each row of
    the cache and for each node.

    Raises ValueError for features that "heavypath" does not have: attention sinks and position biases; trees under
    masks other than causal or sliding-window ones with left padding; soft caps under bidirectional or additive masks.
    """
    if not kwargs.keys() <= _USUAL:
        _check_served(kwargs)
    if tree_attend is not None:
        if softcap is not None:
            raise _unserved("has no soft-capped scores in a decoder", "eager")
        return tree_attend(query, key, value, scaling, sliding_window).transpose(1, 2).contiguous(), None
    has_tree = tree_subtree_end is not None or tree_ancestor_mask is not None
    if tree_prefix_length is not None and not has_tree:
        raise ValueError("tree_prefix_length needs tree_subtree_end or tree_ancestor_mask, got neither")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or (attention_mask is not None and attention_mask.dtype != torch.long):
        if has_tree:
            raise _unserved(
                "has no trees under bidirectional or custom masks, with packed sequences (position_ids that start "
                "again), or after an attention_mask with zeros after ones",
                "eager",
                "; a tree without a cache needs an attention_mask of ones, one under torch.compile on a CPU none",
            )
        if softcap is None:
            sdpa = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
            return sdpa_attention_forward(module, query, key, value, attention_mask, **sdpa)
        has_tree = True
        tree_ancestor_mask = _as_tree(attention_mask, len(query))
        tree_prefix_length = 0
        attention_mask = None
    queries = query.shape[2]
    rows = key.shape[2]
    first_row = None
    prefix = rows - queries
    window = None
    if attention_mask is not None:
        first_row, prefix, window = _read_rows(module, attention_mask, sliding_window)
    elif queries > rows:
        raise _unserved(f"serves causal self-attention only, got {queries} queries and {rows} keys")

    if not has_tree and softcap is None and _takes_sdpa(query, key, value, dropout):
        mask = _dense_mask(queries, rows, first_row, prefix, window, query.device)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)
    if dropout:
        raise _unserved(f"has no dropout of {dropout} for {'trees' if has_tree else 'soft-capped scores'}", "eager")
    if query.dtype != value.dtype:  # under autocast, rotary embeddings return fp32
        query = query.to(value.dtype)
        key = key.to(value.dtype)
    if not has_tree:
        try:
            if queries <= _longest_chain(query):
                return chain_attention(query, key, value, prefix, first_row, window, softcap, scaling), None
            options = {"first_row": first_row, "window": window, "softcap": softcap, "scale": scaling}
            return _long_chain(partial(chain_attention, **options), query, key, value, prefix), None
        except ValueError as error:
            raise _unserved(f"cannot serve this model: {error}") from error
    if tree_prefix_length is not None:
        prefix = tree_prefix_length
    elif isinstance(tree_ancestor_mask, PackedAncestors):
        prefix = prefix + queries - tree_ancestor_mask.nodes
    elif tree_ancestor_mask is not None:
        prefix = prefix + queries - tree_ancestor_mask.shape[-1]
    visible = {"subtree_end": tree_subtree_end, "ancestor_mask": tree_ancestor_mask}
    options = {"first_row": first_row, "window": window, "softcap": softcap, "scale": scaling}
    out = tree_attention(query, key, value, prefix_length=prefix, **visible, **options)
    return out.transpose(1, 2).contiguous(), None


def visible_rows(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: PreTrainedConfig | None = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """Make the mask of a forward pass when transformers asks for it; the attention layers get it as attention_mask.

    The arguments are those of transformers' mask functions: q_length new tokens, the first of which is token q_offset.

    None where a token sees everything before it: there is no padding, the window covers everything, and the new tokens
    are the last in the cache. Otherwise LongTensor [B, 1, 1, 2]: the first row that is not padding, and the number of
    rows before the new tokens; with a sliding window [B, 1, 1, 3], the window last. These numbers count the rows that
    the layer's cache returns. These rows begin at token `kv_offset` if a sliding window dropped earlier ones.
    transformers passes 4-D masks through unchanged.

    In all other cases the mask is sdpa's, bool [B, 1, N, S]: for another mask function, and for a 2-D attention_mask
    that is not zeros followed by ones up to the last token. To check that, the mask's values are read, except where
    this would stall a GPU: in graph capture or under torch.compile. Under torch.compile for a CPU the mask is always
    sdpa's, because there sdpa does everything except trees.
    """
    may_be_packed = attention_mask is None and 1 < q_length == kv_length
    plain = _is_plain(mask_function, local_size, config, use_vmap or may_be_packed)
    end = q_offset + q_length
    first = None
    if plain and attention_mask is not None:
        blind = torch.compiler.is_compiling() or (attention_mask.is_cuda and torch.cuda.is_current_stream_capturing())
        plain, first = _first_ones(attention_mask, end, check=not blind)
        plain = plain and (_has_kernel(attention_mask) or not blind)
    if not plain:
        more |= {"use_vmap": use_vmap, "config": config, "device": device, "allow_is_causal_skip": False}
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,  # pyright: ignore[reportArgumentType]
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            **more,
        )
    window = local_size if local_size is not None and kv_length > local_size else None
    if first is None and window is None and isinstance(q_offset, int) and kv_offset + kv_length == end:
        return None
    # In memory all first rows come first, then all lengths, so that no layer has to copy them.
    rows = torch.zeros(2 if window is None else 3, batch_size, dtype=torch.long, device=device).T[:, None, None]
    if first is not None:
        rows[:, 0, 0, 0] = (first - kv_offset).clamp_(min=0)
    rows[:, 0, 0, 1] = q_offset - kv_offset
    if window is not None:
        rows[:, 0, 0, 2] = window
    return rows


def _unserved(what: str, instead: str = "sdpa", hint: str = "") -> ValueError:
    return ValueError(f'attn_implementation="{NAME}" {what}; use attn_implementation="{instead}"{hint}')


def _check_served(kwargs: Mapping[str, object]) -> None:
    if kwargs.get("output_attentions"):
        logger.warning_once(f'attn_implementation="{NAME}" has no attention weights to return; "eager" has them.')
    for name, given in kwargs.items():
        if name in _SERVED_ELSEWHERE and given is not None and given is not False:
            what, instead = _SERVED_ELSEWHERE[name]
            raise _unserved(f"has no {what} ({name})", instead)
        if name.startswith("tree_"):
            raise TypeError(f"expected tree_subtree_end, tree_ancestor_mask or tree_prefix_length, got {name}")


def _read_rows(module: nn.Module, attention_mask: Tensor, window: int | None) -> tuple[Tensor, Tensor, int | None]:
    """Read a mask that `visible_rows` made. Raises ValueError for a mask of another shape.

    Returns LongTensors [B] of the first row that is not padding and of the number of rows before the queries, and the
    sliding window, None if it covers all rows.
    """
    shape = attention_mask.shape
    if len(shape) != 4 or shape[1:3] != (1, 1):
        given = f"{attention_mask.dtype} {[*shape]}"
        raise _unserved(f"takes an attention_mask [B, rows] that covers cache and new tokens, got {given}")
    batch, _, _, numbers = shape
    if numbers == 1:  # a decoder's placeholder: tree_attend has the mask
        raise _unserved(f"needs the arguments of the call, which {type(module).__name__} does not get")
    windowed = numbers == 3
    if windowed and window is None:
        raise _unserved(f"needs the sliding window, which {type(module).__name__} does not pass to its attention")
    first_row, prefix, *_ = attention_mask.view(batch, numbers).unbind(1)
    return first_row, prefix, window if windowed else None


def _as_tree(mask: Tensor | None, batch: int) -> Tensor:
    """A mask [B or 1, 1, N, S] as bool [B, N, S]: the ancestor mask of a tree's last N nodes without a prefix."""
    if mask is None or mask.dtype != torch.bool or mask.shape[1] != 1:
        raise _unserved("has no soft-capped scores that are bidirectional or under a mask that adds to them", "eager")
    return mask[:, 0].expand(batch, -1, -1)


def _is_plain(
    mask_function: Callable, window: int | None, config: PreTrainedConfig | None, may_be_custom: bool
) -> bool:
    """Whether transformers' mask_function is the causal one, with or without a sliding window, and nothing else.

    window, config: the layer's sliding window, None for none, and the model's config
    may_be_custom: whether the call may have packed sequences; their functions look alike under torch.compile
    """
    if window is None:
        return mask_function is causal_mask_function
    sliding = sliding_window_causal_mask_function(window)
    if not torch.compiler.is_compiling():
        return _same(mask_function, sliding)
    # The compiler cannot read closures, and mask functions of packed sequences and of chunks have the same code.
    unmistakable = not may_be_custom and getattr(config, "sliding_window", None) == window
    return unmistakable and mask_function.__code__ is sliding.__code__


def _same(one: object, other: object) -> bool:
    """Whether two functions have the same code and the same values in their closures."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        cells = zip(one.__closure__ or (), other.__closure__ or (), strict=False)
        return one.__code__ is other.__code__ and all(_same(a.cell_contents, b.cell_contents) for a, b in cells)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _first_ones(attention_mask: Tensor, end: int | Tensor, check: bool) -> tuple[bool, Tensor | None]:
    """Whether each sequence's mask is only ones from the first one to the end; and the column of that first one.

    The columns are LongTensor[B]; None where they are 0 for all sequences. Without `check` the values are not read, and
    ones are assumed.

    attention_mask: bool [B, columns]; end: how many columns count, an int or a tensor [] or [B]
    """
    columns = attention_mask.shape[1]
    ends = end.reshape(-1, 1) if isinstance(end, Tensor) else attention_mask.new_full((1, 1), end, dtype=torch.long)
    seen = attention_mask & (torch.arange(columns, device=attention_mask.device) < ends)
    first = seen.int().argmax(1)
    if not check:
        return True, first
    short = ends[:, 0] - first - seen.sum(1)
    padded, short, needed = torch.stack((first.amax(), short.amax(), ends.amax())).tolist()  # one read from the device
    if needed > columns:
        raise ValueError(f"attention_mask must cover cache and new tokens, {needed} columns, got {columns}")
    return short == 0, first if padded else None


def _takes_sdpa(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    if not _has_kernel(query) or dropout > 0 or len(key) * key.shape[1] > MOST_HEADS:
        return True
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _dense_mask(
    queries: int, rows: int, first_row: Tensor | None, prefix: int | Tensor, window: int | None, device: torch.device
) -> Tensor | None:
    """sdpa's mask of a chain after a prefix, bool [B or 1, 1, N, S]; None if sdpa needs none for it.

    queries: N; rows: S; first_row: LongTensor[B], the first that is not padding, None for 0; prefix: rows before the
    chain, an int or LongTensor[B]; window: of the layer, None if it covers all rows
    """
    if first_row is None and queries in (1, rows):
        return None
    start = prefix.reshape(-1, 1, 1, 1) if isinstance(prefix, Tensor) else prefix
    node = start + torch.arange(queries, device=device)[:, None]
    row = torch.arange(rows, device=device)
    visible = (row <= node).view(-1, 1, queries, rows)
    if window is not None:
        visible = visible & (row > node - window)
    if first_row is not None:
        visible = visible & (row >= first_row[:, None, None, None])
    return visible


def _long_chain(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, prefix: int | Tensor
) -> Tensor:
    """Attention of a chain too long for one call of the kernel: `attend` is called for each chunk of its queries."""
    size = _longest_chain(query)
    starts = range(0, query.shape[2], size)
    return torch.cat([attend(query[:, :, at : at + size], key, value, prefix + at) for at in starts], 1)


def _longest_chain(query: Tensor) -> int:
    return MAX_NODES if query.is_cuda else query.shape[2]


# heavypath.speculative imports this module when its first public name is used.
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, visible_rows)
