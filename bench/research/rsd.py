"""The parts of papers.py that repeat RSD (Jeon et al. 2024, arXiv 2402.14160), experiments 1 and 2 with all shapes.

The tables rsd-1 and rsd-2 have them at T = 0.6 with every verifier.

Accuracy is how alike a text is to what its file has after the prompt, from 0 to 1: twice the characters that match in
order, over those of both (difflib). The files are the running Python's, where the prompts were taken from.
"""

import re
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from functools import partial
from statistics import fmean, stdev

import torch
from demo_pair.corpus import read_corpus
from papers_cells import Cell, rsd_1, rsd_2
from papers_setting import Decoded, Row, Setting, difference
from rejection import kseq_multiplier, least_rejection, rounds_rejection, uncovered

FAMILIES = {1: ("RSD-S",), 2: ("RSD-C", "RSD-S")}  # of which the paper has one ahead of all others, by experiment
SAMPLINGS: dict[str, dict] = {
    "0.3": {"temperature": 0.3}, "0.6": {"temperature": 0.6}, "1": {"temperature": 1.0, "top_p": 0.95},
}  # fmt: skip


def continuations(prompts: list[str], characters: int = 400) -> list[str | None]:
    """What stands behind each prompt in its file, less the indentation that the prompt was taken out of."""
    files, found = [source.text for source in read_corpus() if source.held_out], []
    for prompt in prompts:
        lines = r"\n".join(
            rf"([ \t]*){re.escape(line)}" if line.strip() else r"([ \t]*)" for line in prompt.split("\n")
        )
        hits = (match for text in files if (match := re.search(lines, text)))
        match = next(hits, None)
        indent = match[1] if match else ""
        found.append(match and match.string[match.end() :][: 2 * characters].replace("\n" + indent, "\n")[:characters])
    return found


def accuracy(setting: Setting, decoded: Decoded, truth: list[str | None]) -> list[float]:
    """The mean over the prompts whose file is at hand, and its standard error."""
    texts = setting.pair.tokenizer.batch_decode(decoded.sequences)
    alike = [SequenceMatcher(None, text, true[: len(text)], autojunk=False).ratio()
             for text, true in zip(texts, truth, strict=True) if true is not None]  # fmt: skip
    return [round(fmean(alike), 4), round(stdev(alike) / len(alike) ** 0.5, 4)] if len(alike) > 1 else []


def experiment(setting: Setting, number: int, cells: Callable[[float], Iterator[Cell]], sampling: str) -> Row:
    """All shapes of an experiment with one sampling, and plain decoding for the accuracy.

    ahead: of each group, the best of the paper's families over the best of the others, in pairs.
    """
    options, truth = SAMPLINGS[sampling], continuations(setting.prompts)
    plain = setting.decode("autoregressive", tokens=48, **options)
    rows: list[Row] = [
        {"group": "", "label": "plain decoding", **plain.row, "accuracy": accuracy(setting, plain, truth)}
    ]
    best: dict[str, dict[bool, Decoded]] = {}
    for cell in [*cells(0.6)][: 3 if setting.small else None]:
        own = setting.decode(cell.method, tokens=48, **options, **cell.options)
        group, ours = best.setdefault(cell.group, {}), cell.label.split()[0] in FAMILIES[number]
        if ours not in group or own.row["tokens"] > group[ours].row["tokens"]:
            group[ours] = own
        rows.append({"group": cell.group, "label": cell.label, **own.row, "accuracy": accuracy(setting, own, truth)})
    ahead = {name: difference(each[True].stats, each[False].stats) for name, each in best.items() if len(each) == 2}
    known = sum(each is not None for each in truth)
    return {"sampling": options, "rows": rows, "ahead": ahead, "continuations": known}


def bernoulli(setting: Setting) -> Row:
    """Figure 1: how often one of two children is accepted where P = (p, 1 - p) and Q = (q, 1 - q), by rule.

    Two children that are drawn without replacement are both tokens there are, so that recursive rejection always
    accepts. The others draw independently; "optimal" is what optimal transport leaves to any of them.
    """
    rows = []
    for p in (0.1, 0.3, 0.5):
        for q in (0.1, 0.3, 0.5, 0.7, 0.9):
            target, draft = (torch.tensor([[each, 1 - each]], dtype=torch.float64) for each in (p, q))
            multiplier = kseq_multiplier(target, draft, 2)
            rates = {
                "K-SEQ": uncovered(target, draft, multiplier), "multi-round": rounds_rejection(target, draft, 2),
                "optimal": least_rejection(target, draft, 2),
            }  # fmt: skip
            accepted = {name: round(1 - float(rate[0, 1]), 4) for name, rate in rates.items()}
            rows.append({"p": p, "q": q, **accepted, "recursive": 1.0})
    return {"rows": rows}


PARTS: dict[str, Callable[[Setting], Row]] = {"rsd-bernoulli": bernoulli} | {
    f"rsd-{number}-at-{sampling}": partial(experiment, number=number, cells=cells, sampling=sampling)
    for number, cells in ((1, rsd_1), (2, rsd_2))
    for sampling in SAMPLINGS
}
