"""Targets that are larger than the memory of a device: what decoding them costs.

    python bench/scale.py stream [--gigabytes 8] [--memory 2G] [--json FILE]

stream  weights that are read from disk for each tree, see scale_stream.py, which has the options
"""

import scale_stream
from common import argument_parser

PARTS = {"stream": scale_stream}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    for part in PARTS.values():
        part.add_arguments(parser)
    arguments = parser.parse_args()
    PARTS[arguments.part].run(arguments)


if __name__ == "__main__":
    main()
