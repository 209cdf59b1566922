"""Children of different laws: verify_tree(laws=) against exact enumeration in fractions, and its kernel against it."""

import random
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from bisection import bisected
from law_cases import Problem, law
from mutations import mutated
from verification_cases import DEVICE, mutant

from heavypath.kernels import verification
from heavypath.kernels.filtering import Filters
from heavypath.kernels.verification import verify_tree
from heavypath.kernels.verifying import laws
from heavypath.kernels.verifying.laws import laws_chain
from heavypath.kernels.verifying.residual import residual_chain
from heavypath.speculative.trees.tree import TokenTree

PLAIN = Filters()


def rest(residual, draft):
    """SpecInfer's norm(max(P - Q, 0))."""
    left = [max(p - q, Fraction(0)) for p, q in zip(residual, draft, strict=True)]
    return [each / sum(left) for each in left]


def thresholds(target, drafts, drawn):
    """What each child's coin must be below, those before it rejected; and the law of a recovered token.

    None behind a child that is accepted whatever its coin.
    """
    residual, found = target, []
    for draft, token in zip(drafts, drawn, strict=True):
        found.append(None if residual is None else min(Fraction(1), residual[token] / draft[token]))
        residual = None if residual is None or found[-1] == 1 else rest(residual, draft)
    return found, residual


def emitted(target, drafts):
    """The law of a node's token, over all draws and coins."""
    total = [Fraction(0)] * len(target)
    for drawn in product(range(len(target)), repeat=len(drafts)):
        reach = Fraction(1)
        for draft, token in zip(drafts, drawn, strict=True):
            reach *= draft[token]
        if not reach:
            continue
        found, residual = thresholds(target, drafts, drawn)
        for token, threshold in zip(drawn, found, strict=True):
            total[token] += reach * (threshold or 0)
            reach *= 1 - (threshold or 0)
        for token, weight in enumerate(residual or []):
            total[token] += reach * weight
    return total


def log2(probabilities):
    with np.errstate(divide="ignore"):
        return np.log2(np.array(probabilities, dtype=float))


NODES = {
    "two laws": ([3, 2, 5], [[1, 1, 2], [5, 1, 1]]),
    "three laws": ([3, 2, 5], [[1, 1, 2], [5, 1, 1], [2, 6, 1]]),
    "two of three are one law": ([1, 4, 2], [[3, 1, 1], [1, 1, 7], [3, 1, 1]]),
    "all one law": ([1, 4, 2], [[3, 1, 1], [3, 1, 1], [3, 1, 1]]),
    "zeros in the target": ([0, 2, 5], [[4, 1, 1], [2, 1, 1]]),
    "zeros in the drafts": ([3, 2, 5], [[0, 1, 3], [1, 0, 0], [1, 2, 0]]),
    "zeros in all": ([0, 2, 5], [[1, 1, 0], [3, 0, 1]]),
    "nothing in common": ([0, 0, 1], [[1, 1, 0], [1, 0, 0]]),
    "the target itself": ([3, 2, 5], [[3, 2, 5], [1, 1, 1]]),
}


@pytest.mark.parametrize("name", NODES)
def test_thresholds_and_recovered_tokens_of_one_node_are_those_of_the_paper(name):
    """Coins are bisected; the oracle, in fractions, gives the target's law exactly."""
    target, drafts = law(NODES[name][0]), [*map(law, NODES[name][1])]
    assert emitted(target, drafts) == target
    drawn = np.array([*product(range(3), repeat=len(drafts))])
    log_target = log2([target] * len(drawn))
    log_laws = log2([[draft] * len(drawn) for draft in drafts])
    for place in range(len(drafts)):
        found = bisected(
            lambda coins, place=place: laws_chain(log_target, log_laws, drawn, coins)[0] == place, *drawn.shape, place
        )
        for row, tokens in enumerate(drawn):
            possible = all(draft[token] for draft, token in zip(drafts, tokens, strict=True))
            expected = thresholds(target, drafts, tokens)[0][place] if possible else None
            assert expected is None or float(expected) == pytest.approx(found[row], abs=1e-12)
    choice, weights = laws_chain(log_target, log_laws, drawn, np.ones(drawn.shape))
    for tokens, given in zip(drawn[choice < 0], weights, strict=True):
        possible = all(draft[token] for draft, token in zip(drafts, tokens, strict=True))
        expected = thresholds(target, drafts, tokens)[1] if possible else None
        if expected is not None:
            np.testing.assert_allclose(given / given.sum(), np.array(expected, dtype=float), atol=1e-12)


