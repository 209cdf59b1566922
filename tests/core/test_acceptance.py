"""Measured acceptance is what the verifier does."""

import pytest
import torch
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree
from heavypath.speculative.trees.acceptance import measure_acceptance
from heavypath.speculative.trees.tree import TokenTree


@pytest.mark.parametrize("filters", [Filters(0.6), Filters(1.0, top_k=3), Filters(1.0, top_p=0.8)])
@torch.no_grad()
def test_the_expected_rate_is_the_rate_of_accepted_children(filters):
    models, input_ids = (tiny_llama(1), tiny_llama(2, layers=1)), torch.randint(0, 7, (40, 16))
    told = {"temperature": filters.temperature, "top_k": filters.top_k, "top_p": filters.top_p}
    acceptance = measure_acceptance(*models, input_ids, **told, children=4)
    positions, repeats = input_ids.numel(), 60
    target, draft = (model(input_ids).logits.view(positions, 7).repeat(repeats, 1) for model in models)
    rows, tree = torch.arange(positions * repeats), TokenTree.k_ary(4, 1)
    drawn = gumbel_topk(draft, 4, **filters._asdict(), rows=rows, seed=1).tokens
    tokens, rows = torch.cat([torch.zeros_like(drawn[:, :1]), drawn], 1), rows[:, None].expand(-1, 5)
    logits = (each[:, None].expand(-1, 5, -1) for each in (target, draft))
    options = {**filters._asdict(), "seed": 1, "method": "without_replacement"}
    verified = verify_tree(tokens, tree.parents, *logits, **options, rows=rows)
    accepted = torch.stack([(verified.path[:, 1] == node).double().mean() for node in range(1, 5)])
    # One draw of children per position is in both figures' noise: compare within 5 standard errors of the smaller.
    error = (acceptance * (1 - acceptance) / positions).sqrt()
    assert ((accepted - acceptance).abs() < 5 * error + 1e-3).all()


@torch.no_grad()
def test_likeliest_children_are_accepted_as_often_as_they_agree_and_those_of_an_equal_draft_always():
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    input_ids = torch.randint(0, 7, (8, 16))
    acceptance = measure_acceptance(target, draft, input_ids, temperature=0.0, children=7)
    agree = target(input_ids).logits.argmax(-1) == draft(input_ids).logits.argmax(-1)
    assert float(acceptance.sum()) == pytest.approx(1)
    assert float(acceptance[0]) == pytest.approx(float(agree.double().mean()))
    equal = measure_acceptance(target, target, input_ids, temperature=1.0, children=3)
    assert equal.tolist() == pytest.approx([1, 0, 0])


@pytest.mark.parametrize(("options", "spoilt", "message"), [
    ({"input_ids": torch.tensor([1, 2])}, None, r"input_ids \[B, T\]"),
    ({"temperature": -1.0}, None, "temperature must be"),
    ({"children": 8}, None, r"children in 1 .. 7 .* got 8"),
    ({"children": 3}, "target", "the target's logits after position 0 of input_ids are no distribution"),
    ({"children": 3}, "draft", "the draft's logits after position 0 of input_ids are no distribution"),
])  # fmt: skip
def test_bad_input_is_refused(options, spoilt, message):
    models = {"target": tiny_llama(1), "draft": tiny_llama(2, layers=1)}
    if spoilt:
        with torch.no_grad():
            models[spoilt].lm_head.weight[3] = torch.nan
    with pytest.raises(ValueError, match=message):
        measure_acceptance(**models, **({"input_ids": torch.tensor([[1, 2]]), "temperature": 1.0} | options))
