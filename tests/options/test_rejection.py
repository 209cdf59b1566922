"""bench/research/rejection.py: its formulas against enumeration, and the picture."""

from itertools import combinations, permutations, product
from math import prod

import pytest
import torch
from bench_scripts import script

rejection = script("rejection")
TARGET, DRAFT = [0.05, 0.5, 0.15, 0.3], [0.4, 0.25, 0.3, 0.05]
TOKENS = range(len(TARGET))
COUNTS = [1, 2, 3]
DRAWS = 40_000
MARGIN = 5.1 * 0.5 / DRAWS**0.5  # a mean of DRAWS values in [0, 1] is further off less than once in a million


def rejected_in_turn(drawn, replacement):
    """Probability that recursive rejection takes none of the children drawn, by the distributions themselves."""
    target, draft, rejected = TARGET, DRAFT, 1.0
    for token in drawn:
        if target[token] >= draft[token]:
            return 0.0
        rejected *= 1 - target[token] / draft[token]
        left = [max(p - q, 0) for p, q in zip(target, draft, strict=True)]
        target = [each / sum(left) for each in left]
        if not replacement:
            left = [0 if other == token else q for other, q in enumerate(draft)]
            draft = [q / sum(left) for q in left] if sum(left) else left
    return rejected


@pytest.mark.parametrize("children", COUNTS)
def test_rates_of_independent_children_are_means_over_all_ordered_draws(children):
    """Of multi-step sampling, of K-SEQ, and of the best verifier there is: the worst set of tokens among all."""
    draws = [(drawn, prod(DRAFT[token] for token in drawn)) for drawn in product(TOKENS, repeat=children)]
    rows = [torch.tensor([law], dtype=torch.float64) for law in (TARGET, DRAFT)]
    gamma = rejection.kseq_multiplier(*rows, children)
    refused = [1 - min(1, p / (float(gamma[0, -1]) * q)) for p, q in zip(TARGET, DRAFT, strict=True)]
    rounds = sum(chance * rejected_in_turn(drawn, True) for drawn, chance in draws)
    kseq = sum(chance * prod(refused[token] for token in drawn) for drawn, chance in draws)
    gaps = []
    for tokens in (chosen for size in range(5) for chosen in combinations(TOKENS, size)):
        inside = sum(chance for drawn, chance in draws if {*drawn} <= {*tokens})
        gaps.append(inside - sum(TARGET[token] for token in tokens))
    assert float(rejection.rounds_rejection(*rows, children)[0, -1]) == pytest.approx(rounds, abs=1e-12)
    assert float(rejection.uncovered(*rows, gamma)[0, -1]) == pytest.approx(kseq, abs=1e-9)
    assert float(rejection.least_rejection(*rows, children)[0, -1]) == pytest.approx(max(gaps), abs=1e-12)


def test_sampled_rates_are_the_means_over_all_ordered_draws():
    logits = (torch.tensor(each).log()[None] for each in (TARGET, DRAFT))
    sampled = rejection.rejection_rates(*logits, len(TARGET), temperature=1.0, draws=DRAWS, seed=3, row=7)
    for children in COUNTS:
        recursive = naive = 0.0
        for drawn in permutations(TOKENS, children):
            left = [1 - sum(DRAFT[token] for token in drawn[:place]) for place in range(children)]
            chance = prod(DRAFT[token] / rest for token, rest in zip(drawn, left, strict=True))
            recursive += chance * rejected_in_turn(drawn, False)
            naive += chance * (1 - sum(TARGET[token] for token in drawn))
        likeliest = sorted(TOKENS, key=lambda token: -DRAFT[token])[:children]
        rates = {name: float(rate[children - 1]) for name, rate in sampled.items()}
        assert rates["without replacement"] == pytest.approx(recursive, abs=MARGIN)
        assert rates["naive-distinct"] == pytest.approx(naive, abs=MARGIN)
        assert rates["top-k"] == pytest.approx(1 - sum(TARGET[token] for token in likeliest), abs=1e-6)
    for name in ("without replacement", "race", "naive-distinct", "top-k"):
        assert float(sampled[name][-1]) == pytest.approx(0, abs=1e-6)  # all tokens are children
    assert (sampled["with replacement"] > sampled[rejection.BOUND] - 1e-9).all()


def test_the_summary_names_the_lowest_and_what_is_not_told_from_it():
    rates = {name: torch.full((3, 2), 0.5, dtype=torch.float64) for name in rejection.METHODS}
    rates["race"] = torch.tensor([[0.7, 0.1], [0.7, 0.2], [0.7, 0.3]], dtype=torch.float64)
    rates["top-k"] = rates["race"] + torch.tensor([[0.0, 0.1], [0.0, -0.1], [0.0, 0.1]], dtype=torch.float64)
    rates["naive-distinct"] = rates["race"] + 0.01
    rates[rejection.BOUND] = torch.zeros(3, 2, dtype=torch.float64)
    result = rejection.summary(rates)
    assert result["lowest"] == {"1": ["without replacement", "with replacement", "k-seq"], "2": ["race", "top-k"]}
    race = result["methods"]["race"]
    assert race["rejection"] == pytest.approx([0.7, 0.2])
    assert race["standard_error"] == pytest.approx([0, 0.1 / 3**0.5], abs=1e-6)


def test_a_picture_of_rates_has_colours(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    rates = {name: torch.rand(3, 4, dtype=torch.float64) for name in rejection.METHODS}
    script("papers_figure").draw_rejection({"1.0": rejection.summary(rates)}, tmp_path / "out.png")
    picture = image.imread(tmp_path / "out.png")[..., :3]
    assert (picture.max(-1) - picture.min(-1) > 0.3).mean() > 0.002
