"""Shapes and variants of trained heads, with the same names for checkpoints of all sources."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TappedConfig:
    """Shapes of layers, like Llama's or Qwen3's, that read the target's hidden states.

    taps: the indices of the target's hidden states that it reads, numbered as in transformers: number i is the input of
        layer i; the last one, whose number is the number of layers, is after the final norm
    vocab_size, draft_vocab_size: number of the target's tokens, and of those that the head can propose
    rope_parameters: as in transformers
    biases: names of the linear layers that have a bias: "fc", "q_proj", ...
    head_norms: whether queries and keys are normalised per attention head, as in Qwen3
    owns_embedding, owns_lm_head: whether it has its own, or uses the target's
    acceptance: how often its first token is accepted at temperature 0, and at 1, measured on held-out text by `distil`;
        None if it was not measured
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    layers: int = 1
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    biases: frozenset[str] = frozenset()
    head_norms: bool = False
    owns_embedding: bool = False
    owns_lm_head: bool = False
    acceptance: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class HeadConfig(TappedConfig):
    """Shapes and variants of an EAGLE head.

    generation: 1 for EAGLE-1 and EAGLE-2, which have the same head; 3 for EAGLE-3 and 3.1
    tap_norms: whether each tap is normalised before `fc` (EAGLE-3.1)
    norm_before_fc: whether all taps are normalised together before `fc`
    norm_before_residual: whether the residual stream begins after the norm of the features
    feeds_back_normed: whether the next level gets the output of the final norm (EAGLE-3.1)
    mask_token_id: for a head that drafts all levels at once (P-EAGLE), the token of the entries for levels not drafted
        yet; None for a head that drafts level by level
    """

    generation: Literal[1, 3]
    tap_norms: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    feeds_back_normed: bool = False
    mask_token_id: int | None = None

    @property
    def model_type(self) -> str:
        """Name of this kind of draft in traces."""
        return f"eagle-{self.generation}" if self.mask_token_id is None else "p-eagle"
