"""Recurrent layers over the nodes of a tree on a CPU: calls of the compiled kernel in recurrent.cpp."""

import torch
from torch import Tensor

from heavypath.kernels.native.library import thread_count
from heavypath.kernels.native.recording import Arguments, fields, launch
from heavypath.kernels.recurrent.paths import KeptNodes, Paths


class _TreeRule(Arguments):
    _fields_ = fields(
        "batch nodes before heads key_heads key_columns columns gates delta *query *key *earlier_key *value "
        "*earlier_update *beta *gate *totals *mask *state *out *update threads"
    )


def tree_rule(
    inputs: tuple[Tensor, ...], state: Tensor, paths: Paths, above: KeptNodes | None
) -> tuple[Tensor, KeptNodes]:
    """Return the outputs fp32 [B, Q, H, Dv] of Q new nodes, and the `KeptNodes` of all nodes so far.

    inputs: query, key, value and gate, and for a delta rule beta, shaped as in `recurrent.delta`; state: fp32
    """
    query, key, value, gate, *rest = (each.float().contiguous() for each in inputs)
    batch, nodes, heads, columns = value.shape
    before = paths.before
    gates = gate.shape[3] if gate.dim() == 4 else 1
    totals = torch.empty(batch, before + nodes, *gate.shape[2:], dtype=torch.float64, device="cpu")
    if above is not None:
        totals[:, :before] = above.totals
    earlier = (None, None) if above is None else (above.keys.float().contiguous(), above.values.contiguous())
    out, update = torch.empty(2, batch, nodes, heads, columns, dtype=torch.float32, device="cpu").unbind()
    call = _TreeRule(
        batch,
        nodes,
        before,
        heads,
        key.shape[2],
        key.shape[3],
        columns,
        gates,
        bool(rest),
        query,
        key,
        earlier[0],
        value,
        earlier[1],
        rest[0] if rest else None,
        gate,
        totals,
        paths.mask.contiguous(),
        state.contiguous(),
        out,
        update,
        thread_count(state.nbytes),
    )
    launch("tree_rule", call)
    if above is None:
        return out, KeptNodes(inputs[1], update, totals)
    return out, KeptNodes(torch.cat([above.keys, inputs[1]], 1), torch.cat([above.values, update], 1), totals)
