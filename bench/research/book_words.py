"""What is said in the reproduction book of a part's results: a sentence each, with standard errors."""

from collections.abc import Callable, Sequence
from typing import Any

Found = dict[str, Any]
SURE = "{tokens:.2f} ± {error:.2f}"  # of a row, for `rows`


def sure(row: Found) -> str:
    """Tokens per forward with their error."""
    return SURE.format_map(row)


def pair(values: Sequence[float]) -> str:
    """A difference and its error."""
    return f"{values[0]:+.2f} ± {values[1]:.2f}"


def where(found: Found, **fields: Any) -> Found:
    """The first row with these fields."""
    return next(row for row in found["rows"] if all(row[name] == value for name, value in fields.items()))


def rows(template: str, lead: str = "", only: Callable[[Found], object] = bool) -> Callable[[Found], str]:
    """A template of `str.format` that is filled in with the fields of each row, behind what they all are."""
    return lambda found: lead + "; ".join(template.format_map(row) for row in found["rows"] if only(row))


def growth(found: Found) -> str:
    small, large = where(found, nodes=64), where(found, nodes=1024)
    others = ", ".join(f"{name} {small[name]:.2f}" for name in ("sequences", "binary", "chain"))
    return (
        f"64 nodes: best {small['best']:.2f}, {others}; 1,024: best {large['best']:.2f}, binary {large['binary']:.2f}"
    )


def trees(*sizes: int) -> Callable[[Found], str]:
    def ours(found: Found) -> str:
        rows = {row["nodes"]: row for row in found["trees"]}
        each = (
            f"{size}: {rows[size]['levels']} levels, {rows[size]['root' + chr(39) + 's children']}" for size in sizes
        )
        return "nodes, levels, root's children: " + "; ".join(each)

    return ours


def exponents(found: Found) -> str:
    laws = {key: each["methods"]["without replacement"]["power_law"] for key, each in found["temperature"].items()}
    return "exponent b: " + ", ".join(
        f"T = {key}: {law['exponent']:.2f} ± {law['exponent_standard_error']:.2f}" for key, law in laws.items()
    )


def over(field: str, label: str, *keys: str) -> Callable[[Found], str]:
    """Differences of the rows that have them."""

    def ours(found: Found) -> str:
        rows = [row for row in found["rows"] if row.get(field)]
        named = (f"{' '.join(f'{row[key]}' for key in keys)}: {pair(row[field])}" for row in rows)
        return f"{label}; " + "; ".join(named)

    return ours


def robust(cut: bool) -> Callable[[Found], str]:
    def ours(found: Found) -> str:
        rows = [row for row in found["rows"] if (row["top_p"] is not None) == cut]
        name = "top-p" if cut else "T ="
        each = (f"{name} {row['top_p' if cut else 'temperature']}: {pair(row['over specinfer'])} over SpecInfer, "
                f"{pair(row['over top-k'])} over top-k" for row in rows)  # fmt: skip
        return "by acceptance vectors; " + "; ".join(each)

    return ours


def verification(found: Found) -> str:
    return "t(64), t(128), t(256), of GPUs by a roofline, which is above table 1's: " + "; ".join(
        f"{row['target']}, {row['device']}: {row['64']:.2f}, {row['128']:.2f}, {row['256']:.2f}"
        for row in found["rows"] if row["target"] in ("llama-2-7b", "shipped")
    )  # fmt: skip


def implied(found: Found) -> str:
    values, own = [row["t"] for row in found["published"]], found["rows"][0]
    return (
        f"their rows imply t(128) = {min(values):.2f} to {max(values):.2f}; with their constants and our acceptance "
        f"({own['nodes']}, {own['levels']}) is chosen, {own['speedup']:.2f} x; 5 x 8: {own['5 x 8']:.2f} x"
    )


def corners(found: Found) -> str:
    rows = {(row["width"], row["depth"]): row for row in found["rows"]}
    shown = [
        key
        for key in ((1, 8), (1, 128), (128, 1), (5, 8), (8, 16), (16, 8), (16, 48), (24, 32), (32, 24))
        if key in rows
    ]
    return "; ".join(f"{width} x {depth}: {sure(rows[width, depth])}" for width, depth in shown)


def theorem(found: Found) -> str:
    rows = [row for row in found["rows"] if row["nodes"] in (64, 4096, 262144)]
    return f"b = {found['exponent']:.2f}; lower, k* tree, best, upper: " + "; ".join(
        f"{row['nodes']:,}: {row['lower']:.2f}, {row['k* tree']:.2f}, {row['best tree']:.2f}, {row['upper']:.2f}"
        for row in rows
    )


def offloading(paper: str, table: str) -> Callable[[Found], str]:
    def ours(found: Found) -> str:
        rows = [row for row in found["rows"] if row["ratio"] and paper in row["source"] and table in row["source"]]
        ratios = [row["ratio"] for row in rows]
        return f"simulated, {len(rows)} rows: {min(ratios):.2f} to {max(ratios):.2f} of the published seconds"

    return ours


