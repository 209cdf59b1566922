"""The forward pass of a Llama-family model over tree nodes, from the modules of the transformers model itself.

transformers' own forward pass spends a fifth of a small model's time on masks, cache objects and passing keyword
arguments. It also reads device values on the host, which a CUDA graph cannot do. This is the same arithmetic on the
same modules:

    x = embed(tokens)
    for each layer:  x += o_proj(attention(rotary(q), rotary(k), v));  x += down(act(gate(x)) * up(x))
    logits = lm_head(norm(x))

Keys and values are written to given rows of a preallocated cache, and attention follows the caller's mask. On a GPU a
layer is nine launches, for any batch size: sum and norm; q, k and v as one product (see `joined`); rotary and storing
the new rows; attention; o_proj; sum and norm; gate and up; act and product, which may be part of the launch before;
down. On a CPU the whole pass is one call of compiled code (`native`), and this module is its reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heavypath.kernels.layers.gated import silu_product
from heavypath.kernels.layers.rms_norm import Norm, add_rms_norm
from heavypath.kernels.layers.rotary import HeadNorms, Projected, Turns, rotate_and_store
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Forward, Taps, TreeMask, as_logits, check_window
from heavypath.speculative.models.functions import is_published, strange_parts
from heavypath.speculative.models.layer_weights import streamed, weights_of
from heavypath.speculative.models.linear import Linears, Product, Products, as_it_lies, each_alone, is_silu
from heavypath.speculative.models.native import Ends, native_pass
from heavypath.speculative.models.structure import attentions_of, has_hooks
from heavypath.speculative.names import load
from heavypath.speculative.ranks.peers import Parts, local_of

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class _LlamaLayer:
    """One layer's submodules, shapes and functions, looked up once, because finding a submodule takes a microsecond.

    parts: which part of the weights this rank has
    """

    hidden_norm = None  # only layers of draft heads have this and the next one
    norm_before_residual = False

    def __init__(self, layer: Any, parts: Parts):
        attention = layer.self_attn
        mlp = layer.mlp
        self.parts = parts
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.projections = [*map(parts.of, projections)]
        self.gates = [*map(parts.of, (mlp.gate_proj, mlp.up_proj))]
        self.mixing = attention.o_proj
        self.last = mlp.down_proj
        self.weights = weights_of(layer)
        self.head_norms: HeadNorms | None = None
        if hasattr(attention, "q_norm"):  # as in Qwen3
            of_queries = norm_of(attention.q_norm)
            of_keys = norm_of(attention.k_norm)
            self.head_norms = HeadNorms(of_queries, of_keys)
        self.scaling: float = attention.scaling
        self.head_dim: int = attention.head_dim
        has_window = attention
        if attention.config.model_type == "mistral":
            has_window = attention.config
        self.window: int | None = getattr(has_window, "sliding_window", None)  # Llama has none
        self.activation = mlp.act_fn
        self.norm = norm_of(layer.input_layernorm)
        self.mlp_norm = norm_of(layer.post_attention_layernorm)

    @property
    def linears(self) -> list[nn.Module]:
        """All linear layers: queries, keys, values, o_proj, gate, up, down."""
        return [*self.projections, self.mixing, *self.gates, self.last]

    def look_up(self, one: Callable[[nn.Module], Product], together: Callable[[Sequence[nn.Module]], Products]) -> None:
        """Set the functions that multiply by the layer's weights where the pass is run by PyTorch.

        one:      makes the function of a single linear layer
        together: makes the function of linear layers that share an input, as `Linears.together`
        """
        self.project = together(self.projections)
        self.gate_products = together(self.gates)
        self.gated = gated_by(self.activation, self.gate_products)
        parts = self.parts
        mix = one(parts.of(self.mixing))
        self.mix = parts.summed(self.mixing, mix)
        down = one(parts.of(self.last))
        self.down = parts.summed(self.last, down)


def is_as_published(model: PreTrainedModel, parts: Parts) -> bool:
    """Whether a model is of one of the `MODEL_TYPES` and made of transformers' own modules, without any hook or patch.

    `LlamaForward` does not call most of the modules, nor the functions that they call. So it would leave out anything
    that a user put there, such as an attention of their own. Hooks by which transformers splits a model over ranks are
    known and allowed. A window in a Llama's config has an effect on transformers' cache alone, so it is tried.
    """
    kind = model.config.model_type
    if kind not in MODEL_TYPES or (kind == "llama" and getattr(model.config, "sliding_window", None) is not None):
        return False
    for module in model.modules():
        if has_hooks(module) and not parts.knows_hook_of(module):
            return False
    try:
        passed_by = _modules_passed_by(model)
        embedding = model.model.embed_tokens
    except AttributeError:
        return False
    if not is_plain_embedding(embedding) and not parts.knows_hook_of(embedding):  # of this rank's part, which is plain
        return False
    home = f"transformers.models.{kind}.modeling_{kind}"
    if not all(is_published(type(module), home) for module in passed_by):
        return False
    if strange_parts(model, attentions_of(model), hooks=False):
        return False
    return parts.are_usual(model)


def _modules_passed_by(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of a Llama-family model that `LlamaForward` computes itself, instead of calling them."""
    inner: Any = model.model
    found = [model, inner, inner.rotary_emb, inner.norm]
    for layer in inner.layers:
        attention = layer.self_attn
        found += [layer, attention, layer.mlp]
        found += [layer.input_layernorm, layer.post_attention_layernorm]
        for name in ("q_norm", "k_norm"):
            norm = getattr(attention, name, None)
            if norm is not None:
                found.append(norm)
    return found


