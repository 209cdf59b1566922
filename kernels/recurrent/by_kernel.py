"""Recurrent layers over the nodes of a tree by the fast implementations: the Triton kernel, or C++ on a CPU."""

import torch
from torch import Tensor

from heavypath.kernels.implementation import choose_impl
from heavypath.kernels.native.recurrent import tree_rule
from heavypath.kernels.recurrent.blocks_kernel import launch_blocks
from heavypath.kernels.recurrent.paths import KeptNodes, Paths
from heavypath.kernels.recurrent.totals import GateWeights, path_totals, totals_of_projected


def by_kernel(
    function: str,
    impl: str,
    inputs: tuple[Tensor, ...],
    state: Tensor,
    paths: Paths,
    above: KeptNodes | None,
    weights: GateWeights | None = None,
) -> tuple[Tensor, KeptNodes] | None:
    """Return the results of `function`, a rule such as `tree_delta`; None if the caller must run its reference.

    inputs: query, key, value, gate, and for a delta rule beta; with weights, the inputs of gate and beta instead
    The other arguments are those of the rule.

    Raises ValueError for shapes that do not fit each other, with which kernels would read other memory.
    """
    plain = all(size >= 16 and size & (size - 1) == 0 for size in state.shape[2:])
    if impl == "auto" and state.is_cuda and (above is not None or not plain):
        return None
    chosen = choose_impl(function, impl, state, native=state.dtype == torch.float32)
    if chosen == "torch":
        return None
    if chosen == "native" or not paths.before:  # Triton's kernel refuses trees that grow
        _check_shapes(inputs, state, paths, above, weights)
    query, key, value, gate, *rest = inputs
    if chosen == "native":
        gates = (gate, *rest) if weights is None else weights.opened(gate, rest[0])
        out, kept = tree_rule((query, key, value, *gates), state, paths, above)
        return out.to(query.dtype if rest else torch.float32), kept
    if weights is None:
        total = path_totals(gate, paths, above, impl="triton")
        beta = rest[0] if rest else None
    else:
        total, beta = totals_of_projected(gate, rest[0], weights, paths)
    out, update = launch_blocks(query, key, value, beta, total, state, paths)
    return out, KeptNodes(key, update, total)


def _check_shapes(
    inputs: tuple[Tensor, ...], state: Tensor, paths: Paths, above: KeptNodes | None, weights: GateWeights | None
) -> None:
    batch, heads, key_columns, columns = state.shape
    named: dict[str, Tensor] = {}
    named |= zip(("query", "key", "value", "gate", "beta"), inputs, strict=False)
    key_heads = named["key"].shape[2] if named["key"].dim() == 4 else 0
    by_column = named["gate"].dim() == 4  # then a key head serves one value head
    if key_heads == 0 or heads % key_heads or (by_column and key_heads != heads):
        raise ValueError(f"key must be [B, Q, Hk, Dk], for a state of {heads} heads, got {[*named['key'].shape]}")
    of_key = (key_heads, key_columns)
    of_value = (heads, columns)
    of_gate = (heads, key_columns) if by_column else (heads,)
    new = (batch, paths.new)
    before = (batch, 0 if above is None else above.keys.shape[1])
    expected = {
        "query": (*new, *of_key),
        "key": (*new, *of_key),
        "value": (*new, *of_value),
        "gate": (*new, *of_gate),
        "beta": (*new, heads),
        "mask": (*new, before[1] + paths.new),
        "above.keys": (*before, *of_key),
        "above.values": (*before, *of_value),
        "above.totals": (*before, *of_gate),
        "weights.log_rate": (heads,),
        "weights.bias": (heads,),
    }
    named["mask"] = paths.mask
    for whole, parts in (("above", above), ("weights", weights)):
        named |= {} if parts is None else {f"{whole}.{name}": part for name, part in parts._asdict().items()}
    for name, value in named.items():
        if value.shape != expected[name]:
            raise ValueError(
                f"{name} must be {[*expected[name]]} beside a state {[*state.shape]}, got {[*value.shape]}"
            )
