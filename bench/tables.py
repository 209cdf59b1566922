"""The tables and figures of the documentation, from bench/results/*.json, for cog.

    cog -r -I bench README.md docs/*.md            # writes them again after a measurement
    cog --check -I bench README.md docs/*.md       # fails where a page differs from the results

In Markdown a block names a function of this file:

    <!-- [[[cog import tables; tables.headline() ]]] -->
    <!-- [[[end]]] -->

Each function writes a table, and below it the command, the machine and the date of the measurement.
"""

import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import cog
from predict import compared

BENCH = Path(__file__).parent
GREEDY, SAMPLED = 0.0, 0.6
PROMPTS = 24  # in speculative/demo/prompts.json: a sweep that asks for more has these
Row = dict[str, Any]


def results(name: str, on: str = "cpu") -> Row:
    return json.loads((BENCH / "results" / f"{name}-{on}.json").read_text(encoding="utf-8"))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """All columns but the first are right-aligned; None is an empty cell."""
    cog.outl(f"| {' | '.join(heads)} |")
    cog.outl(f"|{'|'.join(['---'] + ['---:'] * (len(heads) - 1))}|")
    for row in rows:
        cog.outl(f"| {' | '.join('' if each is None else str(each) for each in row)} |")


def source(*names: str, texts: bool = False, also: str = "", on: str = "cpu") -> None:
    """Where the figures come from. texts: also say how many were decoded. also: what else is to be said."""
    cog.outl()
    for name in names:
        facts = results(name, on)["environment"]
        threads = facts.get("threads", 1)
        tried = [threads] if isinstance(threads, int) else threads
        ran = f"{' and '.join(map(str, tried))} thread{'s' * (tried != [1])}"
        ran += also
        if texts:
            new = facts.get("max_new_tokens") or facts["tokens"]
            known = facts["prompts"] <= PROMPTS
            prompts = f"{facts['prompts']} prompts" if known else f"{PROMPTS} prompts (there are no more)"
            ran += f"; {prompts} of {new} new tokens"
            ran += f", {facts['seeds']} seeds" if "seeds" in facts else ""
        cog.outl(f"*`{facts['command']}`; {facts['device']}, {ran}; {facts['date']}*" + "  " * (name != names[-1]))


def spread(values: Sequence[float] | None, digits: int = 2) -> str | None:
    """A median and its quartiles."""
    if values is None:
        return None
    middle, low, high = (f"{value:,.{digits}f}" for value in values)
    return f"{middle} ({low} - {high})"


def percent(value: float) -> str:
    return f"{100 * value:+.1f}%"


def code(name: str) -> str:
    return f"`{name}`"


def grouped(cells: Iterable[tuple[str, object]]) -> list[list[object]]:
    """Rows of a table: a name, and behind it the cells that have it."""
    rows: dict[str, list[object]] = {}
    for name, cell in cells:
        rows.setdefault(name, [name]).append(cell)
    return [*rows.values()]


def cells(name: str, pair: str = "shipped") -> dict[float, dict[str, Row]]:
    """Rows of peers.py by temperature and name."""
    found = [cell for cell in results(name)["cells"] if cell["pair"] == pair]
    return {cell["temperature"]: {row["name"]: row for row in cell["rows"]} for cell in found}


def best(cell: dict[str, Row], *names: str) -> Row | None:
    """The fastest row whose name begins so; only rows of one sequence that keep the target's distribution count."""
    own = [row for row in cell.values() if row["name"].startswith(names) and "*" not in row["name"] and row["lossless"]]
    return max(own, key=lambda row: row["tokens_per_second"][0], default=None)


