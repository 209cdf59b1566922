"""bench/blocks.py: its laws, chains and trees against sums over all texts and all draws, and the command."""

import json
from fractions import Fraction
from itertools import product
from math import prod
from types import SimpleNamespace

import pytest
import torch
from bench_scripts import BENCH, script
from verification_oracle import Drawn, drawn, rejection, whole

study = script("blocks")
TOKENS, LEVELS, NODES, TREES = 3, 3, 4, 10_000
LEARNT = study.languages(2, 0.7, 1, TOKENS).softmax(-1)


def last_two(path):
    return (0, 0, *path)[-2:]


def text_chance(language, path):
    return prod(float(language[(*last_two(path[:place]), token)]) for place, token in enumerate(path))


def as_oracle(target, head):
    """One language for `verification_oracle`, in fractions."""

    def law(given, path):
        return whole([Fraction(float(each)) for each in given[last_two(path)]])

    return SimpleNamespace(
        vocab_size=TOKENS,
        target=lambda path: law(target, path),
        draft=lambda path, source=0: law(head[len(path)], path),
    )


def test_languages_are_as_sharp_as_they_should_be():
    assert float(LEARNT.amax(-1).mean()) == pytest.approx(0.7, abs=1e-6)
    assert torch.allclose(LEARNT.sum(-1), torch.ones(()).double())


@pytest.mark.parametrize("laws", study.LAWS)
def test_a_heads_laws_are_sums_over_all_texts(laws):
    head = study.laws_of_head(LEARNT, laws, LEVELS)
    for index, language in enumerate(LEARNT):
        likeliest = []
        for depth in range(LEVELS):
            texts = {path: text_chance(language, path) for path in product(range(TOKENS), repeat=depth + 1)}
            for path in product(range(TOKENS), repeat=depth):
                kept = {
                    "depth": lambda text: True,
                    "anchor": lambda text, depth=depth, path=likeliest: list(text[:depth]) == path,
                    "token": lambda text, depth=depth, path=path: text[:depth][-1:] == path[-1:],
                    "path": lambda text, depth=depth, path=path: text[:depth] == path,
                }[laws]
                sums = [
                    sum(chance for text, chance in texts.items() if text[-1] == token and kept(text))
                    for token in range(TOKENS)
                ]
                expected = torch.tensor(sums).double() / sum(sums)
                torch.testing.assert_close(head[index, depth][last_two(path)], expected)
            likeliest.append(int(language[last_two(likeliest)].argmax()))


@pytest.mark.parametrize("taken", [False, True])
def test_a_chain_accepts_what_all_its_texts_say(taken):
    head = study.laws_of_head(LEARNT, "token", LEVELS)
    for index, accepted in enumerate(study.chain_accepts(LEARNT, head, taken)):
        expected = 0.0
        for length in range(1, LEVELS + 1):
            for path in product(range(TOKENS), repeat=length):
                chances = []
                for depth, token in enumerate(path):
                    p, q = LEARNT[index][last_two(path[:depth])], head[index, depth][last_two(path[:depth])]
                    chances.append(float(min(p[token], q[token]) if taken else p[token] * (q.argmax() == token)))
                expected += prod(chances)
        assert float(accepted) == pytest.approx(expected)


def worths(tree, language, accepts):
    """Of the next child of each node: by what is left of the law, or by the acceptance of its depth and rank."""
    values, found = [1.0], []
    for node in range(len(tree.parents)):
        if node:
            parent, elder = tree.parents[node], tree.children(tree.parents[node])
            depth, rank = len(tree.context(parent)), elder.index(node)
            by_law = float(language.draft(tree.context(parent))[tree.tokens[node]])
            values.append(values[parent] * (by_law if accepts is None else float(accepts[depth, rank])))
    for node, value in enumerate(values):
        depth, children = len(tree.context(node)), [tree.tokens[child] for child in tree.children(node)]
        if depth == LEVELS or len(children) == TOKENS:
            found.append(-1.0)
        elif accepts is None:
            found.append(
                value * float(sum(q for v, q in enumerate(language.draft(tree.context(node))) if v not in children))
            )
        else:
            found.append(value * float(accepts[depth, len(children)]))
    return found


