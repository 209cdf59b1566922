"""The table of default trees in docs/results.md, from the sweep `defaults` of bench/decoding.py."""

from tables import Row, code, results, source, table


def defaults() -> None:
    """Default trees over plain decoding and over the best chain, with standard errors; and the slowest default."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in results("defaults")["rows"]:
        found.setdefault((row["draft"], row["temperature"], row["batch"]), {})[row["way"]] = row
    rows = []
    for (draft, temperature, batch), ways in found.items():
        own, race = ways["sequoia"], ways["ersd"]
        methods = [way for way in ways if way != "plain" and not way.startswith("chain of")]
        slowest = min(methods, key=lambda way: ways[way]["to_plain"])
        rows.append(
            [
                f"{draft}, T = {temperature:g}" + (f", batch of {batch}" if batch > 1 else ""),
                f"{own['to_plain']:.2f} ± {own['to_plain_error']:.2f}",
                f"{own['to_chain']:.2f} ± {own['to_chain_error']:.2f} ({own['best_chain'].removeprefix('chain of ')})",
                f"{race['to_plain']:.2f} ± {race['to_plain_error']:.2f}",
                f"{code(slowest)} {ways[slowest]['to_plain']:.2f} ± {ways[slowest]['to_plain_error']:.2f}",
            ]
        )
    heads = ["`sequoia` / plain", "/ best chain (its levels)", "`ersd` / plain", "the slowest method / plain"]
    table(["draft", *heads], rows)
    source("defaults")