def probability(field: str) -> Callable[[Found], str]:
    def ours(found: Found) -> str:
        rows = [found["rows"][place] for place in (0, 4, 9)]
        said = ", ".join(f"{row['draft']:.2f}: {row[field]:.2f}" for row in rows)
        return f"by the draft's probability: {said}" + (
            f"; correlation {found['correlation']:.2f}" if field == "target" else ""
        )

    return ours


def shapes_of_64(found: Found) -> str:
    rows = [row for row in found["rows"] if row is not None]
    last = rows[-8:]
    return "expected, decoded: " + "; ".join(
        f"{row['rule']} {row['tree']}: {row['expected']:.2f}, {sure(row)}" for row in last
    )


def marginals(found: Found) -> str:
    rows = [row for row in found["rows"] if row.get("twice the nodes") and row["tree"] == "best tree"][-4:]
    each = []
    for row in rows:
        expected, decoded = row["twice the nodes"]
        each.append(f"{row['rule']}, {row['nodes']:g} nodes: {expected:.2f}, {decoded:.2f}")
    return f"what twice the nodes bring the best tree, expected, decoded: {'; '.join(each)}"


def limits(found: Found) -> str:
    return "best tree, v = 1, least v, theorem 4.1: " + "; ".join(
        f"{row['nodes']:,}: {row['best tree']:.2f}, {row['v = 1']:.2f}, {row['least v']:.2f}, {row['theorem 4.1']:.2f}"
        for row in found["rows"][1::2]
    )


def coupling(found: Found) -> str:
    return "; ".join(
        f"T = {row['temperature']:g}: bound {row['lemma 3.1']:.3f}, race {row['race']:.3f}, "
        f"1 - TV {row['overlap']:.3f}; H of the race {row['H race']:.2f}, D {row['D']:.2f}, (8) {row['upper']:.2f}"
        for row in found["rows"]
    )


def experiment(group: str) -> Callable[[Found], str]:
    """The best of each family in a group, and how alike texts are to plain decoding's."""

    def ours(found: Found) -> str:
        rows = [row for row in found["rows"] if row["group"] == group]
        best: dict[str, Found] = {}
        for row in rows:
            family = row["label"].split()[0]
            if family not in best or row["tokens"] > best[family]["tokens"]:
                best[family] = row
        said = f"{group}: " + "; ".join(f"{row['label']}: {sure(row)}" for row in best.values())
        alike = [row["accuracy"] for row in found["rows"] if "accuracy" in row]
        if not alike:
            return said
        (plain, error), *others = alike
        low, high = min(each for each, _ in others), max(each for each, _ in others)
        return f"{said}; accuracy {low:.2f} to {high:.2f}, plain {plain:.2f} ± {error:.2f}"

    return ours


def bernoulli(found: Found) -> str:
    row = where(found, p=0.3, q=0.7)
    return "p = 0.3, q = 0.7: " + ", ".join(
        f"{name} {row[name]:.2f}" for name in ("multi-round", "K-SEQ", "optimal", "recursive")
    )


def top_k(found: Found) -> str:
    rates = found["temperature"]["0.6"]["methods"]["top-k"]["rejection"]
    return "T = 0.6, " + ", ".join(f"k = {k}: {1 - rates[k - 1]:.2f}" for k in (1, 2, 4, 8))


by_roofline = rows(
    "{costs}: ({nodes}, {levels}), {speedup:.2f} x",
    "simulated, by a roofline and our acceptance: ",
    lambda row: row["costs"] != "the paper's constants",
)
bounded = rows(
    "c = {c:.2f}, {nodes} nodes: {speedup:.2f} with {levels} levels, {speedup unbounded:.2f} with {levels unbounded}",
    only=lambda row: row["draft"] != "roofline" and row["nodes"] in (64, 512),
)
large_shapes = rows("T = {temperature:g}, {width} x {depth}: " + SURE)
scaling = rows(
    "{nodes:.0f}: {expected:.2f}, " + SURE + ", {over sequences[0]:+.2f} ± {over sequences[1]:.2f}",
    "expected, decoded, over sequences: ",
    lambda row: row["tree"] == "best",
)
phases = rows("{nodes} nodes: construction {construction:.1%}, draft {draft:.0%}, target {target:.0%}")
thresholds = rows("{threshold:g}: {nodes:.0f} nodes, " + SURE)
methods = rows("T = {temperature:g}, {method}: " + SURE)
drafts = rows("T = {temperature:g}, {draft}: " + SURE)
blocks = rows(
    "{nodes}: {breadth first:.0f}, {heavy path:.0f}; {prefix of 256}", "breadth first, heavy path; prefix of 256: "
)
random_blocks = rows(
    "{nodes}: {insertion[0]:.0f}, {depth_first[0]:.1f} ± {depth_first[1]:.1f}, "
    "{heavy_path[0]:.1f} ± {heavy_path[1]:.1f}",
    "insertion, depth first, heavy path: ",
)
bits = rows(
    "T = {temperature:g}: D {D:.2f}, H of greedy rejection {H greedy:.2f}, (7) with e = 0 needs a constant of "
    "{constant of (7):.2f} bits, most of {positions} positions"
)
sequences = rows(
    "T = {temperature:g}, {length}: {over expected[0]:+.2f} ± {over expected[1]:.2f}", "decoded less expected: "
)
