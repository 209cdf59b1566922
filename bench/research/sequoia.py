"""The parts of papers.py that repeat Sequoia (Chen et al. 2024, arXiv 2402.12374).

Trees and bounds that are computed take the acceptance vector that was measured on the shipped pair: 64 children at each
position of texts that the target wrote, which is exact over coins and a mean over draws. What is decoded is decoded by
the paper's rule. Depths count levels with the root, as the paper does.
"""

import math
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial

import torch
from batches import jackknife
from bounds import tree_bounds
from papers_setting import Row, Setting, difference
from rejection import power_law, rounds_rejection
from simulation.formulas import Setting as Machine
from simulation.hardware import DEVICES
from simulation.shapes import SHAPES, ModelSize
from torch import Tensor

from heavypath.kernels.sampling import gumbel_topk
from heavypath.speculative import EarlyExit, TokenTree, expected_tokens, greedy_tree, load_demo_head, select_tree
from heavypath.speculative.drafts.retrieval import Retrieval
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE
from heavypath.speculative.trees.acceptance import chain_acceptance

CHILDREN, DRAWS = 64, 8
# Table 1, Llama-2-7B drafted by JF68M on an A100: text and temperature, (nodes, levels), speed-up and tokens per step.
TABLE_1 = {
    "C4, T = 0": ((128, 10), 4.04, 5.08), "C4, T = 0.6": ((128, 7), 3.18, 3.92),
    "OpenWebText, T = 0": ((128, 7), 3.22, 3.86), "OpenWebText, T = 0.6": ((128, 6), 2.71, 3.33),
    "CNN, T = 0": ((128, 7), 3.41, 4.05), "CNN, T = 0.6": ((128, 6), 2.83, 3.45),
    "MT-Bench, T = 0": ((128, 10), 4.03, 4.98), "MT-Bench, T = 0.6": ((128, 7), 3.18, 3.96),
}  # fmt: skip
DRAFT_MS, TARGET_MS = 0.5, 24.2  # a token of JF68M, and one of Llama-2-7B, by the paper
JF68M, JF160M = ModelSize.llama(2, 768, 3072, 12, 12), ModelSize.llama(12, 768, 3072, 12, 12)
ON_DEVICE = {
    "Llama-2-7B, JF68M": ("llama-2-7b", JF68M), "Llama-2-13B, JF68M": ("llama-2-13b", JF68M),
    "Llama-2-13B, JF160M": ("llama-2-13b", JF160M), "Vicuna-33B, 1.3B": ("vicuna-33b", SHAPES["tinyllama-1.1b"]),
}  # fmt: skip


@cache
def vectors(setting: Setting, temperature: float, top_p: float | None = None) -> dict[str, Tensor]:
    """How often child 1, 2, ... is the accepted one, by method: [prompts, CHILDREN]."""
    found: dict[str, list[Tensor]] = {"sequoia": [], "specinfer": [], "top-k": []}
    for number, (target, draft) in enumerate(setting.laws(temperature, top_p)):
        total, rows = torch.zeros(CHILDREN, dtype=torch.float64), torch.arange(len(target)) + number * len(target)
        for draw in range(2 if setting.small else DRAWS):
            drawn = gumbel_topk(draft.log().float(), CHILDREN, seed=setting.seed + 1 + draw, rows=rows).tokens
            total += chain_acceptance(target, draft, drawn).mean(0) / (2 if setting.small else DRAWS)
        found["sequoia"].append(total)
        rates = torch.cat([target.new_ones(len(target), 1), rounds_rejection(target, draft, CHILDREN)], 1).mean(0)
        found["specinfer"].append(-rates.diff())
        found["top-k"].append(target.gather(1, draft.topk(CHILDREN).indices).mean(0))
    return {name: torch.stack(rows).nan_to_num(0).clamp(min=0) for name, rows in found.items()}


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


