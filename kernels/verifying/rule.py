"""The rule by which a drafted tree is verified, in the words of `verify_tree`."""

from typing import NamedTuple

WHOLE_TREE = ("traversal", "held_traversal")  # those that look at the whole tree, not at each node by itself
VERIFICATION_METHODS = (
    "without_replacement", "with_replacement", "kseq", "race", "target_sample", "greedy", "held", *WHOLE_TREE,
)  # fmt: skip
DRAFT_AWARE = ("without_replacement", "with_replacement", "kseq", "held", *WHOLE_TREE)  # that need the draft's logits
# Those that take children drawn without replacement, and independent ones by `replacement`.
EITHER_DRAW = ("held", *WHOLE_TREE)


class Rule(NamedTuple):
    """`method` and `replacement` of `verify_tree`; or "typical" as the method, for typical acceptance."""

    method: str
    replacement: bool = False

    def check(self) -> "Rule":
        """The rule itself; ValueError for one that there is not."""
        if self.method not in VERIFICATION_METHODS:
            raise ValueError(f"method must be one of {', '.join(VERIFICATION_METHODS)}, got {self.method!r}")
        if self.replacement and self.method not in EITHER_DRAW:
            raise ValueError(
                f"replacement is for method {' or '.join(map(repr, EITHER_DRAW))}: {self.method!r} says by its name "
                f"how children are drawn; leave it out, got replacement={self.replacement}"
            )
        return self

    @classmethod
    def of_draws(cls, method: str, replacement: bool) -> "Rule":
        """The rule of a method for children so drawn; the names of most methods say how."""
        return cls(method, replacement and method in EITHER_DRAW)

    @property
    def independent(self) -> bool:
        """True if siblings are weighed as independent draws, so that those of equal token share their children."""
        return self.replacement or self.method in ("with_replacement", "kseq")