class LlamaForward(Forward):
    """A transformers Llama, Mistral, Qwen2 or Qwen3 causal language model, called on tree nodes.

    layers: which of its layers to run before the final norm and the head, in rising order (default: all).

    Raises TypeError for something that is not such a model, ValueError for layers that it does not have.
    """

    def __init__(self, model: PreTrainedModel, name: str = "model", layers: Sequence[int] | None = None):
        config = getattr(model, "config", None)
        kind = getattr(config, "model_type", None)
        if not isinstance(model, nn.Module) or kind not in MODEL_TYPES:
            found = kind or type(model).__name__
            allowed = ", ".join(MODEL_TYPES)
            raise TypeError(f"{name} must be a transformers causal language model of type {allowed}; got {found!r}")
        super().__init__(model, name)
        every = list(model.model.layers)
        if layers is None:
            layers = range(len(every))
        else:
            _check_layers(layers, len(every))
            _check_resident(layers, every)
        self._indices = tuple(layers)
        self.layers = len(self._indices)
        self._look_up()
        self.watch(model)  # again, because joining moved weights
        self.windows = {layer.window for layer in self._layers}
        for window in self.windows:
            check_window(window, name)
        self._head_dim: int = every[0].self_attn.head_dim
        self._kv_heads: int = self.parts.heads(self.config.num_key_value_heads)
        self._rotary = self._rotary_table(1)

    def _look_up(self) -> None:
        """Look up the layers' modules, and choose the compiled pass or the functions that multiply by their weights."""
        model: Any = self.model
        layers = model.model.layers
        self._layers = [_LlamaLayer(layers[index], self.parts) for index in self._indices]
        self._norm = norm_of(model.model.norm)
        copied = []
        if self.stream is None:  # streamed weights are multiplied where they are: no reordered copies
            copied = [local_of(weight) for _, weight in self.weights()]
        linears = Linears(self.name, copied)
        self._linears = linears
        embedding = model.get_input_embeddings()
        ends = Ends(embedding.weight, self._norm, model.lm_head)
        parameters = [*model.parameters()]
        self._native = native_pass(self._layers, parameters, ends, linears, self.rope_limit)
        one: Callable[[nn.Module], Product] = as_it_lies
        together: Callable[[Sequence[nn.Module]], Products] = each_alone
        if self._native is None:  # else PyTorch runs only what the compiled pass does not take
            joining = load("Joining")(model)

            def joined_or_copied(modules: Sequence[nn.Module]) -> Products:
                return joining.products(modules) or linears.together(modules)

            one = linears.one
            together = joined_or_copied
        for layer in self._layers:
            layer.look_up(one, together)
        head = one(self.parts.of(model.lm_head))
        self._head = self.parts.joined(model.lm_head, head)
        self._embed = self.parts.embedded(self.embedding)
        if self.stream is None and hasattr(self._layers[0].project, "gated"):  # joined, on a GPU
            load("request_ahead")(self._layers, self.device)

    def is_current(self) -> bool:
        """Whether the model's structure is unchanged and reordered copies of its weights are up to date."""
        return super().is_current() and self._linears.is_current()

    def state(self) -> int:
        """A number that differs after a change of the model, and for another choice of layers."""
        return hash((super().state(), self._indices))

    def new_cache(self, batch: int, rows: int, lag: int = 0) -> KeyValueCache:
        """An empty cache of `rows` rows for each of `batch` sequences; positions must be below `rows`. lag: ignored."""
        rotary = self._rotary
        if rows > rotary.shape[-3]:
            self._rotary = rotary = self._rotary_table(rows)  # a local name: another thread may replace the attribute
        return KeyValueCache(
            batch=batch,
            layers=len(self._layers),
            kv_heads=self._kv_heads,
            rows=rows,
            head_dim=self._head_dim,
            like=self.like,
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
        taps: Taps | None = None,
    ) -> Tensor:
        """Logits [B, N, V] after each token. Arguments and result are as in `Forward.__call__`."""
        if self._native is not None and self._native.takes(tokens.numel()):
            return self._native(tokens, positions, cache_rows, cache, mask, needs_logits=needs_logits, taps=taps)
        attends = mask.attention(self.dtype, self.windows)
        by_head = *tokens.shape, -1, self._head_dim  # [B, N, heads, D]
        assert cache.rotary is not None
        turns = self._turns_at(positions, cache.rotary)
        hidden = self._embed(tokens.flatten())  # [B * N, H]
        computed = None
        states: dict[int, Tensor] = {}
        with self.exclusive_pass:
            for index, layer in enumerate(self._layers):
                with layer.weights:
                    hidden, normed = add_rms_norm(hidden, computed, layer.norm)
                    if taps is not None and index in taps.numbers:
                        states[index] = hidden
                    query, key, value = layer.project(normed)
                    projected = Projected(
                        query.view(by_head),
                        key.view(by_head),
                        value.view(by_head),
                    )
                    keys, values = cache.read(index)
                    rotated = rotate_and_store(projected, turns, keys, values, cache_rows, layer.head_norms)
                    rotated = rotated.transpose(1, 2)  # [B, heads, N, D]
                    attend = attends[layer.window]
                    mixed = attend(rotated, keys, values, layer.scaling)  # [B, heads, N, D]
                    mixed = mixed.transpose(1, 2)
                    mixed = mixed.reshape(len(hidden), -1)  # [B * N, heads * D]
                    computed = layer.mix(mixed)
                    hidden, normed = add_rms_norm(hidden, computed, layer.mlp_norm)
                    gated = layer.gated(normed)
                    computed = layer.down(gated)
        if not needs_logits and (taps is None or self.layers not in taps.numbers):
            last = hidden.new_empty(0)
        else:
            _, last = add_rms_norm(hidden, computed, self._norm)
        if taps is not None:
            states[self.layers] = last
            taps.take(states, tokens, positions, cache_rows)
        if not needs_logits:
            return hidden.new_empty(len(tokens), 0, self.vocab_size)
        logits = self._head(last)
        return as_logits(logits.view(*tokens.shape, -1))

    def _turns_at(self, positions: Tensor, rotary: Tensor) -> Turns:
        """Cosine and sine of tokens at positions LongTensor[B, N], from a table of `_rotary_table`."""
        if self.rope_limit is None:
            return Turns.at(rotary, positions)
        largest = positions.amax(1, keepdim=True)  # it decides, as in transformers
        is_long = largest >= self.rope_limit
        of_tokens = rotary[is_long.long(), positions]  # [B, N, 2, D]
        cos, sin = of_tokens[:, :, :, None].unbind(2)  # [B, N, 1, D] each
        return Turns(cos, sin)

    @torch.inference_mode()
    def _rotary_table(self, positions: int) -> Tensor:
        """Cosine and sine [positions, 2, D] of all positions below this number, as `turns_of` returns them.

        With a rope_limit, [2, positions, 2, D]: those for short sequences, then those for long ones.
        """
        every = torch.arange(positions, device=self.device)
        limit = self.rope_limit
        if limit is not None:
            of_short = self._turns(every.clamp(max=limit - 1))
            enough = max(positions, limit + 1)  # the factors of long sequences need a long one
            longer = torch.arange(enough, device=self.device)
            of_long = self._turns(longer)
            return torch.stack([of_short, of_long[:positions]])
        if self.has_dynamic_rope:
            self._turns(every[:1])  # a short sequence resets the module's factors, which a longer one may have changed
            every = every.clamp(max=self.max_positions - 1)  # rows of absent nodes must not change them again
        return self._turns(every)

    def _turns(self, positions: Tensor) -> Tensor:
        """Cosine and sine [N, 2, D] for positions LongTensor[N], as `turns_of` returns them."""
        return turns_of(self.model.model.rotary_emb, positions, self.like)


