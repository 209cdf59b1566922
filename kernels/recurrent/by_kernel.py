"""Recurrent layers over the nodes of a tree by what is fast: Triton's kernel, or compiled C++ on a CPU."""

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.native.recurrent import tree_rule
from heavypath.kernels.recurrent.blocks_kernel import launch_blocks
from heavypath.kernels.recurrent.paths import KeptNodes, Paths
from heavypath.kernels.recurrent.totals import GateWeights, path_totals, totals_of_projected


def by_kernel(
    function: str, impl: str, inputs: tuple[Tensor, ...], state: Tensor, paths: Paths, above: KeptNodes | None,
    weights: GateWeights | None = None,
) -> tuple[Tensor, KeptNodes] | None:  # fmt: skip
    """The results of `function`, a rule such as `tree_delta`; None where its reference is to run.

    inputs: query, key, value, gate, and of a delta rule beta; with weights, what these are made of
    The others are those of the rule.
    """
    plain = all(size >= 16 and size & (size - 1) == 0 for size in state.shape[2:])
    if impl == "auto" and state.is_cuda and (above is not None or not plain):
        return None
    chosen = choose_impl(function, impl, state, native=state.dtype == torch.float32)
    if chosen == "torch":
        return None
    query, key, value, gate, *rest = inputs
    if chosen == "native":
        gates = (gate, *rest) if weights is None else weights.opened(gate, rest[0])
        out, kept = tree_rule((query, key, value, *gates), state, paths, above)
        return out.to(query.dtype if rest else torch.float32), kept
    if weights is None:
        total, beta = path_totals(gate, paths, above, impl="triton"), rest[0] if rest else None
    else:
        total, beta = totals_of_projected(gate, rest[0], weights, paths)
    out, update = launch_blocks(query, key, value, beta, total, state, paths)
    return out, KeptNodes(key, update, total)