def test_a_child_that_its_draft_could_not_have_drawn_is_skipped():
    """Even one that the target is sure of; and it takes nothing away from the next one."""
    target, drafts = log2([[0, 1]]), log2([[[1, 0]], [[0.5, 0.5]]])
    for coins in (np.zeros((1, 2)), np.full((1, 2), 0.999)):
        assert laws_chain(target, drafts, np.array([[1, 1]]), coins)[0].tolist() == [1]


def test_a_coin_of_zero_does_not_accept_an_impossible_child():
    target, drafts = log2([[0, 1]]), log2([[[0.5, 0.5]]])
    assert laws_chain(target, drafts, np.array([[0]]), np.zeros((1, 1)))[0].tolist() == [-1]


def test_laws_that_are_all_one_are_the_chain_of_one_law():
    generator = np.random.default_rng(0)
    target, draft = log2(generator.dirichlet(np.ones(9), (2, 200)))
    drawn, coins = generator.integers(0, 9, (200, 4)), generator.random((200, 4))
    choice, weights = laws_chain(target, np.stack([draft] * 4), drawn, coins)
    expected, expected_weights = residual_chain(target, draft, drawn, coins, True)
    assert (choice == expected).all()
    np.testing.assert_allclose(weights, expected_weights, atol=1e-12)


NEAR = Fraction(1, 100_000)  # how near to a threshold coins are tossed, on both sides
# A tree of two levels over two or three tokens. Node i was drawn from row ROWS[i] of LAWS, given the token above.
TREES = {
    "two drafts": (TokenTree([-1, 0, 0, 1, 2]), [0, 0, 5, 1, 2], 3),
    "three children of two drafts": (TokenTree([-1, 0, 0, 0, 1, 2, 3]), [0, 0, 7, 0, 1, 2, 3], 2),
    "siblings out of index order": (TokenTree([-1, 0, 0, 1, 2], [0, 1, 0, 0, 0]), [0, 5, 0, 1, 2], 3),
    "two laws below one node": (TokenTree([-1, 0, 0, 1, 1], [0, 0, 1, 1, 0]), [0, 0, 5, 1, 6], 3),
}


def every_case(tree, rows, vocab, target, drafts):
    """(probability, tokens, coins, first token or None, law of the token after it) of all draws and sides of coins.

    target(token), drafts(row, token above): laws in fractions; the root's token is 0
    """
    nodes = range(1, len(tree))
    parent, rank = tree.parents.tolist(), tree.ranks.tolist()

    def levels(tokens, coins, reach, reached, last):
        """Try the children of the nodes reached, by rank and index."""
        order = sorted((node for node in nodes if parent[node] in reached), key=lambda node: (rank[node], node))
        own = [drafts(rows[node], tokens[parent[node]]) for node in order]
        found, residual = thresholds(target(tokens[last]), own, [tokens[node] for node in order])
        for child, threshold in zip(order, found, strict=True):
            if threshold is None:
                return
            if reach * threshold:
                equal = {node for node in order if tokens[node] == tokens[child]}
                yield reach * threshold, coins | {child: threshold * (1 - NEAR)}, child, equal, None
            reach *= 1 - threshold
            coins = coins | {child: threshold + (1 - threshold) * NEAR}
        if reach:
            yield reach, coins, last, set(), residual if order else target(tokens[last])

    for drawn in product(range(vocab), repeat=len(tree) - 1):
        tokens = [0, *drawn]
        reach = Fraction(1)
        for node in nodes:
            reach *= drafts(rows[node], tokens[parent[node]])[tokens[node]]
        if not reach:
            continue
        for chance, coins, node, equal, residual in levels(tokens, {}, reach, {0}, 0):
            if residual is not None:
                yield chance, tokens, coins, None, residual
                continue
            for further, more, last, _, after in levels(tokens, coins, chance, equal, node):
                second = after if after is not None else [Fraction(int(v == tokens[last])) for v in range(vocab)]
                yield further, tokens, more, tokens[node], second


