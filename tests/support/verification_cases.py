"""Trees with logits and noise, for a kernel and its reference: those of verify_tree. Its neighbours have others."""

import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from devices import DEVICE, moved

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import EITHER_DRAW, Verified
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree
from heavypath.speculative.trees.tree import TokenTree

PLAIN = Filters()
TREES = {
    "root": TokenTree([-1]),
    "chain": TokenTree.chain(3),
    "3-ary": TokenTree.k_ary(3, 1),
    "4, 2": TokenTree.from_branching([4, 2]),
    "sequences": TokenTree.independent(3, 2),
    "ranks": TokenTree([-1, 0, 0, 0, 2, 2], [0, 2, 0, 1, 1, 0]),
}


class Compared:
    """A case for both implementations of a function of the tensors so named, with the options `options`."""

    function: ClassVar[Callable[..., Verified]] = verify_tree
    tensors: ClassVar[tuple[str, ...]] = ("tokens", "parents", "target", "draft")
    options: dict[str, Any]

    def verified(self, impl: str, **changes) -> Verified:
        given = [getattr(self, name) for name in self.tensors], self.options | changes
        if impl == "triton":
            given = moved(given, DEVICE)
        return Verified(*(field.cpu() for field in type(self).function(*given[0], impl=impl, **given[1])))

    def agrees(self, **changes) -> bool:
        return all(map(torch.equal, self.verified("triton", **changes), self.verified("torch", **changes)))


def draft_options(filters: Filters) -> dict[str, float]:
    """These as verify_tree takes them, where None would mean the target's."""
    temperature, top_k, top_p, min_p = filters
    off = Filters(temperature, top_k or 0, top_p or 1.0, min_p or 0.0)
    return {f"draft_{name}": value for name, value in off._asdict().items()}


def random_filters(chosen: random.Random, temperatures: tuple[float, ...] = (0.3, 1.0, 1.7), often=0.2) -> Filters:
    """often: how often each filter is on"""
    on = [chosen.random() < often for _ in range(3)]
    return Filters(
        chosen.choice(temperatures),
        chosen.randint(1, 5) if on[0] else None,
        chosen.uniform(0.2, 0.99) if on[1] else None,
        chosen.uniform(0, 0.3) if on[2] else None,
    )


def random_tree(chosen: random.Random, least: int, most: int) -> TokenTree:
    """Of `least` to `most` nodes, with siblings in any order."""
    parents = [-1, *(chosen.randrange(node) for node in range(1, chosen.randint(least, most)))]
    ranks, order = [0] * len(parents), chosen.sample(range(1, len(parents)), len(parents) - 1)
    for place, node in enumerate(order):
        ranks[node] = sum(parents[other] == parents[node] for other in order[:place])
    return TokenTree(parents, ranks)


class Problem(Compared):
    """Trees drawn from a Markov language, each node's children with that node's row of noise."""

    def __init__(
        self, tree: TokenTree, method: str, target_filters=PLAIN, draft_filters=PLAIN, *,
        vocab_size=5, batch=2, dtype=torch.float32, absent=0.0, noise=1.0, seed=0, replacement: bool | None = None,
    ):  # fmt: skip
        """replacement: whether children were drawn so; of a method that takes either, by the seed if it is not given"""
        if replacement is None:
            replacement = method in ("with_replacement", "kseq") or (method in EITHER_DRAW and seed % 2 == 1)
        generator = torch.Generator().manual_seed(seed)
        contexts = min(vocab_size, 40)
        target = 1.5 * torch.randn(batch, contexts, vocab_size, generator=generator)
        draft = (target + noise * torch.randn(target.shape, generator=generator)).to(dtype)
        nodes, sequence = len(tree), torch.arange(batch)
        self.tokens = torch.full((batch, nodes), -1)
        self.tokens[:, 0] = 0
        self.parents = tree.parents
        self.rows = torch.arange(batch * nodes).view(batch, nodes) + (seed << 33)
        self.target, self.draft = torch.zeros(2, batch, nodes, vocab_size, dtype=dtype)
        for node in range(nodes):
            context = self.tokens[:, node].clamp(min=0) % contexts
            self.target[:, node], self.draft[:, node] = target.to(dtype)[sequence, context], draft[sequence, context]
            children = (tree.parents == node).nonzero()[:, 0]
            if len(children):
                drawn = gumbel_topk(
                    self.draft[:, node], len(children), **draft_filters._asdict(), seed=seed, rows=self.rows[:, node],
                    replacement=replacement, impl="torch", uniform_fill=not replacement and seed % 2 == 0,
                )  # fmt: skip
                self.tokens[:, children] = drawn.tokens[:, tree.ranks[children]]
            else:
                self.draft[:, node] = torch.nan  # leaves' rows are never read
        self.tokens[:, 1:][torch.rand(batch, nodes - 1, generator=generator) < absent] = -1
        greedy = Filters(temperature=0.0)
        self.options = {
            "method": method, "ranks": tree.ranks, "rows": self.rows, "seed": seed,
            "replacement": method in EITHER_DRAW and replacement,
            **(greedy if method == "greedy" else target_filters)._asdict(), **draft_options(draft_filters),
        }  # fmt: skip


def random_problem(method: str, seed: int) -> Problem:
    """Small, and any: the tree, draw order, distributions' distance, filters of both, dtype and absent nodes."""
    chosen = random.Random(f"{method} {seed}")
    return Problem(
        random_tree(chosen, 1, 8), method,
        random_filters(chosen), random_filters(chosen, ((0.0,) if method != "kseq" else ()) + (0.5, 1.0, 1.3)),
        vocab_size=chosen.choice([1, 2, 3, 5, 8, 40]), batch=chosen.choice([1, 1, 2]),
        dtype=chosen.choice([torch.float32, torch.float16, torch.bfloat16]), absent=chosen.choice([0.0, 0.2]),
        noise=chosen.choice([0.0, 0.3, 1.0, 3.0]), seed=seed,
    )  # fmt: skip
