"""Which visits `calibrate` makes: batches whose trees are timed, and gains that there is time for."""

from types import SimpleNamespace

import torch
from profile_cases import counts

from heavypath.kernels.filtering import Filters
from heavypath.speculative import gains
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.costs.timing import Pace, Timed
from heavypath.speculative.gains import measure_gains
from heavypath.speculative.visits import VISIT_PROMPT, Visits, any_pays, costs_by_batch

BATCHES = (1, 2, 4, 8, 16)
ACCEPTED = [counts([[600, 150]])]  # of a thousand: a first child, and a second one


class UpToFourRows:
    """Steps take 1 second up to four rows, and 0.3 for each further row."""

    pace = Pace()

    def __init__(self, batch=1):
        self.batch = batch

    def of(self, batch):
        return UpToFourRows(batch)

    def __call__(self, size, round_):
        return Timed(1 + 0.3 * max(0, self.batch * size - 4), None if size == 1 else 0.01)


def test_batches_larger_than_the_first_for_which_no_tree_pays_are_timed_on_request():
    """With two sequences a tree of two nodes is free; with four it costs 2.2 steps and gives at most 1.75 tokens."""
    lines = []
    costs = costs_by_batch(UpToFourRows(), BATCHES, (1, 2, 3, 4), ACCEPTED, limit=60, report=lines.append, every=False)
    assert costs.batches == (1, 2, 4)
    assert "no tree pays for 4 sequences" in lines[-1]
    assert costs.at(16) == costs.at(4)
    assert [max(costs.at(batch).step) for batch in (1, 2, 4)] == [4, 4, 3], "no larger than the batch before wants"
    costs = costs_by_batch(UpToFourRows(), BATCHES, (1, 2, 3, 4), ACCEPTED, limit=60, report=lines.append)
    assert costs.batches == BATCHES


def test_a_tree_that_a_better_verifier_would_make_pay_is_no_reason_to_stop():
    def with_two_nodes(seconds):
        return Costs({1: 1.0, 2: seconds}, 0.0)

    assert any_pays(ACCEPTED, (2,), with_two_nodes(1.59)), "0.6 of two tokens are accepted"
    assert any_pays(ACCEPTED, (2,), with_two_nodes(1.65)), "a tenth more are 0.66"
    assert not any_pays(ACCEPTED, (2,), with_two_nodes(1.67))


def test_all_children_are_accepted_at_most_as_often_as_their_parent():
    assert not any_pays([counts([[990, 0]])], (2,), Costs({1: 1.0, 2: 2.01}, 0.0))


def test_a_gain_is_not_visited_if_that_would_end_too_late(monkeypatch):
    """Visits of three seconds begin at 0, 3 and 6 if there are ten seconds."""
    clock, begun = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(gains, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def visit(*given):
        begun.append(clock.now)
        clock.now += 3
        return torch.tensor([[1.0, 3.0], [2.0, 2.0]]).double()

    job = SimpleNamespace(visit=visit, filters=Filters(1.0), method="dyspec", nodes=4)
    prompts = [torch.tensor([1])]
    (gain,) = measure_gains([job], prompts, positions=64, until=10.0, seed=0, report=lambda line: None)
    assert begun == [0, 3, 6]
    assert gain.factor == 1
    begun.clear()
    (gain,) = measure_gains([job], prompts, positions=64, until=clock.now + 1, seed=0, report=lambda line: None)
    assert len(begun) == 1, "the first one is not known to be too long"


def test_visits_read_the_last_tokens_of_a_prompt():
    prompts, mask = Visits(None, None, [torch.arange(40), torch.arange(5)], 1, batch=2)._batch_of(0)
    assert prompts.shape == mask.shape == (2, VISIT_PROMPT)
    assert prompts[0].tolist() == [*range(40 - VISIT_PROMPT, 40)]
    assert prompts[1, mask[1] > 0].tolist() == [*range(5)]
