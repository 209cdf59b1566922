"""verify_tree against a straightforward loop in PyTorch, and against the time that reading the logits takes.

    python -m pytest bench/kernels/bench_verification.py --benchmark-only [-k race] [--benchmark-json FILE]

16 / 64 / 256 / 768 nodes x 32,000 / 128,256 tokens, every method, temperature 0.6, no filters, batch 1; bfloat16 logits
on a GPU, float32 on a CPU, where shapes that would take more than half a GiB are left out. The root has 8 children and
every other node 2 or 1 by turns, in heavy-path order. Target logits are normal with a standard deviation of 3, draft
logits are these plus 0.7 times normal noise: the first child of a node is accepted in about 6 of 10 cases. Children are
drawn from the draft in the way that the method requires. The work depends on what is accepted, so 5 problems are drawn
of each shape (3 on a GPU), which take turns.

loop       what published code does: softmax (or arg-max) of the rows of all nodes, then from the root, child after
           child in draw order, the coin against residual / draft, a new residual and a new draft row after each
           rejection, and torch.multinomial at the end. For a race it is given the noise. That it is right is tested by
           tests/bench/test_bench_verification.py
lazy loop  the same, but it normalises a row only when the walk reaches it

The loops wait for the host: on a GPU they are called from Python. Bytes are what a method must read of the logits: the
rows of the nodes that its walk reaches; all_MB those of all nodes (of the draft, of those with children), which it
reads if it treats the nodes in parallel.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import mean
from typing import NamedTuple

import torch
from common import DEVICE, Run
from torch import Tensor

from heavypath.kernels.nodes import DRAFT_AWARE
from heavypath.kernels.noise import Stream, gumbel_noise
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import VERIFICATION_METHODS, verify_tree
from heavypath.speculative import TokenTree

TEMPERATURE, SPREAD, DRAFT_NOISE = 0.6, 3.0, 0.7
PROBLEMS = 3 if DEVICE == "cuda" else 5
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
INDEPENDENT = ("with_replacement", "kseq")  # whose children are independent draws
OURS = ("held", "held_traversal")  # of which there is no published code
MOST_OF_NOISE = 1 << 20  # numbers that the loop is given for a race, which are drawn on the host


class Case(NamedTuple):
    """A shape and a method."""

    table: str
    nodes: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.table} {self.nodes} x {self.vocabulary}"

    def runs_here(self) -> bool:
        """Logits and probabilities of both models, and noise, have room."""
        return DEVICE == "cuda" or 5 * 4 * self.nodes * self.vocabulary <= 1 << 29


CASES = [
    Case(method, nodes, size)
    for size in (32000, 128256)
    for nodes in (16, 64, 256, 768)
    for method in VERIFICATION_METHODS
]
MINIATURE = [Case(method, 16, 100) for method in ("without_replacement", "race")]


def loop_verify(
    children: Sequence[Sequence[int]],
    tokens: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    *,
    method: str,
    temperature: float,
    noise: Tensor | None = None,
    lazy: bool = False,
) -> tuple[list[int], int]:
    """The accepted nodes of one tree, and the token after them.

    children: those of every node, in draw order. tokens [N]; logits [N, V]; noise [N, V], the Gumbels of a race.
    """

    def by_node(rows: Callable[[Tensor], Tensor], *sources: Tensor) -> Callable[[int], Tensor]:
        if lazy:
            return lambda node: rows(*(source[node] for source in sources))
        return rows(*sources).__getitem__

    def softmax(logits: Tensor) -> Tensor:
        return (logits.float() / temperature).softmax(-1)

    drawn, path = tokens.tolist(), [0]
    if method not in DRAFT_AWARE:
        choose = {
            "greedy": lambda logits: logits.argmax(-1),
            "target_sample": lambda logits: softmax(logits).multinomial(1).squeeze(-1),
            "race": lambda logits, noise: (softmax(logits).log() + noise).argmax(-1),
        }[method]
        winner = by_node(choose, *(source for source in (target_logits, noise) if source is not None))
        while True:
            token = int(winner(path[-1]))
            hits = [child for child in children[path[-1]] if drawn[child] == token]
            if not hits:
                return path[1:], token
            path.append(hits[0])

    target, draft = by_node(softmax, target_logits), by_node(softmax, draft_logits)
    coins = torch.rand(len(drawn)).tolist()
    if method == "traversal":
        below, weights = post_order(children, drawn, target, draft, coins)(0, 1.0)
        return below, int(weights.multinomial(1))
    attempt = k_sequential if method == "kseq" else partial(one_by_one, replacement=method == "with_replacement")
    while True:
        here, node = children[path[-1]], path[-1]
        if not here:
            return path[1:], int(target(node).multinomial(1))
        place, residual = attempt(target(node), draft(node), [drawn[child] for child in here], [coins[c] for c in here])
        if residual is not None:
            return path[1:], int(residual.multinomial(1))
        path.append(here[place])


def one_by_one(
    target: Tensor, draft: Tensor, drawn: list[int], coins: list[float], replacement: bool
) -> tuple[int, Tensor | None]:
    """Sequoia's algorithm 2, or SpecInfer's with replacement.

    Returns the place of the accepted child, or -1 and the weights [V] that the recovered token is drawn by.
    """
    for place, token in enumerate(drawn):
        if coins[place] * draft[token] < target[token]:
            return place, None
        target = (target - draft).relu_()
        target = target / target.sum()
        if not replacement:
            draft = draft.index_fill(0, torch.tensor(token, device=draft.device), 0)
            draft = draft / draft.sum()
    return -1, target


def post_order(
    children: Sequence[Sequence[int]],
    drawn: list[int],
    target: Callable[[int], Tensor],
    draft: Callable[[int], Tensor],
    coins: list[float],
) -> Callable[[int, float], tuple[list[int], Tensor] | None]:
    """Traversal of children drawn without replacement: a function of a node and its weight.

    It returns the nodes below that one on the way to the accepted one, and what the token after that is drawn by; None
    where the walk does not end there. `left` is what of P may still be emitted at a node, and the rest is `leaving`.
    """

    def visit(node: int, weight: float) -> tuple[list[int], Tensor] | None:
        left, leaving = weight * target(node), 1 - weight
        law = draft(node) if children[node] else left
        for child in children[node]:
            taken = torch.minimum(law, left)
            chance = float(taken[drawn[child]] / law[drawn[child]])
            found = visit(child, chance)
            if found is not None:
                return [child, *found[0]], found[1]
            rest = leaving + float((left - taken).sum())
            scale = 1 / rest if rest > 0 else 0.0
            left, leaving = (left - taken) * scale, leaving * scale
            law = law.index_fill(0, torch.tensor(drawn[child], device=law.device), 0)
            law = law / law.sum()
        ending = float(left.sum())
        return ([], left) if node == 0 or coins[node] * (ending + leaving) < ending else None

    return visit


def k_sequential(target: Tensor, draft: Tensor, drawn: list[int], coins: list[float]) -> tuple[int, Tensor | None]:
    """SpecTr's K-SEQ; what it returns is the same as that of `one_by_one`."""

    def acceptance(scale: float) -> Tensor:  # the chance of one child, accepted if coin < target / (scale draft)
        return torch.minimum(draft, target / scale).sum()

    low, high = 1.0, float(len(drawn))
    for _ in range(20):
        scale = (low + high) / 2
        once = acceptance(scale)
        low, high = (scale, high) if 1 - (1 - once) ** len(drawn) > scale * once else (low, scale)
    for place, token in enumerate(drawn):
        if coins[place] * high * draft[token] < target[token]:
            return place, None
    once = acceptance(high)
    any_of_them = 1 - (1 - once) ** len(drawn)
    return -1, (target - torch.minimum(draft, target / high) * (any_of_them / once)).relu_()


