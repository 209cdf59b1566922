"""The pictures of the READMEs: a step, what the order of nodes does to attention, and the page of a trace.

    python bench/pictures.py --plot bench/results [--only step]

step   pictures-step.svg: draft, target forward, verification and caches, drawn from a real step of the shipped pair
order  pictures-order.svg: one tree, its ancestor mask and its blocks, in insertion order and in heavy-path order
ranks  pictures-ranks.svg: what trees bring to a target split over 1 to 64 devices, simulated
trace  pictures-trace.png: the page that `heavypath trace` makes, cropped to its text and its tree. It needs Chromium
       (apt-get install chromium), and Pillow, which comes with matplotlib
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import picture_order
import picture_ranks
import picture_step
import picture_trace

PICTURES = {
    "ranks": (picture_ranks.draw, "pictures-ranks.svg"),
    "step": (picture_step.draw, "pictures-step.svg"),
    "order": (picture_order.draw, "pictures-order.svg"),
    "trace": (picture_trace.draw, "pictures-trace.png"),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, required=True, metavar="FOLDER", help="where the pictures go")
    parser.add_argument("--only", choices=PICTURES, help="one of the pictures")
    arguments = parser.parse_args(argv)
    if arguments.plot.is_file():
        parser.error(f"--plot must be a folder, got the file {arguments.plot}")
    arguments.plot.mkdir(parents=True, exist_ok=True)
    for name, (draw, file) in PICTURES.items():
        if arguments.only in (None, name):
            try:
                draw(arguments.plot / file)
            except RuntimeError as error:
                sys.exit(f"{name}: {error}")
            print(arguments.plot / file)


if __name__ == "__main__":
    main()
