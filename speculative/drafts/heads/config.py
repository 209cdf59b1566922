"""The parts of a trained head of layers, from any checkpoint, by one set of names."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TappedConfig:
    """Shapes of layers, as Llama's or Qwen3's, that read the target's hidden states.

    taps:                the hidden states of the target that it reads, by transformers' numbers. Number i is the input
                         of layer i; the last one, with as many layers before it, is after the final norm
    vocab_size:          of the target, draft_vocab_size of the tokens that the head can propose
    rope_parameters:     as transformers has them
    biases:              the linear layers that have one, by name: "fc", "q_proj", ...
    head_norms:          queries and keys are normed by head, as in Qwen3
    owns_embedding, owns_lm_head: whether it has its own, or takes the target's
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


@dataclass(frozen=True, kw_only=True)
class HeadConfig(TappedConfig):
    """Shapes and variants of an EAGLE head.

    generation:          1 for EAGLE-1 and EAGLE-2, whose heads are the same; 3 for EAGLE-3 and 3.1
    tap_norms:           each tap is normed before `fc` (EAGLE-3.1)
    norm_before_fc:      all taps are normed together before `fc`
    norm_before_residual: the residual stream begins after the norm of the features
    feeds_back_normed:   the next level gets the output of the final norm (EAGLE-3.1)
    mask_token_id:       of a head that drafts all levels at once (P-EAGLE), the token of entries that stand for drafted
                         ones; None for one that drafts level by level
    """

    generation: Literal[1, 3]
    tap_norms: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    feeds_back_normed: bool = False
    mask_token_id: int | None = None

    @property
    def model_type(self) -> str:
        """The name of its kind in a trace."""
        return f"eagle-{self.generation}" if self.mask_token_id is None else "p-eagle"
