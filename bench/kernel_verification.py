"""verify_tree against a straightforward loop in PyTorch, and against the time that reading the logits takes.

    python bench/kernel_verification.py [--only race] [--json FILE] [--plot FILE]

16 / 64 / 256 / 768 nodes x 32,000 / 128,256 tokens, every method, temperature 0.6, no filters, batch 1; bfloat16 logits
on a GPU, float32 on a CPU, where shapes that would take more than half a GiB are left out. The root has 8 children and
every other node 2 or 1 by turns, in heavy-path order. Target logits are normal with a standard deviation of 3, draft
logits are these plus 0.7 times normal noise: the first child of a node is accepted in about 6 of 10 cases. Children are
drawn from the draft in the way that the method requires. The work depends on what is accepted, so 5 problems are drawn
of each shape (3 on a GPU).

loop       what published code does: softmax (or arg-max) of the rows of all nodes, then from the root, child after
           child in draw order, the coin against residual / draft, a new residual and a new draft row after each
           rejection, and torch.multinomial at the end. For a race it is given the noise. That it is right is tested by
           tests/bench/test_bench_verification.py
lazy loop  the same, but it normalises a row only when the walk reaches it

On a GPU each time is the median of triton.testing.do_bench, which empties the L2 cache before every run; heavypath is
captured in a CUDA graph ("eager" is not), the loops wait for the host. On a CPU all three run by turns and a ratio is
the median of the ratios within a round. MB are what a method must read of the logits: the rows of the nodes that its
walk reaches; in brackets the rows of all nodes (of the draft, of those with children), which it reads if it treats the
nodes in parallel. Fractions of the roof are those of the speed of a large copy, measured in the same run, for both.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median
from typing import NamedTuple

import torch
from common import DEVICE, PICTURE, argument_parser, environment
from rich.table import Table
from timing import alternated, captured, compared, copy_bandwidth, gpu_milliseconds, measure_cases
from torch import Tensor

from heavypath.kernels.noise import Stream, gumbel_noise
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import DRAFT_AWARE, VERIFICATION_METHODS, verify_tree
from heavypath.kernels.verifying.rule import WHOLE_TREE
from heavypath.speculative import TokenTree

TEMPERATURE, SPREAD, DRAFT_NOISE = 0.6, 3.0, 0.7
PROBLEMS = 3 if DEVICE == "cuda" else 5
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
INDEPENDENT = ("with_replacement", "kseq")  # whose children are independent draws


class Case(NamedTuple):
    """A shape; the tables are the methods."""

    table: str
    nodes: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.table} {self.nodes} x {self.vocabulary}"

    def fits_a_cpu(self) -> bool:
        return 5 * 4 * self.nodes * self.vocabulary <= 1 << 29  # logits and probabilities of both, and noise


CASES = [
    Case(method, nodes, size)
    for size in (32000, 128256)
    for nodes in (16, 64, 256, 768)
    for method in VERIFICATION_METHODS
]


MINIATURE = [Case(method, 16, 100) for method in ("without_replacement", "race")]
MOST_OF_NOISE = 1 << 20  # numbers that the loop is given for a race, which are drawn on the host


def cases(miniature: bool) -> list[Case]:
    """Those that run on this machine."""
    return MINIATURE if miniature else [case for case in CASES if DEVICE == "cuda" or case.fits_a_cpu()]


def warm_up(case: Case) -> None:
    """Compile what our kernels need for a case."""
    with torch.inference_mode():
        Problem(case, 0).heavypath()()


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
    if method in WHOLE_TREE:
        below, weights = post_order(children, drawn, target, draft, coins, held=method == "held_traversal")(0, 1.0)
        return below, int(weights.multinomial(1))
    attempt = {"kseq": k_sequential, "held": held_back}.get(method)
    attempt = attempt or partial(one_by_one, replacement=method == "with_replacement")
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


def held_back(target: Tensor, draft: Tensor, drawn: list[int], coins: list[float]) -> tuple[int, Tensor | None]:
    """Held siblings, drawn without replacement: `target` is the part of P that no child holds, the rest is `weights`.

    What it returns is the same as that of `one_by_one`.
    """
    weights: list[float] = []
    for token in drawn:
        taken = torch.minimum(draft, target)
        chance = float(taken[token] / draft[token])
        rest = float(1 - taken.sum())
        scale = (1 - chance) / rest if rest > 0 else 0.0
        weights = [*(weight * scale for weight in weights), chance]
        target = (target - taken) * scale
        draft = draft.index_fill(0, torch.tensor(token, device=draft.device), 0)
        draft = draft / draft.sum()
    for place in range(len(drawn)):
        if coins[0] < sum(weights[: place + 1]):
            return place, None
    return -1, target


def post_order(
    children: Sequence[Sequence[int]],
    drawn: list[int],
    target: Callable[[int], Tensor],
    draft: Callable[[int], Tensor],
    coins: list[float],
    held: bool,
) -> Callable[[int, float], tuple[list[int], Tensor] | None]:
    """Traversal of children drawn without replacement: a function of a node and its weight.

    It returns the nodes below that one on the way to the accepted one, and what the token behind that is drawn by; None
    where the walk does not end there. `left` is what of P may still be emitted at a node, and the rest is `leaving`.
    """

    def visit(node: int, weight: float) -> tuple[list[int], Tensor] | None:
        left, leaving = weight * target(node), 1 - weight
        law = draft(node) if children[node] else left
        holding: list[float] = []
        for child in children[node]:
            taken = torch.minimum(law, left)
            chance = float(taken[drawn[child]] / law[drawn[child]])
            found = None if held else visit(child, chance)
            if found is not None:
                return [child, *found[0]], found[1]
            rest = leaving + sum(holding) + float((left - taken).sum())
            scale = (1 - chance if held else 1.0) / rest if rest > 0 else 0.0
            left, leaving = (left - taken) * scale, leaving * scale
            holding = [*(other * scale for other in holding), chance] if held else []
            law = law.index_fill(0, torch.tensor(drawn[child], device=law.device), 0)
            law = law / law.sum()
        for place, (child, share) in enumerate(zip(children[node], holding, strict=False)):
            found = visit(child, share / (leaving + float(left.sum()) + sum(holding[place:]))) if share else None
            if found is not None:
                return [child, *found[0]], found[1]
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

    def heavypath(self) -> Callable[[], object]:
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

    def loop(self, lazy: bool) -> Callable[[], object]:
        return partial(
            loop_verify,
            self.children,
            self.tokens,
            self.target,
            self.draft,
            method=self.case.table,
            temperature=TEMPERATURE,
            noise=self.noise,
            lazy=lazy,
        )

    def bytes(self, reached: Sequence[int]) -> int:
        """Bytes of the logits that decide at these nodes."""
        inner = sum(bool(self.children[node]) for node in reached) if self.case.table in DRAFT_AWARE else 0
        return (len(reached) + inner) * self.case.vocabulary * DTYPE.itemsize


def measured(case: Case, facts: dict) -> dict:
    """One row of the table."""
    row = {"case": str(case)} | case._asdict() | {"dtype": str(DTYPE).removeprefix("torch.")}
    times: dict[str, list[float]] = {}
    accepted, reached_bytes, eager = [], [], []
    torch.manual_seed(0)
    with torch.inference_mode():
        for seed in range(PROBLEMS):
            problem = Problem(case, seed)
            runs = {"heavypath": problem.heavypath()}
            if case.table != "race" or problem.noise is not None:
                runs |= {"loop": problem.loop(False), "lazy loop": problem.loop(True)}
            verified = runs["heavypath"]()
            accepted.append(int(verified.length))
            reached_bytes.append(problem.bytes(verified.path[0, : accepted[-1] + 1].tolist()))
            if DEVICE == "cuda":
                eager.append(gpu_milliseconds(runs["heavypath"]))
                runs["heavypath"] = captured(runs["heavypath"])
                more = {name: [gpu_milliseconds(run)] for name, run in runs.items()}
            else:
                more = alternated(runs, seconds=0.2 if case.nodes * case.vocabulary > 10_000 else 0.0)
            for name, values in more.items():
                times.setdefault(name, []).extend(values)
    row |= {"accepted": mean(accepted), "bytes": mean(reached_bytes), "all_bytes": problem.bytes(range(case.nodes))}
    row |= compared(times) | ({"eager_milliseconds": median(eager)} if eager else {})
    row["roof_milliseconds"] = row["bytes"] / facts["bytes_a_second"] * 1e3
    row["fraction_of_roof"] = row["roof_milliseconds"] / row["milliseconds"]["heavypath"]
    row["fraction_of_roof_all"] = row["fraction_of_roof"] * row["all_bytes"] / row["bytes"]
    return row


def as_table(rows: list[dict]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("case", "us", "accepted", "MB", "of roof", "times as fast as"):
        table.add_column(heading, justify="left" if heading in ("case", "times as fast as") else "right")
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['milliseconds']['heavypath'] * 1e3:.1f}",
            f"{row['accepted']:.1f}",
            f"{row['bytes'] / 1e6:.2f} ({row['all_bytes'] / 1e6:.1f})",
            f"{row['fraction_of_roof']:.1%} ({row['fraction_of_roof_all']:.0%})",
            "; ".join(
                f"{name} {ratio:.2f} ({low:.2f} to {high:.2f})"
                for (name, ratio), (low, high) in zip(
                    row["ratio"].items(), row["ratio_quartiles"].values(), strict=True
                )
            ),
        )
    return table


def main() -> None:
    parser = argument_parser(__doc__, plot=PICTURE)
    parser.add_argument("--only", choices=VERIFICATION_METHODS, help="one of the methods")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts = environment() | {"bytes_a_second": copy_bandwidth(arguments.miniature)}
    rows = measure_cases(cases(arguments.miniature), measured, as_table, facts, arguments)
    for row in rows if DEVICE == "cpu" else ():
        if (row["nodes"], row["vocabulary"]) == (64, 32000):
            shares = [1 / value for value in (row["ratio"]["loop"], *reversed(row["ratio_quartiles"]["loop"]))]
            print("{}: {:.2f} ({:.2f} to {:.2f}) of the loop's time; the bar is 0.25".format(row["case"], *shares))


if __name__ == "__main__":
    main()
