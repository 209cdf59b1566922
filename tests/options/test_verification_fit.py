"""The check of a verification: it passes right ones, finds planted bugs, has the power that it states, and refuses."""

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch.nn.functional import pad
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.generation.utils import _speculative_sampling

from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree
from heavypath.speculative import VERIFICATION_CASES, check_verification
from heavypath.speculative.losslessness.chi_square import chi_square_p_value
from heavypath.speculative.losslessness.drawn_trees import DRAWS
from heavypath.speculative.losslessness.verification_fit import CaseFit, VerificationFit, draws_to_detect

CHAIN, TREE = range(-1, 2), [-1, 0, 0, 1, 1]
BATCH = {"batch_size": 20_000}


def cases(*names):
    return {name: VERIFICATION_CASES[name] for name in names}


def ratio(p, q, target):
    """The chance of acceptance of standard speculative sampling, where p and q are those of the drafted token."""
    return p / q


def residual(target, draft):
    left = (target - draft).clamp(min=0)
    return left.where(left.sum(-1, keepdim=True) > 0, target)


def chain(accept=ratio, left=residual):
    """A verification of a chain: accept(p, q, P) is a probability, left(P, Q) the weights of the recovered token."""

    def verify(tokens, parents, target, draft, seed):
        noise = torch.Generator().manual_seed(seed)
        outputs, going = torch.full_like(tokens, -1), torch.ones(len(tokens), dtype=torch.bool)
        last = tokens.shape[1] - 1
        for node in range(last):
            here, drafted = target[:, node], tokens[:, node + 1]
            p, q = (rows[:, node].gather(1, drafted[:, None])[:, 0] for rows in (target, draft))
            accepted = torch.rand(len(tokens), generator=noise) < accept(p, q, here)
            recovered = left(here, draft[:, node]).multinomial(1, generator=noise)[:, 0]
            outputs[:, node] = drafted.where(accepted, recovered).where(going, -1)
            going &= accepted
        bonus = target[:, last].multinomial(1, generator=noise)[:, 0]
        outputs[:, last] = bonus.where(going, -1)
        return outputs

    return verify


def not_normalised(target, draft):
    """What is left of P, as if it summed to 1: the last token gets the rest."""
    left = (target - draft).clamp(min=0)
    left[:, -1] += 1 - left.sum(-1)
    return left


def typical(p, q, target):
    """Typical acceptance of Medusa, by probability and entropy of the target alone."""
    entropy = torch.special.entr(target).sum(-1)
    return (p > (0.3 * (-entropy).exp()).clamp(max=0.09)).float()


def with_bias(verify, amount):
    """Moves this much probability of the first token to the token that is least likely there."""

    def wrong(tokens, parents, target, draft, seed):
        outputs, first = verify(tokens, parents, target, draft, seed), target[:, 0]
        noise = torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed + 2**31))
        moved = torch.full_like(outputs, -1)
        moved[:, 0] = first.argmin(-1)
        return moved.where((noise < amount / (1 - first.min(-1).values))[:, None], outputs)

    return wrong


BUGS = {
    "typical acceptance": chain(typical, lambda target, draft: target),
    "residual not normalised": chain(left=not_normalised),
    "p and q swapped": chain(lambda p, q, target: q / p),
    "recovered token from P": chain(left=lambda target, draft: target),
    "bias of 0.02": with_bias(chain(), 0.02),
}


def by_verify_tree(method, *, impl="auto", **options):
    """The package's own verification, as others call it."""

    def verify(tokens, parents, target, draft, seed):
        path, accepted, next_token = verify_tree(
            tokens, parents, target.log(), draft.log(), method=method, seed=seed, impl=impl, **options
        )
        outputs = tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
        outputs = pad(outputs[:, 1:], (0, 1), value=-1)
        return outputs.scatter(1, accepted[:, None], next_token[:, None])

    return verify


# Which cases show which bug at a total variation of 0.05, by thought: those where the bug can change the distribution.
# "equal" never rejects; with disjoint supports the residual is P; of a one-hot draft and so on any rule may be right.
SEEN_IN = {
    "typical acceptance": {"independent", "near equal", "equal", "both filtered", "ties", "one-hot draft"},
    "residual not normalised": {"independent", "near equal", "filtered target", "ties", "one-hot target"},
    "p and q swapped": {"independent", "disjoint supports", "filtered target", "one-hot target", "one-hot draft"},
    "recovered token from P": {"independent", "filtered draft", "ties", "one-hot draft"},
}
UNSEEN_IN = {
    "typical acceptance": {"disjoint supports"},
    "residual not normalised": {"equal"},
    "p and q swapped": {"equal"},
    "recovered token from P": {"equal", "disjoint supports", "one-hot target"},
}


