"""`LayeredDraft`: what EAGLE heads and block drafts have in common as drafts, whose layers are like Llama's."""

from typing import Any

import torch
from torch import Tensor

from heavypath.kernels.layers.spread import OwnTokens
from heavypath.speculative.drafts.heads.config import TappedConfig
from heavypath.speculative.drafts.tapped import TappedDraft
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.models.linear import Linears
from heavypath.speculative.models.llama import turns_of


class LayeredDraft(TappedDraft):
    """A trained head with layers like Llama's, as a draft for the target whose hidden states it reads.

    embedding: the head's own, or the target's if it has none
    linears: copies of the weights, and the functions that multiply by them
    own_tokens: which of the target's tokens the head has; None for all

    Raises ValueError as `TappedDraft` does, for a head that reads hidden states that the target does not have, and for
    one whose rotary embeddings depend on the length of the sequence.
    """

    def __init__(self, head: Any, target: Forward):
        super().__init__(head, target)
        self.head = head
        self.config = head.config
        self.layers = head.config.layers
        _check_fits(head.config, target)
        self.embedding: Any = head.embed_tokens
        if self.embedding is None:
            self.embedding = target.parts.embedded(target.embedding)
        self.linears = Linears(self.name, head.parameters())
        self.own_tokens = None if head.d2t is None else OwnTokens.by_offsets(head.d2t, self.vocab_size)
        self._rotary = self._rotary_table(1)

    def is_current(self) -> bool:
        """Whether the head has the same modules, and copies of its weights are up to date."""
        return super().is_current() and self.linears.is_current()

    @property
    def lm_head(self) -> Any:
        """The head's own lm_head, or the target's if it has none."""
        return self.target_lm_head if self.head.lm_head is None else self.head.lm_head

    def rotary(self, rows: int) -> Tensor:
        """Cosine and sine of at least `rows` positions, as in `KeyValueCache`, which are kept for later caches."""
        table = self._rotary  # a local name: another thread may replace the attribute
        if rows > len(table):
            self._rotary = table = self._rotary_table(rows)
        return table

    @torch.inference_mode()
    def _rotary_table(self, positions: int) -> Tensor:
        every = torch.arange(positions, device=self.device)
        return turns_of(self.head.rotary_emb, every, self.head.layers[0].post_attention_layernorm.weight)


def _check_fits(config: TappedConfig, target: Forward) -> None:
    """Raise ValueError if a head with this config does not fit a target's width, vocabulary or number of layers, or if
    its rotary embeddings depend on the sequence's length.
    """
    width = target.embedding.weight.shape[1]
    if config.target_hidden_size != width or config.vocab_size != target.vocab_size:
        raise ValueError(
            f"the head was made for a target of width {config.target_hidden_size} with {config.vocab_size} tokens, "
            f"got one of width {width} with {target.vocab_size}"
        )
    if not config.owns_embedding and config.hidden_size != width:
        raise ValueError(
            f"a head of width {config.hidden_size} needs an embedding of its own; the target's has {width}"
        )
    if max(config.taps) > target.layers or min(config.taps) < 0:
        raise ValueError(
            f"the head reads the hidden states {[*config.taps]}, the target has 0 .. {target.layers}; "
            "it was made for a target of more layers"
        )
    kind = config.rope_parameters.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"a head's rotary embeddings must not depend on the length of the text, got rope type {kind!r}"
        )
