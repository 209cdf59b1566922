"""The parts of papers.py that repeat Sequoia (Chen et al. 2024, arXiv 2402.12374).

Trees and bounds that are computed take the acceptance vector that was counted on the shipped pair: 64 children at each
position of texts that the target wrote, exact over coins and a mean over draws. Trees that are compared are evaluated
after recorded contexts (exact.py). Depths count levels with the root, as the paper does.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from batches import jackknife
from bounds import tree_bounds
from llamas import ON_DEVICE, machine_of
from papers_setting import Row, Setting, mean_and_error
from published import APPENDIX_E, LEVEL, TABLE_1, time_of
from rejection import power_law, rounds_rejection
from simulation.formulas import Setting as Machine
from simulation.hardware import DEVICES
from simulation.shapes import SHAPES
from torch import Tensor

from heavypath.kernels.sampling import gumbel_topk
from heavypath.speculative import EarlyExit, TokenTree, expected_tokens, greedy_tree, load_demo_head, select_tree
from heavypath.speculative.drafts.retrieval import Retrieval
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE
from heavypath.speculative.trees.acceptance import chain_acceptance

CHILDREN = 64
SIZES = [2**power for power in range(10)]  # of trees


@cache
def vectors(setting: Setting, temperature: float, top_p: float | None = None) -> dict[str, Tensor]:
    """How often child 1, 2, ... is the accepted one, by method: [prompts, CHILDREN]."""
    found: dict[str, list[Tensor]] = {"sequoia": [], "specinfer": [], "top-k": []}
    for number, (target, draft) in enumerate(setting.laws(temperature, top_p)):
        total, rows = torch.zeros(CHILDREN, dtype=torch.float64), torch.arange(len(target)) + number * len(target)
        for draw in range(setting.draws):
            drawn = gumbel_topk(draft.log().float(), CHILDREN, seed=setting.seed + 1 + draw, rows=rows).tokens
            total += chain_acceptance(target, draft, drawn).mean(0) / setting.draws
        found["sequoia"].append(total)
        rates = torch.cat([target.new_ones(len(target), 1), rounds_rejection(target, draft, CHILDREN)], 1).mean(0)
        found["specinfer"].append(-rates.diff())
        found["top-k"].append(target.gather(1, draft.topk(CHILDREN).indices).mean(0))
    return {name: torch.stack(rows).nan_to_num(0).clamp(min=0) for name, rows in found.items()}


def greedy_vector(setting: Setting) -> list[float]:
    """At temperature 0: how often the target's likeliest token is the draft's 1st, 2nd, ... likeliest one."""
    counts, positions = torch.zeros(CHILDREN, dtype=torch.float64), 0
    for target, draft in setting.contexts(0.0):
        counts += (draft.topk(CHILDREN).indices == target.argmax(1, keepdim=True)).sum(0)
        positions += len(target)
    return falling(counts / positions)


def planning_vector(setting: Setting, temperature: float) -> list[float]:
    """What a tree for this temperature is planned by."""
    return greedy_vector(setting) if temperature == 0 else falling(vectors(setting, temperature)["sequoia"].mean(0))


def falling(vector: Tensor) -> list[float]:
    """A vector for planning: sampling errors among rare children exceed their differences."""
    return vector.sort(descending=True).values.tolist()


def robustness(setting: Setting) -> Row:
    """Figure 4, right, and table 8: one tree at other temperatures and top-p, by the vectors of three rules."""
    tree, rows = greedy_tree(DEFAULT_ACCEPTANCE, 64), []
    for temperature, top_p in [*((each, None) for each in (0.2, 0.4, 0.6, 0.8, 1.0)), (0.6, 0.8), (0.6, 0.9)]:
        own = vectors(setting, temperature, top_p)

        def tokens(kept: Tensor, name: str, own: Mapping[str, Tensor] = own) -> float:
            return expected_tokens(tree, own[name][kept].mean(0).tolist())

        row: Row = {"temperature": temperature, "top_p": top_p}
        for name in own:
            row[name] = [round(each, 4) for each in jackknife(lambda kept, n=name: tokens(kept, n), len(own[name]))]
            more = jackknife(lambda kept, n=name: tokens(kept, "sequoia") - tokens(kept, n), len(own[name]))
            row |= {} if name == "sequoia" else {f"over {name}": [round(each, 4) for each in more]}
        rows.append(row)
    return {"rows": rows}


def compared(setting: Setting, ways: Mapping[str, tuple[str, dict]], **sampling: float) -> list[Row]:
    """A row for each way, with what the first one has over it. ways: method and options by name."""
    found = {name: setting.evaluate(method, **sampling, **options) for name, (method, options) in ways.items()}
    first = next(iter(found.values()))
    return [
        {"way": name, **each.row, "first over it": first.over(each) if each is not first else None}
        for name, each in found.items()
    ]


def sequences(vector: Sequence[float], size: int) -> TokenTree:
    """Of the trees of at most `size` nodes that are sequences of one length, the one that yields most."""
    shapes = [TokenTree.independent(count, (size - 1) // count) for count in range(1, min(len(vector), size - 1) + 1)]
    return max(shapes, key=lambda tree: expected_tokens(tree, vector))


def growth(setting: Setting) -> Row:
    """Figure 1, left: tokens by size for five shapes, by the shipped pair's vector."""
    vector, rows = planning_vector(setting, 0.6), []
    for size in [2**power for power in range(1, 11)]:
        binary, four = size.bit_length() - 2, (size.bit_length() - 1) // 2
        shapes = {
            "best": greedy_tree(vector, size),
            "sequences": sequences(vector, size),
            "chain": TokenTree.chain(size - 1),
        }
        shapes |= {"binary": TokenTree.k_ary(2, binary)} if binary > 0 else {}
        shapes |= {"4-ary": TokenTree.k_ary(4, four - 1)} if four > 1 else {}
        rows.append({"nodes": size} | {name: round(expected_tokens(tree, vector), 4) for name, tree in shapes.items()})
    one, two, four = (sum(vector[:count]) for count in (1, 2, 4))
    caps = {"chain": 1 / (1 - one), "sequences": 1 + 1 / (1 - one), "binary": 1 / (1 - two), "4-ary": 1 / (1 - four)}
    return {"acceptance": [round(each, 5) for each in vector], "rows": rows, "caps": caps}


