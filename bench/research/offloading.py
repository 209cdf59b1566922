"""The part of papers.py for targets larger than a GPU: what papers measured, beside what their constants say.

Sequoia (Chen et al. 2024) and DySpec (Xiong et al. 2024) decode Llamas whose weights lie in the host's memory. Each row
is simulated by bench/simulation/formulas.py. In go

    the GPU's data sheet          memory bandwidth and tensor cores, of which the shares of roofline.py are reached
    the models' config.json       weights, layers, channels
    the row's baseline            published seconds of a token without a draft, by the same engine: the time of the link
    the row's tokens a step       published for its tree, and the size and depth of that tree

and out come the seconds of a token with trees. Nothing is fitted to these. The engine reads one layer after it has
computed the one before: in Infini-AI-Lab/Sequoia, Engine/offload_engine.py, both are queued on one stream; DySpec's is
adapted from it. So steps are `ahead=False`.

Behind them stands what scale.py measured of this repository's own stream, whose reads it slows down to a rate that is
known: there nothing at all is taken from what was measured, and steps read ahead.

ratio   simulated over published: above 1 the simulation is too slow
flat    the same if a tree cost no more than a token: the baseline divided by the tokens of a step

Where the tokens of a step were not published, a pair's row on the RTX 4090 gives them for that on the 2080 Ti.

Assumed: Llama-2-70B on the RTX 4090 was drafted as in Sequoia's table 2 at temperature 0.6. Pairs with TinyLlama had
the same tree, too; DySpec's and Sequoia's trees in DySpec's tables had 18 levels, SpecInfer's of 64 nodes 16.

DySpec's table 3 has 18 rows, each over the baseline of its text and temperature, which table 4 has, too. No engine as
above can have its row on C4 at T = 0: a step of 9.10 tokens of 0.537 s takes 4.9 s, less than the 5.6 s of a token
without a tree.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import beside  # noqa: F401
from common import Row
from published import PLAIN_SECONDS, TABLE_3, TABLE_4
from simulation.formulas import Setting
from simulation.hardware import DEVICES
from simulation.shapes import SHAPES, ModelSize

BLOG = "together.ai/blog/sequoia, March 2024"
TABLE_2 = "Sequoia, NeurIPS 2024, table 2; baseline: arXiv 2402.12374v2, abstract"
DYSPEC_3, DYSPEC_4 = "DySpec, arXiv 2410.11744, table 3", "DySpec, arXiv 2410.11744, table 4"
SEQUOIA, SPECINFER, SMALL = (768, 18), (769, 48), (64, 18)  # nodes and levels; SpecInfer: 16 sequences of 48
HERE = "this repository: python bench/scale.py stream"
OWN = Path(__file__).parents[1] / "results/scale-stream-slow-cpu.json"


@dataclass(frozen=True)
class Published:
    """A published row. tokens: of a step; None where only seconds were published. Seconds are those of a token."""

    source: str
    what: str
    device: str
    target: str
    setting: Setting
    tree: tuple[int, int]
    seconds: float
    tokens: float | None

    @property
    def step(self) -> float:
        """Simulated seconds of a step."""
        nodes, depth = self.tree
        return self.setting.step(nodes, depth)

    @property
    def simulated(self) -> float | None:
        """Simulated seconds of a token; None without the tokens of a step."""
        return None if self.tokens is None else self.step / self.tokens

    @property
    def ratio(self) -> float | None:
        """Simulated over published."""
        return None if self.simulated is None else self.simulated / self.seconds

    @property
    def flat(self) -> float | None:
        """As `ratio`, if a tree cost no more than a token: what the tokens of a step say alone."""
        return None if self.tokens is None else self.setting.step(1, 0) / self.tokens / self.seconds


def of_paper(device: str, target: str, draft: str, plain: float) -> Setting:
    """A paper's engine, whose link is as fast as its baseline says."""
    return Setting(DEVICES[device], SHAPES[target], SHAPES[draft], memory=0.0, ahead=False, plain=plain)


