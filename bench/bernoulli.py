"""Two children in a vocabulary of two tokens: RSD's figure 1, which shows what drawing without replacement is worth.

    python bench/bernoulli.py [--grid 99] [--json FILE] [--plot FILE]

The target gives token 1 the probability p and the draft gives it q, both on a grid inside (0, 1). Two children drawn
without replacement are the whole vocabulary, so a verifier that wastes nothing always accepts one of them. Each figure
is the exact probability that a child is accepted: every order of draws is enumerated and given to the package's own
chain_acceptance. Independent children go by the formulas of rejection.py; "most for i.i.d." is no method but the bound
that optimal transport (OTM) sets them.
"""

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import torch
from common import PICTURE, argument_parser, environment, made, write_results
from rejection import kseq_multiplier, least_rejection, rounds_rejection, uncovered
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from heavypath.speculative.trees.acceptance import chain_acceptance

LABELS = {
    "one child": "one child\n(speculative sampling)",
    "with replacement": "with replacement\n(SpecInfer)",
    "k-seq": "k-seq\n(SpecTr)",
    "most for i.i.d.": "most for i.i.d. children\n(optimal transport)",
    "without replacement": "without replacement\n(RSD, Sequoia, DySpec)",
}
PAIRS = [(0.5, 0.5), (0.6, 0.5), (0.8, 0.5), (0.95, 0.5), (0.5, 0.2), (0.5, 0.05), (0.8, 0.2), (0.2, 0.8), (0.95, 0.05)]


def acceptance(target: Tensor, draft: Tensor) -> dict[str, Tensor]:
    """The acceptance of each method, fp64 [R], for targets (1 - p, p) and drafts (1 - q, q); p and q [R] in (0, 1)."""
    target_probs, draft_probs = (torch.stack([1 - each, each], dim=-1).double() for each in (target, draft))
    gamma = kseq_multiplier(target_probs, draft_probs, 2)
    return {
        "one child": enumerated(target_probs, draft_probs, 1),
        "with replacement": 1 - rounds_rejection(target_probs, draft_probs, 2)[:, 1],
        "k-seq": 1 - uncovered(target_probs, draft_probs, gamma)[:, 1],
        "most for i.i.d.": 1 - least_rejection(target_probs, draft_probs, 2)[:, 1],
        "without replacement": enumerated(target_probs, draft_probs, 2),
    }


def enumerated(target_probs: Tensor, draft_probs: Tensor, children: int) -> Tensor:
    """Probability that a child drawn without replacement is accepted, [R]: the mean over all ordered draws."""
    total = torch.zeros_like(target_probs[:, 0])
    for draw in permutations(range(target_probs.shape[1]), children):
        chance, left = torch.ones_like(total), torch.ones_like(total)
        for token in draw:
            chance, left = chance * draft_probs[:, token] / left, left - draft_probs[:, token]
        drawn = torch.tensor(draw).expand(len(total), -1)
        total += chance * chain_acceptance(target_probs, draft_probs, drawn).sum(1)
    return total


def as_table(pairs: dict[str, Tensor], grid: dict[str, Tensor]) -> Table:
    """A row for each of PAIRS, then the mean and the least over the grid."""
    table = Table("target p", "draft q", box=box.SIMPLE_HEAD)
    for name in grid:
        table.add_column(name.replace(" ", "\n", 1), justify="right")
    for index, pair in enumerate(PAIRS):
        table.add_row(*map(str, pair), *(f"{rate[index]:.3f}" for rate in pairs.values()))
    table.add_section()
    table.add_row("mean", "", *(f"{rate.mean():.3f}" for rate in grid.values()))
    table.add_row("least", "", *(f"{rate.min():.3f}" for rate in grid.values()))
    return table


def draw_plot(grid: dict[str, Tensor], points: Tensor, path: Path) -> None:
    """A heat map for each method, with contours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = matplotlib.colormaps["viridis"].resampled(20)
    extent = (float(points[0]) / 2, 1 - float(points[0]) / 2) * 2  # a cell around each point
    figure, panels = pyplot.subplots(1, len(grid), figsize=(13, 3.5), sharey=True, layout="constrained")
    for axes, (name, rate) in zip(panels, grid.items(), strict=True):
        plane = rate.view(len(points), len(points)).numpy()  # [target, draft]
        image = axes.imshow(plane, colors, vmin=0, vmax=1, origin="lower", extent=extent, interpolation="nearest")
        levels = [level for level in (0.2, 0.4, 0.6, 0.8, 0.9) if plane.min() < level < plane.max()]
        if levels:
            lines = axes.contour(points, points, plane, levels=levels, colors="w", linewidths=0.8)
            axes.clabel(lines, fmt="%g", fontsize=8)
        axes.set(xlabel="draft q", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), xlim=(0, 1), ylim=(0, 1))
        axes.set_title(f"{LABELS[name]}\nmean {plane.mean():.3f}, least {plane.min():.3f}", fontsize=10)
    panels[0].set_ylabel("target p")
    figure.colorbar(image, ax=panels, label="acceptance", shrink=0.8, pad=0.01, ticks=(0, 0.2, 0.4, 0.6, 0.8, 1))
    figure.suptitle("Probability that one of two children is accepted: Bernoulli target and draft")
    figure.savefig(made(path), dpi=100)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, threads=False, plot=PICTURE)
    parser.add_argument("--grid", type=int, default=99, help="values of p, and of q: 1 / (grid + 1) and its multiples")
    arguments = parser.parse_args(argv)
    if arguments.grid < 2:
        parser.error(f"--grid must be at least 2, got {arguments.grid}")

    points = torch.arange(1, arguments.grid + 1, dtype=torch.float64) / (arguments.grid + 1)
    targets, drafts = torch.cartesian_prod(points, points).T
    grid = acceptance(targets, drafts)
    targets, drafts = torch.tensor(PAIRS, dtype=torch.float64).T
    pairs = acceptance(targets, drafts)
    Console(highlight=False).print(as_table(pairs, grid))
    write_results(
        arguments.json,
        environment("cpu"),
        points=arguments.grid**2,
        mean={name: round(float(rate.mean()), 6) for name, rate in grid.items()},
        least={name: round(float(rate.min()), 6) for name, rate in grid.items()},
        pairs=[
            {"target": target, "draft": draft} | {name: round(float(rate[index]), 6) for name, rate in pairs.items()}
            for index, (target, draft) in enumerate(PAIRS)
        ],
    )
    if arguments.plot is not None:
        draw_plot(grid, points, arguments.plot)


if __name__ == "__main__":
    main()
