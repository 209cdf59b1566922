"""The terms of DSpark, DFlash2 and Domino: the distribution after a node depends on its token or path, too.

Let base_k be the logits of depth k, h_k the block's output that they were computed from (after the last norm), a the
node's token, and w = W1[a]. For the children at depth k the logits are

    vanilla   base_k + W2 w
    gated     base_k + W2 (w * sigmoid(G [h_k; w]))
    selector  base_k[b] + <A[a] * (P h_k), C[b]> for the best tokens b of depth k, -inf for the others
    rnn       base_k + W2 tanh(o);  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c);  [g, c, o] = J [s; w; h_k]
    domino    base_k + W2 silu(W1 [h_k; s']), from a depth on;  s' = GRU(E[a], s)

For the root, a is its token and k is 1. G and J may have a bias. s is the state of the node's parent (0 for the root),
and s' is the node's state. So with "rnn" and "domino" distributions depend on the path, with the others on the last
token alone. E is the embedding of the block's rows. The GRU has no biases:

    z = sigmoid(z_a + z_s);  s' = z s + (1 - z) tanh(n_a + sigmoid(r_a + r_s) n_s)
    [r_a, z_a, n_a] = W_ih E[a];  [r_s, z_s, n_s] = W_hh s

Source: "DSpark", arXiv 2607.05147; "selector" is DFlash2's, and "domino" SpecForge's.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from heavypath.kernels.layers.side_by_side import FieldRows, side_by_side
from heavypath.kernels.layers.spread import spread_few
from heavypath.kernels.layers.units import gru_unit, rnn_unit
from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.term import BlockTerm, Parents, TokenLayers, for_each_node
from heavypath.speculative.drafts.heads.settings import number_in
from heavypath.speculative.files.checkpoint import check_config
from heavypath.speculative.models.forward import as_logits

MARKOV_TERMS = ("vanilla", "gated", "rnn")
_PROJECTIONS = {"gate_proj": "gated", "joint_proj": "rnn"}


class MarkovTerm(BlockTerm):
    """DSpark's terms, added to a depth's logits: "vanilla", "gated" or "rnn". Weights are named as in checkpoints."""

    module = "markov_head"
    keys: ClassVar = {
        "markov_rank": int,
        "markov_head_type": str,
        "enable_confidence_head": bool,
        "confidence_head_with_markov": bool,
    }
    found_by_tensors = from_root = stores_states = True

    @classmethod
    def options(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], config: BlockConfig
    ) -> dict[str, Any] | None:
        """{"variant": of the three, "rank": columns of w, "bias": of G or J}; None for a DSpark without a term.

        Arguments and errors as in `BlockTerm.options`.
        """
        words = tensors.get("markov_head.markov_w1.weight")
        found = [name for name in _PROJECTIONS if f"markov_head.{name}.weight" in tensors]
        rank = 0 if words is None else words.shape[-1]
        check_config(settings, {"markov_rank": rank})
        if not found and words is None:
            return None
        variant = _PROJECTIONS[found[0]] if found else "vanilla"
        check_config(settings, {"markov_head_type": variant})
        bias = any(f"markov_head.{name}.bias" in tensors for name in found)
        return {"variant": variant, "rank": rank, "bias": bias}

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        variant, rank, bias = (config.options[name] for name in ("variant", "rank", "bias"))
        self.columns = width = config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.state_size = rank if variant == "rnn" else 0
        if variant == "gated":
            self.gate_proj = nn.Linear(width + rank, rank, bias=bias)
        elif variant == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank, bias=bias)

    def forward(self, base: Tensor, kept: Tensor, nodes: Parents, ends: TokenLayers) -> tuple[Tensor, Tensor | None]:
        """The logits of the nodes' children with the term, and the nodes' states; as `BlockTerm.forward`."""
        latent, state = self.latent(kept, nodes)
        return base[:, None] + as_logits(self.markov_w2(latent)), state

    def latent(self, hidden: Tensor, nodes: Parents, impl: str = "auto") -> tuple[Tensor, Tensor | None]:
        """The input of W2, [B, n, rank], and the nodes' states [B, n, state_size], None for a term without states.

        hidden: [B, H], the block's output of the children's depth
        impl:   of the kernels; training needs "torch", for gradients
        """
        row = FieldRows.for_each(hidden)
        words = FieldRows.of_table(self.markov_w1.weight, nodes.tokens)
        if hasattr(self, "gate_proj"):
            joined = side_by_side([row, words], impl=impl)
            return joined[..., hidden.shape[-1] :] * torch.sigmoid(self.gate_proj(joined)), None
        if nodes.above is None:
            return self.markov_w1(nodes.tokens), None
        joined = side_by_side([nodes.above, words, row], impl=impl)
        return rnn_unit(self.joint_proj(joined), joined[..., : self.state_size], nodes.kept, impl=impl)


class SelectorTerm(BlockTerm):
    """DFlash2's selector: rescores the best tokens of each depth. Weights are named as in its checkpoints."""

    module = "candidate_selector"
    keys: ClassVar = {"selector_rank": int, "selector_top_k": int}
    found_by_tensors = True

    @classmethod
    def options(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], config: BlockConfig
    ) -> dict[str, Any] | None:
        """{"rank": numbers of a token's code, "selected": best tokens of each depth}; None without a selector.

        Arguments and errors as in `BlockTerm.options`.
        """
        codebook = tensors.get("candidate_selector.predecessor_codebook")
        selected = settings.get("selector_top_k", 0)
        rank = 0 if codebook is None else codebook.shape[-1]
        vocab = config.draft_vocab_size
        check_config(settings, {"selector_rank": rank})
        if codebook is None:
            return None
        if not 1 <= selected <= vocab:
            raise ValueError(
                f"config.json must give selector_top_k, 1 to {vocab} tokens to choose from, got {selected}"
            )
        return {"rank": rank, "selected": selected}

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        rank = config.options["rank"]
        self.selected = config.options["selected"]
        self.columns = config.hidden_size
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))

    def forward(self, base: Tensor, kept: Tensor, nodes: Parents, ends: TokenLayers) -> tuple[Tensor, None]:
        """The logits of children: the depth's best tokens, rescored for each node's token; as `BlockTerm.forward`."""
        values, best = base.topk(self.selected, -1)
        queries = self.predecessor_codebook[nodes.tokens] * self.hidden_projection(kept)[:, None]  # [B, n, r]
        pairs = as_logits(queries @ self.successor_codebook[best].mT)  # [B, n, selected]
        return spread_few(pairs, best, base.shape[-1], values), None


