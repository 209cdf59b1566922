"""The compiled kernels of what a step does between forward passes, against their references; and recorded steps."""

import logging
import random
from itertools import product

import pytest
import torch
from drafted_cases import PROMPTS, assert_replays_as_run
from kernel_cases import needs_compiler, same
from tiny_models import tiny_llama
from verification_cases import Problem, random_filters, random_problem, random_tree

from heavypath.kernels.native.recording import ask, do, recorded, refuse
from heavypath.kernels.native.steps import copy_rows
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.step_kernels import StepKernels
from heavypath.kernels.verification import VERIFICATION_METHODS, verify_tree
from heavypath.speculative import Lookahead, SpeculativeDecoder

pytestmark = needs_compiler
FILTERS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}]


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 33, 100, 1003])
def test_draws_are_those_of_the_reference(vocab):
    logits, rows = torch.randn(5, vocab) * 3, torch.arange(5) * 12345678901
    if vocab > 8:
        logits[0, 2], logits[1], logits[2, 3], logits[3, 4] = -torch.inf, -torch.inf, torch.nan, torch.inf
        logits[4, ::2] = 1.0  # equal logits
    ways = [{"seed": 7}, {"seed": -1, "replacement": True}, {"seed": 1 << 70, "uniform_fill": True}]
    for temperature, filters, way, k in product((0.0, 0.3, 1.7), FILTERS, ways, (1, 5, 9) if vocab > 100 else (2, 40)):
        options = {"temperature": temperature, "rows": rows} | filters | way
        pair = (gumbel_topk(logits, k, impl=impl, **options) for impl in ("native", "torch"))
        assert same(*pair, within=1e-5), options


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_top_k_in_a_tensor_of_any_integers_is_the_same_as_its_number(dtype):
    logits = torch.randn(3, 40)
    drawn = gumbel_topk(logits, 8, top_k=torch.tensor(5, dtype=dtype), impl="native")
    assert same(drawn, gumbel_topk(logits, 8, top_k=5, impl="native"))
    assert (drawn.tokens[:, 5:] == -1).all()


@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_what_is_accepted_is_what_the_reference_accepts(method):
    for seed in range(60):
        problem, chosen = random_problem(method, seed), random.Random(seed)
        if seed % 5 == 0:
            filters = random_filters(chosen), random_filters(chosen)
            problem = Problem(random_tree(chosen, 9, 20), method, *filters, vocab_size=200, absent=0.1, seed=seed)
        problem.target, problem.draft = problem.target.float(), problem.draft.float()
        assert all(map(torch.equal, problem.verified("native"), problem.verified("torch"))), seed


def test_a_row_that_is_no_distribution_is_named():
    logits = torch.zeros(2, 1, 5)
    logits[1, 0, 3] = torch.nan
    tokens, parents = torch.zeros(2, 1, dtype=torch.long), torch.tensor([-1])
    for impl in ("native", "torch"):
        with pytest.raises(ValueError, match=r"target_logits must have .* but \[1, 0\] has nan"):
            verify_tree(tokens, parents, logits, None, method="target_sample", impl=impl)


@pytest.mark.parametrize("impl", ["native", "torch"])
def test_rows_are_copied_to_their_places(impl):
    rows, to = torch.randn(2, 6, 5)[:, ::2], torch.zeros(2, 4, 5)
    StepKernels(impl).copy_rows(rows, to, torch.tensor([3, 0, 2]))
    assert torch.equal(to[:, [3, 0, 2]], rows)
    assert not to[:, 1].any()


@pytest.mark.parametrize("to", [
    torch.zeros(2, 4, 5).bfloat16(), torch.zeros(2, 4, 3), torch.zeros(1, 4, 5), torch.zeros(2, 5, 4).mT,
], ids=["a type", "a width", "a batch", "a stride"])  # fmt: skip
def test_rows_are_not_copied_to_what_has_no_room_for_them(to):
    with pytest.raises(ValueError, match=r"copy_rows needs rows \[B, n, V\] and \[B, N, V\] of one type"):
        copy_rows(torch.ones(2, 3, 5), to, torch.tensor([3, 0, 2]))
    assert not to.any()


