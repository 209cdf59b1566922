"""Helpers of tests/kernels/test_verification_oracle.py and its neighbours."""

from verification_oracle import Drawn, static

SHAPES = {
    "chain": [-1, 0, 1, 2],
    "star": [-1, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1, 2],
    "three levels": [-1, 0, 0, 1, 3],
    "a deep younger child": [-1, 0, 0, 2, 2],
}


def by_the_first_token(tree: Drawn) -> int | None:
    """A way to grow that looks at what was drawn: a token 0 gets two children, others get a sibling; five draws."""
    if len(tree.parents) == 5:
        return None
    last = len(tree.parents) - 1
    parent = last if tree.tokens[last] == 0 else max(tree.parents[last], 0)
    return parent if len(tree.children(parent)) < 2 else last


GROWTHS = {name: static(parents) for name, parents in SHAPES.items()}
