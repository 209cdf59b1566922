"""The parts of a block draft, from any checkpoint, by one set of names."""

from dataclasses import dataclass

from heavypath.speculative.drafts.heads.config import TappedConfig


@dataclass(frozen=True, kw_only=True)
class BlockConfig(TappedConfig):
    """Shapes and switches of a block draft.

    kind:          "dflash", ..: how its authors call it, for messages
    block_size:    rows of a pass: the root's, and those of masks
    mask_token_id: the token whose embedding the masks have
    from_root:     row r is the law at depth r + 1; else it is that at depth r, and the root's row is not read
    causal:        of each layer, whether a row of the block sees the rows up to itself alone; else it sees all
    windows:       of each layer, how many positions a row sees; None for the whole text
    multiplier, softcap: logits are softcap * tanh(multiplier * logits / softcap); None for no cap
    term:          what the law below a node takes from its token or its path: "" for nothing, or as `terms` has it
    rank:          of that term; term_bias: whether it has a bias
    state_size:    of the term "domino", columns of a node's state; plain: depths whose laws are without the term
    selected:      of the term "selector", how many tokens of each depth it chooses from
    owns_mask:     whether masks have an embedding of their own, in place of their token's
    conv_size, conv_group: rows that a convolution reads, and columns that share its weights; 0 for none
    """

    kind: str
    block_size: int
    mask_token_id: int
    from_root: bool
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    multiplier: float = 1.0
    softcap: float | None = None
    term: str = ""
    rank: int = 0
    term_bias: bool = False
    state_size: int = 0
    plain: int = 0
    selected: int = 0
    conv_size: int = 0
    conv_group: int = 0
    owns_mask: bool = False

    @property
    def depths(self) -> int:
        """Levels of a tree that a pass drafts."""
        return self.block_size - (not self.from_root)

    @property
    def model_type(self) -> str:
        """The name of its kind in a trace."""
        return f"{self.kind}, {self.term}" if self.term not in ("", self.kind) else self.kind