def planned(setting: Setting) -> Row:
    """Figures 1, right, 2 and 5: the best trees by appendix E's vector, and the one of 64 nodes in 12 levels."""
    vector, rows = sorted(APPENDIX_E, reverse=True), []
    for size, deepest in [*((size, None) for size in (8, 16, 32, 64, 128, 256)), (64, 11)]:
        tree = greedy_tree(vector, size, deepest)
        rows.append({
            "nodes": size, "at most": deepest and deepest + 1, "levels": 1 + tree.depth,
            "children of the root": int((tree.parents == 0).sum()),
            "expected": round(expected_tokens(tree, vector), 4),
        })  # fmt: skip
    return {"rows": rows}


def scaling(setting: Setting) -> Row:
    """Figure 4, left: the best tree and the best sequences, both by Sequoia's sampling and rule, to 512 nodes."""
    vector, rows = planning_vector(setting, 0.6), []
    for size in (4, 8) if setting.small else setting.sizes:
        trees = {"best": greedy_tree(vector, size), "sequences": sequences(vector, size)}
        ways = {name: ("sequoia", {"tree": tree}) for name, tree in trees.items()}
        found = compared(setting, ways, contexts=8 if size < 512 else 2)
        rows += [row | {"expected": round(expected_tokens(trees[row["way"]], vector), 4)} for row in found]
    return {"rows": rows}


