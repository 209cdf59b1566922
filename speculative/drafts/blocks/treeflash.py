"""TreeFlash: the block's output is corrected for each node by its token, before the last norm.

Let h_k be the block's output for depth k before the last norm, a the node's token, and E the embedding:

    logits   lm_head(norm(h_k + W_d (silu(g) * u))),   [u, g] = W_ug [norm_e E[a]; norm(h_k)]

So distributions depend on the last token. `candidate_tokens`, of the authors' search for a tree, is not read: here the
tree is a matter of the method.

Source: "TreeFlash", arXiv 2606.03819.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heavypath.kernels.layers.entries import EntryNorms
from heavypath.kernels.layers.gated import silu_product
from heavypath.kernels.layers.rms_norm import add_rms_norm
from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.term import BlockTerm, Parents, Pass, TokenLayers
from heavypath.speculative.files.checkpoint import check_config
from heavypath.speculative.models.llama import norm_of

_EPSILON = 1e-6  # of norm_e, whatever config.json gives for the other norms


class TreeFlashTerm(BlockTerm):
    """TreeFlash's correction. Weights are named as in its checkpoints, where the layers are in a part "model"."""

    module = "ar_approximation"
    section = "treeflash_config"
    from_root = False
    causal = False
    of_speculators = False
    keys: ClassVar = {"ar_approximation": str, "candidate_tokens": int}

    @classmethod
    def options(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], config: BlockConfig
    ) -> dict[str, Any] | None:
        """{"inner": the inner width of the correction}; None without one. Arguments as in `BlockTerm.options`."""
        weight = tensors.get("ar_approximation.d.weight")
        told = settings.get("ar_approximation")
        if weight is None and told is None:
            return None
        check_config(settings, {"ar_approximation": "swiglu"})
        if weight is None or told is None:
            found = "ar_approximation.d.weight is missing" if weight is None else "the tensors have one"
            raise ValueError(f"config.json gives ar_approximation {told!r}, and {found}; fetch both again")
        return {"inner": weight.shape[-1]}

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.columns = config.hidden_size
        self.uses_lm_head = True
        width = config.hidden_size
        inner = config.options["inner"]
        self.ug = nn.Linear(2 * width, 2 * inner)
        self.d = nn.Linear(inner, width, bias=False)
        self.norm = LlamaRMSNorm(width, _EPSILON)

    def finish(self, rows: Tensor, given: Pass, ends: TokenLayers) -> tuple[Tensor, Tensor]:
        """As `BlockTerm.finish`, but what is kept for `forward` are the rows before the norm."""
        read = rows[:, self.first : self.first + given.levels]
        return ends.logits(ends.norm(read)), read

    def forward(self, base: Tensor, kept: Tensor, nodes: Parents, ends: TokenLayers) -> tuple[Tensor, None]:
        """The logits of the nodes' children, corrected by each node's token; arguments as in `BlockTerm.forward`."""
        inputs = ends.beside(kept, nodes.tokens, EntryNorms(norm_of(self.norm), ends.last_norm), False)
        up, gate = self.ug(inputs.joined).chunk(2, -1)
        _, normed = add_rms_norm(inputs.states, self.d(silu_product(gate, up)), ends.last_norm)
        return ends.logits(normed.view(*nodes.tokens.shape, -1)), None
