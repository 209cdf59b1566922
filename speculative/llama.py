"""The forward pass of a Llama-family model over tree nodes, from the modules of the transformers model itself.

transformers' own forward spends a fifth of a small model's time on masks, cache objects and keyword plumbing, and it
asks the host questions that a CUDA graph can't answer. This one is the same arithmetic, on the same modules:

    x = embed(tokens)
    for each layer:  x += o_proj(attention(rotary(q), rotary(k), v));  x += down(act(gate(x)) * up(x))
    logits = lm_head(norm(x))

with keys and values written to given rows of a preallocated cache, and attention over what the caller prepared.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from heavypath.kernels.tree_attention import prepared_attention

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
PREFILL_CHUNK = 512  # tokens at once: bounds the attention mask of a long prompt
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class KeyValueCache:
    """Keys and values [B, layers * Hkv, rows, D]: layers side by side, so that one gather moves a row of all.

    Rows are written in any order; nothing is counted here. Zeroed at first, so that rows never written can be masked.
    rotary: cos and sin of the positions that the rows may have.
    """

    def __init__(
        self,
        batch: int,
        layers: int,
        kv_heads: int,
        rows: int,
        head_dim: int,
        like: Tensor,
        rotary: tuple[Tensor, Tensor],
    ):
        self.keys = like.new_zeros(batch, layers * kv_heads, rows, head_dim)
        self.values = torch.zeros_like(self.keys)
        self.rotary = rotary
        self._kv_heads = kv_heads

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """Store key and value [B, N, Hkv, D] at cache rows LongTensor[B, N]."""
        for cache, new in ((self.keys, key), (self.values, value)):
            own = cache[:, layer * self._kv_heads : (layer + 1) * self._kv_heads]
            if len(own) == 1:
                own.index_copy_(2, rows[0], new.transpose(1, 2))
            else:
                own.transpose(1, 2)[torch.arange(len(own), device=rows.device)[:, None], rows] = new

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, rows, D]."""
        heads = slice(layer * self._kv_heads, (layer + 1) * self._kv_heads)
        return self.keys[:, heads], self.values[:, heads]