def headline() -> None:
    """For the README: peers, plain decoding, a chain, a tree; a tree with the head where measured."""
    found = cells("peers")

    def peer(name: str, start: str) -> list[Any]:
        line: list[Any] = [name]
        for temperature in (GREEDY, SAMPLED):
            row = best(found[temperature], start)
            line += [spread(row and row["tokens_per_second"], 0) or "-", None, None]
        return line

    def ours(name: str, method: str) -> list[Any]:
        line: list[Any] = [name]
        for temperature in (GREEDY, SAMPLED):
            row = found[temperature][method]
            plain = method.startswith("autoregressive")
            line += [spread(row["tokens_per_second"], 0), over_peers(row), None if plain else spread(row["over_plain"])]
        return line

    wanted = {
        "plain decoding": "autoregressive", "chain": "chain", "tree": "sequoia", "tree, EAGLE head": "sequoia+head",
    }  # fmt: skip
    rows = [ours(f"{name}, `{method}`", method) for name, method in wanted.items() if method in found[GREEDY]]
    peers = [peer("transformers, its best", "transformers"), peer("llama.cpp, its best", "llama-")]
    if len(rows) + len(peers) > 6:  # one row for both
        both = zip(*peers, strict=True)
        peers = [[None if pair == (None, None) else " / ".join(map(str, pair)) for pair in both]]
    heads = [f"tokens/s, T = {temperature:g}" for temperature in (GREEDY, SAMPLED)]
    ratios = ["over transformers / llama.cpp", "speculation"]
    table(["", heads[0], *ratios, heads[1], *ratios], [*peers, *rows])
    source("peers")


def over_peers(row: Row) -> str:
    """Over transformers and over llama.cpp, each at its best."""
    text = f"{row['over_transformers'][0]:.2f}"
    return text + (f" / {row['over_llama_cpp'][0]:.2f}" if row["over_llama_cpp"] else "")


def peers(machine: str = "") -> None:
    """Everything beside llama.cpp and transformers, for the shipped pair and for the enlarged one.

    machine: how the results of another machine than the usual one are named, such as "-avx2"
    """
    of_shipped, of_enlarged = f"peers{machine}", f"peers-enlarged{machine}"
    found = cells(of_shipped)
    columns = [found[GREEDY], found[SAMPLED], cells(of_enlarged, "enlarged")[GREEDY]]

    def line(name: str, rows: Sequence[Row | None]) -> list[Any]:
        cells = [name]
        for row in rows:
            speed = row and f"{row['tokens_per_second'][0]:,.0f}"
            over = row and (row["over_plain"] or row["over_transformers"])
            shown = None if row is None or row["name"].startswith(("trans", "llama")) else over
            text = over_peers(row) if row and row["name"] == "autoregressive" else spread(shown) or ""
            cells += [speed or "-", text]
        return cells

    rows = [
        line("llama.cpp, plain", [best(each, "llama-completion") for each in columns]),
        line("llama.cpp, with a draft", [best(each, "llama-speculative") for each in columns]),
        line("transformers, `generate`", [each.get("transformers generate") for each in columns]),
        line("transformers, assisted", [each.get("transformers assisted") for each in columns]),
    ]
    names = [name for name, row in found[GREEDY].items() if row["over_plain"]]
    rows += [line(code(name), [each.get(name) for each in columns]) for name in names]
    heads = [head for each in ("T = 0", "T = 0.6", "enlarged, T = 0") for head in (f"{each}: tokens/s", "ratio")]
    table(["", *heads], rows)
    source(of_shipped, of_enlarged, texts=True)


def slower_than_plain() -> None:
    """One sentence: the methods that lose against plain decoding."""
    found = cells("peers")
    for temperature in (GREEDY, SAMPLED):
        rows = [row for row in found[temperature].values() if row["over_plain"] and row["over_plain"][0] < 1]
        names = ", ".join(f"`{row['name']}` ({row['over_plain'][0]:.2f})" for row in rows)
        cog.outl(f"Slower than plain decoding at T = {temperature:g}: {names or 'none'}.")


def drafts() -> None:
    """Tokens per forward pass by kind of draft, at T = 0.6."""
    found = results("drafts-kinds")["rows"]
    chain, tree = ({r["draft"]: r for r in found if r["method"] == method} for method in ("chain", "dyspec"))
    rows = [
        [draft, f"{row['overlap']:.2f}", f"{row['tokens_per_forward']:.2f}", f"{tree[draft]['tokens_per_forward']:.2f}"]
        for draft, row in chain.items()
    ]
    table(["draft", "first token accepted", "tokens/forward, `chain` of 5", "`dyspec`, 64 nodes"], rows)
    source("drafts-kinds", texts=True)


