"""Tables of `heavypath plan`: the best tree of each method, its gain, and what limits it."""

from rich import box
from rich.table import Column, Table

from heavypath.kernels.filtering import Filters
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.output.page import sampling_in_words
from heavypath.speculative.profile import Profile

NOTES = (
    "expected: tokens per step of the target with this tree, by the acceptance counted on the calibration texts, with "
    "the measured gain of the method's verifier or growing trees. For naive it is a little too low, as it does not "
    "count the children of equal siblings together.",
    "planned by acceptance as counted; children beyond the counts follow a power law, deeper levels the mean of all.",
    "speed-up: over plain decoding of the same number of sequences, by the measured costs. The figure after +- is one "
    "standard error, by the timings' spread and by the number of nodes whose acceptance was counted.",
    "MBSU: memory-bound speed-up, expected / (1 + depth x draft's parameters / target's parameters) (RSD).",
    "rsd-s, dyspec and eagle-2 grow new trees in each step: shown is the static tree from which they take their size.",
)


def warnings_of(profile: Profile) -> list[str]:
    """Return a line for each sampling setting at which even the best trees, those of sequoia, do not pay."""
    lines = []
    for filters in dict.fromkeys(entry.filters for entry in profile.acceptance):
        planned = profile.plan("sequoia", filters)
        if len(planned.plan.tree) > 1:
            continue
        costs = profile.costs.at(1)
        unit = costs.step[1]
        smallest = min(size for size in costs.step if size > 1)
        error = costs.step_error.get(smallest, 0.0) / unit
        lines.append(
            f"{sampling_in_words(filters._asdict())}: this draft does not pay here, and --profile will decode without "
            f"it. Its first token is accepted with probability {float(planned.acceptance.rates()[0, 0]):.2f}; a step "
            f"over {smallest} nodes takes {costs.step[smallest] / unit:.2f} ± {error:.2f} steps of plain decoding, "
            f"drafting a level {costs.level / unit:.2f} ± {costs.level_error / unit:.2f}"
        )
    return lines


def drawing_in_words(profile: Profile) -> list[str]:
    """Return a line for each sampling setting at which a block draft has drawing temperatures by depth, with these."""
    found = {entry.filters: entry.temperatures for entry in profile.acceptance if entry.temperatures}
    return [
        f"{sampling_in_words(filters._asdict())}: the draft's depths are drawn at "
        f"{', '.join(format(one, 'g') for one in each)} times that temperature"
        for filters, each in found.items()
    ]


def limit(profile: Profile, method: str, filters: Filters) -> dict:
    """Return what limits the speed-up of a method's best tree, by name, for --json.

    filters: temperature and filters, which the profile must have measured
    """
    planned = profile.plan(method, filters)
    return {
        "temperature": filters.temperature,
        "method": method,
        "speedup": planned.plan.speedup,
        **profile.limit(method, planned)._asdict(),
    }


def limit_in_words(facts: dict) -> str:
    """Return the facts that `limit` returned in a line of text."""
    return (
        f"{facts['method']}: {facts['speedup']:.2f} times as fast as plain decoding, limited by {facts['limited_by']}, "
        f"{facts['without_that']:.2f} without that; up to {facts['free_nodes']} nodes a step takes the time of reading "
        "weights (bandwidth)"
    )


def row(profile: Profile, method: str, filters: Filters, batch: int = 1) -> dict:
    """Return the figures of a method's best tree, by name, for `batch` sequences; filters: as in `limit`."""
    found = profile.plan(method, filters, batch)
    planned = found.plan
    tree = found.plan.tree
    return {
        "temperature": filters.temperature,
        "method": method,
        "sequences": batch,
        "nodes": len(tree),
        "depth": tree.depth,
        "expected_tokens": planned.expected_tokens,
        "expected_tokens_error": found.tokens_error,
        "speedup": planned.speedup,
        "speedup_error": profile.speedup_error(found, batch),
        "mbsu": profile.mbsu(planned),
    }


def table(rows: list[dict], key: str = "method") -> Table:
    """Return a table of figures from `row`, with the column `key` first: "method", "sequences" or "prompt"."""
    table = Table(Column(key, no_wrap=True), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("nodes", "depth", "expected", "speed-up", "MBSU"):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = (
            f"{row['expected_tokens']:.2f} ± {row['expected_tokens_error']:.2f}",
            f"{row['speedup']:.2f} ± {row['speedup_error']:.2f}",
            f"{row['mbsu']:.2f}",
        )
        table.add_row(str(row[key]), str(row["nodes"]), str(row["depth"]), *figures)
    return table


def costs_in_words(costs: Costs, batch: int) -> str:
    """Return costs of steps and levels, with errors, in milliseconds, as a text. batch: of how many sequences."""
    steps = ", ".join(
        f"{size}: {_milliseconds(seconds, costs.step_error.get(size, 0.0))}" for size, seconds in costs.step.items()
    )
    level = _milliseconds(costs.level, costs.level_error)
    of = "1 sequence" if batch == 1 else f"{batch} sequences"
    return f"milliseconds of a step of {of} by nodes, in {costs.rounds} rounds: {steps}; of drafting a level: {level}"


def _milliseconds(seconds: float, error: float) -> str:
    return f"{1e3 * seconds:.3g} ± {1e3 * error:.1g}"
