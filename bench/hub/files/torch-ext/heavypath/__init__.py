"""Kernels for token trees: attention, drawing, verification and the cache."""

from . import layers
from .cache_compaction import compact_cache
from .layers.gated import silu_product
from .layers.rms_norm import Norm, add_rms_norm
from .layers.rotary import Projected, Turns, rotate_and_store
from .ordering import Ordering, heavy_path_order
from .sampling import TopK, gumbel_topk
from .tree_attention import chain_attention, tree_attention
from .verification import Verified, verify_tree

__all__ = [
    "Norm", "Ordering", "Projected", "TopK", "Turns", "Verified", "add_rms_norm", "chain_attention", "compact_cache",
    "gumbel_topk", "heavy_path_order", "layers", "rotate_and_store", "silu_product", "tree_attention", "verify_tree",
]  # fmt: skip
