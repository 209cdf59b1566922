"""The delta rule with a gate for each key column, over the nodes of a tree: Kimi Delta Attention (2510.26692).

`delta` has the formulas. Here g and G have Dk columns: e^G scales the columns of K and Q before they meet S0, and

    A_ij = beta_i sum_d k_id k_jd e^(G_id - G_jd)        P_ij = sum_d q_id k_jd e^(G_id - G_jd)

A and P cannot be products of two matrices, since e^(-G_j) overflows. So only pairs of a node and an ancestor are
computed, column by column. `pairs` has the kernel for this; the C++ kernel gathers each node's ancestors.
"""

import torch
from torch import Tensor

from heavypath.kernels.recurrent.by_kernel import by_kernel
from heavypath.kernels.recurrent.paths import BLOCK, KeptNodes, Paths, unit
from heavypath.kernels.recurrent.totals import path_totals


def tree_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    paths: Paths,
    above: KeptNodes | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, KeptNodes]:
    """Return what `tree_delta` returns, for gates [B, Q, H, Dk] and H key heads, the number of value heads."""
    found = by_kernel("tree_kda", impl, (query, key, value, gate, beta), state, paths, above)
    if found is not None:
        return found
    wide = state.dtype
    mask = paths.mask
    before = paths.before
    total = path_totals(gate, paths, above, impl=impl)
    every = KeptNodes(key, value, total).joined(above)
    queries = unit(query).to(wide) * query.shape[-1] ** -0.5
    keys = unit(key).to(wide)
    unit_keys = unit(every.keys).to(wide)
    parts = []
    for begin in range(0, paths.new, BLOCK):  # in blocks, to bound the memory
        rows = slice(begin, begin + BLOCK)
        gap = total[:, rows, None] - every.totals[:, None]
        fade = gap.masked_fill(~mask[:, rows, :, None, None], -torch.inf).to(wide).exp()  # [B, q, M, H, Dk]
        pairs = torch.stack([queries[:, rows], keys[:, rows]])
        parts.append(torch.einsum("tbqhd,bqphd->tbhqp", pairs, unit_keys[:, None] * fade))
    within, system = torch.cat(parts, 3)  # [B, H, Q, M]
    lead = total.to(wide).exp()
    out, read = ((rows * lead).transpose(1, 2) @ state for rows in (queries, keys))
    if above is not None:
        values = above.values.to(wide).transpose(1, 2)
        out = out + within[..., :before] @ values
        read = read + system[..., :before] @ values
    strength = beta.to(wide).transpose(1, 2)[..., None]
    right = strength * (value.to(wide).transpose(1, 2) - read)
    update = torch.linalg.solve_triangular(strength * system[..., before:], right, upper=False, unitriangular=True)
    out = (out + within[..., before:] @ update).transpose(1, 2)
    return out.to(query.dtype), KeptNodes(key, update.transpose(1, 2), total).joined(above)
