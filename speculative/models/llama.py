"""The forward pass of a Llama-family model over tree nodes, from the modules of the transformers model itself.

transformers' own forward pass spends a fifth of a small model's time on masks, cache objects and passing keywords
along, and it asks the host questions that a CUDA graph can't answer. This is the same arithmetic on the same modules:

    x = embed(tokens)
    for each layer:  x += o_proj(attention(rotary(q), rotary(k), v));  x += down(act(gate(x)) * up(x))
    logits = lm_head(norm(x))

Keys and values are written to given rows of a cache that was allocated before, and attention follows the caller's mask.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm
from transformers import PreTrainedModel

from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward, TreeMask, is_plain
from heavypath.speculative.models.structure import has_hooks

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# On a CPU, at most FEW_ROWS rows times a weight of at most SMALL elements are multiplied as columns.
FEW_ROWS = 5
SMALL = 1 << 19
_HAS_BOTH = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


class _Layer:
    """A layer's functions, looked up once: to find one module in another takes a microsecond."""

    def __init__(self, layer: Any, linear: Callable[[nn.Module], Callable[[Tensor], Tensor]]):
        attention, mlp = layer.self_attn, layer.mlp
        self.query, self.key, self.value = map(linear, (attention.q_proj, attention.k_proj, attention.v_proj))
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.query_norm, self.key_norm = (None if norm is None else _rms_norm(norm) for norm in norms)
        self.scaling: float = attention.scaling
        windowed = attention.config if attention.config.model_type == "mistral" else attention
        self.window: int | None = getattr(windowed, "sliding_window", None)  # Llama's have none
        self.mix = linear(attention.o_proj)
        self.gate, self.up, self.down = map(linear, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self.act: Callable[[Tensor], Tensor] = mlp.act_fn
        self.norm, self.mlp_norm = map(_rms_norm, (layer.input_layernorm, layer.post_attention_layernorm))


def is_as_published(model: PreTrainedModel) -> bool:
    """Whether a model is of one of the `MODEL_TYPES`, made of transformers' own modules, without any hook or patch.

    `LlamaForward` does not call most of them, so what somebody put there would be left out.
    """
    kind = model.config.model_type
    if kind not in MODEL_TYPES or any(map(has_hooks, model.modules())):
        return False
    try:
        inner: Any = model.model
        passed_by = [model, inner, inner.rotary_emb, inner.norm]
        for layer in inner.layers:
            passed_by += [layer, layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm]
            own_norms = (getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm"))
            passed_by += [norm for norm in own_norms if norm is not None]
    except AttributeError:
        return False
    home = f"transformers.models.{kind}.modeling_{kind}"
    return all(type(module).__module__ == type(module).forward.__module__ == home for module in passed_by)


def with_a_layer_of_each_kind(model: PreTrainedModel) -> PreTrainedModel:
    """The model, over the same weights, with one layer of each kind that it has: what is right for that is for all.

    Layers are of a kind that have the same modules, settings, and types and shapes of weights.
    """
    kinds: dict[tuple[Any, ...], nn.Module] = {}
    inner: Any = copy(model.model)
    for layer in inner.layers:
        kinds.setdefault(_kind(layer), layer)
    inner._modules = inner._modules | {"layers": nn.ModuleList(kinds.values())}
    short = copy(model)
    short._modules = short._modules | {"model": inner}
    return short


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    modules = [
        (name, type(module), *((key, value) for key, value in vars(module).items() if _is_setting(key, value)))
        for name, module in layer.named_modules()
    ]
    weights = [(name, type(weight), weight.dtype, weight.shape) for name, weight in layer.named_parameters()]
    return *modules, *weights


def _is_setting(name: str, value: object) -> bool:
    return name != "layer_idx" and isinstance(value, (bool, int, float, str, type(None)))


class LlamaForward(Forward):
    """A transformers Llama, Mistral, Qwen2 or Qwen3 causal language model, called on tree nodes.

    layers: how many of its layers to run before the final norm and the head (default: all).

    Raises TypeError for something that is not such a model.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model", layers: int | None = None):
        config = getattr(model, "config", None)
        if not isinstance(model, nn.Module) or getattr(config, "model_type", None) not in MODEL_TYPES:
            kind = getattr(config, "model_type", None) or type(model).__name__
            raise TypeError(
                f"{name} must be a transformers causal language model of type {', '.join(MODEL_TYPES)}; got {kind!r}"
            )
        super().__init__(model, name)
        self._from_memory = sum(weight.numel() for _, weight in self.weights()) > 1 << 20  # no core's cache holds more
        every = list(model.model.layers)
        if layers is not None and not 1 <= layers < len(every):
            raise ValueError(f"an early exit must leave 1 .. {len(every) - 1} layers, got {layers}")
        self._layers = [_Layer(layer, self._linear) for layer in every[:layers]]
        self.layers = len(self._layers)
        self.windows = {layer.window for layer in self._layers}
        self._norm, self._head = _rms_norm(model.model.norm), self._linear(model.lm_head)
        self._head_dim: int = every[0].self_attn.head_dim
        self._kv_heads: int = self.config.num_key_value_heads
        self._rotary = self._rotary_table(1)

    def new_cache(self, batch: int, rows: int) -> KeyValueCache:
        """An empty cache of `rows` rows for each of `batch` sequences; tokens may have positions below `rows`."""
        rotary = self._rotary
        if rows > rotary.shape[-3]:
            self._rotary = rotary = self._rotary_table(rows)  # for this cache, whatever another thread does to it
        return KeyValueCache(
            batch=batch,
            layers=len(self._layers),
            kv_heads=self._kv_heads,
            rows=rows,
            head_dim=self._head_dim,
            like=self.embedding.weight,
            rotary=rotary,
        )

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache_rows: Tensor,
        cache: KeyValueCache,
        mask: TreeMask,
        *,
        needs_logits: bool = True,
    ) -> Tensor:
        """fp32 logits [B, N, V] after each token, see `Forward`."""
        attends = mask.attention(self.dtype, self.windows)
        by_head = *tokens.shape, -1, self._head_dim
        assert cache.rotary is not None
        if self.rope_limit is None:
            turns = cache.rotary[positions]
        else:  # the largest position decides, as in transformers
            turns = cache.rotary[(positions.amax(1, keepdim=True) >= self.rope_limit).long(), positions]
        cos, sin = turns[:, :, :, None].unbind(2)  # [B, N, 1, D]

        hidden = self.embedding(tokens.flatten())
        for index, layer in enumerate(self._layers):
            normed = layer.norm(hidden)
            query, key, value = (project(normed).view(by_head) for project in (layer.query, layer.key, layer.value))
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = layer.query_norm(query), layer.key_norm(key)
            heads = query.shape[2]
            rotated = _rotated(torch.cat([query, key], 2), cos, sin)
            query, key = rotated[:, :, :heads], rotated[:, :, heads:]
            cache.write(index, key, value, cache_rows)
            keys, values = cache.read(index)
            mixed = attends[layer.window](query.transpose(1, 2), keys, values, layer.scaling)
            hidden = hidden + layer.mix(mixed.transpose(1, 2).reshape(len(hidden), -1))
            normed = layer.mlp_norm(hidden)
            hidden = hidden + layer.down(layer.act(layer.gate(normed)) * layer.up(normed))
        if not needs_logits:
            return hidden.new_empty(len(tokens), 0, self.vocab_size, dtype=torch.float32)
        return self._head(self._norm(hidden)).view(*tokens.shape, -1).float()

    def _linear(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """A function that does what a linear layer does to [rows, K]."""
        on_cpu = self.device.type == "cpu" and self.dtype == torch.float32 and _HAS_BOTH
        if not (self._from_memory and on_cpu and type(module) is nn.Linear) or has_hooks(module):
            return module
        return _Linear(module) if is_plain(module.weight) else module  # torchao quantises the weight, not the module

    @torch.inference_mode()
    def _rotary_table(self, positions: int) -> Tensor:
        """Cosine and sine [positions, 2, D] by transformers' own module; the sine has the signs of rotate_half.

        With a rope_limit, [2, positions, 2, D]: of a short text, and of a long one.
        """
        every = torch.arange(positions, device=self.device)
        if self.rope_limit is not None:
            longer = torch.arange(max(positions, self.rope_limit + 1), device=self.device)
            return torch.stack([self._turns(every.clamp(max=self.rope_limit - 1)), self._turns(longer)[:positions]])
        if self.has_dynamic_rope:
            self._turns(every[:1])  # after a text beyond max_positions, a short one brings the module's factors back
            every = every.clamp(max=self.max_positions - 1)  # rows of absent nodes must not look like such a text
        return self._turns(every)

    def _turns(self, positions: Tensor) -> Tensor:
        """The rotary table [N, 2, D] of LongTensor[N] as the positions of one text."""
        cos, sin = self.model.model.rotary_emb(self.embedding.weight, positions[None])
        half = self._head_dim // 2
        return torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)], 1)


class _Linear:
    """A linear layer in fp32 on a CPU, for few rows, where the time goes into reading the weight.

    PyTorch asks MKL for rows @ weight.T. Written as weight @ rows.T, the same product takes MKL a third to two thirds
    of the time, for 2 to 5 rows and a small weight. oneDNN, which torch.compile uses on a CPU, has a larger fixed cost,
    but reads larger weights 1.3 to 5 times as fast as MKL, also for whole prompts (`python bench/linear.py`).

    oneDNN generates code for each number of rows that it meets, which takes half a millisecond and 0.7 MB. So numbers
    of rows are rounded up, to four different ones between a power of two and the next.
    """

    def __init__(self, module: nn.Linear):
        self._module = module
        self._small = module.weight.numel() <= SMALL

    def __call__(self, hidden: Tensor) -> Tensor:
        module, rows = self._module, len(hidden)
        if self._small and rows > FEW_ROWS:
            return module(hidden)
        if not self._small:
            step = 1 << max(0, rows.bit_length() - 3)
            padded = pad(hidden, (0, 0, 0, -rows % step)) if rows % step else hidden
            product = torch.ops.mkldnn._linear_pointwise(padded, module.weight, module.bias, "none", [], "")
            return product[:rows]
        flat = hidden.contiguous() if rows > 1 else hidden.repeat(2, 1)
        product = torch.mm(module.weight, flat.t()).t()
        if rows == 1:
            product = product[:1]
        return product if module.bias is None else product + module.bias


def _rms_norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function that does what a Llama's RMS norm does.

    PyTorch's own is a chain of nine operations on a CPU, each on few numbers; here they are six.
    """
    norm: Any = module
    least = torch.full((), norm.variance_epsilon, device="cpu")

    def normed(hidden: Tensor) -> Tensor:
        if not hidden.is_cpu or hidden.dtype != torch.float32:
            return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
        scale = torch.add(least, (hidden * hidden).sum(-1, keepdim=True), alpha=1 / hidden.shape[-1]).rsqrt_()
        return (hidden * scale).mul_(norm.weight)

    return normed


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of states [B, N, H, D]: x cos + rotate_half(x) sin.

    rotate_half is a roll by half of the columns and a change of signs, which `sin` already has.
    """
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)
