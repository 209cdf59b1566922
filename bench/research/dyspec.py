"""The parts of papers.py that repeat DySpec (Xiong et al. 2024, arXiv 2410.11744).

"as published" takes a token's draft probability for its chance of being accepted (confidence="draft"), and "measured"
takes chances that were counted on the shipped pair. Trees that grow have levels of at most 128 nodes; the paper's have
no such bound.
"""

from statistics import fmean, stdev

import torch
from common import random_tree
from papers_setting import MEASURED, Row, Setting, difference

from heavypath.speculative import TokenTree, greedy_tree
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE

VALUES: dict[str, dict] = {"as published": {"confidence": "draft"}, "measured": {"confidence": MEASURED}}
WIDE, BLOCK = 128, 32


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
            rows.append({name: round(float(weight @ each[chosen]), 4)
                         for name, each in {"draft": draft, "accepted": accepted, "target": target}.items()}
                        | {"share": round(float(draft[chosen].sum() / draft.sum()), 4)})  # fmt: skip
    pair = torch.stack([draft, target])
    mean = (pair * draft).sum(1, keepdim=True) / draft.sum()
    spread = ((pair - mean) * draft) @ (pair - mean).T
    return {"rows": rows, "correlation": round(float(spread[0, 1] / (spread[0, 0] * spread[1, 1]).sqrt()), 4)}


def phases(setting: Setting) -> Row:
    """Figure 4: shares of a step's time, the tree's construction with the draws of its tokens, one text at a time."""
    rows = []
    for size in (8,) if setting.small else (64, 768):
        options = {"tree_size": size, "max_depth": 12, "width": min(WIDE, size - 1)}
        seconds = setting.decode("dyspec", prompts=1, tokens=48, **options, **VALUES["as published"]).stats.seconds
        whole = sum(value for name, value in seconds.items() if name != "prefill")
        names = {"draft": "draft", "sampling": "construction", "target": "target", "verification": "verification"}
        row = {shown: round(seconds.get(name, 0.0) / whole, 4) for name, shown in names.items()}
        rows.append({"nodes": size, **row, "rest": round(1 - sum(row.values()), 4)})
    return {"rows": rows}


def thresholds(setting: Setting) -> Row:
    """Figure 5: nodes and accepted tokens of each step, largest trees first, for thresholds down to 0.001."""
    rows = []
    for threshold in (0.1,) if setting.small else (0.1, 0.03, 0.01, 0.003, 0.001):
        found = setting.decode("dyspec", tokens=48, prompts=8, tree_size=768, max_depth=12, width=WIDE,
                               threshold=threshold, **VALUES["as published"])  # fmt: skip
        steps = sorted(zip(found.steps.drafted, found.steps.accepted, strict=True), reverse=True)
        rows.append({"threshold": threshold, **found.row, "steps": [list(each) for each in steps]})
    return {"rows": rows}


def blocks(setting: Setting) -> Row:
    """Figure 9: occupied 32 x 32 blocks of trees that DySpec grew, as it adds their nodes and by heavy path.

    A prefix of p tokens adds p / 32 blocks to each of the rows of blocks, whatever the order.
    """
    rows = []
    for size in (16,) if setting.small else (256, 768, 1024):
        found = setting.decode("dyspec", prompts=2, tokens=24, tree_size=size, max_depth=24, width=min(WIDE, size - 1),
                               **VALUES["as published"])  # fmt: skip
        counts = []
        for parents in (row.tolist() for step in found.steps.parents[:6] for row in step):
            tree = TokenTree(parents)
            orders = [tree.reordered(order)[0] for order in ("breadth_first", "depth_first", "heavy_path")]
            counts.append([each.occupied_blocks(BLOCK) for each in orders])
        by_order = zip(("breadth first", "depth first", "heavy path"), zip(*counts, strict=True), strict=True)
        rows.append({"nodes": size, **{name: round(fmean(each), 1) for name, each in by_order},
                     "prefix of 256": 8 * -(-size // BLOCK)})  # fmt: skip
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


def compared(setting: Setting, size: int, depth: int, prompts: int | None, tokens: int) -> Row:
    """Trees of one size at T = 0 and 0.6: DySpec by both values, Sequoia and SpecInfer."""
    rows, size, depth = [], 8 if setting.small else size, 4 if setting.small else depth
    for temperature in (0.0, 0.6):
        grown = {"tree_size": size, "max_depth": depth, "width": min(WIDE, size // 2)}
        ways = {f"dyspec, {name}": ("dyspec", grown | values) for name, values in VALUES.items()}
        ways["sequoia"] = ("sequoia", {"tree": greedy_tree(DEFAULT_ACCEPTANCE, size, depth)})
        ways["specinfer"] = ("specinfer", {"tree": TokenTree.independent(size // depth, depth)})
        own = {
            name: setting.decode(method, temperature=temperature, prompts=prompts, tokens=tokens, **options)
            for name, (method, options) in ways.items()
        }
        for name, each in own.items():
            row = {"temperature": temperature, "method": name, **each.row}
            rows.append(row | {"over sequoia": difference(each.stats, own["sequoia"].stats)})
    return {"rows": rows}


PARTS = {
    "dyspec-probabilities": probabilities, "dyspec-random-blocks": random_blocks, "dyspec-blocks": blocks,
    "dyspec-phases": phases, "dyspec-64": lambda setting: compared(setting, 64, 8, None, 64),
    "dyspec-thresholds": thresholds, "dyspec-768": lambda setting: compared(setting, 768, 16, 8, 48),
}  # fmt: skip
