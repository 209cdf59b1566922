"""The two demonstrations of verification methods: their formulas against enumeration, and the commands themselves."""

import importlib
import json
import sys
from itertools import combinations, pairwise, permutations, product
from math import prod
from pathlib import Path

import pytest
import torch

from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree
from heavypath.speculative.trees.tree import TokenTree

BENCH = Path(__file__).parents[2] / "bench"
TARGET, DRAFT = [0.05, 0.5, 0.15, 0.3], [0.4, 0.25, 0.3, 0.05]
TOKENS = range(len(TARGET))
COUNTS = [1, 2, 3]
DRAWS = 40_000
MARGIN = 5.1 * 0.5 / DRAWS**0.5  # a mean of DRAWS values in [0, 1] is further off less than once in a million
COMMANDS = {
    "rejection": ["--temperatures", "1", "--children", "4", "--prompts", "2", "--new-tokens", "3", "--draws", "2"],
    "bernoulli": ["--grid", "5"],
}


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCH), *sys.path])
        yield {name: importlib.import_module(name) for name in COMMANDS}


@pytest.fixture(scope="module")
def rejection(bench):
    return bench["rejection"]


@pytest.fixture(scope="module")
def sampled(rejection):
    """The rates of one position, over so many draws that they are the law's."""
    logits = (torch.tensor(each).log()[None] for each in (TARGET, DRAFT))
    return rejection.rejection_rates(*logits, len(TARGET), temperature=1.0, draws=DRAWS, seed=3, row=7)


def rows(*distributions):
    return [torch.tensor([each], dtype=torch.float64) for each in distributions]


def residual(target, draft):
    left = [max(p - q, 0) for p, q in zip(target, draft, strict=True)]
    return [each / sum(left) for each in left]


def rejected_in_turn(target, drawn, replacement):
    """Probability that recursive rejection takes none of the children drawn, by the distributions themselves."""
    draft, rejected = DRAFT, 1.0
    for token in drawn:
        if target[token] >= draft[token]:
            return 0.0
        rejected *= 1 - target[token] / draft[token]
        target = residual(target, draft)
        if not replacement:
            left = [0 if other == token else q for other, q in enumerate(draft)]
            draft = [q / sum(left) for q in left] if sum(left) else left
    return rejected


def chance_in_order(drawn):
    """Probability of successive draws without replacement."""
    left = [1 - sum(DRAFT[token] for token in drawn[:place]) for place in range(len(drawn))]
    return prod(DRAFT[token] / rest for token, rest in zip(drawn, left, strict=True))


def independent_draws(children):
    """Every ordered draw with replacement, and its probability."""
    return [(drawn, prod(DRAFT[token] for token in drawn)) for drawn in product(TOKENS, repeat=children)]


def subsets(of):
    return [set(chosen) for size in range(len(of) + 1) for chosen in combinations(of, size)]


@pytest.mark.parametrize("children", COUNTS)
def test_rounds_with_replacement_are_the_mean_over_all_ordered_draws(rejection, children):
    exact = sum(chance * rejected_in_turn(TARGET, drawn, True) for drawn, chance in independent_draws(children))
    rates = rejection.rounds_rejection(*rows(TARGET, DRAFT), children)
    assert float(rates[0, -1]) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("children", COUNTS)
def test_kseq_is_the_mean_over_all_ordered_draws_and_leaves_the_target_exactly(rejection, children):
    gamma = rejection.kseq_multiplier(*rows(TARGET, DRAFT), children)
    rate = float(rejection.uncovered(*rows(TARGET, DRAFT), gamma)[0, -1])
    gamma = float(gamma[0, -1])
    assert 1 <= gamma <= children
    accept = [min(1, p / (gamma * q)) for p, q in zip(TARGET, DRAFT, strict=True)]
    accepted = [0.0 for _ in TOKENS]
    for drawn, chance in independent_draws(children):
        for token in drawn:
            accepted[token] += chance * accept[token]
            chance *= 1 - accept[token]
    assert rate == pytest.approx(1 - sum(accepted), abs=1e-9)
    # The law of the token emitted on rejection, by SpecTr's formula, completes what was accepted to the target.
    beta = sum(min(q, p / gamma) for p, q in zip(TARGET, DRAFT, strict=True))
    covered = [min(q, p / gamma) * (1 - (1 - beta) ** children) / beta for p, q in zip(TARGET, DRAFT, strict=True)]
    recovered = [p - each for p, each in zip(TARGET, covered, strict=True)]
    assert min(recovered) > -1e-9
    assert sum(recovered) == pytest.approx(rate, abs=1e-9)
    assert [a + b for a, b in zip(accepted, recovered, strict=True)] == pytest.approx(TARGET, abs=1e-9)