def temperatures(setting: Setting) -> Row:
    """Figure 4, right, decoded: that tree by Sequoia's rule and by SpecInfer's, where equal siblings stand together."""
    tree, rows = greedy_tree(DEFAULT_ACCEPTANCE, 64), []
    for temperature in (0.2, 0.6, 1.0):
        own = {
            method: setting.decode(method, temperature=temperature, tree=tree) for method in ("sequoia", "specinfer")
        }
        more = difference(own["sequoia"].stats, own["specinfer"].stats)
        rows += [{"temperature": temperature, "method": method, **each.row} for method, each in own.items()]
        rows[-2]["over specinfer"] = more
    return {"rows": rows}


def sequences(vector: Sequence[float], size: int) -> TokenTree:
    """Of the trees of at most `size` nodes that are sequences of one length, the one that yields most."""
    shapes = [TokenTree.independent(count, (size - 1) // count) for count in range(1, min(len(vector), size - 1) + 1)]
    return max(shapes, key=lambda tree: expected_tokens(tree, vector))


def growth(setting: Setting) -> Row:
    """Figure 1, both: tokens by size for five shapes; and the best trees, of which figures 2 and 5 are pictures."""
    vector = falling(vectors(setting, 0.6)["sequoia"].mean(0))
    rows, trees = [], []
    for size in [2**power for power in range(1, 11)]:
        best = greedy_tree(vector, size)
        binary, four = size.bit_length() - 2, (size.bit_length() - 1) // 2
        shapes = {"best": best, "sequences": sequences(vector, size), "chain": TokenTree.chain(size - 1)}
        shapes |= {"binary": TokenTree.k_ary(2, binary)} if binary > 0 else {}
        shapes |= {"4-ary": TokenTree.k_ary(4, four - 1)} if four > 1 else {}
        rows.append({"nodes": size} | {name: round(expected_tokens(tree, vector), 4) for name, tree in shapes.items()})
        children = [int((best.parents == node).sum()) for node in range(size)]
        trees.append({"nodes": size, "levels": 1 + best.depth, "root's children": children[0],
                      "inner nodes": sum(count > 0 for count in children)})  # fmt: skip
    one, two, four = (sum(vector[:count]) for count in (1, 2, 4))
    caps = {"chain": 1 / (1 - one), "sequences": 1 + 1 / (1 - one), "binary": 1 / (1 - two), "4-ary": 1 / (1 - four)}
    return {"acceptance": [round(each, 5) for each in vector], "rows": rows, "trees": trees, "caps": caps}


def scaling(setting: Setting) -> Row:
    """Figure 4, left: the best tree and the best sequences, decoded to 512 nodes, beside the expectation."""
    vector, rows = falling(vectors(setting, 0.6)["sequoia"].mean(0)), []
    for size in (4, 8) if setting.small else (8, 32, 128, 512):
        trees = {"best": greedy_tree(vector, size), "sequences": sequences(vector, size)}
        tokens = 64 if size < 512 else 48
        own = {
            name: setting.decode("sequoia" if name == "best" else "specinfer", tree=tree, tokens=tokens)
            for name, tree in trees.items()
        }
        for name, each in own.items():
            expected = round(expected_tokens(trees[name], vector), 4)
            rows.append({"nodes": size, "tree": name, "expected": expected, **each.row})
        rows[-2]["over sequences"] = difference(own["best"].stats, own["sequences"].stats)
    return {"rows": rows}


def shapes(setting: Setting, temperature: float) -> Row:
    """Tables 5 and 6: SpecInfer's width and depth, at most 128 tokens, and 5 x 8."""
    powers = (1, 2) if setting.small else (1, 2, 4, 8, 16, 32, 64, 128)
    grid = [*((width, depth) for width in powers for depth in powers if width * depth <= 128), (5, 8)]
    return {
        "rows": [
            {"width": width, "depth": depth}
            | setting.decode(
                "specinfer", temperature=temperature, tokens=48, tree=TokenTree.independent(width, depth)
            ).row
            for width, depth in grid
        ]
    }


def wide_and_deep(setting: Setting) -> Row:
    """Table 7: SpecInfer's shapes of 768 tokens."""
    grid = [(2, 3)] if setting.small else [(16, 48), (24, 32), (32, 24)]
    return {
        "rows": [
            {"width": width, "depth": depth, "temperature": temperature}
            | setting.decode(
                "specinfer", temperature=temperature, prompts=8, tokens=48, tree=TokenTree.independent(width, depth)
            ).row
            for temperature in (0.0, 0.6)
            for width, depth in grid
        ]
    }


def pairs(setting: Setting) -> Row:
    """Figure 6: other drafts of the same target, by the best tree and by sequences of 64 nodes."""
    drafts = {
        "shipped draft": None,
        "EAGLE-3 head": load_demo_head(setting.pair.target),
        "early exit, 3 layers": EarlyExit(layers=3),
        "retrieval from the prompts": Retrieval(setting.prompts, setting.pair.tokenizer),
    }
    rows = []
    for name, draft in drafts.items():
        size = 8 if setting.small else 64
        ways = {
            "sequoia": {"tree": greedy_tree(DEFAULT_ACCEPTANCE, size)},
            "specinfer": {"tree": TokenTree.independent(8, size // 8)},
        }
        own = {method: setting.decode(method, draft=draft, **options) for method, options in ways.items()}
        rows += [{"draft": name, "method": method, **each.row} for method, each in own.items()]
        rows[-2]["over specinfer"] = difference(own["sequoia"].stats, own["specinfer"].stats)
    return {"rows": rows}


def seconds(machine: Machine, sizes: Sequence[int]) -> dict[int, float]:
    """Figure 8: t(n), a pass over n nodes in tokens of plain decoding."""
    return {size: machine.device(size) / machine.device(1) for size in sizes}


def verification(setting: Setting) -> Row:
    """Figure 8: t(n) of the papers' targets by roofline, and of the shipped target by the processor's time here."""
    sizes, rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], []
    for device in ("a100-80gb", "l40"):
        for name in ("llama-2-7b", "llama-2-13b", "vicuna-33b"):
            curve = seconds(Machine(DEVICES[device], SHAPES[name]), sizes)
            rows.append({"device": device, "target": name, **{str(size): round(curve[size], 3) for size in sizes}})
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(2 if setting.small else 7):
        for size in sizes:
            begin = time.process_time()
            with torch.no_grad():
                setting.pair.target(torch.ones(1, size, dtype=torch.long))
            taken[size].append(time.process_time() - begin)
    least = {size: min(each) for size, each in taken.items()}
    timed = {str(size): round(least[size] / least[1], 3) for size in sizes}
    return {"rows": [*rows, {"device": "this processor", "target": "shipped", **timed}]}


def chosen(setting: Setting) -> Row:
    """Tables 1, 3 and 4: t(128) that the paper's own rows imply; and the trees chosen for these pairs by roofline."""
    implied = [
        {"text": text, "nodes": nodes, "levels": levels, "speedup": speedup, "tokens": tokens,
         "t": round(tokens / speedup - levels * DRAFT_MS / TARGET_MS, 4)}
        for text, ((nodes, levels), speedup, tokens) in TABLE_1.items()
    ]  # fmt: skip
    vector, rows = falling(vectors(setting, 0.6)["sequoia"].mean(0)), []
    t128 = sum(row["t"] for row in implied) / len(implied)
    sizes = [2**power for power in range(10)]
    costs = {
        "the paper's constants": (
            {size: 1 + (t128 - 1) * (size - 1) / 127 for size in (1, 16, 32, 64, 128)},
            DRAFT_MS / TARGET_MS,
        )
    }
    for device in ("a100-80gb", "l40"):
        for pair, (target, draft) in ON_DEVICE.items():
            machine = Machine(DEVICES[device], SHAPES[target], draft)
            level = (machine.step(1, 1) - machine.step(1, 0)) / machine.step(1, 0)
            costs[f"{pair}, {device}"] = (seconds(machine, sizes), level)
    for name, (verify, level) in costs.items():
        plan = select_tree(vector, verify, level)
        five = expected_tokens(TokenTree.independent(5, 8), vector)
        t41 = verify[max(size for size in verify if size <= 64)]
        row = {"costs": name, "nodes": len(plan.tree), "levels": 1 + plan.tree.depth}
        row |= {"tokens": round(plan.expected_tokens, 4), "speedup": round(plan.speedup, 4)}
        rows.append(row | {"5 x 8": round(five / (t41 + 8 * level), 4)})
    return {"published": implied, "rows": rows}


def bounded(setting: Setting) -> Row:
    """Figure 7: the speed-up of the best tree of n nodes where its depth is chosen, and where it is not."""
    vector, rows = falling(vectors(setting, 0.6)["sequoia"].mean(0)), []
    machine = Machine(DEVICES["a100-80gb"], SHAPES["llama-2-7b"], JF68M)
    slow = (machine.step(1, 1) - machine.step(1, 0)) / machine.step(1, 0)
    for name, level in (("the paper's constants", DRAFT_MS / TARGET_MS), ("roofline", slow), ("shipped pair", 0.1)):
        for size in (16, 32, 64, 128, 256, 512):
            cost = 1 + 0.067 * (size - 1) / 127
            free, own = greedy_tree(vector, size), select_tree(vector, {size: cost}, level)
            plain = expected_tokens(free, vector) / (cost + free.depth * level)
            row = {"draft": name, "c": round(level, 4), "nodes": size, "levels": 1 + own.tree.depth}
            row |= {"speedup": round(own.speedup, 4), "levels unbounded": 1 + free.depth}
            rows.append(row | {"speedup unbounded": round(plain, 4)})
    return {"rows": rows}


def theorem(setting: Setting) -> Row:
    """Theorem 3.6: its lower bound, the k*(n)-ary tree of its proof, the best tree, and the least upper bound.

    The bound is b log n / (10 log log n). With rejection a k^-b, k* = (log n)^(1/b) keeps each level's loss near
    1 / log n, and the tree has log n / log k* levels.
    """
    own = vectors(setting, 0.6)["sequoia"].mean(0)
    law = power_law((1 - own.cumsum(0)).clamp(min=1e-9))
    exponent, factor, vector, rows = float(law.exponent), float(law.factor), falling(own), []
    for size in [2**power for power in range(6, 11 if setting.small else 19, 2)]:
        width = max(2, math.ceil(math.log(size) ** (1 / exponent)))
        depth = max(1, math.floor(math.log(size) / math.log(width)))
        some = min(1.0, max(0.0, 1 - factor * width**-exponent))
        best = expected_tokens(greedy_tree(vector, size), vector)
        rows.append({
            "nodes": size, "lower": round(exponent * math.log(size) / (10 * math.log(math.log(size))), 4), "k*": width,
            "k* tree": round(sum(some**level for level in range(depth + 1)), 4), "best tree": round(best, 4),
            "upper": round(tree_bounds(vector, size).least, 4),
        })  # fmt: skip
    return {
        "exponent": round(exponent, 4),
        "factor": round(factor, 4),
        "r_squared": round(float(law.r_squared), 4),
        "rows": rows,
    }


def defaults(setting: Setting) -> Row:
    """Table 1's comparison on the shipped pair: SpecInfer 5 x 8 beside the chosen tree, at both temperatures."""
    rows = []
    for temperature in (0.0, 0.6):
        own = setting.decode("sequoia", temperature=temperature, tree=greedy_tree(DEFAULT_ACCEPTANCE, 64))
        other = setting.decode("specinfer", temperature=temperature, tree=TokenTree.independent(5, 8))
        row = {"temperature": temperature, "method": "sequoia, 64 nodes", **own.row}
        rows.append(row | {"over 5 x 8": difference(own.stats, other.stats)})
        rows.append({"temperature": temperature, "method": "specinfer, 5 x 8", **other.row})
    return {"rows": rows}


PARTS = {
    "sequoia-growth": growth, "sequoia-theorem": theorem, "sequoia-chosen": chosen, "sequoia-bounded": bounded,
    "sequoia-verification": verification, "sequoia-robustness": robustness, "sequoia-temperatures": temperatures,
    "sequoia-scaling": scaling, "sequoia-defaults": defaults, "sequoia-pairs": pairs,
    "sequoia-greedy-shapes": partial(shapes, temperature=0.0), "sequoia-shapes": partial(shapes, temperature=0.6),
    "sequoia-large-shapes": wide_and_deep,
}  # fmt: skip
