"""What trees should bring for a target that is larger than a device, on a machine in numbers. Nothing is run.

    python bench/simulate.py --target llama-2-70b --draft llama-2-7b --device rtx-4090 --acceptance 0.7,0.1,0.05
    python bench/simulate.py --device a100-40gb --draft tinyllama-1.1b --ranks 1,2,4,8,16,32,64

The target is streamed through a link, or split over ranks. Models are given by name or by a folder with config.json,
devices by name or in figures. simulation/formulas.py has the formulas, and research/offloading.py what they make of
published rows.

link, memory, products, wire, drafting, kernels: seconds of reading weights through the link, of reading them from the
    device's memory, of the products of the tree's nodes, of what ranks tell each other, of drafting, of small kernels
limited by: what lets decoding gain most if it cost nothing, and the gain then; acceptance, if nothing of this matters:
    the gain if the likeliest path were always accepted
"""

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from simulation.formulas import SIZES, Setting, Simulated, SimulatedTree, simulate
from simulation.hardware import DEVICES, Hardware
from simulation.shapes import SHAPES, shape_of

from heavypath.kernels.filtering import Filters
from heavypath.speculative.profile import Profile
from heavypath.speculative.streaming.memory import bytes_of
from heavypath.speculative.trees.rates import Acceptance
from heavypath.speculative.trees.tails import of_any_pair

Number = TypeVar("Number", int, float)
NAMED = f"{', '.join(SHAPES)}, or a folder with config.json"
UNITS = {  # of options: the figure of `Hardware` that each gives, and its unit
    "link": ("link", 1e9),
    "bandwidth": ("bandwidth", 1e9),
    "tflops": ("peak", 1e12),
    "wire": ("wire", 1e9),
    "latency": ("collective", 1e-6),
}
WORDS = {  # of `StepSeconds` and of limits
    "reading": "link",
    "memory": "memory",
    "products": "products",
    "telling": "wire",
    "drafting": "drafting",
    "kernels": "kernels",
    "acceptance": "acceptance",
}


