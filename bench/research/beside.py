"""Lets the scripts of this folder import what bench/ has: `import beside` goes before that."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