def wide_tree(nodes: int) -> TokenTree:
    """The root has 8 children, every other node 2 or 1 by turns; in heavy-path order."""
    parents, parent = [-1, *[0] * min(8, nodes - 1)], 1
    while len(parents) < nodes:
        parents += [parent] * (1 + parent % 2)
        parent += 1
    return TokenTree(parents[:nodes]).reordered("heavy_path")[0]


class Problem:
    """The logits and a drawn tree of a case, and the ways to verify it."""

    def __init__(self, case: Case, seed: int):
        self.case, self.seed, self.tree = case, seed, wide_tree(case.nodes)
        self.children: list[list[int]] = [[] for _ in range(case.nodes)]
        by_rank = self.tree.ranks[1:].argsort() + 1
        for node, parent in zip(by_rank.tolist(), self.tree.parents[by_rank].tolist(), strict=True):
            self.children[parent].append(node)
        draw = partial(torch.randn, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
        target = SPREAD * draw(case.nodes, case.vocabulary)
        draft = target + DRAFT_NOISE * draw(target.shape)
        self.target, self.draft = target.to(DTYPE), draft.to(DTYPE)
        tokens = torch.zeros(case.nodes, dtype=torch.long)
        deterministic = case.table in ("greedy", "target_sample")
        for among in ([0], [node for node in range(1, case.nodes) if self.children[node]]):
            drawn = gumbel_topk(
                self.draft[among],
                max(len(self.children[node]) for node in among),
                temperature=0 if deterministic else TEMPERATURE,
                seed=seed,
                rows=torch.tensor(among, device=DEVICE),
                replacement=case.table in INDEPENDENT,
            ).tokens.cpu()
            for node, row in zip(among, drawn, strict=True):
                tokens[self.children[node]] = row[: len(self.children[node])]
        self.tokens, self.noise = tokens.to(DEVICE), None
        if case.table == "race" and (DEVICE == "cpu" or case.nodes * case.vocabulary <= MOST_OF_NOISE):
            rows = torch.arange(case.nodes, device=DEVICE)
            self.noise = gumbel_noise(seed, Stream.DRAFT, rows, case.vocabulary)

    def heavypath(self) -> Run:
        return partial(
            verify_tree,
            self.tokens[None],
            self.tree.parents.to(DEVICE),
            self.target[None],
            self.draft[None] if self.case.table in DRAFT_AWARE else None,
            method=self.case.table,
            ranks=self.tree.ranks.to(DEVICE),
            max_depth=int(self.tree.depths.max()),
            temperature=0 if self.case.table == "greedy" else TEMPERATURE,
            seed=self.seed,
            rows=torch.arange(self.case.nodes, device=DEVICE)[None],
        )

    def loop(self, lazy: bool) -> Run | None:
        if self.case.table in OURS or (self.case.table == "race" and self.noise is None):
            return None
        options = {"method": self.case.table, "temperature": TEMPERATURE, "noise": self.noise, "lazy": lazy}
        return partial(loop_verify, self.children, self.tokens, self.target, self.draft, **options)

    def bytes(self, reached: Sequence[int]) -> int:
        """Bytes of the logits that decide at these nodes."""
        inner = sum(bool(self.children[node]) for node in reached) if self.case.table in DRAFT_AWARE else 0
        return (len(reached) + inner) * self.case.vocabulary * DTYPE.itemsize


@cache
def problems(case: Case) -> list[Problem]:
    """Those of the last case alone, which are large."""
    problems.cache_clear()
    return [Problem(case, seed) for seed in range(PROBLEMS)]


WAYS: dict[str, Callable[[Problem], Run | None]] = {
    "heavypath": Problem.heavypath,
    "heavypath, eager": lambda problem: problem.heavypath() if DEVICE == "cuda" else None,
    "loop, eager": partial(Problem.loop, lazy=False),
    "lazy loop, eager": partial(Problem.loop, lazy=True),
}


def test_verification(case, way, timed):
    torch.manual_seed(0)
    drawn = problems(case)
    with torch.inference_mode():
        verified = [problem.heavypath()() for problem in drawn]
    accepted = [int(each.length) for each in verified]
    reached = [each.path[0, : length + 1].tolist() for each, length in zip(verified, accepted, strict=True)]
    read = mean(problem.bytes(nodes) for problem, nodes in zip(drawn, reached, strict=True))
    whole = drawn[0].bytes(range(case.nodes))
    timed(*(WAYS[way](problem) for problem in drawn), read=read, accepted=mean(accepted), all_MB=whole / 1e6)
