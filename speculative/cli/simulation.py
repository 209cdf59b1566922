"""`heavypath simulate`: what trees should bring for a target that is larger than a device, on a machine in numbers."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heavypath.speculative.cli.options import AsJson, check_word, print_json
from heavypath.speculative.cli.progress import progress
from heavypath.speculative.costs.hardware import DEVICES, Hardware
from heavypath.speculative.costs.shapes import SHAPES, shape_of

if TYPE_CHECKING:
    from rich.table import Table

    from heavypath.speculative.costs.simulation import Setting, Simulated

SIZES = tuple(2**power for power in range(11))  # nodes of the trees that are planned, if none are given
NAMED = f"{', '.join(SHAPES)}, or a folder with config.json"
WORDS = {  # of `Parts` and of limits
    "reading": "link",
    "memory": "memory",
    "products": "products",
    "telling": "wire",
    "drafting": "drafting",
    "kernels": "kernels",
    "acceptance": "acceptance",
}
NOTES = (
    "link: reading weights through it; memory, reading them from the device's; products, of the tree's "
    "nodes; wire, what ranks tell each other; drafting; kernels, the small ones.",
    "limited by: what lets decoding gain most if it cost nothing, and the gain then; acceptance, if nothing of this "
    "matters: the gain if the likeliest path were always accepted.",
    "Nothing is measured here: speculative/costs/simulation.py has the formulas, "
    "bench/research/offloading.py what they make of published rows.",
)


def simulate_command(
    target: Annotated[str, typer.Option(help=f"The target: {NAMED}.")] = "llama-2-70b",
    draft: Annotated[str, typer.Option(help="The draft, given alike.")] = "llama-2-7b",
    device: Annotated[str, typer.Option(help=f"The device: {', '.join(DEVICES)}.")] = "rtx-4090",
    link: Annotated[
        float | None, typer.Option(help="GB/s from where weights lie that the device has no room for, all reached.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s of the device's memory, by its data sheet.")] = None,
    tflops: Annotated[float | None, typer.Option(help="The device's peak, by its data sheet.")] = None,
    wire: Annotated[float | None, typer.Option(help="GB/s from a device to others, in one direction.")] = None,
    latency: Annotated[
        float | None, typer.Option(help="Microseconds of a small collective, for each doubling of the ranks.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of a device for the target's weights, such as 8G; default: what the draft leaves."),
    ] = None,
    bits: Annotated[float | None, typer.Option(help="Of each weight of the target, if not its config's.")] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Numbers of devices that the target is split over.")
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(metavar="A,A,...", help="How often child 0, 1, ... is accepted; default: the shipped pair's."),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="A profile whose acceptance is taken, that of sequoia.")] = None,
    temperature: Annotated[float, typer.Option(help="With --profile: of the acceptance that is taken.")] = 0.0,
    nodes: Annotated[
        str, typer.Option(metavar="N,N,...", help="Sizes of trees, without --ranks each in a row.")
    ] = ",".join(map(str, SIZES)),
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="An engine that reads nothing while it computes or drafts.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what trees should bring for a target larger than a device: streamed, or split over ranks. Nothing is run."""
    if acceptance is not None and profile is not None:
        raise ValueError("acceptance is given by --acceptance or by --profile, got both")
    from rich.console import Console

    from heavypath.speculative.costs.simulation import Setting, simulate
    from heavypath.speculative.trees.tails import of_any_pair

    given = {"link": link, "bandwidth": bandwidth, "peak": tflops, "wire": wire, "collective": latency}
    hardware = _hardware(device, {name: value for name, value in given.items() if value is not None})
    shape = shape_of(target)
    if bits is not None:
        if not bits > 0:
            raise ValueError(f"--bits must be above 0, got {bits:g}")
        shape = shape.stored_in(bits)
    room = None
    if memory is not None:
        from heavypath.speculative.streaming.memory import bytes_of

        room = bytes_of(memory)
    setting = Setting(hardware, shape, shape_of(draft), room, ahead=not one_by_one)
    rates: Any = of_any_pair() if acceptance is None else _numbers("--acceptance", acceptance)
    if profile is not None:
        from heavypath.kernels.filtering import Filters
        from heavypath.speculative.profile import Profile

        rates = Profile.load(profile).plan("sequoia", Filters(temperature)).acceptance.rates()
    sizes = [int(size) for size in _numbers("--nodes", nodes)]
    counts = [int(count) for count in _numbers("--ranks", ranks)] if ranks is not None else [1]
    found: dict[int, tuple[Setting, Simulated]] = {}
    with progress("simulating", quiet=as_json) as report:
        for count in counts:
            split = replace(setting, ranks=count)
            found[count] = split, simulate(split, rates, sizes, report)
    if as_json:
        print_json({"settings": [_facts(split, simulated) for split, simulated in found.values()]})
        return
    console = Console(highlight=False)
    console.print(f"{target} drafted for by {draft}, on {device}: {_sheet(hardware)}", style="dim")
    if ranks is None:
        console.print(_by_size(found[1][1]))
        console.print(_said(setting, found[1][1]))
    else:
        console.print(_by_ranks(found))
    for note in NOTES:
        console.print(note, style="dim")