class DominoTerm(BlockTerm):
    """Domino's term: what is added to the logits of a node's children. A GRU makes it depend on the node's path.

    Weights are named as in Domino's checkpoints.
    """

    module = "logit_head"
    keys: ClassVar = {"emb_dim": int, "gru_hidden_dim": int, "pure_draft_prefix_len": int}
    # Early checkpoints have our names.
    prefixes: ClassVar = {"prefix_gru.": "logit_head.prefix_gru.", "embed_proj.": "logit_head.embed_proj."}
    from_root = causal = of_speculators = False
    stores_states = True

    @classmethod
    def options(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Any]:
        """{"rank": inner width of the term, "state": size of a state, "plain": how many first depths lack the term}.

        Arguments and errors as in `BlockTerm.options`.
        """
        plain = settings.get("pure_draft_prefix_len", 0)
        if not 0 <= plain < config.block_size:
            raise ValueError(f"config.json gives pure_draft_prefix_len {plain}, expected 0 to {config.block_size - 1}")
        sizes = {"rank": number_in(settings, "emb_dim"), "state": number_in(settings, "gru_hidden_dim")}
        return {"plain": plain} | sizes

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        rank, self.state_size, self.plain = (config.options[name] for name in ("rank", "state", "plain"))
        self.columns = width = config.hidden_size
        self.prefix_gru = _GatedUnit(width, self.state_size)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + self.state_size, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, config.draft_vocab_size, bias=False),
        )

    def forward(self, base: Tensor, kept: Tensor, nodes: Parents, ends: TokenLayers) -> tuple[Tensor, Tensor]:
        """The logits of the nodes' children with the term, and the nodes' states; as `BlockTerm.forward`.

        For nodes of a depth below `plain`, the logits are `base` alone.
        """
        joined, state = self.prefix_gru(ends.words(nodes.tokens), for_each_node(kept, nodes), nodes)
        logits = for_each_node(base, nodes)
        depth = nodes.depth
        if isinstance(depth, int) and depth < self.plain:
            return logits, state
        added = logits + as_logits(self.embed_proj(joined))
        if isinstance(depth, int):
            return added, state
        return added.where((depth >= self.plain)[:, None, None], logits), state


class _GatedUnit(nn.Module):
    """A GRU of one layer without biases. Weights are named as in `torch.nn.GRU`."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * size, size))

    def forward(self, words: FieldRows, row: Tensor, nodes: Parents) -> tuple[Tensor, Tensor]:
        """[row; new states], [B, n, H + size], and the new states alone. words: the inputs, rows of H columns."""
        assert nodes.above is not None
        state, word = side_by_side([nodes.above, words]).split([self.weight_hh_l0.shape[1], words.field.shape[-1]], -1)
        of_input = linear(word, self.weight_ih_l0)
        of_state = linear(state, self.weight_hh_l0)
        return gru_unit(of_input, of_state, state, row, nodes.kept)
