"""The operators: each public function with the shapes of its results, and with what it changes in place.

    torch.ops.heavypath.verify_tree(...)    is there once this module is imported, which the first compilation does

Of the other functions with a kernel, `stochastic_beam` and `pack_ancestors` are operations of PyTorch to a compiler,
and `filter_cuts` is a part of other functions. `top_down` is given a function, and `grow` and `assemble` return sizes.
The rules of recurrent layers take `Paths`, in which layers share what they make of a mask.
"""

import torch
from torch import Tensor

from heavypath.kernels.cache_compaction import compact_cache
from heavypath.kernels.commit import commit
from heavypath.kernels.layers.few_rows import few_rows_product
from heavypath.kernels.layers.gated import silu_product
from heavypath.kernels.layers.rms_norm import add_rms_norm
from heavypath.kernels.layers.rotary import Projected, rotate_and_store
from heavypath.kernels.nodes import Verified
from heavypath.kernels.operators.definition import Operator
from heavypath.kernels.ordering import Ordering, heavy_path_order
from heavypath.kernels.recurrent.acceptance import accept_state
from heavypath.kernels.recurrent.convolution import tree_conv
from heavypath.kernels.retrieval.followers import follower_logprobs
from heavypath.kernels.retrieval.latest import latest_logprobs
from heavypath.kernels.retrieval.ranges import Appended, append_tokens
from heavypath.kernels.sampling import TopK, gumbel_topk
from heavypath.kernels.sequence_scores import sequence_scores
from heavypath.kernels.tree_attention import visible_attention
from heavypath.kernels.trees.levels import CommonNodes, NodeInputs, Trees, place
from heavypath.kernels.verification import verify_tree


def _attended(query: Tensor, **_: object) -> Tensor:
    """By nodes, [B, N, Hq, D]."""
    batch, heads, nodes, head_dim = query.shape
    return query.new_empty(batch, nodes, heads, head_dim)


def _drawn(logits: Tensor, k: int, **_: object) -> TopK:
    keys = logits.new_empty((*logits.shape[:-1], k), dtype=torch.float32)
    return TopK(torch.empty_like(keys, dtype=torch.long), keys, torch.empty_like(keys))


def _verified(tokens: Tensor, max_depth: int | None, **_: object) -> Verified:
    """Without a max_depth, how long paths are depends on the tree."""
    places = torch.library.get_ctx().new_dynamic_size() if max_depth is None else max_depth + 1
    batch = tokens.shape[0]
    return Verified(tokens.new_empty(batch, places), tokens.new_empty(batch), tokens.new_empty(batch))


def _ordered(parents: Tensor, **_: object) -> Ordering:
    return Ordering(*(parents.new_empty(parents.shape) for _ in Ordering._fields))


def _scored(logits: Tensor, **_: object) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _placed(trees: Trees, given: CommonNodes, **_: object) -> NodeInputs:
    return NodeInputs(
        *(trees.tokens.new_empty(trees.tokens.shape[0], given.nodes.shape[0]) for _ in NodeInputs._fields)
    )


def _normed(hidden: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)


def _rotated(projected: Projected, **_: object) -> Tensor:
    return projected.query.new_empty(projected.query.shape)


def _gated(gate: Tensor, **_: object) -> Tensor:
    return gate.new_empty(gate.shape)


def _multiplied(x: Tensor, weight: Tensor, gated: bool = False, **_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))


def _followed(cache_rows: Tensor, vocab_size: int, **_: object) -> Tensor:
    return cache_rows.new_empty((*cache_rows.shape, vocab_size), dtype=torch.float32)


def _looked_up(nodes: Appended, is_chain: bool, vocab_size: int, **_: object) -> Tensor:
    batch, count = nodes.tokens.shape
    return nodes.tokens.new_empty(batch, 1 if is_chain else count, vocab_size, dtype=torch.float32)


def _convolved(inputs: Tensor, weight: Tensor, window: Tensor, **_: object) -> Tensor:
    return weight.new_empty(*window.shape[:2], inputs.shape[-1])


OPERATORS = {
    "tree_attention": Operator(visible_attention, _attended, is_fresh=True, name="tree_attention"),
    "gumbel_topk": Operator(gumbel_topk, _drawn),
    "verify_tree": Operator(verify_tree, _verified, is_fresh=True),
    "sequence_scores": Operator(sequence_scores, _scored),
    "heavy_path_order": Operator(heavy_path_order, _ordered),
    "place": Operator(place, _placed, mutates=["trees_tokens"]),
    "commit": Operator(commit, mutates=["state_numbers", "state_output", "state_seen", "state_counts"]),
    "compact_cache": Operator(compact_cache, mutates=["keys", "values"]),
    "add_rms_norm": Operator(add_rms_norm, _normed),
    "rotate_and_store": Operator(rotate_and_store, _rotated, mutates=["keys", "values"]),
    "silu_product": Operator(silu_product, _gated),
    "tree_conv": Operator(tree_conv, _convolved),
    "accept_state": Operator(accept_state, mutates=["state"]),
    "few_rows_product": Operator(few_rows_product, _multiplied),
    "append_tokens": Operator(append_tokens, mutates=["keys", "values"]),
    "follower_logprobs": Operator(follower_logprobs, _followed),
    "latest_logprobs": Operator(latest_logprobs, _looked_up, mutates=["keys", "values"], is_fresh=True),
}
