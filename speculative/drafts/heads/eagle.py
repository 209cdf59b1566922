"""EAGLE heads as PyTorch modules: the layout of checkpoints, the pass for training, and the reference for decoding.

Entry i of a sequence x_0 x_1 .. combines the target's features f_i, computed when it read x_i, with the token after it,
and predicts the token after that:

    (f_i, x_{i+1})  ->  logits of x_{i+2},  at rotary position i

so the root of a tree, the last committed token x_L, is the entry (f_{L-1}, x_L). Below it there are no features of the
target yet, so a node's entry has its parent's output h instead. With e the token's embedding, and [;] concatenation:

    EAGLE-1 (Li et al. 2024, sec. 3; EAGLE-2 has the same head)    EAGLE-3 (Li et al. 2025, sec. 3)

    f_i    after the target's final norm                          g_i = fc[three hidden states of the target]
    x      fc[e; f]                                                g
    layer  h = x + attention(x)                                    h = g + attention([norm(e); norm(g)])
           h = h + mlp(norm(h))                                    h = h + mlp(norm(h))
    logits the target's lm_head(h), no norm                        lm_head(norm(h)), for fewer tokens than the target's
    below  h instead of f                                          h instead of g

`HeadConfig` lists the variants. A head with fewer tokens proposes token i + d2t[i] by its logit i.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from heavypath.speculative.drafts.draft import Draftable
from heavypath.speculative.drafts.heads.config import HeadConfig, TappedConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (query [B, Hq, N, D], key, value [B, Hkv, N, D]) -> [B, Hq, N, D]


class HeadAttention(nn.Module):
    """The attention of a head's layer. width: columns of its input, twice the head's width in EAGLE-3's first layer."""

    def __init__(self, config: TappedConfig, width: int):
        super().__init__()
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        head_dim = config.head_dim
        self.head_dim = head_dim
        self.q_proj = linear_of(config, "q_proj", width, heads * head_dim)
        self.k_proj = linear_of(config, "k_proj", width, kv_heads * head_dim)
        self.v_proj = linear_of(config, "v_proj", width, kv_heads * head_dim)
        self.o_proj = linear_of(config, "o_proj", heads * head_dim, config.hidden_size)
        if config.head_norms:
            self.q_norm = LlamaRMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The attention's output [B, N, H] for entries, from hidden [B, N, width].

        turns: cosine and sine [B or 1, N, D] of the entries' positions
        attend: attention of the entries to everything visible to them, from query, key and value
        """
        by_head = *hidden.shape[:2], -1, self.head_dim
        query = self.q_proj(hidden).view(by_head)
        key = self.k_proj(hidden).view(by_head)
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
            key = self.k_norm(key)
        cos, sin = turns
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        mixed = attend(query, key, self.v_proj(hidden).view(by_head).transpose(1, 2))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class HeadMLP(nn.Module):
    """A gated MLP, like Llama's."""

    def __init__(self, config: TappedConfig):
        super().__init__()
        self.gate_proj = linear_of(config, "gate_proj", config.hidden_size, config.intermediate_size)
        self.up_proj = linear_of(config, "up_proj", config.hidden_size, config.intermediate_size)
        self.down_proj = linear_of(config, "down_proj", config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """The MLP's output [.., H] from the normed hidden states [.., H]."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class HeadLayer(nn.Module):
    """A layer of a head. The first one of EAGLE-3 attends with embedding and features concatenated."""

    def __init__(self, config: HeadConfig, index: int):
        super().__init__()
        self.side_by_side = config.generation == 3 and index == 0
        self.norm_before_residual = config.norm_before_residual
        width = config.hidden_size
        if self.side_by_side or index > 0:  # the first layer of EAGLE-1 has no norm before attention
            self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        if self.side_by_side:
            self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.self_attn = HeadAttention(config, 2 * width if self.side_by_side else width)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.mlp = HeadMLP(config)

    def forward(self, hidden: Tensor, embedded: Tensor, turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The layer's output [B, N, H]; turns, attend: as in `HeadAttention`.

        hidden: [B, N, H], the features or what replaces them, or the layer before's output
        embedded: [B, N, H], the tokens' embeddings
        """
        attended = hidden
        if self.side_by_side:
            normed = self.hidden_norm(hidden)
            attended = torch.cat([self.input_layernorm(embedded), normed], -1)
            hidden = normed if self.norm_before_residual else hidden
        elif hasattr(self, "input_layernorm"):
            attended = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(attended, turns, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module, Draftable):
    """A head of EAGLE-1, 2, 3 or 3.1.

    If it has no embedding or lm_head of its own, `embed_tokens` or `lm_head` is None, and the caller uses the target's.

    d2t: LongTensor[Vd], token i of the head is token i + d2t[i] of the target; None if it has all tokens
    mask_hidden: [taps * Ht], for a head that drafts all levels at once (`blocks.p_eagle`): it stands for the target's
        hidden states in entries that are not known yet; else None
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        eps = config.rms_norm_eps
        read = config.target_hidden_size * len(config.taps)
        if config.owns_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        else:
            self.embed_tokens = None
        self.fc = linear_of(config, "fc", read + (width if config.generation == 1 else 0), width)
        self.fc_norm = None
        if config.tap_norms:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, eps) for _ in config.taps)
        self.input_norm = LlamaRMSNorm(read, eps) if config.norm_before_fc else None
        self.mask_hidden = None if config.mask_token_id is None else nn.Parameter(torch.zeros(read))
        self.layers = nn.ModuleList(HeadLayer(config, index) for index in range(config.layers))
        self.norm = LlamaRMSNorm(width, eps) if config.generation == 3 else None
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.owns_lm_head else None
        self.d2t: Tensor | None
        reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if reduced else None)
        self.rotary_emb = rotary_of(config)

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """What is kept of the target's hidden states [.., Ht] of `config.taps`: [.., H], for EAGLE-1 [.., Ht]."""
        if self.config.generation == 1:
            return taps[0]
        if self.fc_norm is not None:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        joined = torch.cat([*taps], -1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def forward(self, features: Tensor, embedded: Tensor, turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The outputs h [B, N, H] of entries.

        features: [B, N, H] from `features`, or from `fed_back` of their parents' outputs
        embedded: [B, N, H], embeddings of the entries' tokens
        turns: cosine and sine [B or 1, N, D] of the entries' positions, as `rotary_emb` returns them
        attend: attention from the entries to everything visible to them
        """
        hidden = features
        if self.config.generation == 1:
            hidden = self.fc(torch.cat([embedded, features], -1))
        for layer in self.layers:
            hidden = layer(hidden, embedded, turns, attend)
        return hidden

    def fed_back(self, hidden: Tensor) -> Tensor:
        """What replaces the features in the entries of child nodes, [.., H] from outputs [.., H]."""
        return self.norm(hidden) if self.norm is not None and self.config.feeds_back_normed else hidden

    def before_lm_head(self, hidden: Tensor) -> Tensor:
        """The input of the lm_head, [.., H] from outputs [.., H]."""
        return hidden if self.norm is None else self.norm(hidden)


def linear_of(config: TappedConfig, name: str, columns: int, rows: int) -> nn.Linear:
    """A new linear layer from `columns` to `rows` numbers, with a bias if config.biases has its name."""
    return nn.Linear(columns, rows, bias=name in config.biases)


def rotary_of(config: TappedConfig) -> LlamaRotaryEmbedding:
    """The rotary embedding of a head, with the config's rope_parameters and head_dim."""
    rope = config.rope_parameters
    longest = rope.get("original_max_position_embeddings", 2048) * rope.get("factor", 1)  # no table has this size
    return LlamaRotaryEmbedding(
        LlamaConfig(
            max_position_embeddings=int(longest),
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            rope_parameters=dict(rope),
        )
    )
