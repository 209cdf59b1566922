"""A small Llama made larger without a change of what it computes: real shapes with the acceptance of a trained pair.

`enlarged` makes a model of given widths, `widened` one of the same proportions, groups of query heads included.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SILENT = 1e-12  # times a random weight: it is read and multiplied like any other, and lost in what it is added to
LOW = -1e7  # logit of a token that the small model lacks, times the root mean square of the last hidden state


class Widths(NamedTuple):
    """The shape of a Llama without groups of query heads."""

    layers: int
    hidden: int
    heads: int
    intermediate: int


LLAMA_7B, LLAMA_68M = Widths(32, 4096, 32, 11008), Widths(2, 768, 12, 3072)  # meta-llama/Llama-2-7b, JackFram/llama-68m


@torch.no_grad()
def enlarged(
    model: LlamaForCausalLM,
    widths: Widths,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LlamaForCausalLM:
    """A Llama of these widths and vocabulary that computes what a smaller one computes, up to rounding.

    With lower case for the small model, upper case for the large one:

    hidden       channels 0 .. h - 1 are the small model's; the others get nothing from any layer. The sum of squares is
                 over the same numbers, the mean is h / H of what it was: norm weights times sqrt(h / H), epsilon too.
    constant     channel h holds c for every token. Norms would see its square, so epsilon is less by as much:
                     c^2 + H EPS = h eps,    hence    sqrt((sum + c^2) / H + EPS) = sqrt(h / H) sqrt(sum / h + eps).
    vocabulary   the final norm makes 1 / rms of the constant; the head takes LOW times that for tokens v .. V - 1.
    heads        k and v of a group are repeated for each of its query heads; o_proj reads nothing from further heads.
    head size    a multiple m of the small one's. Rotary frequencies are theta^(-2i/d) = theta^(-2mi/D): pair i goes to
                 pair mi, the keys of other pairs are silent. Scores are divided by sqrt(D) = sqrt(m) sqrt(d): queries
                 times sqrt(m).
    intermediate down_proj reads nothing from further channels.
    layers       o_proj and down_proj of further layers say nothing.

    "Nothing" is random numbers times SILENT, and all that is read by it, or reads it, is random: no weight is zero.
    The weights are made on the device. Raises ValueError for widths that are too small or not multiples.
    """
    small: Any = model.config
    least = small.num_hidden_layers, small.hidden_size + 1, small.num_attention_heads, small.intermediate_size
    if any(have < need for have, need in zip((*widths, vocabulary), (*least, small.vocab_size), strict=True)):
        raise ValueError(
            f"expected at least {Widths(*least)} and {small.vocab_size} tokens, got {widths}, {vocabulary}"
        )
    if widths.hidden % (widths.heads * small.head_dim):
        raise ValueError(f"expected heads of a multiple of {small.head_dim}, got {widths.hidden} / {widths.heads}")
    if dtype == torch.float16 or small.attention_bias or small.mlp_bias:
        raise ValueError(f"expected a dtype with the exponents of float32 and a model without biases, got {dtype}")
    channels, head_dim = small.hidden_size, widths.hidden // widths.heads
    multiple, shrink = head_dim // small.head_dim, math.sqrt(channels / widths.hidden)
    budget = channels * small.rms_norm_eps
    constant = 2.0 ** math.floor(math.log2(budget / 2) / 2)  # a power of two is the same in any dtype
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=widths.hidden,
        intermediate_size=widths.intermediate,
        num_hidden_layers=widths.layers,
        num_attention_heads=widths.heads,
        num_key_value_heads=widths.heads,
        max_position_embeddings=small.max_position_embeddings,
        rms_norm_eps=(budget - constant**2) / widths.hidden,
        rope_parameters=small.rope_parameters,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        large: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    def put(into: nn.Linear | nn.Embedding, values: Tensor, rows: Tensor, columns: Tensor, silent: bool) -> None:
        """The small model's values at these rows and columns; what is elsewhere stays random, or becomes silent."""
        if silent:
            into.weight *= SILENT
        into.weight[rows.to(device)[:, None], columns.to(device)] = values.to(into.weight)

    def put_norm(into: Any, values: Tensor, of_constant: float) -> None:
        into.weight[:channels] = values.to(into.weight) * shrink
        into.weight[channels] = of_constant

    hidden, inner, tokens = (torch.arange(size) for size in (channels, small.intermediate_size, small.vocab_size))
    halves, heads = torch.arange(2) * (head_dim // 2), torch.arange(small.num_attention_heads) * head_dim
    pairs = torch.arange(small.head_dim // 2) * multiple
    in_heads = (heads[:, None, None] + halves[:, None] + pairs).flatten()
    group = small.num_attention_heads // small.num_key_value_heads
    for number, layer in enumerate(large.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        if number >= small.num_hidden_layers:
            attention.o_proj.weight *= SILENT
            mlp.down_proj.weight *= SILENT
            continue
        own: Any = model.model.layers[number]
        key, value = (
            projection.weight.unflatten(0, (-1, small.head_dim)).repeat_interleave(group, 0).flatten(0, 1)
            for projection in (own.self_attn.k_proj, own.self_attn.v_proj)
        )
        put(attention.q_proj, own.self_attn.q_proj.weight * math.sqrt(multiple), in_heads, hidden, silent=False)
        put(attention.k_proj, key, in_heads, hidden, silent=True)
        put(attention.v_proj, value, in_heads, hidden, silent=False)
        put(attention.o_proj, own.self_attn.o_proj.weight, hidden, in_heads, silent=True)
        put(mlp.gate_proj, own.mlp.gate_proj.weight, inner, hidden, silent=False)
        put(mlp.up_proj, own.mlp.up_proj.weight, inner, hidden, silent=False)
        put(mlp.down_proj, own.mlp.down_proj.weight, hidden, inner, silent=True)
        put_norm(layer.input_layernorm, own.input_layernorm.weight, SILENT)
        put_norm(layer.post_attention_layernorm, own.post_attention_layernorm.weight, SILENT)
    put(large.model.embed_tokens, model.model.embed_tokens.weight, tokens, hidden, silent=True)
    large.model.embed_tokens.weight[:, channels] = constant
    put_norm(large.model.norm, model.model.norm.weight, shrink / constant)
    put(large.lm_head, model.lm_head.weight, tokens, hidden, silent=False)
    large.lm_head.weight[:, channels] *= SILENT
    large.lm_head.weight[small.vocab_size :, channels] = LOW
    return large


@torch.no_grad()
def widened(model: LlamaForCausalLM, factor: int) -> LlamaForCausalLM:
    """A Llama `factor` times as wide, in heads, hidden and inner channels, that computes the same up to rounding.

    Every hidden state is the small model's, `factor` times over. So a weight is tiled factor x factor times and divided
    by the factor, embeddings and norm weights are tiled, and the mean square, of which norms divide by the root, is the
    same. The head reads `factor` copies and is divided by the factor: it is no longer the embeddings. Query head i of
    n reads key head i // g. All heads are repeated as a whole: head kn + i reads kn / g + i // g, which is its copy.

    Raises ValueError for a factor below 1 and a model with biases.
    """
    small: Any = model.config
    if factor < 1 or small.attention_bias or small.mlp_bias:
        raise ValueError(f"expected a factor of at least 1 and a model without biases, got {factor}; take others")
    wide = {
        name: factor * getattr(small, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    }
    large = LlamaForCausalLM(LlamaConfig(**{**small.to_dict(), **wide, "tie_word_embeddings": False}))
    large = large.to(model.device, model.dtype).eval()
    given = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in large.named_parameters():
        weight = given[name]
        if name == "lm_head.weight":
            parameter.copy_(weight.repeat(1, factor) / factor)
        elif name == "model.embed_tokens.weight":
            parameter.copy_(weight.repeat(1, factor))
        else:
            parameter.copy_(weight.repeat(factor) if weight.ndim == 1 else weight.repeat(factor, factor) / factor)
    return large
