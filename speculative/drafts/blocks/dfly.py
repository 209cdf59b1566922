"""DFly: a context for each layer, and logits that are computed again for each node, from its token.

Let f_t be the T hidden states of token t, h_k the block's output for depth k after the last norm, a the node's token,
and E the embedding. Layer l reads c_t,l instead of the same c_t in all layers:

    context  c_t,l = norm_hidden(fc f_t + sum_j softmax(w_l)_j f_t,j)
    logits   lm_head(h_k + W_down (silu(W_gate u) * W_up u)),   u = [norm_h h_k; norm_e E[a]]

So distributions depend on the last token. The second line is TreeFlash's, "hidden correction"; it may be absent. In
config.json `num_target_layers` is T, and `target_num_hidden_layers` is the number of the target's layers.

Source: "AngelSpec", arXiv 2607.25852.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heavypath.kernels.layers.entries import EntryNorms
from heavypath.kernels.layers.gated import silu_product
from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.term import BlockTerm, Parents, TokenLayers
from heavypath.speculative.drafts.heads.settings import together
from heavypath.speculative.files.checkpoint import check_config
from heavypath.speculative.models.llama import norm_of


class DFlyTerm(BlockTerm):
    """DFly's contexts and correction. Weights are named as in the checkpoints of AngelSpec and of speculators."""

    module = "dfly"
    from_root = False
    causal = False
    prefixes: ClassVar = {
        "context_proj.": "fc.",
        "context_norm.": "hidden_norm.",
        "final_norm.": "norm.",
        "hidden_correction.": "dfly.",
        "layer_fusion_weights": "dfly.layer_fusion_weights",
    }
    keys: ClassVar = {
        "enable_hidden_correction": bool,
        "hidden_correction_intermediate_size": int,
        "hidden_correction_type": str,
        "model_arch": str,
        "target_num_hidden_layers": int,
    }

    @classmethod
    def usual(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """config.json's keys with DFlash's meaning: here the number of the target's layers has another key."""
        taps = settings.get("target_layer_ids") or settings.get("aux_hidden_state_layer_ids")
        if taps is None:
            raise ValueError("config.json must give target_layer_ids, or aux_hidden_state_layer_ids of speculators")
        check_config(settings, {"num_target_layers": len(taps)})
        others = {key: value for key, value in settings.items() if key != "num_target_layers"}
        return together(others, {"num_target_layers": settings.get("target_num_hidden_layers")})

    @classmethod
    def options(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Any]:
        """{"correction": the inner width of the correction, 0 without one}; arguments as in `BlockTerm.options`."""
        weight = tensors.get("dfly.gate_proj.weight")
        width = 0 if weight is None else len(weight)
        if config.target_hidden_size != config.hidden_size:
            raise ValueError(
                f"the target has width {config.target_hidden_size}, the draft {config.hidden_size}; a DFly adds the "
                "target's hidden states to its own, so that both must be the same"
            )
        check_config(settings, {"hidden_correction_type": "swiglu"})
        check_config(settings, {"enable_hidden_correction": width > 0})
        if width:
            check_config(settings, {"hidden_correction_intermediate_size": width})
        return {"correction": width}

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        width = config.hidden_size
        inner = config.options["correction"]
        self.layer_fusion_weights = nn.Parameter(torch.zeros(config.layers, len(config.taps)))
        self.uses_lm_head = inner > 0
        if self.uses_lm_head:
            self.columns = width
            self.hidden_norm, self.embed_norm = (LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(2))
            self.gate_proj, self.up_proj = (nn.Linear(2 * width, inner, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(inner, width, bias=False)

    def contexts(self, taps: Tensor, context: Tensor) -> list[Tensor]:
        """A context [N, H] for each layer, before the norm. taps: [N, T, Ht]; context: [N, H], fc of the taps."""
        parts = self.layer_fusion_weights.softmax(-1)
        return [context + part for part in (parts @ taps).unbind(1)]

    def forward(self, base: Tensor, kept: Tensor, nodes: Parents, ends: TokenLayers) -> tuple[Tensor, None]:
        """The logits of the nodes' children, corrected by each node's token; arguments as in `BlockTerm.forward`."""
        if not self.uses_lm_head:
            return base[:, None], None
        norms = EntryNorms(norm_of(self.embed_norm), norm_of(self.hidden_norm))
        inputs = ends.beside(kept, nodes.tokens, norms, True)
        inner = silu_product(self.gate_proj(inputs.joined), self.up_proj(inputs.joined))
        corrected = inputs.states + self.down_proj(inner)
        return ends.logits(corrected.view(*nodes.tokens.shape, -1)), None

    def level_weights(self) -> list[Tensor]:
        """The weights that `forward` reads at each level: the correction's."""
        return [weight for name, weight in self.named_parameters() if name != "layer_fusion_weights"]
