"""What trees bring by the number of devices that a target is split over: two drafts, simulated, nothing measured."""

from pathlib import Path

from svg import Drawing

from heavypath.speculative.costs.hardware import DEVICES
from heavypath.speculative.costs.shapes import SHAPES
from heavypath.speculative.costs.simulation import Setting, Simulated, simulate
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE

TARGET, DEVICE, RANKS = "llama-2-70b", "a100-40gb", (1, 2, 4, 8, 16, 32, 64)
DRAFTS = {"llama-2-7b": "target", "tinyllama-1.1b": "accepted"}  # and the colours of their lines
LEFT, TOP, WIDTH, HEIGHT = 56.0, 78.0, 620.0, 230.0
MOST = 5.0  # times as fast
SAID = (
    "Both drafts are taken to be accepted as often as that of the shipped pair, and are whole on each device.",
    "NVLink with 300 GB/s; a small collective of two takes 10 us, and as much for each doubling of the devices.",
)


def draw(path: Path) -> None:
    """Draw it to this file."""
    drawing = Drawing(LEFT + WIDTH + 40, TOP + HEIGHT + 124, f"What trees bring to {TARGET} on 1 to 64 A100 of 40 GB")
    drawing.text(26, 35, "Llama-2-70B on A100s of 40 GB, simulated", size=18, style="bold")
    drawing.text(
        26,
        56,
        "times as fast as plain decoding on as many devices, by the best tree; at the dots its nodes",
        size=13,
        colour="dim",
    )
    for gain in range(1, int(MOST) + 1):
        y = height_of(gain)
        drawing.path(f"M{LEFT:g} {y:.1f}h{WIDTH:g}", stroke="line")
        drawing.text(LEFT - 8, y + 4, str(gain), size=12, anchor="end", colour="dim")
    for ranks in RANKS:
        drawing.text(place_of(ranks), TOP + HEIGHT + 34, str(ranks), size=12, anchor="middle", colour="dim")
    fits = (place_of(4) + place_of(2)) / 2
    drawing.path(f"M{fits:.1f} {TOP - 4:g}v{HEIGHT + 4:g}", stroke="faint", dashes="4 4")
    drawing.text(fits - 8, TOP + 8, "read through PCIe", size=12, anchor="end", colour="dim")
    drawing.text(fits + 8, TOP + 8, "all in memory, beside a small draft", size=12, colour="dim")
    for number, (draft, colour) in enumerate(DRAFTS.items()):
        found = {ranks: simulated(draft, ranks) for ranks in RANKS}
        places = [(place_of(ranks), height_of(one.best.gain)) for ranks, one in found.items()]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        drawing.path(f"M{line}", stroke=colour, thickness=2.4)
        drawing.dots(places, 4, colour)
        for (x, y), one in zip(places, found.values(), strict=True):
            drawing.text(x, y - 10 if number else y + 20, str(len(one.best.tree)), size=11, anchor="middle")
        drawing.text(26 + 300 * number, TOP + HEIGHT + 62, f"drafted for by {draft}", size=13, colour=colour)
    for line, words in enumerate(SAID):
        drawing.text(26, TOP + HEIGHT + 86 + 18 * line, words, size=12, colour="dim")
    drawing.save(path)


def simulated(draft: str, ranks: int) -> Simulated:
    """The steps of so many ranks."""
    return simulate(Setting(DEVICES[DEVICE], SHAPES[TARGET], SHAPES[draft], ranks=ranks), DEFAULT_ACCEPTANCE)


def place_of(ranks: int) -> float:
    """Its column."""
    return LEFT + 20 + (WIDTH - 40) * RANKS.index(ranks) / (len(RANKS) - 1)


def height_of(gain: float) -> float:
    """Its line."""
    return TOP + HEIGHT * (MOST - gain) / (MOST - 1)