@torch.inference_mode()
def test_a_recording_replays_calls_and_notices_what_is_none():
    values, out = torch.arange(6.0).view(2, 3), torch.empty(3)
    with recorded() as recording:
        do(lambda: torch.sum(values, 0, out=out))
        column = values[:, 1:2].contiguous()
    assert recording.obstacle is None
    values += 1
    recording.replay()
    assert out.tolist() == [5, 7, 9]
    assert column.tolist() == [[2], [5]]
    for computed in (
        lambda: values.exp(),
        lambda: values[0, 0].item(),
        lambda: values.T.reshape(-1),
        lambda: torch.zeros(2),
    ):
        with recorded() as recording:
            computed()
        assert recording.obstacle is not None
    with recorded() as recording:
        assert ask(lambda: float(values[0, 0])) == 1
        do(lambda: torch.sum(values, 0, out=out))
    assert recording.obstacle is None
    assert recording.replay()
    values += 1
    out.zero_()
    assert not recording.replay()
    assert not out.any()
    with recorded() as recording:
        refuse("a reference")
    assert recording.obstacle == "a reference"
    with recorded() as recording:
        gumbel_topk(values, 2, impl="auto")
    assert recording.obstacle is None


REPLAYED = {  # operations of PyTorch that a recording replays, of x [2, 3, 4], places [2, 3] and a mask [2, 3, 1]
    "add": lambda x, places, mask: torch.add(places[:, :1], places, alpha=3),
    "cat": lambda x, places, mask: torch.cat([x, x], 1),
    "clamp": lambda x, places, mask: places.clamp(min=1),
    "gather": lambda x, places, mask: x.gather(1, places[..., None].expand_as(x)),
    "ge": lambda x, places, mask: places >= 1,
    "index_select": lambda x, places, mask: x.index_select(1, places[0]),
    "mul": lambda x, places, mask: x * 0.5,
    "clone": lambda x, places, mask: x.clone(),
    "contiguous": lambda x, places, mask: x.transpose(1, 2).contiguous(),
    "another type": lambda x, places, mask: x.to(torch.bfloat16),
    "zero_": lambda x, places, mask: torch.empty_like(x).zero_(),
    "masked_fill_": lambda x, places, mask: x.clone().masked_fill_(mask, -torch.inf),
    "index_copy_": lambda x, places, mask: torch.empty_like(x).copy_(x).index_copy_(1, places[0], 2 * x),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", REPLAYED)
def test_a_recording_replays_operations_of_pytorch_into_the_same_results(name):
    x, places, mask = torch.randn(2, 3, 4), torch.tensor([[0, 2, 1], [1, 0, 2]]), torch.tensor([True, False, True])
    mask = mask[None, :, None]
    with recorded() as recording:
        result = REPLAYED[name](x, places, mask)
    assert recording.obstacle is None
    x.copy_(torch.randn(2, 3, 4))
    places.copy_(places.flip(0))
    recording.replay()
    assert result.equal(REPLAYED[name](x, places, mask))


@pytest.mark.parametrize("method", ["autoregressive", "specinfer", "sequoia", "ersd", "dyspec", "rsd-s", "eagle-2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_steps_do_what_others_do(method, temperature, monkeypatch):
    decoder = SpeculativeDecoder(tiny_llama(1), None if method == "autoregressive" else tiny_llama(2), method)
    replays = assert_replays_as_run(decoder, PROMPTS, monkeypatch, max_new_tokens=20, temperature=temperature, seed=1)
    assert sum(replays) > 5


def test_a_replay_ends_where_a_tree_has_grown_to_another_size(monkeypatch):
    decoder = SpeculativeDecoder(tiny_llama(1), tiny_llama(2), "dyspec", tree_size=12, threshold=0.2)
    replays = assert_replays_as_run(decoder, PROMPTS, monkeypatch, max_new_tokens=40, temperature=0.8, seed=1)
    assert {*replays} == {True, False}


def test_what_keeps_a_step_from_being_recorded_is_logged(caplog):
    decoder = SpeculativeDecoder(tiny_llama(1), Lookahead(), "sequoia", tree_size=4)
    with caplog.at_level(logging.DEBUG, "heavypath.speculative.decoding.run"):
        decoder.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=20, temperature=0.8)
    (record,) = (each for each in caplog.records if "recorded" in each.getMessage())
    assert "a step is not recorded because of" in record.getMessage()
