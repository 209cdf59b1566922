"""The forward pass of a Llama-family model over tree nodes, from the modules of the transformers model itself.

transformers' own forward spends a fifth of a small model's time on masks, cache objects and keyword plumbing, and it
asks the host questions that a CUDA graph can't answer. This one is the same arithmetic, on the same modules:

    x = embed(tokens)
    for each layer:  x += o_proj(attention(rotary(q), rotary(k), v));  x += down(act(gate(x)) * up(x))
    logits = lm_head(norm(x))

with keys and values written to given rows of a preallocated cache, and attention over what the caller prepared.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from heavypath.speculative.caches import KeyValueCache
from heavypath.speculative.forward import Forward, TreeMask, is_plain

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class LlamaForward(Forward):
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
        super().__init__(model, name)
        self._layers = list(model.model.layers)
        if layers is not None:
            if not 1 <= layers < len(self._layers):
                raise ValueError(f"an early exit must leave 1 .. {len(self._layers) - 1} layers, got {layers}")
            self._layers = self._layers[:layers]
        self.layers = len(self._layers)
        self._norm = model.model.norm
        self._head_dim: int = self._layers[0].self_attn.head_dim
        self._kv_heads: int = self.config.num_key_value_heads
        self._rotary = self._rotary_tables(1)
        from_memory = sum(weight.numel() for _, weight in self.weights()) > 1 << 20  # more than fits a core's cache
        self._few_rows = 8 if from_memory and self.device.type == "cpu" and self.dtype == torch.float32 else 0

    def new_cache(self, batch: int, rows: int) -> KeyValueCache:
        """An empty cache of `rows` rows for `batch` sequences; positions below `rows` can be used with it."""
        rotary = self._rotary
        if rows > len(rotary[0]):
            self._rotary = rotary = self._rotary_tables(rows)  # for this cache, whatever another thread does to it
        shape = batch, len(self._layers), self._kv_heads, rows, self._head_dim
        return KeyValueCache(*shape, self._embed.weight, rotary)

    def __call__(self, tokens: Tensor, positions: Tensor, rows: Tensor, cache: KeyValueCache, mask: TreeMask) -> Tensor:
        """fp32 logits [B, N, V] after each token, see `Forward`."""
        hidden = self.hidden(tokens, positions, rows, cache, mask)
        return self._linear(self._model.lm_head, _normed(self._norm, hidden)).float()

    def hidden(self, tokens: Tensor, positions: Tensor, rows: Tensor, cache: KeyValueCache, mask: TreeMask) -> Tensor:
        """What the last layer makes of each token, [B, N, hidden], before the final norm."""
        attend = mask.attention(self.dtype)
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
        return hidden

    def _linear(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """module(hidden) for hidden [B, N, K].

        On a CPU the matrix product for 2 to 8 rows is faster as weight @ rows.T than as rows @ weight.T, by 1.4 to 3
        times at a million weights, and one row is faster as two; larger matrices are read at full speed either way.
        """
        rows = hidden.shape[0] * hidden.shape[1]
        if rows > self._few_rows or type(module) is not nn.Linear or module.weight.numel() > 1 << 21:
            return module(hidden)
        if not is_plain(module.weight):  # torchao quantises the weight, not the module
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


def _normed(norm: nn.Module, hidden: Tensor) -> Tensor:
    weight: Tensor = norm.weight  # pyright: ignore[reportAssignmentType]
    return rms_norm(hidden, weight.shape, weight, norm.variance_epsilon)  # pyright: ignore[reportArgumentType]


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, N, H, D]: x cos + rotate_half(x) sin, where rotate_half is a roll with signs."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)
