"""Traversal verification in the oracle's fractions: on a chain it is block verification, and it accepts more.

That it keeps the target's law: test_verification_oracle.py; that the implementation is that rule: test_verification.py.
"""

from fractions import Fraction

import pytest
import torch
import verification_oracle as oracle
from kernel_cases import needs_compiler
from verification_oracle import GROWTHS, Drawn, Language, drawn

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
        verifiers = oracle.rejection, oracle.traversal, oracle.held_traversal
        rejection, traversal, held = (accepted(verifier, Language(3, seed)) for verifier in verifiers)
        assert rejection <= min(traversal, held)
        assert traversal <= held or name != "star"


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("method", ["traversal", "held_traversal"])
def test_a_chain_that_the_target_itself_has_drafted_is_accepted(method, impl):
    """Rounding leaves nothing where a child is taken all but for its last bit: a held one was let go half the time."""
    torch.manual_seed(0)
    logits = 4 * torch.randn(64, 5, 7)
    drafted = torch.distributions.Categorical(logits=logits[:, :4]).sample()
    tokens, rows = torch.cat([torch.zeros_like(drafted[:, :1]), drafted], 1), torch.arange(64 * 5).view(64, 5)
    found = verify_tree(tokens, torch.arange(-1, 4), logits, logits, method=method, seed=1, rows=rows, impl=impl)
    assert found.length.tolist() == [4] * 64


@needs_compiler
@pytest.mark.parametrize("method", ["traversal", "held_traversal"])
def test_a_tree_may_be_deeper_than_a_threads_stack(method):
    nodes = 50_000
    logits = torch.zeros(1, nodes, 3)  # the draft is the target, so all is accepted
    chain = torch.arange(-1, nodes - 1)
    verified = verify_tree(
        torch.zeros(1, nodes, dtype=torch.long), chain, logits, logits, method=method, max_depth=nodes, impl="native"
    )
    assert verified.length.tolist() == [nodes - 1]
