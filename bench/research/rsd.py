"""The parts of papers.py that repeat RSD (Jeon et al. 2024, arXiv 2402.14160), experiments 1 and 2 with all shapes.

Accuracy is how alike a text is to what its file has after the prompt, from 0 to 1: twice the characters that match in
order, over those of both (difflib). The files are the running Python's, where the prompts were taken from.
"""

import re
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from functools import partial
from statistics import fmean, stdev

from papers_cells import Cell, rsd_1, rsd_2
from papers_setting import Decoded, Row, Setting

from heavypath.speculative.demo.corpus import read_corpus

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


def experiment(setting: Setting, cells: Callable[[float], Iterator[Cell]], sampling: str) -> Row:
    """All shapes of an experiment with one sampling, and plain decoding for the accuracy."""
    options, truth = SAMPLINGS[sampling], continuations(setting.prompts)
    plain = setting.decode("autoregressive", **options)
    rows: list[Row] = [
        {"group": "", "label": "plain decoding", **plain.row, "accuracy": accuracy(setting, plain, truth)}
    ]
    for cell in [*cells(0.6)][: 3 if setting.small else None]:
        own = setting.decode(cell.method, **options, **cell.options)
        rows.append({"group": cell.group, "label": cell.label, **own.row, "accuracy": accuracy(setting, own, truth)})
    return {"sampling": options, "rows": rows, "continuations": sum(each is not None for each in truth)}


PARTS = {
    f"rsd-{number}-at-{sampling}": partial(experiment, cells=cells, sampling=sampling)
    for number, cells in ((1, rsd_1), (2, rsd_2))
    for sampling in SAMPLINGS
}
