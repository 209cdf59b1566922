"""`BlockConfig`: the shapes and switches of a block draft, under the same names for all kinds of checkpoints."""

from dataclasses import dataclass, field
from typing import Any

from heavypath.speculative.drafts.heads.config import TappedConfig


@dataclass(frozen=True, kw_only=True)
class BlockConfig(TappedConfig):
    """Shapes and switches of a block draft.

    kind:          its authors' name for this kind of draft ("dflash", ...), for messages
    block_size:    rows of a pass: one for the root, the others for masks
    mask_token_id: the token whose embedding the masks get
    from_root:     whether row r gives the distribution at depth r + 1; else at depth r, and the root's row is not used
    causal:        for each layer, whether a row of the block attends only to the block's rows up to itself; else to all
    windows:       for each layer, the number of positions that a row attends to; None for all
    multiplier, softcap: logits are softcap * tanh(multiplier * logits / softcap); None for no cap
    term:          the entry of `BLOCK_TERMS` that computes it; "dflash" for none
    options:       what its module is made of besides, see `BlockTerm.options`
    owns_mask:     whether the checkpoint has an embedding for masks, used instead of the embedding of mask_token_id
    conv_size:     number of rows that a convolution reads; 0 for no convolutions
    conv_group:    number of columns that share a convolution's input-dependent weights; 0 for no convolutions
    """

    kind: str
    block_size: int
    mask_token_id: int
    from_root: bool
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    multiplier: float = 1.0
    softcap: float | None = None
    term: str = "dflash"
    options: dict[str, Any] = field(default_factory=dict)
    conv_size: int = 0
    conv_group: int = 0
    owns_mask: bool = False

    @property
    def depths(self) -> int:
        """The number of levels of a tree that one pass drafts."""
        return self.block_size - (not self.from_root)

    @property
    def model_type(self) -> str:
        """The kind of this draft, for traces and training records, and its variant or term where that differs."""
        variant = self.options.get("variant", self.term)
        return self.kind if variant in ("dflash", self.kind) else f"{self.kind}, {variant}"
