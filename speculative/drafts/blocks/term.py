"""`BlockTerm`: what a kind of block draft has beyond DFlash. Each kind is a subclass; `BLOCK_TERMS` has them by name.

A draft's pass gives logits for each depth. A term may take part in three places, all of which do nothing here:

    contexts     the input of each layer's keys and values for the target's tokens
    after_layer  the block's rows between two layers
    forward      the logits after a node, from its depth, its token, and a state that comes down from its parent

What `forward` returns is the distribution from which children are drawn, and with which they are verified. So any
function of these arguments is lossless. It must not look at other nodes of the tree.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from heavypath.kernels.layers.entries import EntryNorms, Inputs
from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.layers.side_by_side import FieldRows
from heavypath.speculative.drafts.blocks.config import BlockConfig


class TokenLayers(NamedTuple):
    """The functions around a draft's layers, for tensors of any number of dimensions.

    embed:   tokens LongTensor[...] to [..., H], the embedding of the block's rows
    words:   tokens LongTensor[B, n] to rows of H columns, the same, which need not be looked up
    norm:    [..., H] to [..., H], the norm after the last layer
    logits:  [..., H], after the norm, to fp32 [..., Vd]
    logits_of: rows [B, H], what is added to them for each node [B, n, H], and tokens of the draft [B, K], to fp32
             [B, n, K]: the logits of these tokens alone, after the norm of the sums
    beside:  rows [B, H] and tokens LongTensor[B, n] to the rows for each token, and their norm next to the norm of the
             token's embedding; the norms, and whether the row comes first, are given
    last_norm: the norm of `norm`
    """

    embed: Callable[[Tensor], Tensor]
    words: Callable[[Tensor], FieldRows]
    norm: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    logits_of: Callable[[Tensor, Tensor, Tensor], Tensor]
    beside: Callable[[Tensor, Tensor, EntryNorms, bool], Inputs]
    last_norm: Norm


class Pass(NamedTuple):
    """What a pass over the block of each sequence begins with.

    roots:  LongTensor[B], the roots' tokens
    levels: the number of depths that the step drafts
    before: [B, H], the normed context of the token before the root, for a term that `reads_before`; else None
    begun:  bool [B], whether there is such a token
    """

    roots: Tensor
    levels: int
    before: Tensor | None
    begun: Tensor


class Parents(NamedTuple):
    """n nodes of one level in each sequence, for whose children logits are computed.

    tokens: LongTensor[B, n], the nodes' tokens, by the target's numbers
    depth:  the nodes' depth, 0 for the root; LongTensor[B] if it differs between sequences
    above:  the rows of state_size columns that have the states of the nodes' parents, 0 for the root's; None for a term
            without states
    kept:   the rows in which the nodes' own states are stored; None to store none
    """

    tokens: Tensor
    depth: int | Tensor
    above: FieldRows | None
    kept: FieldRows | None = None

    @property
    def state(self) -> Tensor:
        """The states of the nodes' parents, [B, n, state_size]; of a term that has states."""
        assert self.above is not None
        return self.above.looked_up(*self.tokens.shape)


class BlockTerm(nn.Module):
    """A kind of block draft. This one is DFlash, which adds nothing; the attributes of the class are its defaults.

    module:         name of this module in the head, with which its tensors begin in checkpoints
    prefixes:       beginnings of tensors' names in checkpoints, and what stands for them in the head
    found_by_tensors: whether a draft that config.json calls a DFlash is of this kind if it has its tensors
    flags:          names of tensors of one bool, which must be true; they are not kept
    keys:           the keys that it reads in config.json, or in dflash_config there, and the types of their values
    section:        a further object of config.json that holds keys
    of_speculators: whether `speculators_model_type` may name it
    from_root:      whether row r gives depth r + 1 where config.json does not say; None if the layout decides
    causal:         whether rows attend to rows up to themselves alone where config.json does not say; None if the
                    layers' windows decide
    state_size:     columns of a node's state; 0 if nodes have none
    columns:        columns that a pass keeps of each depth for `forward`; 0 if `forward` reads the logits alone
    keeps_fp32:     whether these columns are fp32, whatever the draft's dtype
    stores_states:  whether `forward` itself stores the nodes' states in `nodes.kept`, as a kernel may; else the draft
                    stores those that it returns
    reads_before:   whether `finish` reads the context of the token before the root
    uses_lm_head:   whether `forward` reads lm_head again
    """

    module: ClassVar[str] = "dflash"
    prefixes: ClassVar[Mapping[str, str]] = {}
    flags: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[Mapping[str, type]] = {}
    section: ClassVar[str] = ""
    of_speculators: ClassVar[bool] = True
    found_by_tensors: ClassVar[bool] = False
    from_root: ClassVar[bool | None] = None
    causal: ClassVar[bool | None] = None
    keeps_fp32: ClassVar[bool] = False
    stores_states: ClassVar[bool] = False
    reads_before: ClassVar[bool] = False
    state_size: int = 0
    columns: int = 0
    uses_lm_head: bool = False

    @classmethod
    def usual(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Translate config.json's keys, those of its sections included, into DFlash's, if a kind has other meanings."""
        return settings

    @classmethod
    def options(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], config: BlockConfig
    ) -> dict[str, Any] | None:
        """The `BlockConfig.options` of a checkpoint, from which this module can be made; None if it is a DFlash.

        settings: as `usual` returned them; tensors: by the head's names; config: without options

        Raises ValueError for settings that are not understood.
        """
        return {}

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.first = 0 if config.from_root else 1  # the row of depth 1

    def contexts(self, taps: Tensor, context: Tensor) -> list[Tensor] | None:
        """What each layer's keys and values are computed from: L tensors [N, H], before the norm.

        None if all layers read the same, `context`.

        taps: [N, T, Ht], the target's hidden states of N tokens; context: [N, H], fc of them
        """
        return None

    def after_layer(self, layer: int, rows: Tensor, roots: Tensor) -> Tensor:
        """The block's rows [B, R, H] as the next layer gets them.

        layer: its index; rows: [B, R, H], its output, the root's row first; roots: LongTensor[B], the roots' tokens
        """
        return rows

    def finish(self, rows: Tensor, given: Pass, ends: TokenLayers) -> tuple[Tensor, Tensor]:
        """The logits of the first `levels` depths [B, levels, Vd], and what `forward` needs of each depth.

        rows: [B, R, H], all rows after the last layer; given: what the pass begins with, and `levels`
        ends: the functions around the layers

        The second result, [B, levels, columns], is kept in the cache for `forward`.
        """
        normed = ends.norm(rows[:, self.first : self.first + given.levels])
        return ends.logits(normed), normed[..., : self.columns]

    def forward(self, base: Tensor, kept: Tensor, nodes: Parents, ends: TokenLayers) -> tuple[Tensor, Tensor | None]:
        """The logits for the nodes' children, [B, n, Vd] or [B, 1, Vd], and the nodes' states [B, n, state_size].

        base: [B, Vd], the logits of the children's depth; kept: [B, columns], what the pass kept of it
        """
        return base[:, None], None

    def level_weights(self) -> list[Tensor]:
        """The weights that `forward` reads at each level, for estimates of time; others are read once a pass."""
        return [*self.parameters()]


def for_each_node(kept: Tensor, nodes: Parents) -> Tensor:
    """Each sequence's row [B, C] repeated for its n nodes, [B, n, C]."""
    return kept[:, None].expand(-1, nodes.tokens.shape[1], -1)
