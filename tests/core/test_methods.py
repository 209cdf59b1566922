"""The table of methods: what each does at a temperature, and what sets the kinds of naive sampling apart."""

from math import comb

import pytest
import torch
from profile_cases import constant_llama
from tiny_models import tiny_llama

from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.output.trace import read_trace


@pytest.mark.parametrize("method", ["naive", "naive-distinct"])
def test_siblings_of_naive_sampling_are_independent_and_those_of_the_other_distinct(method, tmp_path):
    """Of four children of one node among seven tokens, drawn as often as there are steps."""
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    decoder = SpeculativeDecoder(target, draft, method, tree=TokenTree.k_ary(4, 2))
    decoder.generate(torch.tensor([[1, 2, 3]]).expand(8, -1), 20, temperature=1.0, seed=3, trace=tmp_path / "trace")
    equal = below_equal = 0
    for step in read_trace(tmp_path / "trace")[1]:
        parents, fates = step["parents"], step["fates"]
        drawn = [(parent, token) for parent, token in zip(parents, step["tokens"], strict=True) if token >= 0]
        equal += len(drawn) - len({*drawn})
        below_equal += any(fates[node] == "other" and fates[above] == "equal" for node, above in enumerate(parents))
        assert [parents[node] for node in step["path"][1:]] == step["path"][:-1]
    assert (equal > 100) == (below_equal > 0) == (method == "naive")


def test_naive_sampling_tries_the_children_of_all_equal_siblings():
    """Of two levels with three independent children each, on a language whose laws P and Q depend on nothing: c
    children of law Q have the target's token with chance h(c) = sum_t P(t) (1 - (1 - Q(t))^c), and after a token that m
    of the first level's three have, 3 m are tried."""
    target, draft = [1.0, 0.2, -0.5, 0.0], [0.3, 0.9, -0.2, -1.0]
    p, q = (torch.tensor(logits).div(0.6).softmax(-1).double() for logits in (target, draft))
    hit = {children: float((p * (1 - (1 - q) ** children)).sum()) for children in (3, 6, 9)}
    both = sum(float((p * comb(3, m) * q**m * (1 - q) ** (3 - m)).sum()) * hit[3 * m] for m in (1, 2, 3))
    decoder = SpeculativeDecoder(constant_llama(target), constant_llama(draft), "naive", tree=TokenTree.k_ary(3, 2))
    stats = decoder.generate(torch.tensor([[1, 2, 3]]).expand(400, -1), 40, temperature=0.6, seed=1).stats
    assert stats.acceptance_by_depth == pytest.approx([hit[3], both / hit[3]], abs=5 * 0.5 / (stats.steps / 2) ** 0.5)
    assert both / hit[3] > hit[3] + 0.06  # which the children of one sibling alone would give
