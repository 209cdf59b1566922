"""The theory of the papers beside the demo pair: six figures, and the numbers behind them.

    python bench/theory.py [--quick] [--out bench/results]

growth             expected tokens against tree size by shape, and what bounds them (Sequoia, figures 1 and 4; ERSD, 3
                   and 4). The shapes share one acceptance vector: recursive rejection of children drawn without
                   replacement. The bounds are trees.bounds on the race's children, whose acceptance sums to 1 over
                   the vocabulary; the best trees are planning.greedy_tree's (ERSD, algorithm 3)
decoding           the same expectation beside the tokens per target forward that decoding with these trees gave
draft-probability  how often a drawn token is accepted, by the probability that the draft gave it (DySpec, figure 2)
blocks             occupied 32 x 32 blocks of attention, prefix and tree, by node order (DySpec, figure 9)
races              acceptance of a race's first child, exact, against greedy rejection's 1 - TV, with ERSD's lemma 3.1
entropy            bits of a race's place and index against the divergence of target and draft (ERSD, equations 6 - 8)

Positions are those that decoding meets: held-out prompts continued by samples of the target, as in rejection.py. An
expectation takes the accepted child to be independent from node to node; decoding does not. A text's first token, which
no tree precedes, is not counted; its last step is cut short, which makes what was decoded about 1% low. Its standard
errors take groups of prompts as the independent units.

--out is a folder for theory-*.png (needs matplotlib) and theory-cpu.json; without it only tables are printed.
"""

import argparse
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from kernel_attention import random_tree
from decoding import processor
from rejection import positions
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from heavypath.kernels.sampling import gumbel_topk
from heavypath.speculative import SpeculativeDecoder, TokenTree, expected_tokens, greedy_tree, load_demo_pair
from heavypath.speculative.demo import DemoPair, demo_prompts
from heavypath.speculative.trees.acceptance import chain_acceptance
from heavypath.speculative.trees.bounds import (
    entropy_bits,
    entropy_bounds,
    overlap,
    race_acceptance,
    race_acceptance_bound,
    race_index_entropy,
    tokens_per_doubling,
    tree_bounds,
)

CHILDREN = 64  # of a node, when shapes are compared
BLOCK = 32
PREFIXES = (0, 128, 512, 2048, 8192, 32768)
ORDERS = ("insertion", "depth_first", "heavy_path")
SEQUOIA, SEQUENCES, CHAIN, RACE = "best tree", "k sequences", "chain", "best tree, race"
# Okabe and Ito's palette, which colour-blind readers tell apart.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PURPLE, BLACK = "#D55E00", "#CC79A7", "#000000"


class Laws(NamedTuple):
    """Target's and draft's probabilities at the positions of all prompts, fp64 [R, V]."""

    target: Tensor
    draft: Tensor


def position_laws(pair: DemoPair, prompts: Sequence[str], *, new_tokens: int, temperature: float, seed: int) -> Laws:
    logits = positions(pair, prompts, new_tokens=new_tokens, temperature=temperature, seed=seed)
    target, draft = (torch.cat(each).double() / temperature for each in zip(*logits, strict=True))
    return Laws(target.softmax(-1), draft.softmax(-1))


def rejection_acceptance(laws: Laws, children: int, *, draws: int, seed: int) -> list[float]:
    """Probability that recursive rejection accepts child 1, 2, ..., falling: [children].

    Exact over the coins, and a mean over positions and `draws` draws of the children at each. Sorted, because trees are
    planned for acceptance that falls, and sampling errors among rare children exceed their differences.
    """
    total = torch.zeros(children, dtype=torch.float64)
    for target, draft, rows in zip(
        laws.target.split(512), laws.draft.split(512), torch.arange(len(laws.target)).split(512), strict=True
    ):
        for draw in range(draws):
            drawn = gumbel_topk(draft.log().float(), children, seed=seed + draw, rows=rows).tokens
            total += chain_acceptance(target, draft, drawn).sum(0)
    return (total / (draws * len(laws.target))).sort(descending=True).values.tolist()