def _hardware(device: str, given: dict[str, float]) -> Hardware:
    """A named device with some figures of one's own."""
    check_word("--device", device, DEVICES)
    known = DEVICES[device]
    units = {"link": 1e9, "bandwidth": 1e9, "wire": 1e9, "peak": 1e12, "collective": 1e-6}
    changed: dict[str, Any] = {name: value * units[name] for name, value in given.items()}
    if "link" in given:
        changed["reached"] = (*known.reached[:2], 1.0)
    return replace(known, **changed)


def _numbers(option: str, given: str) -> list[float]:
    try:
        return [float(number) if option == "--acceptance" else int(number) for number in given.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be numbers with commas between them, got {given!r}") from None


def _sheet(hardware: Hardware) -> str:
    wire = f", {hardware.wire / 1e9:,.0f} GB/s to other devices" if hardware.wire else ""
    return (
        f"{hardware.memory / 1e9:,.0f} GB of {hardware.reads / 1e9:,.0f} GB/s, "
        f"{hardware.computes / 1e12:,.3g} TFLOP/s, {hardware.brings / 1e9:,.3g} GB/s through the link{wire}: what is "
        f"reached of data sheets ({hardware.source})"
    )


def _by_size(simulated: "Simulated") -> "Table":
    """A row for each size of tree, the best one marked."""
    table = _headed("nodes", "depth", "tokens", "s/step", "s/token", "speed-up", "longest")
    for row in simulated.rows:
        seconds = (f"{row.seconds:.3g}", f"{row.seconds / row.tokens:.3g}")
        cells = (str(row.tree.depth), f"{row.tokens:.2f}", *seconds, f"{row.gain:.2f}", WORDS[row.slowest])
        table.add_row(str(len(row.tree)), *cells, style="bold" if row is simulated.best else None)
    return table


def _by_ranks(found: "dict[int, tuple[Setting, Simulated]]") -> "Table":
    """A row for each number of ranks, with its best tree."""
    table = _headed("ranks", "GB read", "s plain", "nodes", "tokens", "s/step", "speed-up", "limited by")
    for count, (setting, simulated) in found.items():
        row = simulated.best
        table.add_row(
            str(count), f"{setting.streamed / 1e9:.1f}", f"{simulated.plain:.3g}", str(len(row.tree)),
            f"{row.tokens:.2f}", f"{row.seconds:.3g}", f"{row.gain:.2f}",
            f"{WORDS[simulated.limit]} ({simulated.unlimited:.1f})",
        )  # fmt: skip
    return table


def _headed(*headings: str) -> "Table":
    """Columns of figures, and of words after the first that has them."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("longest", "limited by") else "right", no_wrap=True)
    return table


def _said(setting: "Setting", simulated: "Simulated") -> str:
    """The best tree, the free nodes, and what limits the gain, in a line."""
    best, hidden = simulated.best, setting.ahead and setting.streamed > 0
    until = "a tree costs as much as a token" if hidden else "a tree's products take as long as the weights"
    return (
        f"{best.gain:.2f} times as fast with {len(best.tree)} nodes, limited by {WORDS[simulated.limit]}: "
        f"{simulated.unlimited:.2f} without that. Up to N* = {setting.free_nodes:,.0f} nodes {until}."
    )


def _facts(setting: "Setting", simulated: "Simulated") -> dict:
    def facts(row: Any) -> dict:
        figures = {"nodes": len(row.tree), "depth": row.tree.depth, "tokens": row.tokens, "seconds": row.seconds}
        return figures | {"speedup": row.gain, "parts": row.parts._asdict(), "takes_longest": row.slowest}

    return {
        "ranks": setting.ranks,
        "streamed_bytes": setting.streamed,
        "plain_seconds": simulated.plain,
        "free_nodes": setting.free_nodes,
        "rows": [facts(row) for row in simulated.rows],
        "best": facts(simulated.best),
        "limit": simulated.limit,
        "speedup_without_limit": simulated.unlimited,
    }
