"""Gated linear attention over the nodes of a tree, from one state: Mamba-2 (Dao and Gu 2024, 2405.21060).

    S <- e^g S + k u^T        out = S^T q            along a path
    out = e^G Q S0 + P U      P_ij = e^(G_i - G_j) q_i.k_j      for j above i, and i itself: one pass over all nodes

For Mamba-2 the gate is g = dt A with A < 0, the key B, the query C, and u = dt x. Keys are not normalised.
"""

from torch import Tensor

from heavypath.kernels.recurrent.by_kernel import by_kernel
from heavypath.kernels.recurrent.paths import KeptNodes, Paths, fades
from heavypath.kernels.recurrent.totals import path_totals


def tree_ssd(
    query: Tensor,
    key: Tensor,
    update: Tensor,
    gate: Tensor,
    state: Tensor,
    paths: Paths,
    above: KeptNodes | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, KeptNodes]:
    """Return the outputs fp32 [B, Q, H, Dv] of Q nodes of a tree, and the `KeptNodes` of all nodes so far.

    query, key: [B, Q, Hk, Dk], where each key head serves H / Hk value heads; update: [B, Q, H, Dv]; gate: [B, Q, H]
    state, paths, above, impl: as in `tree_delta`
    """
    found = by_kernel("tree_ssd", impl, (query, key, update, gate), state, paths, above)
    if found is not None:
        return found
    heads = update.shape[2] // key.shape[2]
    wide = state.dtype
    total = path_totals(gate, paths, above, impl=impl)
    kept = KeptNodes(key, update.to(wide), total).joined(above)
    queries, keys = (x.to(wide).repeat_interleave(heads, 2).transpose(1, 2) for x in (query, kept.keys))
    lead = total.to(wide).exp().transpose(1, 2)[..., None]
    fade = fades(total, kept.totals, paths.mask, wide)
    out = lead * (queries @ state) + (fade * (queries @ keys.mT)) @ kept.values.transpose(1, 2)
    return out.transpose(1, 2), kept