class LlamaForward:
    """A transformers Llama, Mistral, Qwen2 or Qwen3 causal language model, called on tree nodes.

    layers: how many of its layers to go through before the final norm and head (default: all).

    Raises TypeError for something that is not such a model, ValueError for one with an attention or rotary embedding
    that depends on more than token positions.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model", layers: int | None = None):
        config = getattr(model, "config", None)
        if not isinstance(model, nn.Module) or getattr(config, "model_type", None) not in MODEL_TYPES:
            kind = getattr(config, "model_type", None) or type(model).__name__
            raise TypeError(
                f"{name} must be a transformers causal language model of type {', '.join(MODEL_TYPES)}; got {kind!r}"
            )
        if not hasattr(model, "lm_head"):
            raise TypeError(f"{name} must have a language-model head (…ForCausalLM), got {type(model).__name__}")
        assert config is not None
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope not in _STATIC_ROPE:
            raise ValueError(f"{name} has rope type {rope!r}; supported are {', '.join(_STATIC_ROPE)}")
        if model.training:
            raise ValueError(f"{name} is in training mode; call {name}.eval() first")
        devices = sorted({str(weight.device) for weight in model.parameters()})
        if "meta" in devices:
            raise ValueError(f"{name} is on the meta device, it has no weights or offloads them; load it first")
        if len(devices) > 1:
            spread = f"{name} must be on one device, got one spread over {', '.join(devices)}"
            raise ValueError(spread + "; load it with device_map={'': device}")

        self.name = name
        self.config = config
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        windowed |= config.model_type == "mistral" and config.sliding_window is not None
        self.window: int | None = config.sliding_window if windowed else None
        self._model = model
        self._embed: nn.Embedding = model.get_input_embeddings()  # pyright: ignore[reportAttributeAccessIssue]
        if not _is_plain(self._embed.weight):
            raise ValueError(f"{name} has a quantised token embedding; quantise its linear layers alone")
        self._layers = list(model.model.layers)
        if layers is not None:
            if not 1 <= layers < len(self._layers):
                raise ValueError(f"an early exit must leave 1 .. {len(self._layers) - 1} layers, got {layers}")
            self._layers = self._layers[:layers]
        self._norm = model.model.norm
        self._head_dim: int = self._layers[0].self_attn.head_dim
        self._kv_heads: int = config.num_key_value_heads
        self._rotary = self._rotary_tables(1)
        from_memory = sum(weight.numel() for _, weight in self.weights()) > 1 << 20  # more than fits a core's cache
        self._few_rows = 8 if from_memory and self.device.type == "cpu" and self.dtype == torch.float32 else 0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and cache."""
        return self._embed.weight.dtype

    @property
    def layers(self) -> int:
        """How many layers it goes through."""
        return len(self._layers)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters of the model."""
        return self._model.named_parameters()

    def check_weights(self) -> None:
        """ValueError for NaN or infinite weights; quantised ones are taken as they are."""
        for name, weight in self.weights():
            if _is_plain(weight) and not weight.sum(dtype=torch.float32).isfinite():
                raise ValueError(f"{self.name} has NaN or infinite weights in {name}")

    def new_cache(self, batch: int, rows: int) -> KeyValueCache:
        """An empty cache of `rows` rows for `batch` sequences; positions below `rows` can be used with it."""
        rotary = self._rotary
        if rows > len(rotary[0]):
            self._rotary = rotary = self._rotary_tables(rows)  # for this cache, whatever another thread does to it
        shape = batch, len(self._layers), self._kv_heads, rows, self._head_dim
        return KeyValueCache(*shape, self._embed.weight, rotary)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        cache: KeyValueCache,
        attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],
        last: Tensor | None = None,
    ) -> Tensor:
        """fp32 logits [B, N, V] after each token.

        tokens, positions, rows: LongTensor[B, N]; token n's key and value go to cache row rows[:, n].
        attend: what the tokens see, see `prepared_attention`.
        last: LongTensor[B]; if given, only the logits after token last[b] of each sequence are computed, [B, 1, V].
        """
        batch, nodes = tokens.shape
        cos, sin = (table[positions][:, :, None] for table in cache.rotary)  # [B, N, 1, D]

        hidden = self._embed(tokens)  # [B, N, hidden]
        for index, layer in enumerate(self._layers):
            attention = layer.self_attn
            normed = _normed(layer.input_layernorm, hidden)
            query, key, value = (
                self._linear(project, normed).view(batch, nodes, -1, self._head_dim)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if self.config.model_type == "qwen3":
                query, key = _normed(attention.q_norm, query), _normed(attention.k_norm, key)
            cache.write(index, _rotated(key, cos, sin), value, rows)
            mixed = attend(_rotated(query, cos, sin).transpose(1, 2), *cache.read(index), attention.scaling)
            hidden = hidden + self._linear(attention.o_proj, mixed.transpose(1, 2).reshape(batch, nodes, -1))
            mlp = layer.mlp
            normed = _normed(layer.post_attention_layernorm, hidden)
            gate, up = (self._linear(project, normed) for project in (mlp.gate_proj, mlp.up_proj))
            hidden = hidden + self._linear(mlp.down_proj, mlp.act_fn(gate) * up)
        if last is not None:
            hidden = hidden[torch.arange(batch, device=last.device), last][:, None]
        return self._linear(self._model.lm_head, _normed(self._norm, hidden)).float()

    def prefill(self, prompt: Tensor, lengths: Tensor, cache: KeyValueCache) -> Tensor:
        """Cache right-padded prompts LongTensor[B, T]; fp32 logits [B, 1, V] after the last token of each.

        Padding is cached too, behind the sequence's length, where nothing looks before it is overwritten.
        """
        batch, longest = prompt.shape
        logits = self._embed.weight.new_zeros(batch, 1, self.vocab_size, dtype=torch.float32)
        for start in range(0, longest, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, longest)
            rows = torch.arange(start, stop, device=prompt.device).expand(batch, -1)
            attend = prepared_attention(
                prefix_length=torch.full((), start, device=prompt.device),
                rows=stop,
                dtype=self.dtype,
                subtree_end=torch.full((stop - start,), stop - start, device=prompt.device),
            )
            last = (lengths - 1 - start).clamp(0, stop - start - 1)
            after = self(prompt[:, start:stop], rows, rows, cache, attend, last)
            ends_here = (start < lengths) & (lengths <= stop)
            logits = after.where(ends_here[:, None, None], logits)
        return logits

    def _linear(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """module(hidden) for hidden [B, N, K].

        On a CPU the matrix product for 2 to 8 rows is faster as weight @ rows.T than as rows @ weight.T, by 1.4 to 3
        times at a million weights, and one row is faster as two; larger matrices are read at full speed either way.
        """
        rows = hidden.shape[0] * hidden.shape[1]
        if rows > self._few_rows or type(module) is not nn.Linear or module.weight.numel() > 1 << 21:
            return module(hidden)
        if not _is_plain(module.weight):  # torchao quantises the weight, not the module
            return module(hidden)
        flat = hidden.reshape(rows, -1)
        product = torch.mm(module.weight, (flat if rows > 1 else flat.repeat(2, 1)).t()).t()[:rows].contiguous()
        if module.bias is not None:
            product += module.bias
        return product.view(*hidden.shape[:-1], -1)

    @torch.inference_mode()
    def _rotary_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, D] by transformers' own module; sin with rotate_half's sign folded in."""
        cos, sin = self._model.model.rotary_emb(self._embed.weight, torch.arange(positions, device=self.device)[None])
        half = self._head_dim // 2
        return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)


def _is_plain(weight: Tensor) -> bool:
    """Whether it is an ordinary tensor of floating-point numbers; a quantised one has a class or dtype of its own."""
    return type(weight) is nn.Parameter and weight.is_floating_point() and weight.dtype.itemsize > 1


def _normed(norm: nn.Module, hidden: Tensor) -> Tensor:
    weight: Tensor = norm.weight  # pyright: ignore[reportAssignmentType]
    return rms_norm(hidden, weight.shape, weight, norm.variance_epsilon)  # pyright: ignore[reportArgumentType]


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, N, H, D]: x cos + rotate_half(x) sin, where rotate_half is a roll with signs."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)