def _check_layers(layers: Sequence[int], count: int) -> None:
    """Raise ValueError for layers that are no early exit of a model with `count` layers."""
    if not 1 <= len(layers) < count:
        raise ValueError(f"an early exit must leave 1 .. {count - 1} layers, got {len(layers)}")
    in_range = all(0 <= layer < count for layer in layers)
    rise = [*layers] == sorted({*layers})
    if not (in_range and rise):
        raise ValueError(f"the layers of an early exit must rise within 0 .. {count - 1}, got {[*layers]}")


def _check_resident(layers: Sequence[int], every: Sequence[nn.Module]) -> None:
    """Raise ValueError for an early exit with streamed layers, which each of its passes would read again.

    layers: indices of the early exit's layers; every: all layers of the model
    """
    passing = []
    for index in layers:
        one = streamed(every[index])
        if one is not None and one.index not in one.stream.resident:
            passing.append(index)
    if passing:
        raise ValueError(
            f"the layers of an early exit must stay in memory, got {[*layers]} of which {passing} are streamed; load "
            f"the target with resident={[*layers]}"
        )


def turns_of(rotary_emb: Any, positions: Tensor, like: Tensor) -> Tensor:
    """Cosine and sine [N, 2, D] for positions LongTensor[N], by a rotary module of transformers.

    The first half of the sines is negated, which replaces the sign of transformers' rotate_half.

    like: a tensor with the dtype and device of the result
    """
    cos, sin = rotary_emb(like, positions[None])  # [1, N, D] each
    half = cos.shape[-1] // 2
    first = sin[0, :, :half]
    second = sin[0, :, half:]
    signed = torch.cat([-first, second], -1)
    return torch.stack([cos[0], signed], 1)


def gated_by(activation: nn.Module, products: Products) -> Product:
    """A function from an MLP's input [R, H] to act(gate) * up, [R, F]; with SiLU in one launch where that is possible.

    activation: the module act; products: a function from the input to the products with gate and up
    """
    if not is_silu(activation):

        def act_and_multiply(hidden: Tensor) -> Tensor:
            gate, up = products(hidden)
            return activation(gate) * up

        return act_and_multiply

    at_once: Product | None = getattr(products, "gated", None)  # of `JoinedProducts`
    if at_once is not None:
        return at_once

    def silu_and_multiply(hidden: Tensor) -> Tensor:
        gate, up = products(hidden)
        return silu_product(gate, up)

    return silu_and_multiply


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether an embedding looks tokens up in its weight and does nothing else."""
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return False
    return type(module.weight) is nn.Parameter


def norm_of(module: Any) -> Norm:
    """The weight and epsilon of a Llama RMS norm of transformers."""
    return Norm(module.weight, module.variance_epsilon)
