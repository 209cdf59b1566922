"""The gated delta rule over the nodes of a tree, from one state: Gated DeltaNet (Yang et al. 2024, 2412.06464).

Along a path, with a gate g <= 0 for each node, a strength beta, and normalised keys,

    S <- e^g S        u = beta (v - S^T k)        S <- S + k u^T        out = S^T q

In one pass over all nodes, with G_i the sum of g from the root to i, and S0 the state before the tree:

    (I + A) U = beta (V - e^G K S0)       A_ij = beta_i e^(G_i - G_j) k_i.k_j     for j strictly above i, else 0
    out = e^G Q S0 + P U                  P_ij = e^(G_i - G_j) q_i.k_j            for j above i, and i itself

A is strictly lower triangular in an order that rises along each path. No state is stored for a node, only its key, its
u and its G (`KeptNodes`). If a tree comes in several passes, A and P also have columns for the earlier nodes, whose u
are known.
"""

import torch
from torch import Tensor

from heavypath.kernels.recurrent.by_kernel import by_kernel
from heavypath.kernels.recurrent.paths import KeptNodes, Paths, fades, unit
from heavypath.kernels.recurrent.totals import GateWeights, path_totals


def tree_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    paths: Paths,
    above: KeptNodes | None = None,
    *,
    weights: GateWeights | None = None,
    impl: str = "auto",
) -> tuple[Tensor, KeptNodes]:
    """Return the outputs [B, Q, H, Dv] of Q nodes of a tree, in the query's dtype, and the `KeptNodes` of all so far.

    query, key: [B, Q, Hk, Dk], not normalised; Hk divides H, and each key head serves H / Hk value heads
    value: [B, Q, H, Dv]; gate, beta: [B, Q, H]; with `weights` the projections a and b instead, see `totals`
    state: fp32 [B, H, Dk, Dv], before the tree; with fp64 everything is computed in fp64
    paths: of the Q nodes; above: the nodes of earlier passes over the same tree, or None
    impl:  see `implementation`; "triton" takes trees in one pass. For others "auto" on a GPU is "torch"

    Raises ValueError if a kernel does not support the shapes, strides or dtypes.
    """
    found = by_kernel("tree_delta", impl, (query, key, value, gate, beta), state, paths, above, weights)
    if found is not None:
        return found
    if weights is not None:
        gate, beta = weights.opened(gate, beta)
    heads = value.shape[2] // key.shape[2]
    wide = state.dtype
    total = path_totals(gate, paths, above, impl=impl)
    scaled = unit(query).to(wide) * query.shape[-1] ** -0.5
    queries, keys = (x.repeat_interleave(heads, 2).transpose(1, 2) for x in (scaled, unit(key).to(wide)))
    lead = total.to(wide).exp().transpose(1, 2)[..., None]  # [B, H, Q, 1]
    strength = beta.to(wide).transpose(1, 2)[..., None]
    out, read = (lead * (x @ state) for x in (queries, keys))
    mask = paths.mask
    before = paths.before
    if above is not None:
        earlier = unit(above.keys).to(wide).repeat_interleave(heads, 2).transpose(1, 2)
        fade = fades(total, above.totals, mask[..., :before], wide)
        values = above.values.to(wide).transpose(1, 2)
        out = out + (fade * (queries @ earlier.mT)) @ values
        read = read + (fade * (keys @ earlier.mT)) @ values
    fade = fades(total, total, mask[..., before:], wide)
    system = strength * fade * (keys @ keys.mT)
    right = strength * (value.to(wide).transpose(1, 2) - read)
    update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = out + (fade * (queries @ keys.mT)) @ update
    return out.transpose(1, 2).to(query.dtype), KeptNodes(key, update.transpose(1, 2), total).joined(above)