def pairs(setting: Setting) -> Row:
    """Figure 6: other drafts of the same target, by the best tree and by sequences of 64 nodes, by one rule."""
    drafts = {
        "shipped draft": None,
        "EAGLE-3 head": load_demo_head(setting.pair.target),
        "early exit, 3 layers": EarlyExit(layers=3),
        "retrieval from the prompts": Retrieval(setting.prompts, setting.pair.tokenizer),
    }
    size, rows = 8 if setting.small else 64, []
    trees = {"best": greedy_tree(DEFAULT_ACCEPTANCE, size), "sequences": TokenTree.independent(8, size // 8)}
    for name, draft in drafts.items():
        ways = {shape: ("sequoia", {"tree": tree, "draft": draft}) for shape, tree in trees.items()}
        rows += [{"draft": name} | row for row in compared(setting, ways)]
    return {"rows": rows}


def shapes(setting: Setting, temperature: float) -> Row:
    """Tables 5 and 6: SpecInfer's width and depth, at most 128 tokens, and 5 x 8; speed-ups by table 1's constants.

    tree: the nodes, levels and speed-up of the tree that they choose, which is evaluated after the same contexts
    """
    powers = (1, 2) if setting.small else (1, 2, 4, 8, 16, 32, 64, 128)
    grid, rows = [*((width, depth) for width in powers for depth in powers if width * depth <= 128), (5, 8)], []
    plan = select_tree(planning_vector(setting, temperature), {size: time_of(size) for size in SIZES[:8]}, LEVEL)

    def sped_up(method: str, tree: TokenTree) -> tuple[Row, Tensor]:
        found = setting.evaluate(method, temperature=temperature, contexts=4, tree=tree)
        return found.row, found.tokens / (time_of(len(tree)) + tree.depth * LEVEL)

    _, chosen = sped_up("sequoia", plan.tree)
    for width, depth in grid:
        row, own = sped_up("specinfer", TokenTree.independent(width, depth))
        row |= {"speedup": mean_and_error(own), "behind the tree": mean_and_error(chosen - own)}
        rows.append({"width": width, "depth": depth, **row})
    tree = {"nodes": len(plan.tree), "levels": 1 + plan.tree.depth, "speedup": mean_and_error(chosen)}
    return {"tree": tree, "rows": rows}


def wide_and_deep(setting: Setting) -> Row:
    """Table 7: SpecInfer's shapes of 768 tokens beside the best tree of 768 nodes, at most 18 levels below the root."""
    grid, rows = [(2, 3)] if setting.small else [(16, 48), (24, 32), (32, 24)], []
    for temperature in (0.0, 0.6):
        tree = greedy_tree(planning_vector(setting, temperature), 8 if setting.small else 768, 18)
        ways = {"best": ("sequoia", {"tree": tree})}
        for width, depth in grid:
            ways[f"{width} x {depth}"] = ("specinfer", {"tree": TokenTree.independent(width, depth)})
        rows += [
            {"temperature": temperature} | row for row in compared(setting, ways, temperature=temperature, contexts=1)
        ]
    return {"rows": rows}


def seconds(machine: Machine) -> dict[int, float]:
    """t(n) by a roofline: a pass over n nodes in tokens of plain decoding."""
    return {size: machine.device(size) / machine.device(1) for size in SIZES}


@cache
def costs_here(setting: Setting) -> tuple[dict[int, float], float]:
    """t(n) of the shipped target on this processor, and c, the draft's pass over one token, both by processor time."""

    def least(model: Callable, size: int) -> float:
        taken = []
        for _ in range(2 if setting.small else 7):
            begin = time.process_time()
            with torch.no_grad():
                model(torch.ones(1, size, dtype=torch.long))
            taken.append(time.process_time() - begin)
        return min(taken)

    own = {size: least(setting.pair.target, size) for size in SIZES}
    return {size: own[size] / own[1] for size in SIZES}, least(setting.pair.draft, 1) / own[1]


def verification(setting: Setting) -> Row:
    """Figure 8: t(n) of the papers' targets by roofline, and of the shipped target by the processor's time here."""
    rows = []
    for device in ("a100-80gb", "l40"):
        for name in ("llama-2-7b", "llama-2-13b", "vicuna-33b"):
            curve = seconds(Machine(DEVICES[device], SHAPES[name]))
            rows.append({"device": device, "target": name, **{str(size): round(curve[size], 3) for size in SIZES}})
    here, level = costs_here(setting)
    timed = {str(size): round(here[size], 3) for size in SIZES}
    return {"rows": [*rows, {"device": "this processor", "target": "shipped", **timed}], "c": round(level, 4)}


def chosen(setting: Setting) -> Row:
    """Tables 1, 3 and 4: t(128) that table 1's rows imply; and the trees chosen by its constants, and by rooflines."""
    implied = [
        {"text": text, "t": round(tokens / speedup - levels * LEVEL, 4)}
        for text, ((_, levels), speedup, tokens) in TABLE_1.items()
    ]
    rows, by_table_1 = [], ({size: time_of(size) for size in SIZES[:8]}, LEVEL)
    costs = {("table 1's constants", 0.6): by_table_1, ("table 1's constants", 0.0): by_table_1}
    for pair in ON_DEVICE:
        machine, level = machine_of(pair)
        costs[pair, 0.6] = (seconds(machine), level)
    for (name, temperature), (verify, level) in costs.items():
        vector = planning_vector(setting, temperature)
        plan = select_tree(vector, verify, level)
        five = expected_tokens(TokenTree.independent(5, 8), vector)
        row = {"costs": name, "temperature": temperature, "nodes": len(plan.tree), "levels": 1 + plan.tree.depth}
        row |= {"expected": round(plan.expected_tokens, 4), "speedup": round(plan.speedup, 4)}
        rows.append(row | {"5 x 8": round(five / (verify[64] + 8 * level), 4)})
    return {"published": implied, "rows": rows}


def bounded(setting: Setting) -> Row:
    """Figure 7: the speed-up of the best tree of n nodes where its depth is chosen, and where it is not."""
    vector, rows, (here, level_here) = planning_vector(setting, 0.6), [], costs_here(setting)
    machines = {
        "table 1's constants": (time_of, LEVEL),
        "this processor, measured": (here.__getitem__, level_here),
    }
    for name, (cost, level) in machines.items():
        for size in (16, 32, 64, 128, 256, 512):
            free, own = greedy_tree(vector, size), select_tree(vector, {size: cost(size)}, level)
            plain = expected_tokens(free, vector) / (cost(size) + free.depth * level)
            row = {"costs": name, "c": round(level, 4), "nodes": size, "levels": 1 + own.tree.depth}
            row |= {"speedup": round(own.speedup, 4), "levels unbounded": 1 + free.depth}
            rows.append(row | {"speedup unbounded": round(plain, 4)})
    return {"rows": rows}


def best_k_ary(vector: Sequence[float], size: int) -> tuple[int, float]:
    """k and the tokens of the best complete k-ary tree of at most `size` nodes, which is appendix F.1.3's k*(n)."""
    found = []
    for width in range(2, min(len(vector), size - 1) + 1):
        some, nodes, levels = sum(vector[:width]), 1, 1
        while nodes + width**levels <= size:
            nodes += width**levels
            levels += 1
        found.append((sum(some**level for level in range(levels)), width))
    tokens, width = max(found)
    return width, tokens


def theorem(setting: Setting) -> Row:
    """Theorem 3.6: b log n / (10 log log n), the best k-ary tree, the best tree, and the least upper bound."""
    own = vectors(setting, 0.6)["sequoia"].mean(0)
    law = power_law((1 - own.cumsum(0)).clamp(min=1e-9))
    exponent, vector, rows = float(law.exponent), falling(own), []
    for size in [2**power for power in range(6, 11 if setting.small else 19, 2)]:
        width, tokens = best_k_ary(vector, size)
        best = expected_tokens(greedy_tree(vector, size), vector)
        rows.append({
            "nodes": size, "lower": round(exponent * math.log(size) / (10 * math.log(math.log(size))), 4), "k*": width,
            "k* tree": round(tokens, 4), "best tree": round(best, 4),
            "upper": round(tree_bounds(vector, size).least, 4),
        })  # fmt: skip
    return {"exponent": round(exponent, 4), "r_squared": round(float(law.r_squared), 4), "rows": rows}


def defaults(setting: Setting) -> Row:
    """Table 1's comparison on the shipped pair: the best tree of 64 nodes beside SpecInfer 5 x 8, at T = 0 and 0.6.

    The speed-up is by table 1's constants.
    """
    rows = []
    for temperature in (0.0, 0.6):
        best, five = greedy_tree(planning_vector(setting, temperature), 64), TokenTree.independent(5, 8)
        ways = {"best, 64 nodes": ("sequoia", {"tree": best}), "5 x 8": ("specinfer", {"tree": five})}
        for row in compared(setting, ways, temperature=temperature):
            tree = ways[row["way"]][1]["tree"]
            cost = time_of(len(tree)) + tree.depth * LEVEL
            rows.append({"temperature": temperature} | row | {"speedup": round(row["tokens"] / cost, 4)})
    return {"rows": rows}


PARTS = {
    "sequoia-growth": growth, "sequoia-planned": planned, "sequoia-theorem": theorem, "sequoia-chosen": chosen,
    "sequoia-verification": verification, "sequoia-bounded": bounded, "sequoia-robustness": robustness,
    "sequoia-scaling": scaling, "sequoia-defaults": defaults,
    "sequoia-pairs": pairs, "sequoia-greedy-shapes": partial(shapes, temperature=0.0),
    "sequoia-shapes": partial(shapes, temperature=0.6), "sequoia-large-shapes": wide_and_deep,
}  # fmt: skip
