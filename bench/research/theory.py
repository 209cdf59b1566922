"""The theory of the papers beside the shipped pair: six figures, and the numbers behind them.

    python bench/research/theory.py [--miniature] [--json bench/results/theory-cpu.json] [--plot bench/results]

growth             expected tokens against the size and the shape of the tree, what twice the nodes bring, and what
                   bounds them (Sequoia, figures 1 and 4; ERSD, 3 and 4). The shapes share one acceptance vector:
                   recursive rejection of children drawn without replacement. The bounds are those of trees/bounds.py
                   for the race's children, whose acceptance sums to 1 over the vocabulary; the best trees come from
                   greedy_tree (ERSD, algorithm 3)
decoding           the same expectation beside the tokens per target forward that decoding with these trees gave
draft-probability  how often a drawn token is accepted, by the probability that the draft gave it (DySpec, figure 2)
blocks             occupied 32 x 32 blocks of attention, prefix and tree, by node order (DySpec, figure 9)
races              the exact acceptance of a race's first child against greedy rejection's 1 - TV. The curve is Daliri
                   et al.'s bound; the mean is of the larger of that and of ERSD's lemma 3.1, at each position
entropy            bits of a race's place and index against the divergence of target and draft (ERSD, equations 6 and 8;
                   7, for greedy rejection, is not here)

Positions are those that decoding meets: held-out prompts continued by samples of the target, as in rejection.py. An
expectation takes the accepted child to be independent from node to node, which decoding does not guarantee. The first
token of a text is not counted, because no tree precedes it; the last step is cut short, which makes what was decoded
about 1% low. Standard errors take prompts as the independent units (batches.py).

--plot is a folder for theory-growth.png and the other figures (needs matplotlib).
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import beside  # noqa: F401
import torch
from batches import Texts, batch_of, tokens_per_forward
from common import (
    argument_parser,
    environment,
    paper_verifier,
    quiet_demo_pair,
    random_tree,
    show,
    token_ids,
    write_results,
)
from races import (
    entropy_bits,
    entropy_bounds,
    overlap,
    race_acceptance,
    race_acceptance_bound,
    race_index_entropy,
    tokens_per_doubling,
)
from rejection import positions
from theory_figures import BATCH, BEST, BLOCK, CHAIN, ORDERS, RACE, SEQUENCES, SPECINFER, draw_figures
from torch import Tensor

from heavypath.kernels.sampling import gumbel_topk
from heavypath.speculative import SpeculativeDecoder, TokenTree, expected_tokens, greedy_tree
from heavypath.speculative.demo import DemoPair, demo_prompts
from heavypath.speculative.trees.acceptance import chain_acceptance
from heavypath.speculative.trees.bounds import tree_bounds

CHILDREN = 64  # of a node, when shapes are compared


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


def specinfer_tree(size: int) -> TokenTree:
    """SpecInfer's own tree, <1, 1, 3, 1, 1, ...>: two tokens, then three sequences, as long as `size` nodes allow."""
    return TokenTree.from_branching([1, 1, 3, *[1] * (size // 3 - 2)])


def growth(acceptance: Sequence[float], sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Expected tokens {size: tokens} of trees of at most so many nodes, by shape.

    k-ary trees have the sizes that full ones have; a batch, all children of the root, no more than acceptance is for.
    """
    most = max(sizes)
    shapes = {
        BEST: {size: greedy_tree(acceptance, size) for size in sizes},
        "binary": {2 ** (depth + 1) - 1: TokenTree.k_ary(2, depth) for depth in range(1, most.bit_length())},
        "4-ary": {(4 ** (depth + 1) - 1) // 3: TokenTree.k_ary(4, depth) for depth in range(1, most.bit_length() // 2)},
        SEQUENCES: {size: best_sequences(acceptance, size) for size in sizes},
        SPECINFER: {size: specinfer_tree(size) for size in sizes if size >= 6},
        CHAIN: {size: TokenTree.chain(size - 1) for size in sizes},
        BATCH: {size: TokenTree.independent(size - 1, 1) for size in sizes if size - 1 <= len(acceptance)},
    }
    return {
        name: {size: expected_tokens(tree, acceptance) for size, tree in trees.items() if size <= most}
        for name, trees in shapes.items()
    }


def marginals(curve: Mapping[int, float]) -> dict[int, float]:
    """What twice the nodes bring, {size: tokens}: the rise from the size before, over log2 of the size (ERSD, fig. 4).

    Times 1 / (n log 2), it is what the n-th node brings.
    """
    return {size: (curve[size] - curve[before]) / math.log2(size / before) for before, size in pairwise(sorted(curve))}


def caps(acceptance: Sequence[float]) -> dict[str, float]:
    """What no tree of a shape yields, at any size: those that Sequoia is compared with in its paper, and ERSD.

    With P_k the chance that one of k children is accepted: 1 / (1 - P_k) where every node has k children, and one token
    more than a chain for sequences that part at the root; where they part at the second token, by P_3 and endlessly. A
    batch yields two.
    """
    one, two, three, four = (sum(acceptance[:children]) for children in (1, 2, 3, 4))
    return {
        CHAIN: 1 / (1 - one),
        SEQUENCES: 1 / (1 - one) + 1,
        SPECINFER: 1 + one + one**2 * (1 + three / (1 - one)),
        BATCH: 2.0,
        "binary": 1 / (1 - two),
        "4-ary": 1 / (1 - four),
    }


def limits(law: Sequence[float], vocabulary: int, sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """The best tree and its bounds {size: tokens}, for acceptance that sums to 1."""
    slope = tokens_per_doubling(law)
    bounds = {size: tree_bounds(law, size) for size in sizes}
    return {
        RACE: {size: best_tokens(law, size) for size in sizes},
        "paper": {size: slope * (math.log2(size) + math.log2(vocabulary)) for size in sizes},
        "leaves": {size: bound.leaves for size, bound in bounds.items()},
        "merged": {size: bound.merged for size, bound in bounds.items()},
        "renewal": {size: bound.renewal for size, bound in bounds.items() if bound.renewal < math.inf},
        "moments": {size: bound.moments for size, bound in bounds.items()},
        "slope": {size: slope * math.log2(size) for size in sizes},
    }


class Decoded(NamedTuple):
    """Tokens per target forward, prefills left out, and its standard error over prompts."""

    decoded: float
    standard_error: float


def decode(pair: DemoPair, method: str, tree: TokenTree, texts: Texts, **asked: Any) -> Decoded:
    """Of all prompts as one batch."""
    decoder = SpeculativeDecoder(pair.target, pair.draft, method, tree=tree, verifier=paper_verifier(method))
    return Decoded(*tokens_per_forward(decoder.generate(texts.tokens, **texts.options, **asked).stats))


def decoding_trees(
    acceptance: Sequence[float], places: Sequence[float], largest: int
) -> dict[str, list[tuple[str, TokenTree, float]]]:
    """The trees to decode with, by curve: (method, tree, expected tokens)."""
    sizes = [2**power for power in range(1, 12) if 2**power <= largest]
    curves = {
        BEST: ("sequoia", acceptance, [greedy_tree(acceptance, size) for size in sizes]),
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


def races(laws: Laws, points: int) -> dict[str, dict]:
    """What greedy rejection and the race accept of one child, and the race's bound: at some positions, and the mean."""
    target, draft = laws
    values = {
        "overlap": overlap(target, draft),
        "race": race_acceptance(target, draft),
        "bound": race_acceptance_bound(target, draft),
    }
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
    targets, drafts = laws.target[::step], laws.draft[::step]
    places, index = [], []
    for target, draft in zip(targets, drafts, strict=True):
        repeated = Laws(target.expand(draws, -1), draft.expand(draws, -1))
        law = race_places(repeated, draws=1, seed=seed + len(places)).mean(0)
        seen = int((law > 0).sum())
        places.append(float(entropy_bits(law)) + (seen - 1) / (2 * draws * math.log(2)))
        index.append(float(race_index_entropy(target, draft)))
    bounds = entropy_bounds(targets, drafts)
    return {
        "divergence": bounds.lower.tolist(),
        "place": places,
        "index": index,
        "finer": bounds.finer.tolist(),
        "upper": bounds.upper.tolist(),
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def rounded(value: Any) -> Any:
    """The same value with all its numbers rounded to four decimals, for a file."""
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def print_tables(results: dict) -> None:
    """What the figures show."""
    curves = results["growth"]["shapes"] | results["growth"]["limits"]
    sizes = [size for size in curves[BEST] if size >= 4]
    grown = [{"shape or bound": name} | {str(size): curve.get(size, curve.get(size - 1)) for size in sizes}
             for name, curve in curves.items()]  # fmt: skip
    show(grown, title="expected tokens by tree size")
    decoded = [{"tree": name} | row for name, rows in results["decoding"].items() for row in rows]
    show(decoded, title="tokens per target forward")
    by_bin = [{"temperature": name} | row for name, rows in results["draft-probability"].items() for row in rows]
    show(by_bin, title="acceptance by draft probability")
    blocks = [{"tree": f"{name}, {found['nodes']} nodes"} | found["tree"] for name, found in results["blocks"].items()]
    show(blocks, title=f"{BLOCK} x {BLOCK} blocks of a tree")
    one = [{"temperature": name} | found["mean"] for name, found in results["races"].items()]
    show(one, title="acceptance of one child, mean over positions: overlap is 1 - TV")
    bits = [{"temperature": name} | {key: mean(each) for key, each in points.items()}
            for name, points in results["entropy"].items()]  # fmt: skip
    show(bits, title="bits, mean over positions")


def measure(arguments: argparse.Namespace) -> dict:
    """All numbers that the figures show."""
    pair, prompts, seed = quiet_demo_pair(), demo_prompts()[: arguments.prompts], arguments.seed
    at = {
        temperature: position_laws(pair, prompts, new_tokens=arguments.new_tokens, temperature=temperature, seed=seed)
        for temperature in arguments.temperatures
    }
    first = arguments.temperatures[0]
    acceptance = rejection_acceptance(at[first], CHILDREN, draws=arguments.draws, seed=seed + 1)
    places = race_places(at[first], draws=arguments.draws, seed=seed).mean(0)
    places = places[places > 0].sort(descending=True).values.tolist()
    sizes = [2**power for power in range(12) if 2 <= 2**power <= arguments.nodes]
    shapes, bounds = growth(acceptance, sizes), limits(places, pair.target.config.vocab_size, sizes)

    nodes = arguments.nodes
    planned = tree_blocks(insertion_order(greedy_tree(acceptance, nodes), acceptance))
    grown = [tree_blocks(random_tree(nodes, seed)) for seed in range(10)]
    random = {order: mean([each[order] for each in grown]) for order in ORDERS}
    curves = decoding_trees(acceptance, places, arguments.decoded_nodes)
    texts = batch_of(token_ids(pair.tokenizer, prompts))
    asked = {"max_new_tokens": arguments.new_tokens, "temperature": first, "seed": seed}
    trees = {(method, tree) for curve in curves.values() for method, tree, _ in curve}
    decoded = {(method, tree): decode(pair, method, tree, texts, **asked) for method, tree in trees}
    return {
        "growth": {
            "temperature": first,
            "entropy": 1 / tokens_per_doubling(places),
            "acceptance": acceptance,
            "places": places[:CHILDREN],
            "shapes": shapes,
            "caps": caps(acceptance),
            "limits": bounds,
            "marginals": {name: marginals(curve) for name, curve in (shapes | bounds).items()},
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
    parser = argument_parser(__doc__, threads=False, plot="a folder for the figures (needs matplotlib)")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.6, 1.0], help="the first is that of growth and decoding"
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64, help="after each prompt")
    parser.add_argument("--draws", type=int, default=32, help="of the children, at each position")
    parser.add_argument("--races", type=int, default=2048, help="at each position whose entropy is estimated")
    parser.add_argument("--points", type=int, default=128, help="positions whose entropy is estimated")
    parser.add_argument("--nodes", type=int, default=1024, help="of the largest tree, a power of two")
    parser.add_argument("--decoded-nodes", type=int, default=64, help="of the largest tree that is decoded")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.miniature:
        vars(arguments).update(prompts=4, new_tokens=24, draws=8, races=512, points=40, nodes=256, decoded_nodes=8)
    if min(arguments.temperatures) <= 0 or min(arguments.prompts, arguments.new_tokens, arguments.decoded_nodes) < 2:
        parser.error("expected temperatures above 0, and at least 2 prompts, new tokens and nodes")
    if arguments.plot is not None:
        if arguments.plot.is_file():
            parser.error(f"--plot must be a folder, got the file {arguments.plot}")
        arguments.plot.mkdir(parents=True, exist_ok=True)
    results = measure(arguments)
    print_tables(results)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "plot")}
    write_results(arguments.json, environment("cpu") | settings, **rounded(results))
    if arguments.plot is not None:
        draw_figures(results, arguments.plot)


if __name__ == "__main__":
    main()
