"""The modules of a block draft, named as in checkpoints. They hold the weights; `draft` computes with them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.convolution import BlockConvolution
from heavypath.speculative.drafts.blocks.kinds import BLOCK_TERMS
from heavypath.speculative.drafts.blocks.term import BlockTerm
from heavypath.speculative.drafts.draft import Draftable
from heavypath.speculative.drafts.heads.eagle import HeadAttention, HeadMLP, linear_of, rotary_of


class BlockLayer(nn.Module):
    """The weights of one layer, named as in Qwen3."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = HeadAttention(config, config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = HeadMLP(config)
        self.attention_conv = BlockConvolution(config) if config.conv_size else None
        self.mlp_conv = BlockConvolution(config) if config.conv_size else None


class BlockHead(nn.Module, Draftable):
    """A block draft: one pass computes the distributions of all depths. `load_draft` reads published checkpoints.

    embed_tokens, lm_head: None if the checkpoint has none; then the target's are used
    mask_embedding: [H], the embedding of masks; None if masks have the embedding of config.mask_token_id
    d2t: LongTensor[Vd]: token i of the draft is token i + d2t[i] of the target; None if the draft has all tokens
    temperatures: one for each depth, see `set_temperatures`; empty for 1 at all depths
    """

    temperatures: tuple[float, ...] = ()

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.owns_embedding else None
        self.fc = linear_of(config, "fc", config.target_hidden_size * len(config.taps), width)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.layers))
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.owns_lm_head else None
        self.d2t: Tensor | None
        reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if reduced else None)
        kind = BLOCK_TERMS[config.term]
        self._term = kind.module
        self.add_module(kind.module, kind(config))
        self.mask_embedding = nn.Parameter(torch.zeros(width)) if config.owns_mask else None
        self.rotary_emb = rotary_of(config)

    def set_temperatures(self, temperatures: Sequence[float]) -> None:
        """Set a temperature for each depth, from the root's children on; its logits are divided by it.

        An empty sequence stands for 1 at all depths. The distributions of deep levels do not depend on the path, so
        they are flatter than the target's, and tokens sampled from them are seldom accepted. Temperatures below 1
        sharpen them. Nodes are verified with the same distributions, so any values are lossless. Call this before a
        decoder is made. Raises ValueError for another number of depths, and for values of 0 or less.
        """
        depths = self.config.depths
        if temperatures and (len(temperatures) != depths or not all(each > 0 for each in temperatures)):
            raise ValueError(f"temperatures must be {depths} numbers above 0, one a depth, got {[*temperatures]}")
        self.temperatures = tuple(temperatures)

    @property
    def term(self) -> BlockTerm:
        """The module of what this kind of draft has beyond DFlash."""
        term: Any = self.get_submodule(self._term)
        return term