def retrieval() -> None:
    found = [row for row in results("retrieval")["rows"] if "tokens_per_forward" in row]
    names = dict.fromkeys(row["draft"] for row in found)
    named = [(f"`{row['method']}`, T = {row['temperature']:g}", row["tokens_per_forward"]) for row in found]
    rows = grouped((name, f"{tokens:.2f}") for name, tokens in named)
    table(["tokens/forward", *names], rows)
    source("retrieval", texts=True)


def recall() -> None:
    """Tokens per forward pass in the first and the last round of texts of the same prompts."""
    found = results("recall")["rows"]
    rounds = [(row["draft"], row["tokens_per_forward"]) for row in found]
    rows = grouped((draft, f"{each[0]:.2f} -> {each[-1]:.2f}") for draft, each in rounds)
    temperatures = dict.fromkeys(row["temperature"] for row in found)
    table(["tokens/forward", *(f"T = {each:g}" for each in temperatures)], rows)
    source("recall")


def nodes() -> None:
    """Tokens per forward pass for an equal budget of nodes, and what planning expected."""
    found: dict[str, dict[tuple, str]] = {}
    places = [(temperature, size) for temperature in (0.0, 0.6, 1.0) for size in (32, 64)]
    for row in results("efficiency")["rows"]:
        name, _, sequences = row["method"].partition(", ")
        published = name.endswith(" as published")
        name = name.removesuffix(" as published")
        name = f'{code(name)}, `confidence="draft"`' if published else code(name)
        expected = f" ({row['expected']:.2f})" if row.get("expected") else ""
        shown, place = f"{row['block_efficiency']:.2f}{expected}", (row["temperature"], row["size"])
        if not sequences:
            found.setdefault(name, {})[place] = shown
            continue
        fixed, planned = (found.setdefault(f"{name}, {each}", {}) for each in ("3 sequences", "planned number"))
        if sequences == "3 sequences":
            fixed[place] = shown
            planned.setdefault(place, shown)  # which is 3, if there is no other row
        else:
            planned[place] = shown
    heads = [f"T = {temperature:g}, {size} nodes" for temperature, size in places]
    table(["", *heads], [[name, *(row.get(place) for place in places)] for name, row in found.items()])
    source("efficiency", texts=True)


def expected() -> None:
    """Tokens per forward pass that a profile promises, those decoded, and how far apart they are with the error."""
    heads, found = [], []
    for name in ("expected", "expected-longer"):
        rows, texts = results(name)["rows"], results(name)["environment"]["texts"]
        heads += [f"T = {each:g}, {texts} texts" for each in dict.fromkeys(row["temperature"] for row in rows)]
        for row in rows:
            shown = f"{row['expected']:.2f} / {row['decoded']:.2f}, {percent(row['off'])} ({100 * row['error']:.1f})"
            found.append((f"{code(row['method'])}, {row['nodes']} nodes", shown))
    table(["expected / decoded, off (error)", *heads], grouped(found))
    facts = results("expected")["environment"]
    source("expected", also=f"; texts of {facts['tokens']} tokens after each of {facts['prompts']} prompts")
    source("expected-longer")


def verifiers() -> None:
    """More tokens per forward pass than recursive rejection has, with the standard error."""
    found: dict[str, dict[tuple, Row]] = {}
    for row in results("verifiers")["rows"]:
        found.setdefault(row["tree"], {})[row["temperature"], row["verifier"]] = row
    rows = []
    for tree, cells in found.items():
        line = [tree]
        for temperature in (0.6, 1.0):
            line.append(f"{cells[temperature, 'rejection']['tokens_per_forward']:.2f}")
            for name in ("held", "traversal", "held_traversal"):
                row = cells.get((temperature, name))
                line.append("refused" if row is None else f"{percent(row['gain'])} ({100 * row['gain_error']:.1f})")
        rows.append(line)
    heads = [(f"T = {each}: rejection", "`held`", "`traversal`", "`held_traversal`") for each in (0.6, 1)]
    table(["tree", *heads[0], *heads[1]], rows)
    source("verifiers", texts=True)


