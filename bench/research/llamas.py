"""The parts of papers.py that need no model: what Sequoia's tables of Llamas say by its own formulas.

A step of n nodes and d levels takes t(n) + d c tokens of plain decoding, so that G tokens a step are G / (t(n) + d c)
times as fast.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

from papers_setting import Row, Setting
from published import LEVEL, TABLE_1, TABLE_5, TABLE_6, TABLES_3_4, time_of
from simulation.formulas import Setting as Machine
from simulation.hardware import DEVICES
from simulation.shapes import SHAPES, ModelSize

from heavypath.speculative import select_tree

Sweep = dict[int, dict[int, float]]  # speed-ups by width and depth
JF68M, SHEARED = ModelSize.llama(2, 768, 3072, 12, 12), ModelSize.llama(24, 2048, 5504, 16, 16)
ON_DEVICE = {  # the pairs of tables 3 and 4: device, target, draft
    "Llama-2-13B, JF68M, A100": ("a100-80gb", "llama-2-13b", JF68M),
    "Vicuna-33B, SL-1.3B, A100": ("a100-80gb", "vicuna-33b", SHEARED),
    "Llama-2-7B, JF68M, L40": ("l40", "llama-2-7b", JF68M),
    "Llama-2-13B, JF68M, L40": ("l40", "llama-2-13b", JF68M),
}
SWEEPS = {"table 5": (TABLE_5, "C4, T = 0"), "table 6": (TABLE_6, "C4, T = 0.6")}


def machine_of(pair: str) -> tuple[Machine, float]:
    """The machine of a pair of tables 3 and 4, and c by its roofline."""
    device, target, draft = ON_DEVICE[pair]
    machine = Machine(DEVICES[device], SHAPES[target], draft)
    return machine, (machine.step(1, 1) - machine.step(1, 0)) / machine.step(1, 0)


def on_devices(setting: Setting) -> Row:
    """Tables 3 and 4: the speed-up of each row by its published tokens and a roofline, over the published one."""
    rows = []
    for pair, published in TABLES_3_4.items():
        machine, level = machine_of(pair)

        def cost(nodes: int, levels: int, machine: Machine = machine, level: float = level) -> float:
            return machine.device(nodes) / machine.device(1) + levels * level

        trees = [tokens / cost(*tree) / speedup for tree, speedup, tokens, _, _ in published]
        five = [tokens / cost(41, 8) / speedup for _, _, _, speedup, tokens in published]
        row = {"pair": pair, "published": span(speedup for _, speedup, _, _, _ in published)}
        row |= {"ratio": span(trees), "ratio of 5 x 8": span(five)}
        rows.append(row | {"ratios": [round(each, 3) for each in (*trees, *five)]})
    return {"rows": rows}


def span(values: Iterable[float]) -> str:
    least, *_, most = sorted(values)
    return f"{least:.2f} to {most:.2f}"


def tokens_of(first: float, exponent: float, width: int, depth: int) -> float:
    """Expected tokens of `width` sequences of `depth` tokens, where none of k children is accepted in (1 - a) k^-b."""
    some = 1 - (1 - first) * width**-exponent
    return 1 + some * (1 - first**depth) / (1 - first)


def vector_of(first: float, exponent: float) -> list[float]:
    """The acceptance of child 1, 2, ... by the same law."""
    left = [(1 - first) * children**-exponent for children in range(1, 129)]
    return [first, *(before - after for before, after in pairwise(left))]


def cells(sweep: Sweep) -> Iterator[tuple[int, int, float, float]]:
    """Width, depth, speed-up and the time of a step, of each cell."""
    for width, row in sweep.items():
        for depth, speedup in row.items():
            yield width, depth, speedup, time_of(1 + width * depth) + depth * LEVEL


def fitted(sweep: Sweep) -> tuple[float, float, float]:
    """a and b of the law whose speed-ups are nearest to a sweep's, and how far they are off: root mean square."""

    def off(first: float, exponent: float) -> float:
        squares = [
            (tokens_of(first, exponent, width, depth) / time / speedup - 1) ** 2
            for width, depth, speedup, time in cells(sweep)
        ]
        return math.sqrt(sum(squares) / len(squares))

    laws = [(first / 200, exponent / 100) for first in range(80, 190) for exponent in range(5, 150)]
    away, (first, exponent) = min((off(*law), law) for law in laws)
    return first, exponent, away


def planned_by_sweeps(setting: Setting) -> Row:
    """Tables 5 and 6: a vector fitted to the cells, and the tree that it and table 1's constants choose."""
    rows = []
    for name, (sweep, text) in SWEEPS.items():
        first, exponent, away = fitted(sweep)
        plan = select_tree(vector_of(first, exponent), {2**power: time_of(2**power) for power in range(8)}, LEVEL)
        published, speedup, _ = TABLE_1[text]
        rows.append({
            "sweep": name, "first child": first, "exponent": exponent, "off": round(away, 4),
            "chosen": f"{len(plan.tree)}, {1 + plan.tree.depth}", "published": f"{published[0]}, {published[1]}",
            "speedup": round(plan.speedup, 3), "published speedup": speedup,
            "best cell": max(speedup for _, _, speedup, _ in cells(sweep)),
        })  # fmt: skip
    return {"rows": rows}


def predicted(tokens: float, length: int) -> float:
    """1 + a + .. + a^length, where 1 + a + .. + a^8 is `tokens`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**level for level in range(9)) < tokens else (low, middle)
    return sum(low**level for level in range(length + 1))


def chains(setting: Setting) -> Row:
    """ERSD's section 5 in the first rows of tables 5 and 6: tokens of chains, less what the shortest one predicts.

    Tokens are speed-ups times the time of a step. A cell is taken to be as uncertain as the fitted law is off.
    """
    rows = []
    for name, (sweep, _) in SWEEPS.items():
        own = {depth: speedup * time for width, depth, speedup, time in cells(sweep) if width == 1}
        _, _, away = fitted(sweep)
        for length, tokens in own.items():
            if length > 8:
                expected = predicted(own[8], length)
                error = math.hypot(tokens * away, predicted(own[8] * (1 + away), length) - expected)
                rows.append({
                    "sweep": name, "length": length, "predicted": round(expected, 3), "published": round(tokens, 3),
                    "over predicted": [round(tokens - expected, 3), round(error, 3)],
                })  # fmt: skip
    return {"rows": rows}


PARTS = {"llamas-devices": on_devices, "llamas-sweeps": planned_by_sweeps, "llamas-chains": chains}
