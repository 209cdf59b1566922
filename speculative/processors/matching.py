"""Follow a grammar along a sequence, and along the paths of the trees that are drafted after it.

One matcher goes from node to node: it is rolled back to the last common ancestor of the two nodes, and then reads the
tokens from there to the other node. The time does not depend on the length of the sequence, which is not read again.
The tokens that may follow a node are kept until the next step, so that the draft's and the target's logits get the same
mask.
"""

from collections.abc import Sequence

from torch import Tensor

from heavypath.speculative.processors.grammar import Grammar, before_end, words_of, words_with

Path = tuple[int, ...]  # drafted tokens, from the root's child down to a node; () is the root


class GrammarText:
    """Follows a grammar along one sequence, and finds the tokens that may follow each node of its trees."""

    def __init__(self, grammar: Grammar):
        self._matcher = grammar.matcher()
        self._ends = grammar.eos_token_ids
        self._size = len(words_of(self._matcher, self._ends))
        self._at: Path = ()  # the tokens that the matcher has read after the root
        self._ended = False
        self._words: dict[Path, Tensor] = {}  # path to a node of this step -> bit mask of the tokens that may follow

    def advance(self, new: Sequence[int]) -> None:
        """Append the new tokens of a step to the sequence. Raises ValueError if the grammar does not allow them."""
        self._words.clear()
        if self._ended:
            return
        read, ended = before_end(new, self._ends)
        if not self._go_to(tuple(read)):
            raise ValueError(
                f"the tokens {list(new)} are not of the sequence's grammar: another processor has allowed them"
            )
        self._at, self._ended = (), ended

    def words_after(self, path: Path) -> Tensor:
        """The tokens that may follow a node of this step, one bit each: IntTensor[ceil(V / 32)].

        After the end of the text these are the end-of-sequence tokens alone; none if the grammar refuses the path.

        path: the drafted tokens from the root's child to the node
        """
        if path not in self._words:
            ended = self._ended or before_end(path, self._ends)[1]
            if not ended and self._go_to(path):
                words = words_of(self._matcher, self._ends)
            else:  # after the end only end-of-sequence tokens are allowed; after a token that is not allowed, none
                words = words_with(self._ends if ended else (), self._size)
            self._words[path] = words
        return self._words[path]

    def _go_to(self, path: Path) -> bool:
        """Move the matcher to the end of a path, or as far as the grammar allows. Returns whether it is at the end."""
        common = 0
        while common < min(len(path), len(self._at)) and path[common] == self._at[common]:
            common += 1
        if common < len(self._at) and not self._matcher.rollback(len(self._at) - common):
            raise ValueError(f"the grammar could not be followed any further: {self._matcher.get_error()}")
        read = self._matcher.try_consume_tokens(list(path[common:]))
        self._at = path[: common + read]
        return self._at == path