@pytest.mark.parametrize("bug", SEEN_IN)
def test_planted_bugs_are_found_where_they_show_and_nowhere_else(bug):
    fit = check_verification(BUGS[bug], CHAIN, draw="with_replacement", detect=0.05, **BATCH)
    assert not fit.ok
    assert SEEN_IN[bug] <= {*fit.departing}
    assert not UNSEEN_IN[bug] & {*fit.departing}
    assert fit.p_value < 1e-9


def test_a_bias_of_two_hundredths_is_found_in_each_case_and_measured():
    given = cases("independent", "equal", "one-hot target")
    fit = check_verification(BUGS["bias of 0.02"], CHAIN, draw="with_replacement", cases=given, **BATCH)
    assert fit.departing == ["independent", "equal", "one-hot target"]
    for name in ("independent", "equal"):
        case = fit.cases[name]
        assert 0.015 < case.total_variation < 0.02 + 4 * case.error
        assert case.detectable <= 0.02


@pytest.mark.parametrize("detect", [0.1, 0.05, pytest.param(0.02, marks=pytest.mark.slow)])
def test_a_right_verification_fits_in_each_case(detect):
    fit = check_verification(chain(), CHAIN, draw="with_replacement", detect=detect, **BATCH)
    assert fit.ok, fit
    assert {*fit.cases} == {*VERIFICATION_CASES}
    for case in fit.cases.values():
        assert abs(case.total_variation) < 5 * case.error + 1e-9
    assert fit.cases["equal"].accepted == 2
    assert fit.cases["disjoint supports"].accepted == 0


# Which draws each rule is for. Those of the last line look at no draft.
OURS = [
    ("without_replacement", {}, "without_replacement"), ("with_replacement", {}, "with_replacement"),
    ("kseq", {}, "with_replacement"), ("held", {}, "without_replacement"),
    ("held", {"replacement": True}, "with_replacement"), ("traversal", {}, "without_replacement"),
    ("traversal", {"replacement": True}, "with_replacement"), ("held_traversal", {}, "without_replacement"),
    ("held_traversal", {"replacement": True}, "with_replacement"),
    *((method, {}, draw) for method in ("race", "target_sample") for draw in DRAWS),
]  # fmt: skip


