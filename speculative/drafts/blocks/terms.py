"""Terms that the law below a node has of its own token, or of the path to it, beside the law of its depth.

With base_k the logits of depth k, h_k the row that they were made of (after the last norm), a the node's token, and
w = W1[a]:

    vanilla   base_k + W2 w
    gated     base_k + W2 (w * sigmoid(G [h_k; w]))
    selector  base_k[b] + <A[a] * (P h_k), C[b]> of the best tokens b of depth k, -inf of the others
    rnn       base_k + W2 tanh(o);  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c);  [g, c, o] = J [s; w; h_k]

Of the root a is its own token, and k is 1. G and J may have a bias. The state s is of the node's parent, and s' is the
node's own; above the root it is 0. So a law of "rnn" depends on the path, and one of the others on the last token
alone. Source: "DSpark", arXiv 2607.05147; "selector" is DFlash2's.
"""

import torch
from torch import Tensor, nn

from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.models.forward import as_logits

MARKOV_TERMS = ("vanilla", "gated", "rnn")


class MarkovTerm(nn.Module):
    """A term of low rank, by the names of DSpark's checkpoints. state_size: columns of a node's state; 0 for none."""

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

    def forward(
        self, base: Tensor, hidden: Tensor, tokens: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, n, Vd] below nodes of tokens LongTensor[B, n], and their own states, like those of their parents.

        base:   [B, Vd], of the depth below them, and hidden [B, H], the row that it is of
        state:  [B, n, state_size], of their parents; None without states
        """
        word, beside = self.markov_w1(tokens), hidden[:, None].expand(-1, tokens.shape[1], -1)
        if hasattr(self, "gate_proj"):
            word = word * torch.sigmoid(self.gate_proj(torch.cat([beside, word], -1)))
        elif state is not None:
            gate, new, word = self.joint_proj(torch.cat([state, word, beside], -1)).chunk(3, -1)
            kept = torch.sigmoid(gate)
            state, word = kept * state + (1 - kept) * torch.tanh(new), torch.tanh(word)
        return base[:, None] + as_logits(self.markov_w2(word)), state


class SelectorTerm(nn.Module):
    """A choice between the best tokens of each depth, by the names of DFlash2's checkpoints."""

    state_size = 0

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.selected = config.selected
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.rank))

    def forward(self, base: Tensor, hidden: Tensor, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, None]:
        """As of `MarkovTerm`."""
        values, best = base.topk(self.selected, -1)
        asked = self.predecessor_codebook[tokens] * self.hidden_projection(hidden)[:, None]  # [B, n, r]
        pairs = as_logits(asked @ self.successor_codebook[best].mT)  # [B, n, selected]
        logits = base.new_full((*tokens.shape, base.shape[-1]), -torch.inf)
        return logits.scatter_(2, best[:, None].expand(-1, tokens.shape[1], -1), values[:, None] + pairs), None