@pytest.mark.parametrize("planned", [False, True])
def test_drawn_trees_accept_what_all_draws_and_all_coins_say(planned):
    """Each of some trees exactly, by the oracle; and the mean of many is that of all that can be drawn."""
    head = study.laws_of_head(LEARNT, "depth", LEVELS)
    accepts = study.acceptance(LEARNT, head, [False] * LEVELS, 500, 3) if planned else None
    few = study.grown(head, NODES, 4, [False] * LEVELS, 5, accepts)
    many = study.tree_accepts(LEARNT, study.grown(head, NODES, TREES, [False] * LEVELS, 6, accepts), rejection=True)
    for index in range(2):
        language, own = as_oracle(LEARNT[index], head[index]), None if accepts is None else accepts[index]

        def growth(tree, language=language, own=own):
            worth = worths(tree, language, own)
            return None if len(worth) > NODES else worth.index(max(worth))

        trees = dict(drawn(language, growth))
        means = {
            tree: float(sum(chance * len(path) for (path, _), chance in rejection(language, tree).items()))
            for tree in trees
        }
        for row in range(4 * index, 4 * index + 4):
            one = study.Trees(*(each[row : row + 1] for each in few))
            parents = (-1, *one.parents[0, 1:].tolist())
            tree = Drawn(parents, (-1, *one.context[0, 1:, 1].tolist()), (0,) * (NODES + 1))
            assert tree in trees
            accepted = study.tree_accepts(LEARNT[index : index + 1], one, rejection=True)
            assert float(accepted[0]) == pytest.approx(means[tree])
        expected = float(sum(chance * means[tree] for tree, chance in trees.items()))
        assert float(many[index]) == pytest.approx(expected, abs=5.1 * LEVELS / 2 / TREES**0.5)


def test_a_heads_error_is_such_that_its_laws_overlap_as_they_should():
    error = study.error_of(LEARNT, 0.8, 3)
    for laws in study.LAWS:
        head = study.laws_of_head(LEARNT, laws, 1, error, 3)
        if laws in ("depth", "anchor"):
            assert float(head[:, 0, 0, 0].minimum(LEARNT[:, 0, 0]).sum(-1).mean()) == pytest.approx(0.8, abs=1e-4)
        assert torch.allclose(head.sum(-1), torch.ones(()).double())
        assert not torch.allclose(head, study.laws_of_head(LEARNT, laws, 1), atol=1e-2)
    assert study.error_of(LEARNT, 1.0, 3) == 0


def test_a_tree_of_the_likeliest_tokens_has_the_best_products_and_the_chances_of_its_texts():
    head = study.laws_of_head(LEARNT, "depth", LEVELS)
    tree = study.grown(head, NODES, 1, [True] * LEVELS, 0)
    for index, accepted in enumerate(study.tree_accepts(LEARNT, tree, rejection=True)):
        paths = [path for length in range(1, LEVELS + 1) for path in product(range(TOKENS), repeat=length)]
        said = {path: prod(float(head[index, d, 0, 0, token]) for d, token in enumerate(path)) for path in paths}
        best = sorted(paths, key=said.__getitem__, reverse=True)[:NODES]
        assert float(accepted) == pytest.approx(sum(text_chance(LEARNT[index], path) for path in best))


def test_what_children_are_worth_is_how_often_they_are_accepted():
    head, texts = study.laws_of_head(LEARNT, "depth", LEVELS), 20_000
    found = study.acceptance(LEARNT, head, [False, True, True], texts, 4)
    for index in range(2):
        second = torch.einsum("a,av->v", LEARNT[index, 0, 0], LEARNT[index, 0])  # of all texts
        likeliest = second[head[index, 1, 0, 0].argsort(descending=True)]
        assert found[index, 1].tolist() == pytest.approx(likeliest.tolist(), abs=5.1 * 0.5 / texts**0.5)
        language, expected = as_oracle(LEARNT[index], head[index]), [0.0] * TOKENS
        for tree, chance in drawn(language, lambda tree: 0 if len(tree.parents) <= TOKENS else None):
            for (path, _), weight in rejection(language, tree).items():
                for node in path:
                    expected[node - 1] += float(chance * weight)
        assert found[index, 0].tolist() == pytest.approx(expected, abs=5.1 * 0.5 / texts**0.5)


@pytest.mark.slow
def test_the_command_writes_a_row_for_each_case(tmp_path):
    path = tmp_path / "out.json"
    study.main(["--kinds", "flat", "--miniature", "--threads", "1", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == len(study.LAWS) * len(study.CASES)
    for row in rows:
        assert 1 <= row["ratio"] * (1 + row["chain"]) <= 1 + row["levels"] + 1e-2
        assert ("planned" in row) == (row["temperature"] > 0)


def test_by_the_committed_results_a_tree_pays_and_no_likeliest_tokens_accept_more_than_drawn_ones():
    """A perfect head is another thing: a chain of it ends where the block does, and no tree can accept more."""
    rows = json.loads((BENCH / "results" / "blocks-cpu.json").read_text())["rows"]
    assert len(rows) == len(study.KINDS) * len(study.LAWS) * len(study.CASES)
    for row in rows:
        if row["overlap"] < 1:
            assert row["ratio"] >= 1.2, row
        if row["temperature"]:
            assert row["even"]["sharpened"] >= row["even"]["likeliest"], row
        if row["overlap"] == row["temperature"] == 1 and row["nodes"] < 64:
            assert row["rejection"] > row["likeliest"], row
            assert row["planned"] > row["rejection"], row
