"""Children of different laws: verify_tree(laws=) against exact enumeration in fractions, and its kernel against it."""

import random
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from test_verification_kernel import DEVICE

from heavypath.kernels import verification
from heavypath.kernels.filtering import Filters
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree
from heavypath.kernels.verifying.laws import laws_chain
from heavypath.kernels.verifying.residual import residual_chain
from heavypath.speculative.trees.tree import TokenTree

PLAIN = Filters()


def law(weights):
    return [Fraction(weight, sum(weights)) for weight in weights]


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
        low, high = np.zeros(len(drawn)), np.ones(len(drawn))
        for _ in range(45):
            coins = np.ones(drawn.shape)
            coins[:, place] = middle = (low + high) / 2
            accepted = laws_chain(log_target, log_laws, drawn, coins)[0] == place
            low, high = np.where(accepted, middle, low), np.where(accepted, high, middle)
        for row, tokens in enumerate(drawn):
            possible = all(draft[token] for draft, token in zip(drafts, tokens, strict=True))
            expected = thresholds(target, drafts, tokens)[0][place] if possible else None
            assert expected is None or float(expected) == pytest.approx(low[row], abs=1e-12)
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
                yield reach * threshold, coins | {child: threshold / 2}, child, equal, None
            reach *= 1 - threshold
            coins = coins | {child: (1 + threshold) / 2}
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


@pytest.mark.parametrize("name", TREES)
def test_two_consecutive_tokens_of_a_whole_tree_have_exactly_the_targets_law(name, monkeypatch):
    """verify_tree is given each draw with coins on each side of the oracle's thresholds; its keys are taken as laws."""
    tree, rows, vocab = TREES[name]
    chosen = random.Random(name)
    made = {}

    def table(*key):
        return made.setdefault(key, law([chosen.randint(1, 6) for _ in range(vocab)]))

    def target(token):
        return table("target", token)

    def drafts(row, token):
        return table("draft", row, token)

    cases = [*every_case(tree, rows, vocab, target, drafts)]
    assert sum(case[0] for case in cases) == 1
    joint = {pair: Fraction(0) for pair in product(range(vocab), repeat=2)}
    for chance, _, _, first, second in cases:
        for token in range(vocab):
            for after in range(vocab):
                one = (second[token] if first is None else Fraction(int(token == first))) * chance
                joint[token, after] += one * (target(token)[after] if first is None else second[after])
    assert joint == {(one, two): target(0)[one] * target(one)[two] for one, two in joint}

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

    monkeypatch.setattr(verification, "coins", lambda seed, row, rank: coins)
    monkeypatch.setattr(verification, "gumbels", lambda seed, stream, row, vocab: np.zeros((len(row), vocab)))
    monkeypatch.setattr(verification, "best_token", keeping)
    verified = verify_tree(
        tokens, tree.parents, logits, draft, method="with_replacement", ranks=tree.ranks, laws=torch.tensor(rows)
    )
    seen = np.zeros((vocab, vocab))
    for case, path, length, kept in zip(cases, *(field.tolist() for field in verified), strict=True):
        after = taken[kept] / taken[kept].sum()
        accepted = [case[1][node] for node in path[1 : length + 1]]
        for first, second in product(range(vocab), repeat=2):
            sure = [*accepted, None, None]
            one = after[first] if sure[0] is None else float(sure[0] == first)
            if sure[0] is None:
                two = float(target(first)[second])
            else:
                two = after[second] if sure[1] is None else float(sure[1] == second)
            seen[first, second] += float(case[0]) * one * two
    expected = np.array([[float(joint[one, two]) for two in range(vocab)] for one in range(vocab)])
    np.testing.assert_allclose(seen, expected, atol=1e-6)