LLAMA = ("llama-2-70b", "llama-2-7b")
PAIRS = {  # target, draft: seconds of a token by trees, and without, on the RTX 4090 and on the 2080 Ti
    ("vicuna-33b", "tinyllama-1.1b"): ((0.35, 1.78), (0.87, 4.81)),
    ("llama-2-22b", "tinyllama-1.1b"): ((0.17, 0.95), (0.53, 3.04)),
    ("llama-2-13b", "tinyllama-1.1b"): ((0.09, 0.27), (0.34, 1.53)),
}
ON_AN_L40 = {  # target, draft, temperature: Sequoia's seconds and tokens, SpecInfer's speed-up over 5.7 s and tokens
    ("llama-2-70b", "llama-2-7b", 0.0): ((0.66, 10.30), (5.7, 7.63)),
    ("llama-2-70b", "llama-2-7b", 0.6): ((0.68, 9.91), (5.2, 7.03)),
    ("llama-3-70b", "llama-3-8b", 0.0): ((0.60, 11.68), (7.0, 9.07)),
    ("llama-3-70b", "llama-3-8b", 0.6): ((0.61, 11.37), (6.1, 8.29)),
}
DEEPSPEED, OWN_ENGINE = 5.7, 5.6  # seconds of a token: what speed-ups are over; Sequoia's engine without trees


def rows() -> list[Published]:
    """All published rows."""
    blog, sequoia = of_paper("rtx-4090", *LLAMA, 4.54), "Sequoia"
    found = [Published(BLOG, sequoia, "rtx-4090", LLAMA[0], blog, SEQUOIA, 0.57, 9.91)]
    for (target, draft), (on_4090, on_2080) in PAIRS.items():
        setting = of_paper("rtx-4090", target, draft, on_4090[1])
        given = Published(BLOG, sequoia, "rtx-4090", target, setting, SEQUOIA, on_4090[0], None)
        other, tokens = of_paper("rtx-2080-ti", target, draft, on_2080[1]), given.step / given.seconds
        found += [given, Published(BLOG, sequoia, "rtx-2080-ti", target, other, SEQUOIA, on_2080[0], tokens)]
    for (target, draft, temperature), ((seconds, tokens), (faster, fewer)) in ON_AN_L40.items():
        setting, what = of_paper("l40", target, draft, OWN_ENGINE), f"MT-Bench, T = {temperature:g}"
        row = Published(TABLE_2, f"Sequoia, {what}", "l40", target, setting, SEQUOIA, seconds, tokens)
        slow = DEEPSPEED / faster
        found += [row, replace(row, what=f"SpecInfer, {what}", tree=SPECINFER, seconds=slow, tokens=fewer)]
    for texts, plain in PLAIN_SECONDS.items():
        setting = of_paper("a100-40gb", *LLAMA, plain)
        for who, (seconds, tokens) in zip(("DySpec", "Sequoia"), TABLE_4[texts], strict=True):
            what = f"{who}, {texts}"
            found.append(Published(DYSPEC_4, what, "a100-40gb", LLAMA[0], setting, SEQUOIA, seconds, tokens))
        for who, (faster, tokens) in zip(("DySpec", "Sequoia", "SpecInfer"), TABLE_3[texts], strict=True):
            tree, what = (64, 16) if who == "SpecInfer" else SMALL, f"{who}, {texts}"
            found.append(Published(DYSPEC_3, what, "a100-40gb", LLAMA[0], setting, tree, plain / faster, tokens))
    return found


def own_rows() -> list[Published]:
    """What scale.py measured of this stream at 100 MB/s: a Llama of 12 layers of 51 MB in fp32, of which 11 pass.

    No constant is taken from what was measured. The default tree of 768 nodes has 9 levels.
    """
    target = ModelSize.llama(12, 1024, 2816, 32, 32, 1024, itemsize=4)
    measured = json.loads(OWN.read_text(encoding="utf-8"))
    layer = (target.weights - target.vocab * target.hidden) / target.layers * 4
    memory = target.nbytes + target.embedding * 4 - 11 * layer
    setting = Setting(
        replace(DEVICES["cpu"], link=measured["environment"]["rate"]), target,
        ModelSize(weights=433_120, layers=1, hidden=160, vocab=1024, itemsize=4), memory,
    )  # fmt: skip
    found = []
    for row in measured["rows"]:
        if "tokens_per_step" in row:
            nodes = int(row["way"].split()[-2])
            tree, seconds = (nodes, 9 if nodes > 1 else 0), row["seconds_per_token"]
            found.append(
                Published(HERE, row["way"], "cpu", "0.6 GB, fp32", setting, tree, seconds, row["tokens_per_step"])
            )
    return found


def simulated(setting: object) -> Row:
    """Published rows, and our own, beside what is simulated."""
    return {"rows": [
        {
            "source": row.source, "what": row.what, "device": row.device, "target": row.target, "tree": row.tree,
            "baseline": row.setting.step(1, 0), "tokens": row.tokens, "published": row.seconds,
            "simulated": row.simulated, "ratio": row.ratio, "flat": row.flat,
        }
        for row in [*rows(), *own_rows()]
    ]}  # fmt: skip


PARTS = {"offloading": simulated}
