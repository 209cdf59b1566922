"""Helpers of tests/kernels/test_typical.py and its neighbours."""

import math
import random
from itertools import pairwise

import torch
from verification_cases import Compared, random_filters, random_tree

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.typical.acceptance import Typical, accept_typical

USUAL = Typical()


def brute_force(tokens, parents, log_p, limits, max_depth):
    """The nodes of the best path of one tree, root first: of all paths of nodes that are likely enough the longest, and
    of these the likeliest. tokens, parents: lists; log_p: fp64 [N, V]."""
    found = [(0, 0.0, 0, [0])]
    for node in range(1, len(tokens)):
        path = [node]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        likelihood, accepted = 0.0, len(path) - 1 <= max_depth
        for above, below in pairwise(path):
            p = log_p[above].exp()
            entropy = -sum(float(q) * math.log(float(q)) for q in p if q > 0)
            accepted = accepted and tokens[below] >= 0
            accepted = accepted and float(p[tokens[below]]) > min(limits.epsilon, limits.delta * math.exp(-entropy))
            likelihood += math.log(float(p[tokens[below]])) if accepted else 0.0
        if accepted:
            found.append((len(path) - 1, likelihood, -node, path))
    return max(found)[3]


class Problem(Compared):
    """Trees of random tokens, some of them equal among siblings, and logits after their nodes."""

    function, tensors = accept_typical, ("tokens", "parents", "target")

    def __init__(
        self, tree, vocab_size=5, batch=2, dtype=torch.float32, absent=0.0, filters=Filters(), limits=USUAL, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        nodes = len(tree)
        logits = 2 * torch.randn(batch, nodes, vocab_size, generator=generator)
        self.target = logits.to(dtype)
        likely = logits[:, tree.parents.clamp(min=0)].softmax(-1).flatten(0, 1)
        self.tokens = torch.multinomial(likely, 1, generator=generator).view(batch, nodes)
        self.tokens[:, 1:][torch.rand(batch, nodes - 1, generator=generator) < absent] = -1
        self.parents, self.tree, self.filters, self.limits = tree.parents, tree, filters, limits
        rows = torch.arange(batch * nodes).view(batch, nodes) + (seed << 33)
        self.options = {"rows": rows, "seed": seed} | filters._asdict() | limits._asdict()

    def check(self, impl):
        """Its paths are those of the search, and its tokens those of the reference."""
        out = self.verified(impl)
        assert impl == "torch" or all(map(torch.equal, out, self.verified("torch")))
        for b, tokens in enumerate(self.tokens.tolist()):
            log_p = filtered_logprobs(self.target[b].float(), self.filters)
            path = brute_force(tokens, self.parents.tolist(), log_p, self.limits, self.tree.depth)
            assert out.path[b].tolist() == path + [-1] * (self.tree.depth + 1 - len(path))
            assert int(out.length[b]) == len(path) - 1


def random_problem(seed, filtered=0.3):
    """Small, and any: tree, vocabulary, filters, limits, dtype and absent nodes. filtered: how often a filter is on."""
    chosen = random.Random(seed)
    return Problem(
        random_tree(chosen, 1, 12), vocab_size=chosen.choice([1, 2, 3, 5, 40]), batch=chosen.choice([1, 2, 3]),
        dtype=chosen.choice([torch.float32, torch.float16, torch.bfloat16]), absent=chosen.choice([0.0, 0.2]),
        filters=random_filters(chosen, often=filtered), seed=seed,
        limits=Typical(chosen.choice([0.0, 0.09, 0.5]), chosen.choice([0.0, 0.3, 1.0])),
    )  # fmt: skip