def default_verifiers() -> None:
    """What the defaults of a CPU bring over the papers' rules for the default trees."""
    found = {(row["tree"], row["temperature"], row["verifier"]): row for row in results("verifiers-default")["rows"]}
    rows = []
    for tree in dict.fromkeys(tree for tree, *_ in found):
        default = "held_traversal" if (tree, 0.6, "held_traversal") in found and tree != "chain" else "traversal"
        line = [code(tree), code(default)]
        for temperature in (0.6, 1.0):
            row = found[tree, temperature, default]
            line += [f"{percent(row['gain'])} ({100 * row['gain_error']:.1f})", f"{row['speed']:.2f}"]
        rows.append(line)
    table(["", "default", "T = 0.6: tokens", "speed", "T = 1: tokens", "speed"], rows)
    source("verifiers-default", texts=True)


def batches() -> None:
    """Over transformers' generate of the same batch; for mixed lengths over plain decoding of the same batch."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in results("batch_sizes")["rows"]:
        found.setdefault((row["batch"], row["temperature"]), {})[row["way"] + row.get("lengths", "")] = row
    rows = []
    for (batch, temperature), ways in found.items():
        line = [f"{batch}, T = {temperature:g}"]
        for way in ("default", "5 nodes", "2 nodes", "plain"):
            mixed = ways.get(f"{way}mixed")
            line.append(f"{ways[way]['median']:.1f}" + (f" / {mixed['median']:.2f}" if mixed else ""))
        rows.append(line)
    table(["batch", "default trees", "5 nodes", "2 nodes", "no draft"], rows)
    source("batch_sizes")


def in_vain() -> None:
    """Defaults over plain decoding where the draft is of no use; the shipped draft alone is left out."""
    rows = [row for row in results("in-vain")["rows"] if row["draft"] != "the shipped draft"]
    shown = grouped((row["draft"], spread([row["median"], *row["quartiles"]])) for row in rows)
    table(["draft", "T = 0", "`ersd`, T = 0.6"], shown)
    source("in-vain")


def ragged() -> None:
    found = results("ragged")["rows"]
    ratios = " and ".join(f"{row['ratio']:.2f} times as fast with `{row['method']}`" for row in found)
    cog.outl(f"A batch is {ratios} if finished sequences are removed.")
    source("ragged")


def disk() -> None:
    """Targets on disk: this package's stream beside accelerate's offloading."""
    rows: list[Sequence[object]] = []
    for size, name in (("8 GB", "scale-stream"), ("26 GB", "scale-stream-26"), ("0.6 GB", "scale-stream-slow")):
        for row in results(name)["rows"]:
            if "seconds_per_token" in row:
                speed = row.get("bandwidth") and f"{row['bandwidth'] / 1e9:.2f}"
                waited = None if row.get("waited") is None else f"{100 * row['waited']:.0f}%"
                step = f"{row['tokens_per_step']:.2f}"
                rows.append([f"{size}: {row['way']}", f"{row['seconds_per_token']:.2f}", step, speed, waited])
    table(["target", "s/token", "tokens/step", "GB/s", "waited"], rows)
    source("scale-stream", "scale-stream-26", "scale-stream-slow")


def serving() -> None:
    rows = [[row["way"], row["load"], f"{row['tokens_per_second']:,.0f}", f"{row['requests_per_second']:.1f}",
             f"{row['first_p50_ms']:,.0f} / {row['first_p99_ms']:,.0f}",
             f"{row['between_p50_ms']:.1f} / {row['between_p99_ms']:.1f}"]
            for row in results("serving")["rows"]]  # fmt: skip
    heads = ["tokens/s", "requests/s", "first token, ms (p50 / p99)", "between tokens, ms (p50 / p99)"]
    table(["way", "load", *heads], rows)
    source("serving")


def soak() -> None:
    found = results("soak")
    asked, memory = found["requests"], found["resident_mb"]
    early, late = memory[len(memory) // 6][1], memory[-1][1]
    slow = asked.get("of these read slowly", 0)
    slowly = f" ({slow:,} of them read slowly)" if slow else ""
    cog.outl(
        f"In {found['environment']['minutes']:g} minutes {asked['answered']:,} requests were answered{slowly}, "
        f"{asked['dropped']:,} were dropped by their clients and {asked['refused']:,} were refused. "
        f"{len(found['wrong']) or 'None'} had a wrong text. "
        f"Memory was {early:.0f} MB after {memory[len(memory) // 6][0]} s and {late:.0f} MB at the end."
    )
    source("soak")


def turns() -> None:
    found = results("turns")
    each = found["first_ms"] | {"ratio": found["ratio"]}
    kept, none, ratio = (list(each[name].values()) for name in ("kept", "none", "ratio"))
    cog.outl(
        f"In a service, {found['environment']['conversations']} conversations: a second turn's first token after "
        f"{spread(kept, 0)} ms where ended texts are kept, {spread(none, 0)} ms where not, ratio {spread(ratio)}. "
        f"{found['wrong'] or 'No'} texts differed."
    )
    source("turns")


def chat() -> None:
    rows = [[code(row["method"]), f"{row['ms']:.0f}", f"{row['ms_with_past']:.0f}"]
            for row in results("chat")["rows"]]  # fmt: skip
    table(["second turn, first token", "without `past=`, ms", "with `past=`, ms"], rows)
    source("chat")


# Of large.py in predictions.json, by field. What is missing here is not shown: its prediction has other kernels.
LARGE = {
    "step_ms": "whole step", "over_limit": "whole step / reading the target", "models_ms": "passes of both models",
    "rest": "share of the step outside the models", "record_seconds": "recording the CUDA graph",
}  # fmt: skip

MODELS = {"large": "`sequoia`", "head": "`sequoia`, 8B with an EAGLE-3 head"}  # by file


def predictions() -> None:
    """What was predicted for a GPU, beside what was measured on an H200 so far."""
    rows = []
    for each in json.loads((BENCH / "predictions.json").read_text(encoding="utf-8"))["figures"]:
        where, unit, predicted, bounds = each["where"], each["unit"], each["predicted"], each["range"]
        if each["file"] in MODELS and where["method"] == "sequoia" and each.get("field") in LARGE:
            name = f"{MODELS[each['file']]}, {where['nodes']} nodes: {LARGE[each['field']]}"
        elif "64 x 128256" in where.get("case", ""):
            name = f"{each['file'].removeprefix('kernel_')}, {where['case']}".replace("_", " ")
        else:
            continue
        spans = {gpu: "{:.3g} - {:.3g}".format(*bounds[gpu]) for gpu in predicted}
        cells = [f"{predicted[gpu]:.3g} ({spans[gpu]}) {unit}".strip() for gpu in ("H100", "H200")]
        found = compared(BENCH / "results", [each | {"file": f"{each['file']}-h200"}])
        rows.append([name, *cells, found[0]["measured"].strip() if found else "not yet"])
    table(["figure", "H100", "H200", "H200, measured"], rows)
    cog.outl()
    cog.outl("*Predicted: `bench/predictions.json`, by `python bench/predict.py step` and its siblings*")


def first_on_gpu() -> None:
    """Milliseconds a token or a step of an 8B target, and how fast all its weights are read."""
    head = results("head", "h200")
    rows: list[list[object]] = []
    for row in head["rows"]:
        step = [f"{row[field]:.2f}" if row[field] else None for field in ("step_ms", "alone_ms", "over_limit")]
        rows.append([row["method"], row["nodes"], f"{row['tokens_per_second']:.0f}", *step])
    table(["8B, batch 1", "nodes", "tokens/s", "ms a step", "alone, again and again", "/ reading the weights"], rows)
    source("head", on="h200")
    cog.outl()
    ways = {"products": "products", "few rows": "by `few_rows`", "pass": "pass", "ahead 32/6": "with requests ahead"}
    every = results("weight_stream", "h200")["rows"]
    shapes = dict.fromkeys((row["shape"], row["rows"]) for row in every)
    found = {(row["shape"], row["rows"], row["way"]): row for row in every}
    rows = [
        [shape, nodes, *("{ms:.2f} ({copy:.2f})".format(**found[shape, nodes, way]) for way in ways)]
        for shape, nodes in shapes
    ]
    table(["weights of", "nodes", *ways.values()], rows)
    source("weight_stream", on="h200")


def offloading() -> None:
    """The papers' seconds per token for large targets: published, and simulated."""
    groups: dict[str, list[Row]] = {}
    for row in results("papers")["offloading"]["rows"]:
        if row["ratio"] is not None:
            groups.setdefault(row["source"].split("; ")[0], []).append(row)
    ours = "this repository: python bench/scale.py stream"
    rows = []
    for paper, own in groups.items():
        spans = [[row[field] for row in own] for field in ("published", "ratio", "flat")]
        name = "our stream on a CPU, 100 MB/s" if paper == ours else paper
        rows.append([name, len(own), *(f"{min(values):.2f} to {max(values):.2f}" for values in spans)])
    table(["published in", "rows", "published, s/token", "simulated / published", "flat / published"], rows)
    own = [row for paper, each in groups.items() if paper != ours for row in each]

    def off(some: Sequence[Row]) -> str:
        """How far simulation is off on average, and flat."""
        means = (100 * fmean(abs(row[field] - 1) for row in some) for field in ("ratio", "flat"))
        return " and ".join(f"{mean:.1f}%" for mean in means)

    near = [sum(abs(row[field] - 1) <= 0.15 for row in own) for field in ("ratio", "flat")]
    small, large = [row for row in own if row["tree"][0] <= 64], [row for row in own if row["tree"][0] > 64]
    cog.outl()
    cog.outl(
        f"Of the {len(own)} published rows simulation is within 15% in {near[0]}, and flat in {near[1]}; they are "
        f"{off(own)} off on average, {off(small)} up to 64 nodes ({len(small)} rows), {off(large)} for about 768."
    )
    cog.outl()