class Problem:
    """Any small tree whose nodes were drawn from any laws: draw order, filters of both, dtype and absent nodes."""

    def __init__(self, seed: int, **fixed):
        chosen = random.Random(f"laws {seed}")
        parents = [-1, *(chosen.randrange(node) for node in range(1, chosen.randint(2, 8)))]
        ranks, order = [0] * len(parents), chosen.sample(range(1, len(parents)), len(parents) - 1)
        for place, node in enumerate(order):
            ranks[node] = sum(parents[other] == parents[node] for other in order[:place])
        count, batch = len(parents), chosen.choice([1, 2])
        vocab = fixed.get("vocab_size", chosen.choice([1, 2, 3, 5, 8, 40]))
        dtype = fixed.get("dtype", chosen.choice([torch.float32, torch.float16, torch.bfloat16]))
        more = chosen.randint(0, 3)
        self.target_filters, self.draft_filters = fixed.get("filters", (self.filters(chosen), self.filters(chosen)))
        generator = torch.Generator().manual_seed(seed)
        contexts = min(vocab, 40)
        target = 1.5 * torch.randn(contexts, vocab, generator=generator)
        distance = chosen.choice([0.0, 0.3, 1.0, 3.0])
        drafts = (target + distance * torch.randn(3, contexts, vocab, generator=generator)).to(dtype)
        self.parents, self.tokens = torch.tensor(parents), torch.full((batch, count), -1)
        self.laws = torch.randint(0, count + more, (batch, count), generator=generator)
        if chosen.random() < 0.5:  # rows that a tree's own nodes have, as several drafts would have them
            own = torch.tensor(
                [[max(0, parent), count + max(0, more - 1)][parent == 0 and more > 0] for parent in parents]
            )
            self.laws = torch.where(torch.rand(count, generator=generator) < 0.5, own, self.parents.clamp(min=0))
            self.laws = self.laws.expand(batch, -1)
        self.target = torch.zeros(batch, count, vocab, dtype=dtype)
        self.draft = torch.full((batch, count + more, vocab), torch.nan, dtype=dtype)  # others are never read
        self.tokens[:, 0] = 0
        every = torch.arange(batch)
        for node in range(count):
            self.target[:, node] = target[self.tokens[:, node].clamp(min=0) % contexts].to(dtype)
            for child in range(1, count):
                if parents[child] == node:
                    law, context = self.laws[:, child], self.tokens[:, node].clamp(min=0) % contexts
                    unset = self.draft[every, law, 0].isnan()
                    self.draft[every[unset], law[unset]] = drafts[law[unset] % 3, context[unset]]
                    drawn = gumbel_topk(
                        self.draft[every, law], 1, **self.draft_filters._asdict(), seed=seed,
                        rows=1000 * child + every, impl="torch",
                    )  # fmt: skip
                    self.tokens[:, child] = drawn.tokens[:, 0]
        absent = torch.rand(batch, count, generator=generator) < chosen.choice([0.0, 0.2])
        self.tokens[absent & (torch.arange(count) > 0)] = -1
        temperature, top_k, top_p, min_p = self.draft_filters
        off = Filters(temperature, top_k or 0, top_p or 1.0, min_p or 0.0)  # None would mean the target's
        self.options = {
            "method": "with_replacement", "ranks": torch.tensor(ranks), "seed": seed, **self.target_filters._asdict(),
            **{f"draft_{name}": value for name, value in off._asdict().items()},
        }  # fmt: skip

    @staticmethod
    def filters(chosen) -> Filters:
        drops = [chosen.random() < 0.2 for _ in range(3)]
        return Filters(
            chosen.choice([0.3, 1.0, 1.7]),
            chosen.randint(1, 5) if drops[0] else None,
            chosen.uniform(0.2, 0.99) if drops[1] else None,
            chosen.uniform(0, 0.3) if drops[2] else None,
        )

    def verified(self, impl: str, **changes):
        tensors = (self.tokens, self.parents, self.target, self.draft)
        given = self.options | {"laws": self.laws} | changes
        if impl == "triton":
            tensors = tuple(tensor.to(DEVICE) for tensor in tensors)
            given = {k: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for k, value in given.items()}
        return [field.cpu() for field in verify_tree(*tensors, impl=impl, **given)]

    def agrees(self, **changes) -> bool:
        both = zip(self.verified("triton", **changes), self.verified("torch", **changes), strict=True)
        return all(torch.equal(kernel, reference) for kernel, reference in both)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 100), marks=pytest.mark.slow)])
def test_the_kernel_accepts_what_the_reference_accepts_in_random_trees(seeds):
    differ = [seed for seed in seeds if not Problem(seed).agrees()]
    assert not differ


def test_several_tiles_views_and_shallow_walks_agree():
    for seed in (3, 4):
        assert Problem(seed, vocab_size=5_001, filters=(PLAIN, PLAIN)).agrees()
    problem = Problem(5, vocab_size=7)
    for depth in (0, 1):
        assert problem.agrees(max_depth=depth)
    assert problem.agrees(rows=torch.arange(problem.tokens.numel()).view_as(problem.tokens) + (5 << 33), ranks=None)
    wide = torch.zeros(*problem.draft.shape[:2], 16, dtype=problem.draft.dtype)
    wide[..., :7] = problem.draft
    problem.draft, problem.laws = wide[..., :7], problem.laws.t().contiguous().t()
    assert problem.agrees(seed=torch.tensor(-(2**40) - 3))


def test_rows_without_a_distribution_are_flagged_by_the_kernel_and_refused_by_the_reference():
    tokens, parents, rows = torch.tensor([[0, 1, 2]] * 2), torch.tensor([-1, 0, 0]), torch.tensor([0, 3, 4])
    target, draft = torch.tensor([0.0, -3.0, 0.0]).expand(2, 3, 3), torch.zeros(2, 5, 3)
    for bad in (torch.nan, torch.inf, -torch.inf):
        draft[1, 4] = bad  # asked for where the first child, token 1, is rejected
        choices = set()
        for seed in range(6):
            options = {"method": "with_replacement", "laws": rows, "seed": seed}
            given = [tensor.to(DEVICE) for tensor in (tokens, parents, target, draft, rows)]
            verified = verify_tree(*given[:4], **options | {"laws": given[4]}, impl="triton")
            choices.add(tuple(verified.next_token.tolist()))
            if int(verified.next_token[1]) == -1:
                with pytest.raises(ValueError, match=r"draft_logits .* \[1, 4\] has"):
                    verify_tree(tokens, parents, target, draft, **options, impl="torch")
        assert all(first >= 0 for first, _ in choices)
        assert any(second == -1 for _, second in choices)


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
