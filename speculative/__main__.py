"""`python -m heavypath.speculative` is the `heavypath` command."""

import sys

from heavypath.speculative.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
