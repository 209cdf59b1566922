"""LiLiCorr: a small encoder over the best K tokens of all depths says which of them follow each other.

Let b_k,i be the i-th best token of depth k by the block's logits, p its probability, h_k the block's output after the
last norm, c the context of the token before the root (`norm_hidden(fc f)`), and e the embedding:

    candidate  x_k,i = W_t e(b_k,i) + W_h h_k + MLP(LayerNorm(y)) + s_k + r_i
               y = log p, p, log p - log p_k,0, i / (K - 1), and 1 if i = 0
    layers     attention over all candidates, with a bias of each head for k - k' and one for k = k'; then an MLP
    anchor     a = norm(W_c c); W_c c is 0 if no token is before the root
    factors    z_k,i = silu(W_f [x; a; x * a]),  out_k,i = unit(W_o z),  in_k,i = unit(W_i z),  x after a norm
    logits     scale <unit(W_a a), in_1,j> for the root's children;  scale <out_(k-1),i, in_k,j> below b_(k-1),i

Other tokens have no logits. Below a token that is not a candidate, as in a mixture of drafts, all have their log p.

Source: "LiLiCorr", arXiv 2608.20530.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heavypath.kernels.layers.spread import spread_few
from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.encoder import EncoderLayer, bias_by_depth
from heavypath.speculative.drafts.blocks.term import BlockTerm, Parents, Pass, TokenLayers
from heavypath.speculative.drafts.heads.settings import number_in
from heavypath.speculative.files.checkpoint import check_config

_FEATURES = 5
_MOST_LAYERS = 32
_SIZES = ("candidate_topk", "num_layers", "num_heads", "factor_dim")


class LiLiCorrTerm(BlockTerm):
    """LiLiCorr's encoder. Weights are named as in its checkpoints, of which some have other names of the MLPs."""

    module = "lilicorr"
    from_root = False
    causal = False
    of_speculators = False
    keeps_fp32 = reads_before = True
    prefixes: ClassVar = {
        "lilicorr.feature_norm.": "lilicorr.feature_mlp.0.",
        "lilicorr.feature_mlp.up_proj.": "lilicorr.feature_mlp.1.",
        "lilicorr.feature_mlp.down_proj.": "lilicorr.feature_mlp.3.",
        **{
            f"lilicorr.layers.{layer}.mlp.{theirs}.": f"lilicorr.layers.{layer}.mlp.{ours}."
            for layer in range(_MOST_LAYERS)
            for theirs, ours in (("up_proj", 0), ("down_proj", 2))
        },
    }
    keys: ClassVar = {
        "lilicorr_enabled": bool,
        "lilicorr_hidden_size": int,
        "lilicorr_mlp_ratio": float,
        "has_own_lm_head": bool,
        "lilicorr_vector_eps": float,
        "lilicorr_logit_scale": float,
        **{f"lilicorr_{name}": int for name in _SIZES},
    }

    @classmethod
    def usual(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """config.json's keys with DFlash's meaning: here rows always attend to the whole block."""
        told = {key: settings[key] for key in ("is_causal", "causal", "causal_head") if key in settings}
        check_config(told, dict.fromkeys(told, False))
        return settings

    @classmethod
    def options(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Any]:
        """The encoder's sizes by name, and the scale of its logits; arguments and errors as in `BlockTerm.options`."""
        check_config(settings, {"lilicorr_enabled": True})
        found: dict[str, Any] = {name: number_in(settings, f"lilicorr_{name}") for name in _SIZES}
        for name, most in (("mlp_ratio", 64), ("vector_eps", 0.5), ("logit_scale", 1e6)):
            found[name] = settings.get(f"lilicorr_{name}", 0)
            if not 0 < found[name] <= most:
                raise ValueError(f"config.json must give lilicorr_{name}, above 0, at most {most}, got {found[name]}")
        found["width"] = settings.get("lilicorr_hidden_size") or config.hidden_size
        if config.draft_vocab_size != config.vocab_size or found["candidate_topk"] > config.vocab_size:
            raise ValueError(f"a LiLiCorr must have all of the target's {config.vocab_size} tokens to choose from")
        if found["width"] % found["num_heads"] or found["num_layers"] > _MOST_LAYERS:
            raise ValueError(f"no such LiLiCorr can be: {found}; fetch config.json again")
        slots = tensors.get("lilicorr.slot_embedding")
        return found | {"dimensions": 5 if slots is None else slots.dim()}

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        options = config.options
        hidden = config.hidden_size
        block = config.block_size
        width, self.selected, heads = (options[name] for name in ("width", "candidate_topk", "num_heads"))
        self.columns = self.selected * (self.selected + 3)
        ones = (1,) * (options["dimensions"] - 3)
        self.epsilon = options["vector_eps"]
        self.logit_scale = options["logit_scale"]
        self.token_proj = nn.Identity() if hidden == width else nn.Linear(hidden, width)
        self.pass_hidden_proj, self.context_proj = (nn.Linear(hidden, width) for _ in range(2))
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(_FEATURES), nn.Linear(_FEATURES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.slot_embedding = nn.Parameter(torch.zeros((*ones, block - 1, 1, width)))
        self.rank_embedding = nn.Parameter(torch.zeros((*ones, 1, self.selected, width)))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * block - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        inner = int(width * options["mlp_ratio"])
        eps = config.rms_norm_eps
        self.layers = nn.ModuleList(EncoderLayer(width, heads, inner, eps) for _ in range(options["num_layers"]))
        self.output_norm, self.anchor_norm = (LlamaRMSNorm(width, eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(width, options["factor_dim"]) for _ in range(3))

    def finish(self, rows: Tensor, given: Pass, ends: TokenLayers) -> tuple[Tensor, Tensor]:
        """The block's logits of each depth, and for `forward` the candidates and their logits; as `BlockTerm.finish`.

        Of each depth are kept: the candidates, those of the depth above, and logits below other tokens and below each.
        """
        normed = ends.norm(rows[:, self.first :])
        base = ends.logits(normed)
        values, best = base.topk(self.selected, -1)  # [B, D, K]
        said = values - base.logsumexp(-1, keepdim=True)
        starts, pairs = self._logits(said, normed, ends.embed(best), given)
        above = torch.cat([torch.full_like(best[:, :1], -1), best[:, :-1]], 1)
        pairs = (
            torch.cat([torch.zeros_like(pairs[:, :1]), pairs], 1)
            if pairs.shape[1]
            else pairs.new_zeros(len(pairs), 1, self.selected, self.selected)
        )
        others = torch.cat([starts[:, None], said[:, 1:]], 1)
        kept = torch.cat([best.float(), above.float(), others, pairs.flatten(2)], -1)
        return base[:, : given.levels], kept[:, : given.levels]

    def forward(self, base: Tensor, kept: Tensor, nodes: Parents, ends: TokenLayers) -> tuple[Tensor, None]:
        """The logits of the nodes' children, looked up by each node's token; arguments as in `BlockTerm.forward`."""
        best, above, others, pairs = kept.split([self.selected] * 3 + [self.selected**2], -1)
        same = nodes.tokens[:, :, None] == above[:, None].long()  # [B, n, K]
        found = same.float() @ pairs.view(-1, self.selected, self.selected)
        logits = found.where(same.any(-1, keepdim=True), others[:, None])
        return spread_few(logits, best, base.shape[-1]), None

    def level_weights(self) -> list[Tensor]:
        """An empty list: `forward` reads no weights, since the pass computes all logits."""
        return []

    def _logits(self, said: Tensor, normed: Tensor, words: Tensor, given: Pass) -> tuple[Tensor, Tensor]:
        """The logits of the root's children [B, K], and of each candidate's children [B, D - 1, K, K].

        said: log p of the candidates [B, D, K]; normed: the block's outputs [B, D, H]; words: embeddings of the
        candidates [B, D, K, H]; given: what the pass begins with
        """
        assert given.before is not None
        depths = said.shape[1]
        count = self.selected
        dtype = normed.dtype
        ranks = torch.arange(count, device=said.device, dtype=torch.float32).expand_as(said)
        features = [said, said.exp(), said - said[..., :1], ranks / max(count - 1, 1), (ranks == 0).float()]
        states = self.token_proj(words) + self.pass_hidden_proj(normed)[:, :, None]
        states = states + self.feature_mlp(torch.stack(features, -1).to(dtype))
        states = states + self.slot_embedding.view(-1, 1, states.shape[-1]) + self.rank_embedding.view(count, -1)
        states = states.flatten(1, 2)
        bias = bias_by_depth(self.relative_slot_bias, self.same_slot_bias, depths, count)
        for layer in self.layers:
            states = layer(states, bias)
        states = self.output_norm(states).unflatten(1, (depths, count))
        anchor = self.anchor_norm(self.context_proj(given.before) * given.begun[:, None].to(dtype))
        beside = anchor[:, None, None].expand_as(states)
        factors = silu(self.factor_input_proj(torch.cat([states, beside, states * beside], -1)))
        out, into, start = (
            normalize(head(each), dim=-1, eps=self.epsilon)
            for head, each in ((self.out_head, factors), (self.in_head, factors), (self.anchor_out_head, anchor))
        )
        starts = (start[:, None] * into[:, 0]).sum(-1)
        pairs = out[:, :-1] @ into[:, 1:].mT
        return self.logit_scale * starts.float(), self.logit_scale * pairs.float()