@pytest.mark.parametrize("children", COUNTS)
def test_the_least_rate_is_the_worst_set_of_tokens_among_all(rejection, children):
    def gap(tokens):
        inside = sum(chance for drawn, chance in independent_draws(children) if set(drawn) <= tokens)
        return inside - sum(TARGET[token] for token in tokens)

    least = rejection.least_rejection(*rows(TARGET, DRAFT), children)
    assert float(least[0, -1]) == pytest.approx(max(map(gap, subsets(TOKENS))), abs=1e-12)


@pytest.mark.parametrize("children", COUNTS)
def test_sampled_rates_are_the_means_over_all_ordered_draws(sampled, children):
    orders = [(drawn, chance_in_order(drawn)) for drawn in permutations(TOKENS, children)]
    recursive = sum(chance * rejected_in_turn(TARGET, drawn, False) for drawn, chance in orders)
    naive = sum(chance * (1 - sum(TARGET[token] for token in drawn)) for drawn, chance in orders)
    likeliest = sorted(TOKENS, key=lambda token: -DRAFT[token])[:children]
    rates = {name: float(rate[children - 1]) for name, rate in sampled.items()}
    assert rates["without replacement"] == pytest.approx(recursive, abs=MARGIN)
    assert rates["naive-distinct"] == pytest.approx(naive, abs=MARGIN)
    assert rates["top-k"] == pytest.approx(1 - sum(TARGET[token] for token in likeliest), abs=1e-6)


@pytest.mark.parametrize("children", COUNTS)
def test_a_race_is_lost_where_that_many_children_come_before_the_targets_token(sampled, children):
    """Exactly: the target's token v arrives at t P(v), t exponential, and every other after t P(u).

    Child u is then before v with probability 1 - exp(-t a(u)), a(u) = max(P(v) Q(u) / Q(v) - P(u), 0), each on its own;
    the mean over t of exp(-t c) is 1 / (1 + c).
    """
    lost = 0.0
    for token in TOKENS:
        others = [other for other in TOKENS if other != token]
        pace = {u: max(TARGET[token] * DRAFT[u] / DRAFT[token] - TARGET[u], 0) for u in others}
        for before in subsets(others):
            if len(before) >= children:
                behind = sum(pace[u] for u in others if u not in before)
                terms = [(-1) ** len(some) / (1 + behind + sum(pace[u] for u in some)) for some in subsets(before)]
                lost += TARGET[token] * sum(terms)
    assert float(sampled["race"][children - 1]) == pytest.approx(lost, abs=MARGIN)


@pytest.mark.parametrize(
    ("name", "method", "replacement"),
    [
        ("without replacement", "without_replacement", False),
        ("with replacement", "with_replacement", True),
        ("race", "race", False),
        ("naive-distinct", "target_sample", False),
        ("top-k", "target_sample", None),
    ],
)
def test_verify_tree_rejects_as_often(sampled, name, method, replacement):
    children, row = 2, torch.arange(DRAWS)
    target_logits, draft_logits = (torch.tensor(each).log().expand(DRAWS, -1) for each in (TARGET, DRAFT))
    options = {"temperature": 0.0} if replacement is None else {"replacement": replacement}
    drawn = gumbel_topk(draft_logits, children, **options, seed=1, rows=row).tokens
    verified = verify_tree(
        torch.cat([torch.zeros_like(drawn[:, :1]), drawn], 1),
        TokenTree.k_ary(children, 1).parents,
        target_logits[:, None].expand(-1, children + 1, -1),
        draft_logits[:, None].expand(-1, children + 1, -1),
        method=method,
        seed=1,
        rows=row[:, None].expand(-1, children + 1),
    )
    rate = float((verified.length == 0).double().mean())
    assert rate == pytest.approx(float(sampled[name][children - 1]), abs=2 * MARGIN)


def test_methods_agree_where_theory_says_so(rejection, sampled):
    apart = sum(max(p - q, 0) for p, q in zip(TARGET, DRAFT, strict=True))
    for name in ("with replacement", "k-seq", "least for i.i.d."):
        assert float(sampled[name][0]) == pytest.approx(apart, abs=1e-6)  # one child: 1 - overlap
    assert float(sampled["without replacement"][0]) == pytest.approx(apart, abs=MARGIN)
    for name in ("without replacement", "race", "naive-distinct", "top-k"):
        assert float(sampled[name][-1]) == pytest.approx(0, abs=1e-6)  # all tokens are children
    for name in ("with replacement", "k-seq"):
        assert (sampled[name] > sampled[rejection.BOUND] - 1e-9).all()
    for rate in sampled.values():
        assert all(fewer >= more for fewer, more in pairwise(rate.tolist()))


