"""Traversal verification in the oracle's fractions: on a chain it is block verification, and it accepts more.

That it keeps the target's law: test_verification_oracle.py; that the implementation is that rule: test_verification.py.
"""

from fractions import Fraction

import pytest
import torch
import verification_oracle as oracle
from growths import GROWTHS
from verification_oracle import Drawn, Language, drawn

from heavypath.kernels.verification import verify_tree


def block_verification(target, draft, tokens) -> list[Fraction]:
    """The law of how many tokens are accepted, as in algorithm 2 of Sun et al. 2024.

    target, draft: the laws at each of the tokens; target also behind the last one
    """
    kept, ends = [Fraction(1)], []
    for p, q, token in zip(target, draft, tokens, strict=False):
        kept.append(min(kept[-1] * p[token] / q[token], Fraction(1)))
    for weight, p, q in list(zip(kept, target, draft, strict=False))[1:]:
        residual = sum(max(weight * one - other, 0) for one, other in zip(p, q, strict=True))
        ends.append(residual / (residual + 1 - weight) if residual else Fraction(0))
    ends.append(kept[-1])
    longest, law = Fraction(1), []  # the paper looks at all lengths, and takes the longest whose coin falls
    for chance in ends[::-1]:
        law.append(longest * chance)
        longest *= 1 - chance
    return [longest, *law[::-1]]


@pytest.mark.parametrize("verifier", [oracle.traversal, oracle.held_traversal])
def test_on_a_chain_it_is_block_verification(verifier):
    language = Language(4, 5)
    for tokens in ([0, 1, 2, 3], [3, 3, 0, 1], [2, 0, 0, 0], [1, 2, 2, 1]):
        contexts = [tuple(tokens[:length]) for length in range(5)]
        target, draft = map(language.target, contexts), map(language.draft, contexts[:4])
        accepted = [Fraction(0)] * 5
        for (path, _), chance in verifier(language, Drawn((-1, 0, 1, 2, 3), (-1, *tokens), 5 * (0,))).items():
            accepted[len(path)] += chance
        assert accepted == block_verification([*target], [*draft], tokens)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("name", GROWTHS)
def test_no_fewer_tokens_are_accepted_than_by_rejection(name, replacement):
    def accepted(verifier, language):
        total = Fraction(0)
        for tree, chance in drawn(language, GROWTHS[name], (), replacement):
            verdict = verifier(language, tree, (), replacement)
            total += chance * sum(len(path) * part for (path, _), part in verdict.items())
        return total

    for seed in range(2):
        rejection, traversal, held = (
            accepted(verifier, Language(3, seed))
            for verifier in (oracle.rejection, oracle.traversal, oracle.held_traversal)
        )
        assert rejection <= traversal
        assert rejection <= held
        assert traversal <= held or name != "star"


def test_a_chain_of_two_by_hand():
    """P = (1/2, 1/2) everywhere. Q = (1, 0) gives the first child w = 1/2, and then the second one t = w / 2. From
    l = 2 on S = 1/4 and r = (1 - w) + S = 3/4, so that n = 1/3 of the 3/4 that are left end at the first child.

    With Q = (1/2, 1/2) at first, w is 1, and the second child has 1/2.
    """
    half, one, none = Fraction(1, 2), Fraction(1), Fraction(0)
    for first, lengths in (((one, none), {0: half, 1: half / 2, 2: half / 2}), ((half, half), {1: half, 2: half})):
        language = Language(2, 0)
        even = {("target", context): (half, half) for context in ((), (0,), (0, 0))}
        language._known = even | {("draft", ()): first, ("draft", (0,)): (one, none)}
        found = dict.fromkeys(lengths, none)
        for (path, _), chance in oracle.traversal(language, Drawn((-1, 0, 1), (-1, 0, 0), (0, 0, 0))).items():
            found[len(path)] += chance
        assert found == lengths


@pytest.mark.parametrize("replacement", [False, True])
def test_all_nodes_may_be_accepted_and_equal_siblings_share_their_children(replacement):
    """Siblings 1 and 2 both carry token 1; node 3 hangs below the second of them only."""
    parents, tokens = torch.tensor([-1, 0, 0, 2]), torch.tensor([[0, 1, 1, 2]]).expand(200, -1)
    logits = torch.randn(2, 1, 4, 3, generator=torch.Generator().manual_seed(1)).expand(2, 200, 4, 3)
    verified = verify_tree(tokens, parents, *logits, method="traversal", replacement=replacement)
    assert (verified.path[:, 1] == 2).any() == (verified.length == 2).any() == replacement