def part(source: str, *rules: str) -> None:
    """The fields and rows of a part of research/papers.py that research/book.py shows, and verdicts on it."""
    own = book()
    heads = ["ahead by" if field == "first over it" else field for field in own.SHOWN[source][0]]
    table(heads, own.result_rows(source, results("papers")[source]))
    cog.outl()
    verdicts(source, *rules)


def verdicts(source: str, *rules: str) -> None:
    """The command of a part, and whether results show what a paper claims, by rules of research/verdicts.py."""
    own, found = book(), results("papers")[source]
    number, said = found["prompts"], [own.judged(found, rule) for rule in rules]
    words = code(found["command"].removeprefix("python bench/research/papers.py "))
    words += "" if number == PROMPTS else f", {number} prompt{'s' * (number > 1)}"
    words += f". Shown if {'; if '.join(said)}." if said else "."
    cog.outl(words)
    cog.outl()


def ahead(*parts: str) -> None:
    """RSD's experiments by group: the best of its families over the best of the others; decoded ones are not judged."""
    from papers_table import by_group  # which imports this module

    own, rows = book(), []
    for source in parts:
        found = results("papers")[source]
        exact = all("contexts" in row for row in found["rows"])
        rows.append([
            code(found["command"].removeprefix("python bench/research/papers.py ")),
            "; ".join(f"{group}: {own.printed(more)}" for group, more in by_group(found)),
            own.judged(found, "family_ahead").split(": ")[1] if exact else "not judged",
        ])  # fmt: skip
    table(["part", "RSD's best less the best of the others", "verdict"], rows)


def book() -> Any:
    if str(BENCH / "research") not in sys.path:
        sys.path.append(str(BENCH / "research"))
    return importlib.import_module("book")