def test_a_draft_equal_to_the_target_is_rejected_by_the_draft_blind_only(rejection):
    logits = torch.tensor(TARGET).log()[None]
    rates = rejection.rejection_rates(logits, logits, 2, temperature=0.7, draws=100, seed=0, row=0)
    for name in ("without replacement", "with replacement", "k-seq", "race", "least for i.i.d."):
        assert rates[name].tolist() == pytest.approx([0, 0], abs=1e-9)
    assert rates["top-k"].min() > 0.05


def test_a_power_law_is_found_again(rejection):
    law = rejection.power_law(0.4 * torch.arange(1.0, 33, dtype=torch.float64) ** -0.75)
    assert [float(value) for value in law] == pytest.approx([0.4, 0.75, 1])


def test_the_summary_names_the_lowest_and_what_is_not_told_from_it(rejection):
    rates = {name: torch.full((3, 2), 0.5, dtype=torch.float64) for name in rejection.LABELS}
    rates["race"] = torch.tensor([[0.7, 0.1], [0.7, 0.2], [0.7, 0.3]], dtype=torch.float64)
    rates["top-k"] = rates["race"] + torch.tensor([[0.0, 0.1], [0.0, -0.1], [0.0, 0.1]], dtype=torch.float64)
    rates["naive-distinct"] = rates["race"] + 0.01
    rates[rejection.BOUND] = torch.zeros(3, 2, dtype=torch.float64)
    result = rejection.summary(rates)
    assert result["lowest"] == {"1": ["without replacement", "with replacement", "k-seq"], "2": ["race", "top-k"]}
    race = result["methods"]["race"]
    assert race["rejection"] == pytest.approx([0.7, 0.2])
    assert race["standard_error"] == pytest.approx([0, 0.1 / 3**0.5], abs=1e-6)


def test_two_distinct_children_of_two_tokens_always_suffice(bench):
    rates = bench["bernoulli"].acceptance(torch.tensor([0.8, 0.3, 0.01]), torch.tensor([0.5, 0.3, 0.99]))
    assert rates["without replacement"].tolist() == pytest.approx([1, 1, 1])
    # By hand, target 0.8 and draft 0.5: one child 1 - 0.3. SpecInfer's second is right half the time that the first
    # is rejected. An accepted 1 among two independent children has probability 0.75 at most.
    assert float(rates["one child"][0]) == pytest.approx(0.7)
    assert float(rates["with replacement"][0]) == pytest.approx(0.85)
    assert float(rates["most for i.i.d."][0]) == pytest.approx(0.95)
    assert 0.85 < float(rates["k-seq"][0]) < 0.95


@pytest.fixture(scope="module", params=COMMANDS)
def command(request, bench, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)

    def run(*more):
        bench[request.param].main([*COMMANDS[request.param], *map(str, more)])

    return request.param, folder, run


def test_a_command_prints_and_writes_its_table(command, bench, capsys):
    name, folder, run = command
    run("--json", folder / "out.json")
    written = json.loads((folder / "out.json").read_text())
    printed = capsys.readouterr().out
    assert "without" in printed
    if name == "bernoulli":
        assert written["points"] == 25
        assert written["least"]["without replacement"] == 1
        assert len(written["pairs"]) == len(bench[name].PAIRS)
    else:
        result = written["temperature"]["1.0"]
        assert list(result["methods"]) == list(bench[name].LABELS)
        assert f"{result['methods']['k-seq']['rejection'][3]:.3f}" in printed
        assert all(len(method["rejection"]) == 4 for method in result["methods"].values())


def test_a_command_draws_a_picture(command):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    _, folder, run = command
    run("--plot", folder / "out.png")
    picture = image.imread(folder / "out.png")[..., :3]
    assert min(picture.shape[:2]) > 300
    assert (picture.min(-1) < 0.5).mean() > 0.01  # ink
    assert (picture.max(-1) - picture.min(-1) > 0.3).mean() > 0.002  # colour


@pytest.mark.parametrize("wrong", [["--prompts", "1"], ["--children", "0"], ["--temperatures", "0"], ["--draws", "0"]])
def test_what_cannot_be_measured_is_refused(rejection, wrong, capsys):
    with pytest.raises(SystemExit):
        rejection.main(wrong)
    assert "error: " in capsys.readouterr().err
