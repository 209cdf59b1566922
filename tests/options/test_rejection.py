"""bench/rejection.py and bench/bernoulli.py: their formulas against enumeration, and the commands themselves."""

import importlib
import json
import sys
from itertools import combinations, permutations, product
from math import prod
from pathlib import Path

import pytest
import torch

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
def test_rates_of_independent_children_are_means_over_all_ordered_draws(rejection, children):
    """Of multi-step sampling, of K-SEQ, and of the best verifier there is: the worst set of tokens among all."""

    def gap(tokens):
        inside = sum(chance for drawn, chance in independent_draws(children) if set(drawn) <= tokens)
        return inside - sum(TARGET[token] for token in tokens)

    exact = sum(chance * rejected_in_turn(TARGET, drawn, True) for drawn, chance in independent_draws(children))
    rates = rejection.rounds_rejection(*rows(TARGET, DRAFT), children)
    assert float(rates[0, -1]) == pytest.approx(exact, abs=1e-12)
    gamma = rejection.kseq_multiplier(*rows(TARGET, DRAFT), children)
    rate = float(rejection.uncovered(*rows(TARGET, DRAFT), gamma)[0, -1])
    refused = [1 - min(1, p / (float(gamma[0, -1]) * q)) for p, q in zip(TARGET, DRAFT, strict=True)]
    kseq = sum(chance * prod(refused[token] for token in drawn) for drawn, chance in independent_draws(children))
    assert rate == pytest.approx(kseq, abs=1e-9)
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


def test_methods_agree_where_theory_says_so(rejection, sampled):
    apart = sum(max(p - q, 0) for p, q in zip(TARGET, DRAFT, strict=True))
    for name in ("with replacement", "k-seq", "least for i.i.d.", "without replacement"):
        assert float(sampled[name][0]) == pytest.approx(apart, abs=MARGIN)  # one child: 1 - overlap
    for name in ("without replacement", "race", "naive-distinct", "top-k"):
        assert float(sampled[name][-1]) == pytest.approx(0, abs=1e-6)  # all tokens are children
    for name in ("with replacement", "k-seq"):
        assert (sampled[name] > sampled[rejection.BOUND] - 1e-9).all()


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


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_and_writes_its_table_and_draws_a_picture(name, bench, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    bench[name].main([*COMMANDS[name], "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")])
    written = json.loads((tmp_path / "out.json").read_text())
    printed = capsys.readouterr().out
    assert "without" in printed
    if name == "bernoulli":
        assert (written["points"], written["least"]["without replacement"]) == (25, 1)
        assert len(written["pairs"]) == len(bench[name].PAIRS)
    else:
        result = written["temperature"]["1.0"]
        assert list(result["methods"]) == list(bench[name].LABELS)
        assert f"{result['methods']['k-seq']['rejection'][3]:.3f}" in printed
    picture = image.imread(tmp_path / "out.png")[..., :3]
    assert (picture.max(-1) - picture.min(-1) > 0.3).mean() > 0.002  # colour


@pytest.mark.parametrize("wrong", [["--prompts", "1"], ["--children", "0"], ["--temperatures", "0"], ["--draws", "0"]])
def test_what_cannot_be_measured_is_refused(rejection, wrong, capsys):
    with pytest.raises(SystemExit):
        rejection.main(wrong)
    assert "error: " in capsys.readouterr().err