@pytest.mark.parametrize("detect", [0.1, pytest.param(0.02, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "options", "draw"), OURS)
def test_our_own_verifications_are_lossless(method, options, draw, detect):
    fit = check_verification(by_verify_tree(method, **options), TREE, draw=draw, detect=detect, **BATCH)
    assert fit.ok, fit


@pytest.mark.parametrize(("method", "draw"), [
    ("with_replacement", "without_replacement"), ("kseq", "without_replacement"), ("without_replacement", "top_k"),
])  # fmt: skip
def test_a_rule_for_another_draw_is_found(method, draw):
    assert not check_verification(by_verify_tree(method), TREE, draw=draw, detect=0.05, **BATCH).ok


def test_a_race_whose_noise_drew_the_children_is_lossless():
    """The draw of a user, which has the seed of the verification and the node's rows."""

    def draw(draft, count, node, seed):
        rows = torch.arange(len(draft)) * len(TREE) + node
        return gumbel_topk(draft.log(), count, seed=seed, rows=rows).tokens

    fits = [check_verification(by_verify_tree("race"), TREE, draw=each, detect=0.1, **BATCH)
            for each in (draw, "without_replacement")]  # fmt: skip
    assert all(fit.ok for fit in fits)
    accepted = [fit.cases["near equal"].accepted for fit in fits]
    assert accepted[0] > accepted[1] + 0.3, "the race often wins with the drafted token"


def speculative_sampling(weight=None):
    """transformers' own function, one tree at a time."""

    def verify(tokens, parents, target, draft, seed):
        torch.default_generator.manual_seed(seed)
        logits, drafted = (target[None].log(), draft[None, :-1].log()), len(tokens) - 1
        return _speculative_sampling(tokens[None, 1:], logits[1], drafted, logits[0], weight)[0][0]

    return verify


@pytest.mark.slow
@pytest.mark.parametrize(("detect", "names"), [
    (0.15, ["independent", "equal"]), pytest.param(0.02, [*VERIFICATION_CASES], marks=pytest.mark.slow),
])  # fmt: skip
def test_the_speculative_sampling_of_transformers_is_lossless(detect, names):
    verify = speculative_sampling()
    fit = check_verification(verify, CHAIN, draw="with_replacement", detect=detect, cases=cases(*names))
    assert fit.ok, fit


@pytest.mark.parametrize(("weight", "draw"), [(0.8, "with_replacement"), (None, "top_k")])
def test_the_ensemble_of_transformers_and_drafts_by_argmax_are_not(weight, draw):
    """An ensemble weight says that it is not. Drafts that are no samples of the logits given with them are not, too."""
    verify = speculative_sampling(weight)
    assert not check_verification(verify, CHAIN, draw=draw, detect=0.15, cases=cases("independent")).ok


def test_a_generator_of_transformers_drafts_by_argmax_and_gives_other_logits():
    """So sampling by it is not lossless. When this fails, what docs/guides/check-a-verification.md says has changed."""

    class Gemma4AssistantOfOneRow(torch.nn.Module):
        generation_config = type("", (), {"num_assistant_tokens": 3})()
        device = "cpu"

        def forward(self, inputs_embeds, **_):
            logits = torch.tensor([[[0.0, 1.0, 0.5]]])
            return type("", (), {"logits": logits, "last_hidden_state": inputs_embeds[..., :1]})()

    settings = type("", (), {"max_length": 20, "do_sample": True})()
    generator = SinglePositionMultiTokenCandidateGenerator(
        Gemma4AssistantOfOneRow(), torch.nn.Embedding(3, 1), settings
    )
    outputs = type("", (), {"hidden_states": [torch.zeros(1, 2, 1)], "shared_kv_states": {}})()
    ids, logits = generator.get_candidates(torch.tensor([[0, 2]]), {}, outputs, False, 0)
    assert ids.tolist() == [[0, 2, 1, 1, 1]]
    assert logits.softmax(-1).max() < 0.6, "of samples of these, only one in two would be token 1"


def test_a_verification_is_called_with_trees_distributions_and_seeds():
    calls = []

    def verify(tokens, parents, target, draft, seed):
        calls.append((tokens.clone(), target.clone(), draft.clone(), seed))
        assert parents.tolist() == TREE
        bonus = target[:, :1, :].flatten(0, 1).multinomial(1)
        for given in (tokens, parents, target, draft):
            given.zero_()  # its own to change
        return bonus.int()  # one token, as two bytes more or less

    torch.manual_seed(0)
    check_verification(
        verify, TREE, draw="without_replacement", detect=0.1, cases=cases("independent"), batch_size=1000, seed=7
    )
    assert [seed for *_, seed in calls] == [*range(7, 7 + len(calls))]
    assert {len(tokens) for tokens, *_ in calls[:-1]} == {1000}
    tokens, target, draft = (torch.cat(each) for each in [*zip(*calls, strict=True)][:3])
    assert (tokens.dtype, target.dtype, draft.dtype) == (torch.long, torch.float32, torch.float32)
    assert target.shape == draft.shape == (len(tokens), 5, 4)
    for rows in (target, draft):
        assert (rows[:, 0] == rows[0, 0]).all()  # there is one root
        assert float(rows.sum(-1).sub(1).abs().max()) < 1e-6
    below = tokens[:, 1]
    assert all((target[below == token, 1] == target[below == token][0, 1]).all() for token in range(4))
    for (one, other), node in (((1, 2), 0), ((3, 4), 1)):
        for context in [0] if node == 0 else range(4):
            some = torch.ones_like(below, dtype=torch.bool) if node == 0 else below == context
            q, counts, law = draft[some][0, node].double(), [], []
            for a, b in permutations(range(4), 2):
                counts.append(int(((tokens[:, one] == a) & (tokens[:, other] == b) & some).sum()))
                law.append(float(q[a] * q[b] / (1 - q[a])))
            assert sum(counts) == int(some.sum()), "siblings differ"
            assert chi_square_p_value(torch.tensor(counts), torch.tensor(law)) > 1e-6


def test_absent_nodes_have_no_children_and_are_said_to_be_absent():
    seen = []

    def verify(tokens, parents, target, draft, seed):
        seen.append(tokens)
        return target[:, 0].multinomial(1)

    check_verification(
        verify, [-1, 0, 0, 2], draw="without_replacement", detect=0.3, cases=cases("one-hot draft"), batch_size=100
    )
    tokens = torch.cat(seen)
    assert (tokens[:, 1] >= 0).all()
    assert (tokens[:, 2:] == -1).all()


@pytest.mark.parametrize("total_variation", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("cells", [2, 64, 625])
def test_the_number_of_draws_has_the_power_that_is_stated(cells, total_variation):
    """By the noncentral chi-square: a total variation d from the uniform distribution adds 4 N d^2."""
    draws, freedom = draws_to_detect(torch.full((cells,), 1 / cells), total_variation, 1e-7), cells - 1
    moved = 4 * draws * total_variation**2
    assert stats.ncx2.sf(stats.chi2.isf(0.5e-7, freedom), freedom, moved) >= 0.99
    assert stats.ncx2.sf(stats.chi2.isf(0.5e-7, freedom), freedom, moved / 3) < 0.9, "not far too many"


@pytest.mark.slow
@pytest.mark.parametrize("runs", [30, 1000])
def test_false_alarms_are_as_rare_as_stated(runs):
    given = {"draw": "with_replacement", "cases": cases("independent", "ties"), "batch_size": 20_000}
    fits = [check_verification(chain(), CHAIN, detect=0.15, seed=100 * run, significance=0.05, **given)
            for run in range(runs)]  # fmt: skip
    alarms = sum(not fit.ok for fit in fits)
    assert stats.binom.sf(alarms - 1, runs, 0.05) > 1e-6
    deviations = [case.total_variation / case.error for fit in fits for case in fit.cases.values()]
    assert abs(sum(deviations) / len(deviations)) < 5 / len(deviations) ** 0.5, "it is 0 on average"


def test_one_tree_at_a_time_gives_the_same_as_a_batch():
    def accept_all(tokens, parents, target, draft, seed):
        return torch.cat([tokens[..., 1:], target[..., -1, :].argmax(-1, keepdim=True)], -1)

    given = {"draw": "with_replacement", "detect": 0.3, "cases": cases("independent", "one-hot draft")}
    together = check_verification(accept_all, CHAIN, batch_size=4096, **given)
    assert not together.ok
    for verify in (accept_all, lambda *given: accept_all(*given).tolist()):
        alone = check_verification(verify, CHAIN, **given)
        case, other = (fit.cases["one-hot draft"] for fit in (alone, together))
        assert (case.accepted, case.fit.sequences) == (other.accepted, other.fit.sequences)
        assert abs(case.total_variation - other.total_variation) <= 4 * case.error


@pytest.mark.parametrize(
    ("p_values", "departing"), [((0.006, 0.5), []), ((0.004, 0.5), ["0"]), ((0.004, 1e-9), ["0", "1"])]
)
def test_the_significance_is_shared_by_the_cases(p_values, departing):
    """Two cases at 0.01: each departs below 0.005, so that a right verification fails once in a hundred times."""
    fits = {str(number): CaseFit(SimpleNamespace(p_value=p), 0, 0, 0, 0) for number, p in enumerate(p_values)}
    fit = VerificationFit(fits, significance=0.01)
    assert fit.departing == departing
    assert fit.ok == (not departing)
    assert fit.p_value == 2 * min(p_values)


def test_a_fit_says_in_words_what_departs():
    fit = check_verification(
        BUGS["recovered token from P"], CHAIN, draw="with_replacement", detect=0.1,
        cases=cases("equal", "independent"), **BATCH,
    )  # fmt: skip
    lines = str(fit).splitlines()
    assert lines[0].startswith("departs from the target's distribution in 1 of 2 cases: p = ")
    assert lines[1].startswith("  equal             p = ")
    assert "2.00 accepted" in lines[1]
    assert lines[2].startswith("  independent       p = ")
    assert lines[3].startswith("    position 1: token ")
    fit = check_verification(chain(), CHAIN, draw="with_replacement", detect=0.1, cases=cases("equal"), **BATCH)
    assert str(fit).startswith("no departure from the target's distribution: p = ")
    assert len(str(fit).splitlines()) == 2


def refused(answer=None, parents=CHAIN, **options):
    """Check a verification that answers so, or that is not called."""

    def verify(tokens, *_):
        return pytest.fail("called") if answer is None else answer(tokens) if callable(answer) else answer

    given = {"draw": "with_replacement", "detect": 0.2, "cases": cases("independent")} | options
    return check_verification(verify, parents, **given)


ROWS = {"batch_size": 8}


@pytest.mark.parametrize(("call", "message"), [
    (lambda: refused(parents=[0, 0]), r"parents must be -1 for node 0 and .*, got \[0, 0\]: range\(-1, 2\) is a chain"),
    (lambda: refused(parents=[-1, 2, 0]), r"parents must be -1 for node 0 and .*, got \[-1, 2, 0\]"),
    (lambda: refused(parents=[-1]), r"at least one, got \[-1\]"),
    (lambda: refused(draw="gumbel"), "draw must be one of without_replacement, .*, or a function, got 'gumbel'"),
    (lambda: refused(draw="top_k", parents=[-1, *[0] * 5]), "needs a vocab_size of at least 5, .*, got 4"),
    (lambda: refused(batch_size=0), "batch_size must be None or at least 1, got 0"),
    (lambda: refused(detect=0.0), "detect must be a total variation between 0 and 1, got 0.0"),
    (lambda: refused(vocab_size=1), "vocab_size must be at least 2, got 1"),
    (lambda: refused(significance=1.0), "significance must be between 0 and 1, got 1.0"),
    (lambda: refused(seed=-1), "seed must be at least 0, got -1"),
    (lambda: refused(cases={}), "cases must have at least one kind"),
    (lambda: refused(parents=range(-1, 12)), r"4 \*\* 13 = 67108864 outputs are too many"),
    (lambda: refused(cases={"mine": lambda g, rows, v: (torch.ones(rows, 3),) * 2}),
     r"case 'mine' must give probabilities \[1, 4\], got torch.float32 \[1, 3\]"),
    (lambda: refused(cases={"mine": lambda g, rows, v: (torch.ones(rows, v),) * 2}), "rows that .* sum to 1"),
    (lambda: refused(draw=lambda *_: [0]), r"draw must return a LongTensor \[\d+, 1\], got list"),
    (lambda: refused(draw=lambda *_: torch.zeros(1, 1).long()), r"LongTensor \[\d+, 1\], got \[1, 1\]"),
    (lambda: refused(draw=lambda draft, *_: draft[:, :1].long() + 4), "tokens in 0 .. 3, or -1 .*, got 4 .. 4"),
    (lambda: refused(torch.zeros(8, 4).long(), **ROWS), r"integers \[8, at most 3\].*; got \[8, 4\]"),
    (lambda: refused(torch.zeros(7, 3).long(), **ROWS), r"integers \[8, at most 3\].*; got \[7, 3\]"),
    (lambda: refused(torch.zeros(8, 3), **ROWS), r"integers \[8, at most 3\].*; got torch.float32 \[8, 3\]"),
    (lambda: refused([[0]] * 8, **ROWS), r"integers \[8, at most 3\].*; got list"),
    (lambda: refused(torch.full((8, 1), 4), **ROWS), "tokens in 0 .. 3, and -1 after them, got -1 .. 4"),
    (lambda: refused(torch.full((8, 1), -2), **ROWS), "tokens in 0 .. 3, and -1 after them, got -2 .. -1"),
    (lambda: refused(torch.full((8, 1), -1), **ROWS), r"returned no token in 8 of 8 rows: in row 0 it returned \[-1"),
    (lambda: refused(torch.tensor([[0, -1, 0]] * 8), **ROWS), "returned a token after a -1 in 8 of 8 rows"),
    (lambda: refused(lambda tokens: (tokens[:, [1, 1, 1]] + 1) % 4, **ROWS), "accepted no path of the tree in 8 of 8"),
    (lambda: refused(lambda tokens: tokens[:, [1, 3]], parents=TREE, **ROWS), None),
    (lambda: refused(lambda tokens: tokens[:, [3, 1]], parents=[-1, 0, 1, 2], **ROWS), "accepted no path of the tree"),
    (lambda: refused([0, 1, 2, 3]), "at most 3 tokens, the tree's depth .*, got 4 in call 0"),
    (lambda: refused([0.5]), r"list of integers or a Tensor \[T\] of them, got \[0.5\] in call 0"),
    (lambda: refused(3), r"list of integers or a Tensor \[T\] of them, got 3 in call 0"),
])  # fmt: skip
def test_what_is_no_verification_is_refused(call, message):
    if message is None:
        assert not call().ok  # it is one, and wrong
        return
    with pytest.raises((TypeError, ValueError), match=message):
        call()