def parser_of_options() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-2-70b", help=f"the target: {NAMED}")
    parser.add_argument("--draft", default="llama-2-7b", help="the draft, given alike")
    parser.add_argument("--device", default="rtx-4090", choices=DEVICES)
    parser.add_argument("--link", type=float, help="GB/s from where weights lie that the device has no room for")
    parser.add_argument("--bandwidth", type=float, help="GB/s of the device's memory, by its data sheet")
    parser.add_argument("--tflops", type=float, help="the device's peak, by its data sheet")
    parser.add_argument("--wire", type=float, help="GB/s from a device to others, in one direction")
    parser.add_argument("--latency", type=float, help="microseconds of a small collective, for each doubling of ranks")
    parser.add_argument("--memory", help="of a device for the target, such as 8G; default: what the draft leaves")
    parser.add_argument("--bits", type=float, help="of each weight of the target, if not its config's")
    parser.add_argument("--ranks", type=partial(listed, int), metavar="N,N,...", help="devices that share the target")
    of_children = parser.add_mutually_exclusive_group()
    of_children.add_argument(
        "--acceptance", type=partial(listed, float), metavar="A,A,...",
        help="how often child 0, 1, ... is accepted; default: the shipped pair's",
    )  # fmt: skip
    of_children.add_argument("--profile", type=Path, help="a profile whose acceptance is taken, that of sequoia")
    parser.add_argument("--temperature", type=float, default=0.0, help="with --profile: of its acceptance")
    parser.add_argument(
        "--nodes", type=partial(listed, int), default=SIZES, metavar="N,N,...",
        help="sizes of trees, without --ranks each in a row",
    )  # fmt: skip
    parser.add_argument(
        "--one-by-one", action="store_true", help="an engine that reads nothing while it computes or drafts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def listed(kind: Callable[[str], Number], given: str) -> list[Number]:
    """The numbers that an option has with commas between them."""
    try:
        return [kind(number) for number in given.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"must be numbers with commas between them, got {given!r}") from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of_options()
    given = parser.parse_args(argv)
    try:
        setting = setting_of(given)
        rates = acceptance_of(given)
        settings = [replace(setting, ranks=count) for count in given.ranks or [1]]
        found = [(split, simulate(split, rates, given.nodes)) for split in settings]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if given.json:
        print(json.dumps({"settings": [facts_of(split, simulated) for split, simulated in found]}))
        return
    console = Console(highlight=False)
    console.print(
        f"{given.target} drafted for by {given.draft}, on {given.device}: {sheet(setting.hardware)}", style="dim"
    )
    if given.ranks is not None:
        console.print(by_ranks(found))
        return
    ((_, simulated),) = found
    console.print(by_size(simulated))
    console.print(in_words(setting, simulated))


def setting_of(given: Namespace) -> Setting:
    """The target and the draft on the device that the options describe, on one rank."""
    target = shape_of(given.target)
    if given.bits is not None:
        target = target.stored_in(given.bits)
    memory = None if given.memory is None else bytes_of(given.memory)
    return Setting(hardware_of(given), target, shape_of(given.draft), memory, ahead=not given.one_by_one)


def hardware_of(given: Namespace) -> Hardware:
    """The named device, with those figures that options give. All of a given link is reached."""
    known = DEVICES[given.device]
    changed: dict[str, Any] = {
        name: getattr(given, option) * unit
        for option, (name, unit) in UNITS.items()
        if getattr(given, option) is not None
    }
    if given.link is not None:
        changed["reached"] = (*known.reached[:2], 1.0)
    return replace(known, **changed)


def acceptance_of(given: Namespace) -> Acceptance:
    """How often each child is accepted: by the options, by a profile, or as usual."""
    if given.acceptance is not None:
        return given.acceptance
    if given.profile is not None:
        return Profile.load(given.profile).plan("sequoia", Filters(given.temperature)).acceptance.rates()
    return of_any_pair()


def sheet(hardware: Hardware) -> str:
    wire = f", {hardware.wire / 1e9:,.0f} GB/s to other devices" if hardware.wire else ""
    return (
        f"{hardware.memory / 1e9:,.0f} GB of {hardware.reads / 1e9:,.0f} GB/s, "
        f"{hardware.computes / 1e12:,.3g} TFLOP/s, {hardware.brings / 1e9:,.3g} GB/s through the link{wire}: what is "
        f"reached of data sheets ({hardware.source})"
    )


def by_size(simulated: Simulated) -> Table:
    """A row for each size of tree, the best one marked."""
    table = headed("nodes", "depth", "tokens", "s/step", "s/token", "speed-up", "longest")
    for row in simulated.rows:
        seconds = (f"{row.seconds:.3g}", f"{row.seconds / row.tokens:.3g}")
        cells = (str(row.tree.depth), f"{row.tokens:.2f}", *seconds, f"{row.gain:.2f}", WORDS[row.slowest])
        table.add_row(str(len(row.tree)), *cells, style="bold" if row is simulated.best else None)
    return table


def by_ranks(found: list[tuple[Setting, Simulated]]) -> Table:
    """A row for each number of ranks, with its best tree."""
    table = headed("ranks", "GB read", "s plain", "nodes", "tokens", "s/step", "speed-up", "limited by")
    for setting, simulated in found:
        row = simulated.best
        table.add_row(
            str(setting.ranks), f"{setting.streamed / 1e9:.1f}", f"{simulated.plain:.3g}", str(len(row.tree)),
            f"{row.tokens:.2f}", f"{row.seconds:.3g}", f"{row.gain:.2f}",
            f"{WORDS[simulated.limit]} ({simulated.unlimited:.1f})",
        )  # fmt: skip
    return table


def headed(*headings: str) -> Table:
    """Columns of figures, and of words after the first that has them."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("longest", "limited by") else "right", no_wrap=True)
    return table


def in_words(setting: Setting, simulated: Simulated) -> str:
    """The best tree, the free nodes, and what limits the gain, in a line."""
    best, hidden = simulated.best, setting.ahead and setting.streamed > 0
    until = "a tree costs as much as a token" if hidden else "a tree's products take as long as the weights"
    return (
        f"{best.gain:.2f} times as fast with {len(best.tree)} nodes, limited by {WORDS[simulated.limit]}: "
        f"{simulated.unlimited:.2f} without that. Up to N* = {setting.free_nodes:,.0f} nodes {until}."
    )


def facts_of(setting: Setting, simulated: Simulated) -> dict[str, Any]:
    """What --json prints of a setting."""
    return {
        "ranks": setting.ranks,
        "streamed_bytes": setting.streamed,
        "plain_seconds": simulated.plain,
        "free_nodes": setting.free_nodes,
        "rows": [facts_of_tree(row) for row in simulated.rows],
        "best": facts_of_tree(simulated.best),
        "limit": simulated.limit,
        "speedup_without_limit": simulated.unlimited,
    }


def facts_of_tree(row: SimulatedTree) -> dict[str, Any]:
    figures = {"nodes": len(row.tree), "depth": row.tree.depth, "tokens": row.tokens, "seconds": row.seconds}
    return figures | {"speedup": row.gain, "parts": row.parts._asdict(), "takes_longest": row.slowest}


if __name__ == "__main__":
    main()