def two_tokens(name, monkeypatch, module=verification):
    """The joint law of two consecutive tokens of a tree, by verify_tree of a module, and as it must be: [V, V] each.

    verify_tree is given each draw, with coins near both sides of the oracle's thresholds; its keys are taken as laws.
    """
    tree, rows, vocab = TREES[name]
    chosen, made = random.Random(name), {}

    def table(*key):
        return made.setdefault(key, law([chosen.randint(1, 6) for _ in range(vocab)]))

    def target(token):
        return table("target", token)

    def drafts(row, token):
        return table("draft", row, token)

    cases = [*every_case(tree, rows, vocab, target, drafts)]
    assert sum(case[0] for case in cases) == 1
    tokens = torch.tensor([case[1] for case in cases])
    coins = np.array([[float(case[2].get(node, 0.5)) for node in range(len(tree))] for case in cases])
    above = {row: node for node, row in zip(tree.parents.tolist()[1:], rows[1:], strict=True)}
    draft = torch.tensor([[[float(p) for p in drafts(row, case[1][above.get(row, 0)])] for row in range(len(tree) + 3)]
                          for case in cases]).log()  # fmt: skip
    logits = torch.tensor([[[float(p) for p in target(token)] for token in case[1]] for case in cases]).log()
    taken = []

    def keeping(keys):
        taken.extend(np.exp(keys))
        return np.arange(len(taken) - len(keys), len(taken))

    monkeypatch.setattr(module, "coins", lambda seed, row, rank: coins)
    monkeypatch.setattr(module, "gumbels", lambda seed, stream, row, vocab: np.zeros((len(row), vocab)))
    monkeypatch.setattr(module, "best_token", keeping)
    verified = module.verify_tree(
        tokens, tree.parents, logits, draft, method="with_replacement", ranks=tree.ranks, laws=torch.tensor(rows)
    )

    def joint(first, second, law_of_next):
        """Of one case: its known tokens or None, and the law of the token behind them."""
        table = np.zeros((vocab, vocab))
        for one, two in product(range(vocab), repeat=2):
            now = float(law_of_next[one]) if first is None else float(one == first)
            then = target(one)[two] if first is None else law_of_next[two] if second is None else two == second
            table[one, two] = now * float(then)
        return table

    ours, oracles = np.zeros((2, vocab, vocab))
    for case, path, length, kept in zip(cases, *(field.tolist() for field in verified), strict=True):
        chance, drawn, _, first, last = case
        accepted = [drawn[node] for node in path[1 : length + 1]]
        ours += float(chance) * joint(*[*accepted, None, None][:2], taken[kept] / taken[kept].sum())
        oracles += float(chance) * joint(first, None, last)
    right = np.array([[float(target(0)[one] * target(one)[two]) for two in range(vocab)] for one in range(vocab)])
    np.testing.assert_allclose(oracles, right, atol=1e-12)
    return ours, right


@pytest.mark.parametrize("name", TREES)
def test_two_consecutive_tokens_of_a_whole_tree_have_exactly_the_targets_law(name, monkeypatch):
    np.testing.assert_allclose(*two_tokens(name, monkeypatch), atol=1e-6)


BUGS = {
    "S is not carried on": (laws, "more if taken is None else taken + more", "more"),
    "Q is not multiplied by F": (laws, "np.where(rejected, total, 0)", "np.where(rejected, 1.0, 0)"),
    "a threshold is not divided by F": (laws, "/ total * np.exp2(-log_q)", "* np.exp2(-log_q)"),
    "the recovered token comes from the target": (laws, "total[:, None] > 0, residual", "total[:, None] > 9, residual"),
    "each child is weighed against its parent's law": (verification, "own = law[sequence[inner, None]",
                                                       "own = above[np.arange(len(inner))[:, None]"),
    "all children are weighed against the law of the first": (verification, "own = np.where(tried >= 0, own",
                                                              "own = np.where(tried < 0, own"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_the_reference_is_found(name, monkeypatch):
    module, original, replacement = BUGS[name]
    copy = mutated(module, original, replacement)
    if module is laws:
        monkeypatch.setattr(verification, "laws_chain", copy.laws_chain)
    used = copy if module is verification else verification
    both = [two_tokens(tree, monkeypatch, used) for tree in ("two drafts", "three children of two drafts")]
    assert max(abs(ours - right).max() for ours, right in both) > 1e-3


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)])
def test_the_kernel_accepts_what_the_reference_accepts_in_random_trees(seeds):
    differ = [seed for seed in seeds if not Problem(seed).agrees()]
    assert not differ


def unfiltered(seed: int, vocab_size: int = 5, batch: int = 2) -> Problem:
    return Problem(seed, vocab_size=vocab_size, batch=batch, filters=(PLAIN, PLAIN))


def test_several_tiles_views_and_shallow_walks_agree():
    assert unfiltered(3, vocab_size=5_001).agrees()
    problem = unfiltered(5, vocab_size=7)
    for depth in (0, 1):
        assert problem.agrees(max_depth=depth)
    assert problem.agrees(rows=torch.arange(problem.tokens.numel()).view_as(problem.tokens) + (5 << 33), ranks=None)
    wide = torch.zeros(*problem.draft.shape[:2], 16, dtype=problem.draft.dtype)
    wide[..., :7] = problem.draft
    problem.draft, problem.laws = wide[..., :7], problem.laws.t().contiguous().t()
    assert problem.agrees(seed=torch.tensor(-(2**40) - 3))


