"""A Markov language as target and another as draft, decoded step by step through drawn and verified trees.

Nothing of the decoder is used: what is tested is that gumbel_topk and verify_tree together emit the target's law over
several tokens and several steps.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from verification_cases import draft_options

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree
from heavypath.kernels.verifying.rule import Rule
from heavypath.speculative.trees.tree import TokenTree


class ToyLanguage:
    """target, draft: logits [V, V] of the token after each token."""

    def __init__(self, vocab_size: int, seed: int = 0, spread: float = 1.5):
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        self.target = spread * torch.randn(vocab_size, vocab_size, generator=generator)
        self.draft = 0.5 * self.target + spread * torch.randn(vocab_size, vocab_size, generator=generator)

    def law(self, filters: Filters, length: int = 3) -> Tensor:
        """Probabilities [V ** length] of the first `length` tokens after token 0."""
        step = filtered_logprobs(self.target, filters).exp()
        joint, last = step[0], torch.arange(self.vocab_size)
        for _ in range(length - 1):
            joint = (joint[:, None] * step[last]).flatten()
            last = torch.arange(self.vocab_size).repeat(len(last))
        return joint


def decode(
    language: ToyLanguage,
    tree: TokenTree,
    *,
    method: str,
    sequences: int,
    length: int = 3,
    target_filters: Filters = Filters(),
    draft_filters: Filters = Filters(),
    replacement: bool = False,
    uniform_fill: bool = False,
    seed: int = 0,
    verify_tree: Callable = verify_tree,
    stale: bool = False,
) -> Tensor:
    """The first `length` tokens LongTensor[sequences, length] after token 0, a fresh tree each step.

    stale reuses the first step's noise in every step, a bug that the tests must find.
    """
    nodes, parents, ranks, depths = len(tree), tree.parents, tree.ranks, tree.depths
    text = torch.zeros(sequences, length + tree.depth + 2, dtype=torch.long)
    written = torch.zeros(sequences, dtype=torch.long)
    sequence = torch.arange(sequences)
    for step in range(length):
        root = text[sequence, written]
        tokens = torch.full((sequences, nodes), -1)
        tokens[:, 0] = root
        if method == "race":  # noise by position
            rows = (sequence[:, None] << 24) + written[:, None] + depths
        else:
            rows = (sequence[:, None] << 24) + ((0 if stale else step) << 12) + torch.arange(nodes)
        draft_logits = torch.full((sequences, nodes, language.vocab_size), torch.nan)  # leaves' are never read
        for node in range(nodes):
            children = (parents == node).nonzero()[:, 0]
            if not len(children):
                continue
            draft_logits[:, node] = language.draft[tokens[:, node].clamp(min=0)]
            drawn = gumbel_topk(
                draft_logits[:, node], len(children), **draft_filters._asdict(), seed=seed, rows=rows[:, node],
                replacement=replacement, uniform_fill=uniform_fill,
            )  # fmt: skip
            tokens[:, children] = drawn.tokens[:, ranks[children]]
        verified = verify_tree(
            tokens, parents, language.target[tokens.clamp(min=0)], draft_logits,
            **Rule.of_draws(method, replacement)._asdict(), ranks=ranks,
            **target_filters._asdict(), **draft_options(draft_filters),
            seed=seed, rows=rows,
        )  # fmt: skip
        new = torch.cat([tokens.gather(1, verified.path.clamp(min=0))[:, 1:], torch.zeros_like(root)[:, None]], 1)
        new = new.scatter(1, verified.length[:, None], verified.next_token[:, None])
        for place in range(new.shape[1]):
            put = (verified.length >= place) & (written + 1 + place < text.shape[1])
            text[sequence[put], written[put] + 1 + place] = new[put, place]
        written = (written + verified.length + 1).clamp(max=length)
    return text[:, 1 : length + 1]
