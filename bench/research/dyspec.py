"""The parts of papers.py that repeat DySpec (Xiong et al. 2024, arXiv 2410.11744).

Trees grow as in the paper: a token's draft probability stands for its chance of being accepted (confidence="draft"),
the draft's temperature is 0.6 whatever the target's is, and levels and depth are as the tree wants; only 768 nodes
are held to levels of at most 128.
"""

from statistics import fmean, stdev

import torch
from batches import jackknife
from common import random_tree
from papers_setting import Row, Setting
from sequoia import planning_vector
from torch import Tensor

from heavypath.speculative import TokenTree, greedy_tree

WIDE, DEEP, BLOCK = 128, 30, 32
AS_PUBLISHED = {"confidence": "draft", "draft_temperature": 0.6}


def probabilities(setting: Setting) -> Row:
    """Figure 2: acceptance and the target's probability by the draft's, in tenths; every token counts by its draw."""
    laws = setting.laws(0.6)
    target, draft = (torch.cat(each).flatten() for each in zip(*laws, strict=True))
    target, draft = target[draft > 0], draft[draft > 0]
    accepted, place, rows = (target / draft).clamp(max=1), (draft * 10).long().clamp(max=9), []
    for tenth in range(10):
        chosen = place == tenth
        if chosen.any():
            weight = draft[chosen] / draft[chosen].sum()
            means = {
                name: round(float(weight @ each[chosen]), 4)
                for name, each in {"draft": draft, "accepted": accepted, "target": target}.items()
            }
            order = accepted[chosen].argsort()
            below = weight[order].cumsum(0)
            quartiles = [
                round(float(accepted[chosen][order][int((below < part).sum().clamp(max=len(order) - 1))]), 4)
                for part in (0.25, 0.5, 0.75)
            ]
            share = round(float(draft[chosen].sum() / draft.sum()), 4)
            rows.append(means | {"quartiles of accepted": quartiles, "share": share})
    pair = torch.stack([draft, target])
    mean = (pair * draft).sum(1, keepdim=True) / draft.sum()
    spread = ((pair - mean) * draft) @ (pair - mean).T
    return {"rows": rows, "correlation": round(float(spread[0, 1] / (spread[0, 0] * spread[1, 1]).sqrt()), 4)}


def phases(setting: Setting) -> Row:
    """Figure 4: shares of a step's time, one text at a time. A tree's construction is timed with its tokens' draws."""
    rows = []
    for size in (8,) if setting.small else (64, 768):
        options = {"tree_size": size, "max_depth": 12, "width": min(WIDE, size - 1), "confidence": "draft"}
        seconds = setting.decode("dyspec", prompts=1, tokens=48, **options).seconds
        whole = sum(value for name, value in seconds.items() if name != "prefill")
        names = {"draft": "draft", "sampling": "construction", "target": "target", "verification": "verification"}
        row = {shown: round(seconds.get(name, 0.0) / whole, 4) for name, shown in names.items()}
        rows.append({"nodes": size, **row, "rest": round(1 - sum(row.values()), 4)})
    return {"rows": rows}


def thresholds(setting: Setting) -> Row:
    """Figure 5: nodes and expected tokens of each step, and how they go together, for falling thresholds."""
    rows = []
    for threshold in (0.1,) if setting.small else (0.1, 0.03, 0.01):
        found = setting.evaluate(
            "dyspec", contexts=2, tree_size=64 if setting.small else 768, max_depth=DEEP, width=WIDE,
            threshold=threshold, **AS_PUBLISHED,
        )  # fmt: skip
        steps = torch.tensor([[float(step.nodes), step.expected] for step in found.steps])
        by_prompt = steps.view(-1, len(setting.prompts), 2)

        def together(kept: Tensor, by_prompt: Tensor = by_prompt) -> float:
            return float(torch.corrcoef(by_prompt[:, kept].flatten(0, 1).T)[0, 1])

        correlation = jackknife(together, len(setting.prompts))
        each = [[step.nodes, round(step.expected, 3)] for step in found.steps]
        rows.append({
            "threshold": threshold, **found.row, "correlation": [round(value, 4) for value in correlation],
            "steps": sorted(each, reverse=True),
        })  # fmt: skip
    return {"rows": rows}


def blocks(setting: Setting) -> Row:
    """Figure 9: occupied 32 x 32 blocks of trees that DySpec grew, as it adds their nodes, depth first, by heavy path.

    A prefix of p tokens adds p / 32 blocks to each of the rows of blocks, whatever the order.
    """
    rows = []
    for size in (16,) if setting.small else (256, 768, 1024):
        found = setting.evaluate(
            "dyspec", contexts=1, tree_size=size, max_depth=DEEP, width=min(WIDE, size - 1), **AS_PUBLISHED
        )
        counts: dict[str, list[int]] = {"breadth_first": [], "depth_first": [], "heavy_path": []}
        for step in found.steps:
            tree = TokenTree(step.parents)
            for order, own in counts.items():
                own.append(tree.reordered(order)[0].occupied_blocks(BLOCK))
        means = {name: round(fmean(each), 1) for name, each in counts.items()}
        rows.append({"nodes": size, "trees": len(found.steps), **means, "prefix of 256": 8 * -(-size // BLOCK)})
    return {"rows": rows}


def random_blocks(setting: Setting) -> Row:
    """Table 5: occupied 32 x 32 blocks of random trees of ten seeds, by order."""
    rows, seeds = [], 2 if setting.small else 10
    for size in (64,) if setting.small else (256, 512, 1024, 2048):
        row: Row = {"nodes": size}
        trees = [random_tree(size, seed) for seed in range(seeds)]
        for name in ("insertion", "depth_first", "heavy_path"):
            own = trees if name == "insertion" else [tree.reordered(name)[0] for tree in trees]
            counts = [tree.occupied_blocks(BLOCK) for tree in own]
            row[name] = [round(fmean(counts), 1), round(stdev(counts) / len(counts) ** 0.5, 2)]
        rows.append(row)
    return {"rows": rows}


def compared(setting: Setting, size: int, sequences: int, contexts: int) -> Row:
    """Trees of one size at T = 0 and 0.6: DySpec, Sequoia's by the vector of that temperature, and SpecInfer's."""
    rows, size = [], 8 if setting.small else size
    for temperature in (0.0, 0.6):
        grown = {"tree_size": size, "max_depth": DEEP, "width": min(WIDE, size - 1), **AS_PUBLISHED}
        ways = {
            "dyspec": ("dyspec", grown),
            "sequoia": ("sequoia", {"tree": greedy_tree(planning_vector(setting, temperature), size)}),
            "specinfer": ("specinfer", {"tree": TokenTree.independent(sequences, size // sequences)}),
        }
        own = {
            name: setting.evaluate(method, temperature=temperature, contexts=contexts, **options)
            for name, (method, options) in ways.items()
        }
        for name, each in own.items():
            more = own["dyspec"].over(each) if name != "dyspec" else None
            deepest = max(step.depth for step in each.steps)
            rows.append({"temperature": temperature, "method": name, **each.row, "deepest": deepest, "behind": more})
    return {"rows": rows}


PARTS = {
    "dyspec-probabilities": probabilities, "dyspec-random-blocks": random_blocks, "dyspec-blocks": blocks,
    "dyspec-phases": phases, "dyspec-thresholds": thresholds,
    "dyspec-64": lambda setting: compared(setting, 64, 4, contexts=8),
    "dyspec-768": lambda setting: compared(setting, 768, 16, contexts=2),
}  # fmt: skip
