"""Markov acceptance by hand, and how it is counted."""

import pytest
import torch
from bench_scripts import script
from planning_cases import random_rates
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters
from heavypath.speculative import METHODS, TokenTree, expected_tokens, greedy_tree, select_tree
from heavypath.speculative.calibration import Extent, Way, walk
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models.llama import LlamaForward

markov = script("markov")
falling, markov_acceptance, markov_table = markov.falling, markov.markov_acceptance, markov.markov_table

# Far more is accepted below a second child than below a first one.
BETTER_BELOW_THE_SECOND = torch.tensor([[0.5, 0.4], [0.1, 0.0], [0.9, 0.05]])


def test_expected_tokens_by_hand():
    acceptance = markov_acceptance(BETTER_BELOW_THE_SECOND)
    assert expected_tokens(TokenTree.chain(3), acceptance) == pytest.approx(1 + 0.5 + 0.5 * 0.1 + 0.5 * 0.1 * 0.1)
    second = TokenTree.from_paths([(0,), (1,), (1, 0), (1, 0, 0), (1, 1)])
    assert expected_tokens(second, acceptance) == pytest.approx(1 + 0.9 + 0.4 * (0.9 + 0.9 * 0.1 + 0.05))


def test_subtrees_differ_by_the_rank_of_their_root():
    tree = greedy_tree(markov_acceptance(BETTER_BELOW_THE_SECOND), 5)
    assert tree == TokenTree.from_paths([(0,), (1,), (1, 0), (0, 0)]).reordered("heavy_path")[0]
    plan = select_tree(markov_acceptance(BETTER_BELOW_THE_SECOND), {1: 1.0, 4: 1.1}, draft_cost=0.05)
    assert plan.tree == TokenTree.from_paths([(0,), (1,), (1, 0)]).reordered("heavy_path")[0]


def test_counting_by_hand():
    # root: 1, below it 0, below that none; root: none offered; root: 0, and the text ends
    table = markov_table(torch.tensor([[1, 0, -1, -2, 0]]), 2, prior=0)
    assert table.tolist() == [[0.5, 0.5], [0, 0], [1, 0]]
    overall = torch.tensor([2 / 4, 1 / 4])
    drawn = markov_table(torch.tensor([[1, 0, -1, -2, 0]]), 2, prior=4)
    expected = torch.stack([(1 + 4 * overall) / 6, 4 * overall / 5, (torch.tensor([1.0, 0]) + 4 * overall) / 5])
    assert torch.allclose(drawn, expected.double())


def test_rates_fall_as_little_as_they_must():
    """Against the definition, and by hand: neighbours that rise become their mean."""
    assert falling(torch.tensor([[0.3, 0.1, 0.2, 0.05], [0.1, 0.2, 0.3, 0.0]])).tolist() == [
        pytest.approx([0.3, 0.15, 0.15, 0.05]), pytest.approx([0.2, 0.2, 0.2, 0])
    ]  # fmt: skip
    rates = random_rates(50, 5, seed=3)
    found = falling(rates)
    assert (found.diff(dim=1) <= 1e-12).all()
    assert torch.allclose(found.sum(1), rates.sum(1))
    for row, result in zip(rates.tolist(), found.tolist(), strict=True):  # pool adjacent violators
        blocks = []
        for rate in row:
            blocks.append([rate])
            while len(blocks) > 1 and sum(blocks[-1]) / len(blocks[-1]) > sum(blocks[-2]) / len(blocks[-2]):
                blocks[-2:] = [blocks[-2] + blocks[-1]]
        assert result == pytest.approx([sum(block) / len(block) for block in blocks for _ in block])


def test_calibration_notes_the_ranks_that_it_counts():
    target = LlamaForward(tiny_llama(1))
    way, depth, children = Way(METHODS["sequoia"].kind(1.0), None), 3, 4
    counts = walk(
        target, as_draft(tiny_llama(2, layers=1), target, None), [torch.tensor([1, 2])], way, Filters(1.0),
        Extent(tokens=30, sequences=20, depth=depth, children=children), seed=0,
    )  # fmt: skip
    (ranks,) = counts.ranks
    accepted, reached = torch.zeros(depth, children, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
    for text in ranks.tolist():
        at = 0
        for rank in text:
            assert (rank == -2) == (at == depth)
            if at < depth:
                reached[at] += 1
            if rank >= 0:
                accepted[at, rank] += 1
            at = at + 1 if rank >= 0 else 0
    assert torch.equal(accepted, counts.accepted)
    assert torch.equal(reached, counts.reached)
    table = markov_table(ranks, children)
    assert len(greedy_tree(markov_acceptance(table), 16)) == 16


@pytest.mark.parametrize(("call", "message"), [
    (lambda: markov_acceptance(torch.zeros(3, 3)), r"table \[1 \+ K, K\].* got \[3, 3\]"),
    (lambda: markov_acceptance(torch.full((3, 2), 0.6)), "rows that sum to at most 1"),
    (lambda: greedy_tree(markov_acceptance(torch.tensor([[0.2, 0.1], [0.1, 0.3], [0, 0]])), 4), r"at path \(0,\)"),
    (lambda: markov_table(torch.zeros(4), 2), r"ranks \[S, T\] .* got shape \[4\]"),
    (lambda: markov_table(torch.tensor([[2]]), 2), "below the number of children, 2, got 2"),
    (lambda: markov_table(torch.tensor([[1]]), 2, prior=-1), "prior must be at least 0, got -1"),
])  # fmt: skip
def test_bad_tables_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
