"""Terms that make the distribution after a node depend on its token or path, and not on its depth alone.

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

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.models.forward import as_logits

MARKOV_TERMS = ("vanilla", "gated", "rnn")


class Parents(NamedTuple):
    """n nodes of one level in each sequence, for whose children logits are computed.

    tokens: LongTensor[B, n], the nodes' tokens
    depth:  the nodes' depth, 0 for the root; LongTensor[B] if it differs between sequences
    state:  [B, n, state_size], the states of the nodes' parents; None for a term without states
    words:  [B, n, H], the embeddings of the tokens; None for a term that does not read them
    """

    tokens: Tensor
    depth: int | Tensor
    state: Tensor | None
    words: Tensor | None


class MarkovTerm(nn.Module):
    """DSpark's terms of low rank: "vanilla", "gated" or "rnn". Weights are named as in its checkpoints.

    state_size: columns of a node's state; 0 if there are no states
    """

    reads_words = False

    def __init__(self, config: BlockConfig):
        super().__init__()
        rank, width, bias = config.rank, config.hidden_size, config.term_bias
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.state_size = rank if config.term == "rnn" else 0
        if config.term == "gated":
            self.gate_proj = nn.Linear(width + rank, rank, bias=bias)
        elif config.term == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank, bias=bias)

    def forward(self, base: Tensor, hidden: Tensor, nodes: Parents) -> tuple[Tensor, Tensor | None]:
        """The logits for the nodes' children [B, n, Vd], and the nodes' states [B, n, state_size], or None.

        base: [B, Vd], the logits of the children's depth
        hidden: [B, H], the block's output from which they were computed
        """
        latent, state = self.latent(hidden, nodes)
        return base[:, None] + as_logits(self.markov_w2(latent)), state

    def latent(self, hidden: Tensor, nodes: Parents) -> tuple[Tensor, Tensor | None]:
        """The input of W2, [B, n, rank], and the nodes' states; arguments as in `forward`."""
        word, row, state = self.markov_w1(nodes.tokens), _for_each_node(hidden, nodes), nodes.state
        if hasattr(self, "gate_proj"):
            word = word * torch.sigmoid(self.gate_proj(torch.cat([row, word], -1)))
        elif state is not None:
            gate, new, word = self.joint_proj(torch.cat([state, word, row], -1)).chunk(3, -1)
            kept = torch.sigmoid(gate)
            state, word = kept * state + (1 - kept) * torch.tanh(new), torch.tanh(word)
        return word, state


class SelectorTerm(nn.Module):
    """DFlash2's selector: rescores the best tokens of each depth. Weights are named as in its checkpoints."""

    state_size, reads_words = 0, False

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.selected = config.selected
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.rank))

    def forward(self, base: Tensor, hidden: Tensor, nodes: Parents) -> tuple[Tensor, None]:
        """The logits for the nodes' children [B, n, Vd]; arguments as in `MarkovTerm.forward`."""
        tokens, (values, best) = nodes.tokens, base.topk(self.selected, -1)
        queries = self.predecessor_codebook[tokens] * self.hidden_projection(hidden)[:, None]  # [B, n, r]
        pairs = as_logits(queries @ self.successor_codebook[best].mT)  # [B, n, selected]
        logits = base.new_full((*tokens.shape, base.shape[-1]), -torch.inf)
        return logits.scatter_(2, best[:, None].expand(-1, tokens.shape[1], -1), values[:, None] + pairs), None


class DominoTerm(nn.Module):
    """Domino's term: what is added to the logits of a node's children. A GRU makes it depend on the node's path.

    Weights are named as in Domino's checkpoints.
    """

    reads_words = True

    def __init__(self, config: BlockConfig):
        super().__init__()
        width, rank = config.hidden_size, config.rank
        self.state_size, self.plain = config.state_size, config.plain
        self.prefix_gru = _GatedUnit(width, config.state_size)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + config.state_size, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, config.draft_vocab_size, bias=False),
        )

    def forward(self, base: Tensor, hidden: Tensor, nodes: Parents) -> tuple[Tensor, Tensor]:
        """The logits for the nodes' children and the nodes' states; arguments as in `MarkovTerm.forward`.

        For nodes of a depth below `plain`, the logits are `base` alone.
        """
        assert nodes.words is not None
        assert nodes.state is not None
        state = self.prefix_gru(nodes.words, nodes.state)
        logits, depth = base[:, None].expand(-1, nodes.tokens.shape[1], -1), nodes.depth
        if isinstance(depth, int) and depth < self.plain:
            return logits, state
        added = logits + as_logits(self.embed_proj(torch.cat([_for_each_node(hidden, nodes), state], -1)))
        if isinstance(depth, int):
            return added, state
        return added.where((depth >= self.plain)[:, None, None], logits), state


class _GatedUnit(nn.Module):
    """A GRU of one layer without biases. Weights are named as in `torch.nn.GRU`."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * size, size))

    def forward(self, words: Tensor, state: Tensor) -> Tensor:
        """The new states [..., size]. words: [..., H], the inputs; state: [..., size], the states before."""
        reset, gate, new = linear(words, self.weight_ih_l0).chunk(3, -1)
        reset_of, gate_of, new_of = linear(state, self.weight_hh_l0).chunk(3, -1)
        gate = torch.sigmoid(gate + gate_of)
        return gate * state + (1 - gate) * torch.tanh(new + torch.sigmoid(reset + reset_of) * new_of)


def _for_each_node(hidden: Tensor, nodes: Parents) -> Tensor:
    """Each sequence's row [B, H] repeated for its n nodes, [B, n, H]."""
    return hidden[:, None].expand(-1, nodes.tokens.shape[1], -1)
