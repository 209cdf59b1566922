"""Targets that are larger than the memory of a device: what decoding them costs.

    python bench/scale.py ranks [--ranks 1 2 4] [--nodes 256] [--json FILE]

ranks   a target split over processes, see scale_ranks.py, which has the options
"""

import scale_ranks
from common import argument_parser

PARTS = {"ranks": scale_ranks}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    for part in PARTS.values():
        part.add_arguments(parser)
    arguments = parser.parse_args()
    PARTS[arguments.part].run(arguments)


if __name__ == "__main__":
    main()
