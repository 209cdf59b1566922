"""Typical acceptance against a search through all paths, written down a second time."""

import math
import random
from itertools import pairwise, product

import pytest
import torch
import verification_cases
from devices import DEVICE
from statistical import SIGNIFICANCE, chi_square_p_value
from verification_cases import TREES, random_filters, random_tree

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.nodes import Nodes
from heavypath.kernels.noise import Noise
from heavypath.speculative import TokenTree
from heavypath.speculative.decoding.typical import Typical

USUAL = Typical()


def brute_force(tokens, parents, log_p, limits, max_depth):
    """The nodes of the best path of one tree, root first: of all paths of nodes that are likely enough the longest, and
    of these the likeliest. tokens, parents: lists; log_p: fp64 [N, V]."""
    found = [(0, 0.0, 0, [0])]
    for node in range(1, len(tokens)):
        path = [node]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        likelihood, accepted = 0.0, len(path) - 1 <= max_depth
        for above, below in pairwise(path):
            p = log_p[above].exp()
            entropy = -sum(float(q) * math.log(float(q)) for q in p if q > 0)
            accepted = accepted and tokens[below] >= 0
            accepted = accepted and float(p[tokens[below]]) > min(limits.epsilon, limits.delta * math.exp(-entropy))
            likelihood += math.log(float(p[tokens[below]])) if accepted else 0.0
        if accepted:
            found.append((len(path) - 1, likelihood, -node, path))
    return max(found)[3]


class Problem(verification_cases.Problem):
    """Trees of random tokens, some of them equal among siblings, and logits after their nodes."""

    def __init__(self, tree, filters=Filters(), limits=USUAL, seed=1, **shape):
        super().__init__(tree, "target_sample", filters, seed=seed, **shape)
        self.tree, self.filters, self.limits, self.seed = tree, filters, limits, seed

    def verified(self, **changes):
        seed = changes.get("seed", self.seed)
        out = self.limits(
            Nodes(self.tokens.to(DEVICE), self.tree.parents.to(DEVICE), None), self.target.to(DEVICE), None,
            max_depth=changes.get("max_depth", self.tree.depth), target_filters=self.filters,
            draft_filters=self.filters, noise=Noise(torch.tensor(seed, device=DEVICE), self.rows.to(DEVICE)),
        )  # fmt: skip
        return type(out)(*(field.cpu() for field in out))

    def check(self, **changes):
        """Its paths are those of the search."""
        out, depth = self.verified(**changes), changes.get("max_depth", self.tree.depth)
        for b, tokens in enumerate(self.tokens.tolist()):
            log_p = filtered_logprobs(self.target[b].float(), self.filters)
            path = brute_force(tokens, self.tree.parents.tolist(), log_p, self.limits, depth)
            assert out.path[b].tolist() == path + [-1] * (depth + 1 - len(path))
            assert int(out.length[b]) == len(path) - 1
            assert log_p[path[-1], out.next_token[b]] > -math.inf


def random_problem(seed):
    """Small, and any: tree, vocabulary, filters, limits, dtype and absent nodes."""
    chosen = random.Random(seed)
    return Problem(
        random_tree(chosen, 1, 12), vocab_size=chosen.choice([1, 2, 3, 5, 40]), batch=chosen.choice([1, 2, 3]),
        dtype=chosen.choice([torch.float32, torch.float16, torch.bfloat16]), absent=chosen.choice([0.0, 0.2]),
        filters=random_filters(chosen, often=0.3), seed=seed,
        limits=Typical(chosen.choice([0.0, 0.09, 0.5]), chosen.choice([0.0, 0.3, 1.0])),
    )  # fmt: skip


def test_every_tree_of_tokens_has_the_path_of_a_search_through_all_paths():
    """All assignments of two tokens, or of absence, to the nodes of two trees, as one batch."""
    for parents in ([-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]):
        tree = TokenTree(parents)
        drafted = torch.tensor([*product(range(-1, 2), repeat=len(tree) - 1)])
        problem = Problem(tree, vocab_size=2, batch=len(drafted), limits=Typical(0.4, 0.9))
        problem.tokens[:, 1:] = drafted
        problem.check()
    for depth in (0, 1):
        Problem(TREES["3-ary"], vocab_size=7, seed=4).check(max_depth=depth)


@pytest.mark.parametrize("first", range(4))
def test_random_trees_have_the_path_of_that_search(first):
    """A hundred; a GPU has fewer, since kernels are compiled for each dtype, vocabulary and choice of filters."""
    for seed in range(first, 100 if DEVICE == "cpu" else 8, 4):
        random_problem(seed).check()


def test_the_next_token_is_a_draw_from_p_at_the_end_of_the_path():
    count = 20_000
    p = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    problem = Problem(TokenTree([-1, 0, 0]), Filters(0.7), Typical(0.5, 1.0), vocab_size=3, batch=count)
    problem.target, problem.tokens = 0.7 * p.log().expand(count, 3, 3), torch.tensor([[0, 1, 2]]).expand(count, -1)
    out, other = (problem.verified(seed=seed) for seed in (3, 4))
    assert (out.path == torch.tensor([0, 1])).all()  # the child with 0.6 is accepted, and node 1 the end
    assert chi_square_p_value(out.next_token.bincount(minlength=3), p[1].double()) > SIGNIFICANCE
    assert not torch.equal(out.next_token, other.next_token)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_below_a_row_without_a_distribution_nothing_is_accepted(bad):
    """On a CPU the row is refused where the next token would be drawn from it."""
    problem = Problem(TREES["chain"], limits=Typical(0.0, 0.0), seed=1)
    assert problem.verified().length.tolist() == [3, 3]
    problem.target[1, 1:] = bad
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"target_logits must have a finite maximum .* but \[1, 0\] has"):
            problem.verified()
    else:
        out = problem.verified()
        assert out.length.tolist() == [3, 1]
        assert (out.next_token >= 0).tolist() == [True, False]
    problem.tokens[1, 1] = -1  # rows that nobody reaches do not matter
    problem.check()


def test_a_verifier_says_which_law_it_gives_and_checks_its_limits():
    assert Typical(0.2, 0.5).check().law_changed_by == "typical acceptance, epsilon 0.2, delta 0.5"
    for wrong in (Typical(epsilon=-0.1), Typical(delta=math.nan)):
        with pytest.raises(ValueError, match=r"(epsilon|delta) must be in \[0, 1\], got"):
            wrong.check()
