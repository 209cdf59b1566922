"""The loop that kernel_verification.py holds verify_tree against: what it emits follows the target's law."""

import importlib
from pathlib import Path

import pytest
import torch
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts

from heavypath.kernels.noise import Stream, gumbel_noise
from heavypath.kernels.sampling import gumbel_topk

BENCH = Path(__file__).parents[2] / "bench"
VOCABULARY, TEMPERATURE, TEXTS = 5, 0.6, 4000
CHILDREN = [[1, 4, 2], [5, 3], [6], [], [], [], []]  # of each node, in draw order


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("kernel_verification")


@pytest.mark.parametrize(
    "lazy", [pytest.param(False, id="loop"), pytest.param(True, id="lazy loop", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", ["without_replacement", "with_replacement", "kseq", "held", "race", "target_sample",
                                    "traversal", "held_traversal"])  # fmt: skip
def test_two_tokens_of_the_loop_follow_the_targets_law(bench, method, lazy):
    # Row 0 of each table is the distribution after the root, row 1 + v the one after token v.
    target = torch.randn(1 + VOCABULARY, VOCABULARY)
    draft = target + 2 * torch.randn(1 + VOCABULARY, VOCABULARY)
    law = (target / TEMPERATURE).softmax(-1)
    rows = torch.arange(TEXTS * len(CHILDREN)).view(TEXTS, -1)
    tokens = torch.full((TEXTS, len(CHILDREN)), -1)
    for node, children in enumerate(CHILDREN):
        if children:
            logits, replacement = draft[tokens[:, node] + 1], method in bench.INDEPENDENT
            options = {"temperature": TEMPERATURE, "rows": rows[:, node], "replacement": replacement}
            tokens[:, children] = gumbel_topk(logits, len(children), **options).tokens
    noise = gumbel_noise(0, Stream.DRAFT, rows.flatten(), VOCABULARY).view(*rows.shape, -1)

    texts, depths = [], [0, 0, 0, 0]
    for drawn, noise_here in zip(tokens, noise if method == "race" else [None] * TEXTS, strict=True):
        logits = target[drawn + 1], draft[drawn + 1]
        options = {"method": method, "temperature": TEMPERATURE, "noise": noise_here, "lazy": lazy}
        path, last = bench.loop_verify(CHILDREN, drawn, *logits, **options)
        depths[len(path)] += 1
        text = [*drawn[path].tolist(), last]
        texts.append(text[:2] if len(text) > 1 else [last, int(law[1 + last].multinomial(1))])
    begin = int(method == "held_traversal")  # which always accepts one of three children here
    assert min(depths[begin:3]) > TEXTS // 50  # recovered and bonus tokens at every depth
    joint = law[0][:, None] * law[1:]
    assert chi_square_p_value(joint_counts(torch.tensor(texts), VOCABULARY), joint.flatten()) > SIGNIFICANCE


def test_the_greedy_loop_walks_along_the_arg_max(bench):
    logits = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]])
    children, tokens = [[2, 1], [3], [], []], torch.tensor([0, 1, 0, 2])
    for lazy in (False, True):
        options = {"method": "greedy", "temperature": 1.0, "lazy": lazy}
        assert bench.loop_verify(children, tokens, logits, None, **options) == ([1, 3], 1)


def test_the_tree_of_the_benchmark_is_wide_at_the_root_and_narrow_below(bench):
    tree = bench.wide_tree(64)
    fanout = torch.bincount(tree.parents[1:], minlength=64)
    assert len(tree) == 64
    assert int(fanout[0]) == 8
    assert sorted(set(fanout[1:].tolist())) == [0, 1, 2]
    assert torch.equal(tree.subtree_end, tree.reordered("heavy_path")[0].subtree_end)


@pytest.fixture(scope="module")
def predictions():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("predict_verification")


def test_a_first_pass_reads_every_row_once(predictions):
    shape = predictions.Shape("without_replacement", 64, 20, 7, 128_256)
    assert predictions.first_pass(shape)["bytes"] == pytest.approx(84 * 128_256 * 2 / 4.3e6)  # 5.0 us at 4.3 TB/s
    assert predictions.most_passes("without_replacement", 8) == 7  # none for the first child
    assert predictions.most_passes("kseq", 1) == 0
    assert [predictions.most_passes("held", children) for children in (1, 2, 8)] == [0, 2, 8]


def test_a_pass_of_one_program_takes_its_chunks_in_turn(predictions):
    shape = predictions.Shape("without_replacement", 64, 20, 7, 128_256)
    alone, shared = (predictions.shared_pass(shape, workers=workers) for workers in (1, None))
    assert alone["chunk"] == pytest.approx(63 * shared["chunk"] + 62 * 0.3)
    assert {part: us for part, us in alone.items() if part != "chunk"}.items() <= shared.items()


def test_the_worst_root_takes_60_microseconds_and_k_seq_twice_that(predictions):
    for method, most in (("without_replacement", 60), ("kseq", 120)):
        passes = predictions.most_passes(method, 8)
        assert predictions.decide(predictions.Shape(method, 64, 20, passes, 128_256)) <= most


def test_chains_of_traversal_wait_for_the_elder_siblings_on_their_way_alone(predictions):
    """A tree of 64 nodes takes at most 65 us; a launch for each level, with the most passes of each, would take 141."""
    tree, chain = (shape for shape in predictions.SHAPES if shape.method == "traversal" and shape.vocabulary == 32_000)
    assert predictions.decide(chain) < predictions.decide(tree) < 65
    longer = predictions.decide(tree._replace(chains=tree.chains + 1)) - predictions.decide(tree)
    assert longer == pytest.approx(sum(predictions.beginning(tree).values()))
