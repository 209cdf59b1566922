"""Targets that are larger than the memory of a device: what decoding them costs.

    python bench/scale.py ranks [--ranks 1 2 4] [--nodes 256] [--json FILE]
    python bench/scale.py stream [--gigabytes 8] [--memory 2G] [--json FILE]
    python bench/scale.py device [--gpu-gigabytes 12] [--gpu-memory 4G] [--json FILE]

ranks   a target split over processes, see scale_ranks.py, which has the options
stream  weights that are read from disk for each tree, see scale_stream.py, which has the options
device  weights that are copied to a GPU for each tree, see scale_device.py, which has the options
"""

import scale_device
import scale_ranks
import scale_stream
from common import argument_parser, options_of

PARTS = {"ranks": scale_ranks, "stream": scale_stream, "device": scale_device}


def main() -> None:
    parser = argument_parser(__doc__, device=True)
    parser.add_argument("part", choices=PARTS)
    for part in PARTS.values():
        part.add_arguments(parser)
    arguments = options_of(parser)
    PARTS[arguments.part].run(arguments)


if __name__ == "__main__":
    main()