def race_places(laws: Laws, *, draws: int, seed: int) -> Tensor:
    """How often the target's token is the draft's arrival 1, 2, ... among distinct tokens: [R, V], rows sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = laws.target.float(), laws.draft.float()
    counts = torch.zeros_like(laws.target)
    for _ in range(draws):
        arrivals = torch.empty_like(target).exponential_(generator=generator)
        winner = (arrivals / target).argmin(1, keepdim=True)
        times = arrivals / draft
        place = (times < times.gather(1, winner)).sum(1, keepdim=True)
        counts.scatter_add_(1, place, torch.ones_like(place, dtype=torch.float64))
    return counts / draws


def best_tokens(acceptance: Sequence[float], size: int) -> float:
    return expected_tokens(greedy_tree(acceptance, size), acceptance)


def best_sequences(acceptance: Sequence[float], size: int) -> TokenTree:
    """Of the trees of at most `size` nodes that are k sequences of one length, the one that yields most."""
    counts = range(1, min(len(acceptance), size - 1) + 1)
    shapes = [TokenTree.independent(count, (size - 1) // count) for count in counts]
    return max(shapes, key=lambda tree: expected_tokens(tree, acceptance))


def growth(acceptance: Sequence[float], sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Expected tokens {size: tokens} by shape; k-ary trees have the sizes that full ones have."""
    shapes = {
        SEQUOIA: [greedy_tree(acceptance, size) for size in sizes],
        "binary": [TokenTree.k_ary(2, depth) for depth in range(1, 12) if 2 ** (depth + 1) - 1 <= max(sizes)],
        "4-ary": [TokenTree.k_ary(4, depth) for depth in range(1, 6) if (4 ** (depth + 1) - 1) // 3 <= max(sizes)],
        SEQUENCES: [best_sequences(acceptance, size) for size in sizes],
        CHAIN: [TokenTree.chain(size - 1) for size in sizes],
    }
    return {
        name: {
            size: expected_tokens(tree, acceptance)
            for size, tree in zip(sizes if name == SEQUENCES else map(len, trees), trees, strict=True)
        }
        for name, trees in shapes.items()
    }


def limits(law: Sequence[float], vocabulary: int, sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """The best tree and its bounds {size: tokens}, for acceptance that sums to 1."""
    slope = tokens_per_doubling(law)
    bounds = {size: tree_bounds(law, size) for size in sizes}
    return {
        RACE: {size: best_tokens(law, size) for size in sizes},
        "paper": {size: slope * (math.log2(size) + math.log2(vocabulary)) for size in sizes},
        "leaves": {size: bound.leaves for size, bound in bounds.items()},
        "renewal": {size: bound.renewal for size, bound in bounds.items() if bound.renewal < math.inf},
        "moments": {size: bound.moments for size, bound in bounds.items()},
        "slope": {size: slope * math.log2(size) for size in sizes},
    }


class Decoded(NamedTuple):
    """Tokens per target forward, prefills left out, and its standard error over groups of prompts."""

    decoded: float
    standard_error: float


def decode(
    pair: DemoPair,
    method: str,
    tree: TokenTree,
    prompts: Sequence[str],
    *,
    new_tokens: int,
    temperature: float,
    seed: int,
) -> Decoded:
    decoder = SpeculativeDecoder(pair.target, pair.draft, method, tree=tree)
    tokens, steps = [], []
    group = max(1, len(prompts) // 6)
    for begin in range(0, len(prompts), group):
        inputs = pair.tokenizer(list(prompts[begin : begin + group]), return_tensors="pt", padding=True)
        stats = decoder.generate(**inputs, max_new_tokens=new_tokens, temperature=temperature, seed=seed + begin).stats
        tokens.append(stats.new_tokens)
        steps.append(stats.steps)
    ratio, groups = sum(tokens) / sum(steps), len(steps)
    off = sum((count - ratio * step) ** 2 for count, step in zip(tokens, steps, strict=True))  # of a ratio of sums
    return Decoded(ratio, math.sqrt(off * groups / (groups - 1)) / sum(steps))


def decoding_trees(
    acceptance: Sequence[float], places: Sequence[float], largest: int
) -> dict[str, list[tuple[str, TokenTree, float]]]:
    """What is decoded: (method, tree, expected tokens) by curve."""
    sizes = [2**power for power in range(1, 12) if 2**power <= largest]
    curves = {
        SEQUOIA: ("sequoia", acceptance, [greedy_tree(acceptance, size) for size in sizes]),
        RACE: ("ersd", places, [greedy_tree(places, size) for size in sizes]),
        SEQUENCES: ("sequoia", acceptance, [best_sequences(acceptance, size) for size in sizes if size >= 16]),
        CHAIN: ("sequoia", acceptance, [TokenTree.chain(size - 1) for size in sizes if size <= 16]),
    }
    return {
        name: [(method, tree, expected_tokens(tree, chances)) for tree in trees]
        for name, (method, chances, trees) in curves.items()
    }


def by_draft_probability(laws: Laws, bins: int) -> list[dict[str, float]]:
    """A drawn token's acceptance min(1, P / Q) by its Q, in bins of equal width that are not empty.

    Exact over the draw: every token counts with its probability Q. The quartiles are of acceptance within the bin, and
    `share` is the share of draws that fall in it.
    """
    drawn = laws.draft > 0
    accepted, order = (laws.target[drawn] / laws.draft[drawn]).clamp_max(1).sort()
    draft = laws.draft[drawn][order]
    place = (draft * bins).long().clamp_max(bins - 1)
    rows = []
    for index in range(bins):
        value, weight = accepted[place == index], draft[place == index]
        if len(value):
            share = weight / weight.sum()
            low, high = (value[min(int((share.cumsum(0) < part).sum()), len(value) - 1)] for part in (0.25, 0.75))
            row = {"draft": share @ weight, "acceptance": share @ value, "low": low, "high": high}
            row["share"] = weight.sum() / draft.sum()
            rows.append({name: float(number) for name, number in row.items()})
    return rows


def insertion_order(tree: TokenTree, acceptance: Sequence[float]) -> TokenTree:
    """The tree renumbered as a priority queue adds its nodes: by falling probability, the shallower first."""
    parents, ranks, depths = tree.parents.tolist(), tree.ranks.tolist(), tree.depths.tolist()
    probability = [1.0] * len(tree)
    for node in range(1, len(tree)):
        probability[node] = probability[parents[node]] * acceptance[ranks[node]]
    order = sorted(range(len(tree)), key=lambda node: (-probability[node], depths[node]))
    new = {node: index for index, node in enumerate(order)} | {-1: -1}
    return TokenTree([new[parents[node]] for node in order], [ranks[node] for node in order])


def tree_blocks(tree: TokenTree) -> dict[str, int]:
    """Occupied blocks among the nodes, as inserted and reordered."""
    reordered = {order: tree.reordered(order)[0] for order in ("depth_first", "heavy_path")}
    return {order: each.occupied_blocks(BLOCK) for order, each in ({"insertion": tree} | reordered).items()}


def prefix_blocks(nodes: int, prefix: int) -> int:
    """Blocks between the nodes and a prefix, all full: they are the same in any order."""
    return math.ceil(nodes / BLOCK) * math.ceil(prefix / BLOCK)


def races(laws: Laws, points: int) -> dict[str, dict]:
    """What greedy rejection and the race accept of one child, and the race's bound: at some positions, and the mean."""
    values = {"overlap": overlap(*laws), "race": race_acceptance(*laws), "bound": race_acceptance_bound(*laws)}
    step = max(1, len(laws.target) // points)
    return {
        "points": {name: each[::step].tolist() for name, each in values.items()},
        "mean": {name: float(each.mean()) for name, each in values.items()},
    }


def entropies(laws: Laws, points: int, *, draws: int, seed: int) -> dict[str, list[float]]:
    """At some positions, in bits: D, H of the place among distinct children, H[K], and their bounds.

    The place's entropy is estimated from `draws` races, with Miller and Madow's correction.
    """
    step = max(1, len(laws.target) // points)
    laws = Laws(laws.target[::step], laws.draft[::step])
    places, index = [], []
    for target, draft in zip(*laws, strict=True):
        repeated = Laws(target.expand(draws, -1), draft.expand(draws, -1))
        law = race_places(repeated, draws=1, seed=seed + len(places)).mean(0)
        seen = int((law > 0).sum())
        places.append(float(entropy_bits(law)) + (seen - 1) / (2 * draws * math.log(2)))
        index.append(float(race_index_entropy(target, draft)))
    bounds = entropy_bounds(*laws)
    return {
        "divergence": bounds.lower.tolist(),
        "place": places,
        "index": index,
        "finer": bounds.finer.tolist(),
        "upper": bounds.upper.tolist(),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def rounded(value: object) -> object:
    """The same with numbers of four decimals, for a file."""
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def tables(results: dict) -> list[Table]:
    """What the figures show, in short."""
    grown, decoded = Table(title="expected tokens by tree size"), Table(title="tokens per target forward")
    curves = results["growth"]["shapes"] | results["growth"]["limits"]
    sizes = [size for size in curves[SEQUOIA] if size >= 4]
    grown.add_column("shape or bound")
    for size in sizes:
        grown.add_column(str(size), justify="right")
    for name, curve in curves.items():
        if name != "4-ary":
            grown.add_row(name, *(f"{curve.get(size, curve.get(size - 1, math.nan)):.2f}" for size in sizes))
    for heading in ("tree", "nodes", "expected", "decoded", "standard error"):
        decoded.add_column(heading, justify="left" if heading == "tree" else "right")
    for name, rows in results["decoding"].items():
        for row in rows:
            values = (f"{row[key]:.2f}" for key in ("expected", "decoded", "standard_error"))
            decoded.add_row(name, str(row["nodes"]), *values)
    by_bin = Table(title="acceptance by draft probability")
    for heading in ("temperature", "draft probability", "acceptance", "share of draws"):
        by_bin.add_column(heading, justify="right")
    for temperature, rows in results["draft-probability"].items():
        for row in rows:
            by_bin.add_row(temperature, *(f"{row[key]:.2f}" for key in ("draft", "acceptance", "share")))
    blocks = Table("tree", *(order.replace("_", "-") for order in ORDERS), title=f"{BLOCK} x {BLOCK} blocks of a tree")
    for name, tree in results["blocks"].items():
        blocks.add_row(f"{name}, {tree['nodes']} nodes", *(f"{tree['tree'][order]:.0f}" for order in ORDERS))
    one = Table("temperature", "1 - TV", "race", "its bound", title="acceptance of one child, mean over positions")
    for temperature, result in results["races"].items():
        one.add_row(temperature, *(f"{result['mean'][key]:.3f}" for key in ("overlap", "race", "bound")))
    keys = ("divergence", "place", "index", "finer", "upper")
    bits = Table("temperature", "D", "H of place", "H of K", "finer bound", "bound", title="bits, mean over positions")
    for temperature, points in results["entropy"].items():
        bits.add_row(temperature, *(f"{mean(points[key]):.2f}" for key in keys))
    made = [grown, decoded, by_bin, blocks, one, bits]
    for table in made:
        table.box, table.title_justify = box.SIMPLE_HEAD, "left"
    return made


def label_ends(axes, labels: Sequence[tuple[float, float, str, str]], *, gap: float) -> None:
    """Write (x, y, text, colour) right of the points, moved apart to `gap` of the panel's height."""
    axes.figure.canvas.draw()  # which settles the axes
    transform = axes.transData + axes.transAxes.inverted()
    points = [(*transform.transform((x, y)).tolist(), text, color) for x, y, text, color in labels]
    points.sort(key=lambda point: point[1])
    heights = apart([float(point[1]) for point in points], gap)
    for (left, _, text, color), height in zip(points, heights, strict=True):
        axes.text(left + 0.015, height, text, transform=axes.transAxes, color=color, va="center", fontsize=9)


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """The same rising heights, at least `gap` from each other and moved no further than it takes."""
    moved = list(heights)
    for _ in range(200):
        for low in range(len(moved) - 1):
            lack = gap - (moved[low + 1] - moved[low])
            if lack > 0:
                moved[low] -= lack / 2
                moved[low + 1] += lack / 2
    return moved


def tidy(axes, **options) -> None:
    axes.set(**options)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def size_axis(axes, sizes: Sequence[int], room: float) -> None:
    """Sizes on a logarithmic axis, with room for labels on the right."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) * 0.9, max(sizes) * max(4, max(sizes) / min(sizes)) ** room)
    shown = [size for size in sizes if math.log2(size) % 1 == 0]
    axes.set_xticks(shown, [f"{size:,}" for size in shown], fontsize=8)
    axes.minorticks_off()


def draw_growth(pyplot, result: dict):
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.5, 5), layout="constrained")
    looks = {
        SEQUOIA: (BLUE, "best tree (Sequoia)"),
        "binary": (GREEN, "full binary"),
        "4-ary": (PURPLE, "full 4-ary"),
        SEQUENCES: (ORANGE, "k sequences, best k"),
        CHAIN: (RED, "chain"),
    }
    labels, ends = [], []
    for name, (color, text) in looks.items():
        sizes, tokens = list(result["shapes"][name]), list(result["shapes"][name].values())
        marker = {"marker": "o", "markersize": 4} if "ary" in name else {}
        left.plot(sizes, tokens, color=color, linewidth=2.4 if name == SEQUOIA else 1.6, **marker)
        labels.append((max(result["shapes"][SEQUOIA]), tokens[-1], text, color))
    tidy(left, xlabel="nodes of the tree, root included", ylabel="expected tokens per target forward", ylim=(1, None))
    left.set_title("shapes: sequences saturate, planned trees grow on", fontsize=11)
    size_axis(left, list(result["shapes"][SEQUOIA]), 0.36)

    looks = {
        RACE: (BLUE, "-", "best tree"),
        "paper": (PURPLE, "-", "(log |V| + log n) / H"),
        "leaves": (RED, "-", "leaf entropy"),
        "renewal": (GREEN, "-", "renewal"),
        "moments": (ORANGE, "-", "moments"),
        "slope": (BLACK, ":", "log n / H"),
    }
    for name, (color, line, text) in looks.items():
        sizes, tokens = list(result["limits"][name]), list(result["limits"][name].values())
        right.plot(sizes, tokens, color=color, linestyle=line, linewidth=2.4 if name == RACE else 1.6)
        ends.append((sizes[-1], tokens[-1], text, color))
    tidy(right, xlabel="nodes of the tree, root included", ylim=(0, None))
    right.set_title(f"races: upper bounds on every tree; H = {result['entropy']:.2f} bits", fontsize=11)
    size_axis(right, list(result["limits"][RACE]), 0.36)
    figure.suptitle(f"What a tree of n nodes yields: the demo pair at temperature {result['temperature']}")
    label_ends(left, labels, gap=0.05)
    label_ends(right, ends, gap=0.05)
    return figure


def draw_decoding(pyplot, result: dict[str, list[dict]], temperature: float):
    figure, axes = pyplot.subplots(figsize=(8.2, 5), layout="constrained")
    looks = {
        SEQUOIA: (BLUE, "o", -0.06, "best tree, recursive rejection"),
        RACE: (GREEN, "s", 0.06, "best tree, race"),
        SEQUENCES: (ORANGE, "^", 0.0, "k sequences"),
        CHAIN: (RED, "D", 0.12, "chain"),
    }
    labels = []
    for name, (color, marker, aside, text) in looks.items():
        rows = result[name]
        if rows:
            nodes, expected, decoded = ([row[key] for row in rows] for key in ("nodes", "expected", "decoded"))
            axes.plot(nodes, expected, color=color, linewidth=1.6)
            errors = [2 * row["standard_error"] for row in rows]
            beside = [size * 2**aside for size in nodes]
            look = {"color": color, "marker": marker, "markersize": 5, "elinewidth": 1, "capsize": 2}
            axes.errorbar(beside, decoded, errors, linestyle="none", **look)
            labels.append((nodes[-1] * 2**0.12, expected[-1], text, color))
    sizes = [2**power for power in range(1, 12) if 2**power <= max(row["nodes"] for row in result[SEQUOIA])]
    tidy(axes, xlabel="nodes of the tree, root included", ylabel="tokens per target forward")
    size_axis(axes, sizes, 0.42)
    axes.set_title(
        f"Expected (lines) and decoded (marks, two standard errors): the demo pair at temperature {temperature}",
        fontsize=11,
    )
    label_ends(axes, labels, gap=0.05)
    return figure


def draw_draft_probability(pyplot, result: dict[str, list[dict]]):
    figure, panels = pyplot.subplots(
        1, len(result), figsize=(5 * len(result), 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (temperature, rows) in zip(panels[0], result.items(), strict=True):
        draft, means, low, high, share = (
            [row[key] for row in rows] for key in ("draft", "acceptance", "low", "high", "share")
        )
        axes.bar(draft, share, width=0.06, color="0.75", zorder=1)
        axes.fill_between(draft, low, high, color=SKY, alpha=0.35, linewidth=0)
        axes.plot(draft, means, color=BLUE, marker="o", linewidth=2)
        axes.plot([0, 1], [0, 1], color="0.3", linestyle=":", linewidth=1.2)
        axes.text(0.15, 0.93, "middle half", color="#1f6f9f", fontsize=9)
        axes.text(0.15, 0.67, "mean", color=BLUE, fontsize=9, weight="bold")
        axes.text(0.43, 0.36, "= draft probability", color="0.25", fontsize=9)
        axes.text(0.15, 0.12, "share of draws", color="0.3", fontsize=9)
        tidy(axes, xlabel="probability that the draft gave the token", title=f"temperature {temperature}")
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
    panels[0][0].set_ylabel("probability of acceptance, min(1, P / Q)")
    figure.suptitle("A drawn token's acceptance by the probability that the draft gave it: the demo pair", fontsize=12)
    return figure


def draw_blocks(pyplot, result: dict[str, dict]):
    figure, panels = pyplot.subplots(
        1, len(result), figsize=(5.6 * len(result), 4.8), sharey=True, squeeze=False, layout="constrained"
    )
    looks = {
        "insertion": (RED, "insertion"),
        "depth_first": (ORANGE, "depth-first"),
        "heavy_path": (BLUE, "heavy-path"),
    }
    places = range(len(PREFIXES))
    for axes, (name, tree) in zip(panels[0], result.items(), strict=True):
        prefix = [prefix_blocks(tree["nodes"], rows) for rows in PREFIXES]
        axes.plot(places[1:], prefix[1:], color="0.5", linestyle=":", linewidth=1.5)
        axes.annotate("prefix alone", (1, prefix[1]), (8, -8), textcoords="offset points", color="0.35", fontsize=9)
        for order, (color, label) in looks.items():
            total = [tree["tree"][order] + each for each in prefix]
            axes.plot(places, total, color=color, marker="o", markersize=4, linewidth=2)
            height = total[0] * {"insertion": 1.0, "depth_first": 1.15, "heavy_path": 0.9}[order]
            axes.text(-0.12, height, f"{label} {total[0]:,.0f}", color=color, fontsize=9, ha="right", va="center")
        for place, each in zip(places, prefix, strict=True):
            most, least = (tree["tree"][order] + each for order in ("insertion", "heavy_path"))
            options = {"textcoords": "offset points", "ha": "right", "fontsize": 9}
            axes.annotate(f"{most / least:.2f}x", (place, most), (4 if place < 2 else -2, 9), **options)
        tidy(axes, yscale="log", xlabel="prefix length, rows", title=f"{name}, {tree['nodes']:,} nodes")
        axes.set_xlim(-2.1, len(PREFIXES) - 0.6)
        axes.set_xticks(places, [f"{rows:,}" for rows in PREFIXES])
        axes.minorticks_off()
    panels[0][0].set_ylabel(f"occupied {BLOCK} x {BLOCK} blocks, tree and prefix")
    figure.suptitle(
        "Node order saves blocks of the tree, which a long prefix outweighs (factors: insertion / heavy-path)",
        fontsize=12,
    )
    return figure


def draw_races(pyplot, result: dict[str, dict]):
    figure, panels = pyplot.subplots(
        1, len(result), figsize=(5 * len(result), 5), sharey=True, squeeze=False, layout="constrained"
    )
    line = torch.linspace(0, 1, 101).tolist()
    for axes, (temperature, at) in zip(panels[0], result.items(), strict=True):
        axes.plot(line, line, color=BLACK, linewidth=1.3)
        axes.plot(line, [each / (2 - each) for each in line], color=RED, linewidth=1.6)
        axes.scatter(at["points"]["overlap"], at["points"]["race"], s=9, color=BLUE, alpha=0.45, linewidths=0)
        axes.text(0.38, 0.47, "any coupling: 1 - TV", rotation=45, ha="center", va="center", fontsize=9)
        axes.text(0.63, 0.36, "(1 - TV) / (1 + TV)", color=RED, fontsize=9)
        names = {"overlap": "1 - TV", "race": "race", "bound": "bound"}
        means = ", ".join(f"{text} {at['mean'][key]:.3f}" for key, text in names.items())
        axes.text(0.53, 0.03, f"means: {means}", fontsize=9, ha="center", transform=axes.transAxes)
        tidy(axes, xlabel="greedy rejection's acceptance, 1 - TV", title=f"temperature {temperature}")
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    panels[0][0].set_ylabel("race's acceptance, exact")
    figure.suptitle("One child: what it costs a race not to know the other law (a point is a position)", fontsize=12)
    return figure


def draw_entropy(pyplot, result: dict[str, dict[str, list[float]]]):
    figure, panels = pyplot.subplots(
        1, len(result), figsize=(5.6 * len(result), 5), sharey=True, squeeze=False, layout="constrained"
    )
    low, high = 0.01, 1.2 * max(max(points["divergence"]) for points in result.values())
    line = torch.logspace(math.log10(low), math.log10(high), 101).tolist()
    kinds = [
        ("finer", PURPLE, "D", "bound from E[log K]"),
        ("index", ORANGE, "^", "H of index K, repeats counted"),
        ("place", BLUE, "o", "H of place, distinct children"),
    ]
    for axes, (temperature, points) in zip(panels[0], result.items(), strict=True):
        axes.plot(line, line, color=BLACK, linewidth=1.3)
        axes.plot(line, [each + math.log2(each + 2) + 2 for each in line], color=RED, linewidth=1.6)
        for place, (key, color, marker, label) in enumerate(kinds):
            axes.scatter(points["divergence"], points[key], s=11, color=color, marker=marker, alpha=0.6, linewidths=0)
            axes.scatter(0.5, 0.17 - 0.055 * place, s=20, color=color, marker=marker, transform=axes.transAxes)
            axes.text(0.53, 0.17 - 0.055 * place, label, color=color, va="center", fontsize=9, transform=axes.transAxes)
        axes.text(low * 1.3, 3.45, "D + log2(D + 2) + 2", color=RED, fontsize=9)
        axes.text(low * 4.2, low * 3.0, "D, least for K", fontsize=9)
        tidy(axes, xlabel="divergence D of target from draft, bits", title=f"temperature {temperature}")
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, 1.6 * high))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[0][0].set_ylabel("entropy, bits")
    figure.suptitle("What the index of a race carries, and its bounds (points: positions)", fontsize=12)
    return figure


def draw(results: dict, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperature = results["growth"]["temperature"]
    for name, figure in {
        "growth": draw_growth(pyplot, results["growth"]),
        "decoding": draw_decoding(pyplot, results["decoding"], temperature),
        "draft-probability": draw_draft_probability(pyplot, results["draft-probability"]),
        "blocks": draw_blocks(pyplot, results["blocks"]),
        "races": draw_races(pyplot, results["races"]),
        "entropy": draw_entropy(pyplot, results["entropy"]),
    }.items():
        figure.savefig(folder / f"theory-{name}.png", dpi=100)
        pyplot.close(figure)


def measure(arguments: argparse.Namespace) -> dict:
    """Everything that the figures show."""
    pair, prompts, seed = load_demo_pair(), demo_prompts()[: arguments.prompts], arguments.seed
    at = {
        temperature: position_laws(pair, prompts, new_tokens=arguments.new_tokens, temperature=temperature, seed=seed)
        for temperature in arguments.temperatures
    }
    first = arguments.temperatures[0]
    acceptance = rejection_acceptance(at[first], CHILDREN, draws=arguments.draws, seed=seed + 1)
    places = race_places(at[first], draws=arguments.draws, seed=seed).mean(0)
    places = places[places > 0].sort(descending=True).values.tolist()
    sizes = [2**power for power in range(12) if 2 <= 2**power <= arguments.nodes]

    nodes = arguments.nodes
    planned = tree_blocks(insertion_order(greedy_tree(acceptance, nodes), acceptance))
    grown = [tree_blocks(random_tree(nodes, seed)) for seed in range(10)]
    random = {order: mean([each[order] for each in grown]) for order in ORDERS}
    curves = decoding_trees(acceptance, places, arguments.decoded_nodes)
    decoded = {
        (method, tree): decode(
            pair, method, tree, prompts, new_tokens=arguments.new_tokens, temperature=first, seed=seed
        )
        for method, tree in {(method, tree) for trees in curves.values() for method, tree, _ in trees}
    }
    return {
        "growth": {
            "temperature": first,
            "entropy": 1 / tokens_per_doubling(places),
            "acceptance": acceptance,
            "places": places[:CHILDREN],
            "shapes": growth(acceptance, sizes),
            "limits": limits(places, pair.target.config.vocab_size, sizes),
        },
        "decoding": {
            name: [
                {"nodes": len(tree), "expected": expected} | decoded[method, tree]._asdict()
                for method, tree, expected in trees
            ]
            for name, trees in curves.items()
        },
        "draft-probability": {str(key): by_draft_probability(each, 10) for key, each in at.items()},
        "blocks": {
            "planned tree": {"nodes": nodes, "tree": planned},
            "random recursive trees": {"nodes": nodes, "tree": random},
        },
        "races": {str(key): races(each, 4 * arguments.points) for key, each in at.items()},
        "entropy": {
            str(key): entropies(each, arguments.points, draws=arguments.races, seed=seed) for key, each in at.items()
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0], help="growth, decoding: the first")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64, help="after each prompt")
    parser.add_argument("--draws", type=int, default=32, help="of the children, at each position")
    parser.add_argument("--races", type=int, default=2048, help="at each position whose entropy is estimated")
    parser.add_argument("--points", type=int, default=128, help="positions whose entropy is estimated")
    parser.add_argument("--nodes", type=int, default=1024, help="of the largest tree, a power of two")
    parser.add_argument("--decoded-nodes", type=int, default=64, help="of the largest tree that is decoded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a small run, for a look at the figures")
    parser.add_argument("--out", type=Path, help="a folder for the figures and their numbers")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        small = {
            "prompts": 4,
            "new_tokens": 24,
            "draws": 8,
            "races": 512,
            "points": 40,
            "nodes": 256,
            "decoded_nodes": 8,
        }
        vars(arguments).update(small)
    if min(arguments.temperatures) <= 0 or min(arguments.prompts, arguments.new_tokens, arguments.decoded_nodes) < 2:
        parser.error("expected temperatures above 0, and at least 2 prompts, new tokens and nodes")
    if arguments.out is not None and not arguments.out.is_dir():
        parser.error(f"--out must be a folder, got {arguments.out}")
    transformers.logging.disable_progress_bar()
    results = measure(arguments)
    console = Console(highlight=False, width=110)
    for table in tables(results):
        console.print(table)
    if arguments.out is not None:
        facts = {
            "device": processor(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        } | {key: value for key, value in vars(arguments).items() if key != "out"}
        written = {"environment": facts} | results
        lines = (f"{json.dumps(name)}: {json.dumps(rounded(each))}" for name, each in written.items())
        (arguments.out / "theory-cpu.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        draw(results, arguments.out)


if __name__ == "__main__":
    main()