KERNEL_BUGS = {
    "S is not carried on": ("tl.where(rejected > 0, V, 0)", "0 * V"),
    "Q is not multiplied by F": ("DRAFT_FILTERED) + log_over)", "DRAFT_FILTERED))"),
    "a threshold is not divided by F": ("0.0) / over", "0.0)"),
    "a threshold knows nothing of S": ("log_s = tl.load(taken_ptr + token", "unused = tl.load(taken_ptr + token"),
    "the numbers of the first law stay": ("if this_law != law_before:", "if law_before < 0:"),
    "the recovered token comes from the target": ("tl.where(rejected > 0, 0.0, ", "tl.where(rejected > 99, 0.0, "),
    "rank is ignored": ("tl.where(child, rank * N + index, NONE)", "tl.where(child, index, NONE)"),
}


@pytest.mark.usefixtures("interpreter")  # which needs no compiler for each bug, and ends
@pytest.mark.parametrize("name", [
    name if name.startswith("the recovered token") else pytest.param(name, marks=pytest.mark.slow)
    for name in KERNEL_BUGS
])  # fmt: skip
def test_a_bug_of_the_kernel_is_found(name, tmp_path, monkeypatch):
    copy = mutant(tmp_path, laws, *KERNEL_BUGS[name], "mutant")
    monkeypatch.setattr(verification, "decide_by_laws", copy.decide_by_laws)
    assert not all(unfiltered(seed, batch=4).agrees() for seed in range(80))


def test_rows_without_a_distribution_are_flagged_by_the_kernel_and_refused_by_the_reference():
    tokens, parents, rows = torch.tensor([[0, 1, 2]] * 2), torch.tensor([-1, 0, 0]), torch.tensor([0, 3, 4])
    target, draft = torch.tensor([0.0, -3.0, 0.0]).expand(2, 3, 3), torch.zeros(2, 5, 3)
    for bad in (torch.nan, torch.inf, -torch.inf):
        draft[1, 4] = bad  # asked for where the first child, token 1, is rejected
        options = {"method": "with_replacement", "laws": rows, "seed": 1}
        given = [tensor.to(DEVICE) for tensor in (tokens, parents, target, draft, rows)]
        verified = verify_tree(*given[:4], **options | {"laws": given[4]}, impl="triton")
        assert int(verified.next_token[0]) >= 0
        assert verified.next_token[1] == -1
        with pytest.raises(ValueError, match=r"draft_logits .* \[1, 4\] has"):
            verify_tree(tokens, parents, target, draft, **options, impl="torch")


GOOD = {
    "tokens": torch.tensor([[0, 1, 1]]),
    "parents": torch.tensor([-1, 0, 0]),
    "target_logits": torch.zeros(1, 3, 3),
    "draft_logits": torch.zeros(1, 4, 3),
    "method": "with_replacement",
    "laws": torch.tensor([0, 0, 3]),
}


@pytest.mark.parametrize(("change", "message"), [
    ({"method": "without_replacement"}, "laws are for method 'with_replacement' .* got method 'without_replacement'"),
    ({"method": "target_sample"}, "laws are for .* leave laws out"),
    ({"draft_temperature": 0.0}, "draft_temperature > 0; got .* draft_temperature 0"),
    ({"laws": torch.tensor([0, 0, 4])}, r"laws must be in \[0, 4\), got 0 .. 4"),
    ({"laws": torch.tensor([0, -1, 3])}, r"laws must be in \[0, 4\), got -1 .. 3"),
    ({"laws": torch.tensor([0, 3])}, r"laws must be a LongTensor \[3\] or \[1, 3\], got .* \[2\]"),
    ({"laws": torch.tensor([0.0, 0.0, 3.0])}, "laws must be a LongTensor"),
    ({"draft_logits": torch.zeros(1, 2, 3)}, r"floating point \[1, M, 3\] with M >= 3, got torch.float32 \[1, 2, 3\]"),
    ({"draft_logits": torch.zeros(1, 4, 2)}, r"floating point \[1, M, 3\] with M >= 3"),
    ({"laws": None}, r"draft_logits must be floating point \[1, 3, V\]"),
    ({"draft_logits": None}, "needs draft_logits"),
])  # fmt: skip
def test_laws_that_do_not_fit_are_refused(change, message):
    assert verify_tree(**GOOD).length[0] in (0, 1)
    with pytest.raises(ValueError, match=message):
        verify_tree(**GOOD | change)
