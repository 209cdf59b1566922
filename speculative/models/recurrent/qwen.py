"""The forward pass of Qwen3.5 over tree nodes, from the modules of the transformers model itself.

It is the arithmetic of transformers' own pass, which needs several times as many launches on a GPU:

    x = embed(tokens)
    for each layer:  x += mixed(norm(x));  x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = lm_head(norm(x))

    attention     q, s = q_proj(x);   o_proj(attention(turn(norm(q)), turn(norm(k_proj(x))), v_proj(x)) * sigmoid(s))
    delta rule    q, k, v = silu(conv(qkv(x)));   g = -exp(A) softplus(a(x) + dt);   beta = sigmoid(b(x))
                  out_proj(norm(tree_delta(q, k, v, g, beta)) * silu(z(x)))

The factors of norms are 1 + weight, except in the delta rule. Rotary embeddings turn only the first columns of each
head. On a GPU linear layers that share an input are one product: q, k and v; qkv, z, b and a; gate and up (see
`joined`). States, cache rows and acceptance are those of `RecurrentForward`, and each model must pass the same trial.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from heavypath.kernels.layers.rms_norm import Norm, add_rms_norm
from heavypath.kernels.recurrent.delta import tree_delta
from heavypath.kernels.recurrent.totals import GateWeights
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Attend, Taps, TreeMask, as_logits
from heavypath.speculative.models.functions import is_published, strange_parts
from heavypath.speculative.models.joined import Joining
from heavypath.speculative.models.layer_weights import stream_of
from heavypath.speculative.models.linear import Linears, Product, Products
from heavypath.speculative.models.llama import gated_by, is_plain_embedding, norm_of
from heavypath.speculative.models.recurrent.cache import HybridCache
from heavypath.speculative.models.recurrent.forward import RecurrentForward
from heavypath.speculative.models.structure import attentions_of, has_hooks

_HOME = "transformers.models.qwen3_5.modeling_qwen3_5"
_norm = partial(add_rms_norm, centred=True)


class QwenForward(RecurrentForward):
    """A transformers Qwen3.5 causal language model, called on tree nodes.

    Raises the same errors as `RecurrentForward`.
    """

    is_foreign = False

    def __init__(self, model: PreTrainedModel, name: str = "model"):
        super().__init__(model, name)
        inner: Any = model.model
        linears = self._linears = Linears(name, (weight for _, weight in self.weights()))
        joining = Joining(model)

        def together(layers: Sequence[nn.Module]) -> Products:
            return joining.products(layers) or linears.together(layers)

        self._layers = [_Layer(layer, linears.one, together) for layer in inner.layers]
        self._last = _centred(inner.norm)
        self._head = linears.one(model.lm_head)
        self.watch(model)  # again, because joining moved weights

    def is_current(self) -> bool:
        """Whether the model's structure is unchanged and reordered copies of its weights are up to date."""
        return super().is_current() and self._linears.is_current()

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache_rows: Tensor,
        cache: KeyValueCache,
        mask: TreeMask,
        *,
        needs_logits: bool = True,
        taps: Taps | None = None,
    ) -> Tensor:
        """Logits [B, N, V] after each token. Arguments and result are as in `Forward.__call__`."""
        assert isinstance(cache, HybridCache)
        rows = cache.give(mask, positions, cache_rows)
        within = positions.clamp(max=self.max_positions - 1)  # positions of absent nodes may be larger
        nodes = _Nodes(cache, rows, self._turns(within), mask.attention(self.dtype, (None,))[None])
        hidden = self.embedding(tokens.flatten())
        computed = None
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            hidden, normed = _norm(hidden, computed, layer.norm)
            if taps is not None and index in taps.numbers:
                states[index] = hidden
            hidden, normed = _norm(hidden, layer.mixed(normed, nodes), layer.mlp_norm)
            computed = layer.down(layer.gated(normed))
        cache.end_of_pass()
        if not needs_logits and (taps is None or self.layers not in taps.numbers):
            last = hidden.new_empty(0)
        else:
            _, last = _norm(hidden, computed, self._last)
        if taps is not None:
            taps.take(states | {self.layers: last}, tokens, cache_rows=rows, positions=positions)
        if not needs_logits:
            return hidden.new_empty(len(tokens), 0, self.vocab_size)
        return as_logits(self._head(last).view(*tokens.shape, -1))

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [B, N, 1, R] for positions LongTensor[B, N]; the first half of the sines is negated."""
        rotary: Any = self.model.model.rotary_emb
        cos, sin = rotary(self.like, positions[None].expand(3, -1, -1))
        low, high = sin.chunk(2, -1)
        return cos[:, :, None], torch.cat([-low, high], -1)[:, :, None]


class _Nodes:
    """What all layers share in a pass: the cache, the nodes' rows in it, rotary factors, and the attention."""

    def __init__(self, cache: HybridCache, rows: Tensor, turns: tuple[Tensor, Tensor], attend: Attend):
        """rows: LongTensor[B, N], cache rows; turns: from `QwenForward._turns`."""
        self.cache = cache
        self.rows = rows
        self.attend = attend
        self._cos, self._sin = turns

    def turned(self, heads: Tensor) -> Tensor:
        """Apply rotary embeddings to the first R columns of heads [B, N, H, D]."""
        columns = self._cos.shape[-1]
        part = heads[..., :columns]
        part = torch.addcmul(part * self._cos, part.roll(columns // 2, -1), self._sin)
        return torch.cat([part, heads[..., columns:]], -1)


class _Layer:
    """One layer's modules, and the functions that multiply by its weights, looked up once."""

    def __init__(self, layer: Any, one: Callable[[Any], Product], together: Callable[[Sequence[nn.Module]], Products]):
        mlp = layer.mlp
        self.norm = _centred(layer.input_layernorm)
        self.mlp_norm = _centred(layer.post_attention_layernorm)
        self.gated = gated_by(mlp.act_fn, together([mlp.gate_proj, mlp.up_proj]))
        self.down = one(mlp.down_proj)
        if hasattr(layer, "linear_attn"):
            own = self._own = layer.linear_attn
            self.mixed = self._by_delta_rule
            self._project = together([own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a])
            self._mix = one(own.out_proj)
            self._norm = norm_of(own.norm)
        else:
            own = self._own = layer.self_attn
            self.mixed = self._by_attention
            self._project = together([own.q_proj, own.k_proj, own.v_proj])
            self._mix = one(own.o_proj)
            self._query_norm = _centred(own.q_norm)
            self._key_norm = _centred(own.k_norm)

    def _by_attention(self, hidden: Tensor, nodes: _Nodes) -> Tensor:
        """The attention's output [B * N, H] for normed hidden states [B * N, H]; keys and values go into the cache."""
        own = self._own
        by_head = (*nodes.rows.shape, -1, self._own.head_dim)
        both, key, value = self._project(hidden)
        query, gate = both.view(*by_head[:3], 2 * own.head_dim).chunk(2, -1)
        query, key = (
            nodes.turned(_norm(heads.reshape(-1, own.head_dim), None, norm)[1].view(by_head))
            for heads, norm in ((query, self._query_norm), (key, self._key_norm))
        )
        nodes.cache.write(own.layer_idx, key, value.view(by_head), nodes.rows)
        mixed = nodes.attend(query.transpose(1, 2), *nodes.cache.read(own.layer_idx), own.scaling)
        return self._mix((mixed.transpose(1, 2) * gate.sigmoid()).reshape(len(hidden), -1))

    def _by_delta_rule(self, hidden: Tensor, nodes: _Nodes) -> Tensor:
        """The output [B * N, H] of a gated delta rule for normed hidden states [B * N, H], by the cache's states."""
        own = self._own
        state = nodes.cache.state(self._own.layer_idx, 0)
        by_node = *nodes.rows.shape, -1
        joined, z, strength, decay = (each.view(by_node) for each in self._project(hidden))
        joined = state.convolved(joined.transpose(1, 2), own.conv1d.weight.squeeze(1), own.conv1d.bias, own.activation)
        query, key, value = joined.transpose(1, 2).split([own.key_dim, own.key_dim, own.value_dim], -1)
        query, key = (each.unflatten(-1, (-1, own.head_k_dim)) for each in (query, key))
        inputs = query, key, value.unflatten(-1, (-1, own.head_v_dim)), decay, strength
        rule = partial(tree_delta, weights=GateWeights(own.A_log, own.dt_bias))
        mixed = state.recur(rule, inputs).reshape(-1, own.head_v_dim)
        _, mixed = add_rms_norm(mixed, None, self._norm)
        mixed = (mixed * silu(z.reshape(mixed.shape).float())).to(hidden.dtype)
        return self._mix(mixed.view(len(hidden), -1))


def recurrent_forward(model: PreTrainedModel, name: str, fits: Callable[[RecurrentForward], bool]) -> RecurrentForward:
    """The forward pass of a model with recurrent layers: `QwenForward` where it fits, otherwise `RecurrentForward`.

    fits: whether a forward pass gives the model's own logits
    """
    if is_published_qwen(model) and fits(own := QwenForward(model, name)):
        return own
    return RecurrentForward(model, name)


def is_published_qwen(model: PreTrainedModel) -> bool:
    """Whether a model is a Qwen3.5 made of transformers' own modules, without any hook or patch, and all in memory.

    `QwenForward` calls few of its modules, so it would leave out anything that a user put there.
    """
    if model.config.model_type != "qwen3_5_text" or stream_of(model) is not None:
        return False
    try:
        inner: Any = model.model
        passed_by = [model, inner, inner.rotary_emb, inner.norm]
        for layer in inner.layers:
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            norms = [mixer.norm] if hasattr(layer, "linear_attn") else [mixer.q_norm, mixer.k_norm]
            passed_by += [layer, mixer, *norms, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm]
            if hasattr(mixer, "conv1d") and (type(mixer.conv1d) is not nn.Conv1d or has_hooks(mixer.conv1d)):
                return False
    except AttributeError:
        return False
    own = all(is_published(type(module), _HOME) and not has_hooks(module) for module in passed_by)
    return (
        own and is_plain_embedding(inner.embed_tokens) and not strange_parts(model, attentions_of(model), hooks=False)
    )


def _centred(module: Any) -> Norm:
    """The weight and epsilon of a Qwen3.5 RMS norm, whose factor is 1 + weight."""
    return Norm(module.weight, module.eps)
