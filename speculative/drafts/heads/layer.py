"""A layer of a trained head as functions, for EAGLE heads and block drafts."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.layers.rotary import HeadNorms, Projected, Turns, rotate_and_store
from heavypath.speculative.models.forward import Attend
from heavypath.speculative.models.linear import Product, Products
from heavypath.speculative.models.llama import gated_by, norm_of


class LayerFunctions:
    """A layer's attention and MLP as functions, with their modules looked up once."""

    window = None

    def __init__(self, layer: Any):
        attention = layer.self_attn
        mlp = layer.mlp
        self.projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.gates = [mlp.gate_proj, mlp.up_proj]
        self.mixing = attention.o_proj
        self.last = mlp.down_proj
        self.norm = norm_if_any(layer, "input_layernorm")
        self.mlp_norm = norm_of(layer.post_attention_layernorm)
        query_norm, key_norm = (norm_if_any(attention, name) for name in ("q_norm", "k_norm"))
        self.head_norms = None if query_norm is None or key_norm is None else HeadNorms(query_norm, key_norm)
        self.activation = mlp.act_fn
        self.head_dim = attention.head_dim
        self.scaling = attention.head_dim**-0.5

    @property
    def linears(self) -> list[nn.Module]:
        """All linear layers of attention and MLP."""
        return [*self.projections, self.mixing, *self.gates, self.last]

    def look_up(self, one: Callable[[Any], Product], together: Callable[[Sequence[Any]], Products]) -> None:
        """Set the functions that multiply by the layer's weights where PyTorch runs it.

        one: makes the function of a single linear layer; together: of several that share an input
        """
        self._project = together(self.projections)
        self._gated = gated_by(self.activation, together(self.gates))
        self._mix, self._down = one(self.mixing), one(self.last)

    def attention(
        self, attended: Tensor, turns: Turns, rows: Tensor, kept: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """The attention output [R, H] of entries, whose keys and values are first stored in a cache.

        attended: [R, any], the input of the query, key and value projections
        turns: rotary angles of the entries' positions
        rows: LongTensor[B, N], the entries' cache rows
        kept: the layer's keys and values [B, Hkv, rows, D]
        attend: attention from the entries to everything visible to them
        """
        by_head = *rows.shape, -1, self.head_dim
        projected = Projected(*[states.view(by_head) for states in self._project(attended)])
        keys, values = kept
        query = rotate_and_store(projected, turns, keys, values, rows, self.head_norms)
        mixed = attend(query.transpose(1, 2), keys, values, self.scaling)
        return self._mix(mixed.transpose(1, 2).reshape(len(attended), -1))

    def mlp(self, normed: Tensor) -> Tensor:
        """The MLP's output, [R, H] from [R, H]."""
        return self._down(self._gated(normed))


def norm_if_any(module: Any, name: str) -> Norm | None:
    """The weight and epsilon of the module's norm with this name; None if it has none."""
    return norm_of(getattr(module, name)) if hasattr(module, name) else None
