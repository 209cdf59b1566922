"""Follow a grammar along a text, and along the paths of the trees that are drafted after it.

One matcher goes from node to node: back to where the two paths part, then forward by the tokens of the other. Neither
depends on how long the text is, and nothing of it is read again. What may follow a node is kept until the next step, so
that the target's logits are masked by what the draft's were.
"""

from collections.abc import Sequence

from torch import Tensor

from heavypath.speculative.processors.grammar import Grammar, before_end, words_of, words_with

Path = tuple[int, ...]  # drafted tokens, from the root's child down to a node; () is the root


class GrammarText:
    """A grammar's place in one text."""

    def __init__(self, grammar: Grammar):
        self._matcher, self._ends = grammar.matcher(), grammar.eos_token_ids
        self._size = len(words_of(self._matcher))
        self._at: Path = ()  # what the matcher has read after the root
        self._ended = False
        self._words: dict[Path, Tensor] = {}  # what may follow the nodes of this step

    def advance(self, new: Sequence[int]) -> None:
        """The text has these tokens more. Raises ValueError where they are not of the grammar."""
        self._words.clear()
        if self._ended:
            return
        read, self._ended = before_end(new, self._ends)
        if not self._go_to(tuple(read)):
            raise ValueError(
                f"the text's tokens {list(new)} are not of its grammar: another processor has allowed them"
            )
        self._at = ()

    def words_after(self, path: Path) -> Tensor:
        """The tokens that may follow a node of this step, a bit each: an IntTensor[V / 32]."""
        if path not in self._words:
            ended = self._ended or before_end(path, self._ends)[1]
            if not ended and self._go_to(path):
                words = words_of(self._matcher)
            else:  # nothing follows what is not of the grammar
                words = words_with(self._ends if ended else (), self._size)
            self._words[path] = words
        return self._words[path]

    def _go_to(self, path: Path) -> bool:
        """Move the matcher after a path; whether it is one of the grammar, and if not, as far as it goes."""
        common = 0
        while common < min(len(path), len(self._at)) and path[common] == self._at[common]:
            common += 1
        if common < len(self._at) and not self._matcher.rollback(len(self._at) - common):
            raise ValueError(f"the grammar could not be followed any further: {self._matcher.get_error()}")
        read = self._matcher.try_consume_tokens(list(path[common:]))
        self._at = path[: common + read]
        return self._at == path
