"""A block draft, as PyTorch: what its checkpoints hold. `draft` says what is computed."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.convolution import BlockConvolution
from heavypath.speculative.drafts.blocks.terms import MARKOV_TERMS, DominoTerm, MarkovTerm, SelectorTerm
from heavypath.speculative.drafts.draft import Draftable
from heavypath.speculative.drafts.heads.eagle import HeadAttention, HeadMLP, linear_of, rotary_of


class BlockLayer(nn.Module):
    """A layer, with the names of Qwen3's."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = HeadAttention(config, config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = HeadMLP(config)
        self.attention_conv = BlockConvolution(config) if config.conv_size else None
        self.mlp_conv = BlockConvolution(config) if config.conv_size else None


class BlockHead(nn.Module, Draftable):
    """A draft that gives the laws of all depths in one pass; `load_draft` reads it as it was published.

    Where it has no embedding or no lm_head of its own, `embed_tokens` or `lm_head` is None, and the target's is taken.
    mask_embedding: [H], of masks; None for that of their token.
    d2t: LongTensor[Vd], token i + d2t[i] of the target is token i of the draft; None if it has all tokens.
    temperatures: of the depths, by which their laws are sharpened: see `set_temperatures`
    """

    temperatures: tuple[float, ...] = ()

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.owns_embedding else None
        self.fc = linear_of(config, "fc", config.target_hidden_size * len(config.taps), width)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.layers))
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.owns_lm_head else None
        self.d2t: Tensor | None
        reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if reduced else None)
        self.markov_head = MarkovTerm(config) if config.term in MARKOV_TERMS else None
        self.candidate_selector = SelectorTerm(config) if config.term == "selector" else None
        self.logit_head = DominoTerm(config) if config.term == "domino" else None
        self.mask_embedding = nn.Parameter(torch.zeros(width)) if config.owns_mask else None
        self.rotary_emb = rotary_of(config)

    def set_temperatures(self, temperatures: Sequence[float]) -> None:
        """Divide the logits of each depth by a temperature, from the root's children on; none for 1 at all depths.

        A law of a deep level knows nothing of the path, and is flatter than the target's. Above temperature 0 tokens
        drawn from it are seldom accepted. What is drawn is verified by the same law, so that any values are exact. Call
        it before a decoder is made. Raises ValueError for another number of depths, and for values of 0 or less.
        """
        depths = self.config.depths
        if temperatures and (len(temperatures) != depths or not all(each > 0 for each in temperatures)):
            raise ValueError(f"temperatures must be {depths} numbers above 0, one a depth, got {[*temperatures]}")
        self.temperatures = tuple(temperatures)

    @property
    def term(self) -> MarkovTerm | SelectorTerm | DominoTerm | None:
        """The part that adds something below a node by its own token; None for laws by depth alone."""
        return self.markov_head or self.candidate_selector or self.logit_head
