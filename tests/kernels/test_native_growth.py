"""The compiled kernels of growing trees, `grow` and `assemble`, against their references on random levels and trees."""

import math
from itertools import product

import pytest
import torch
from slot_cases import DTYPES, FIELDS, flat, lines_of

from heavypath.kernels.native.library import library
from heavypath.kernels.native.recording import recorded
from heavypath.kernels.sampling import TopK, gumbel_topk
from heavypath.kernels.trees.assembly import assemble
from heavypath.kernels.trees.growing import grow, logprobs_at
from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
IMPLS = "native", "torch"
SHAPES = [  # batch, width, depth, tokens
    (1, 1, 4, 6), (1, 4, 3, 9), (2, 3, 3, 5), (3, 6, 2, 4), (2, 5, 3, 40), (1, 16, 2, 11), (2, 2, 4, 1),
    (1, 8, 4, 1024), (1, 30, 3, 200),
]  # fmt: skip
LAWS = ["normal", "tied", "sparse", "empty", "equal"]
BY = [
    *((by, noisy) for by in ("slot", "node") for noisy in (True, False)),
    ("beam", True),
    ("beam", False),
]


def random_logits(shape, law, generator):
    """Rows of normal logits; with ties, with hardly any support, with one row that has none, or all of them equal."""
    logits = 2 * torch.randn(shape, generator=generator)
    if law == "tied":
        logits = logits.round()
    if law == "sparse":
        logits[torch.rand(shape, generator=generator) < 0.6] = -torch.inf
    if law == "empty":
        logits[0, 0] = -torch.inf
    return logits[:1, :1].expand(shape) if law == "equal" else logits


def check_slots(native: Slots, reference: Slots, end: int, policy: Policy):
    """Where numbers are only moved and compared, they are equal."""
    for name in FIELDS:
        one, other = getattr(native, name)[:, :end], getattr(reference, name)[:, :end]
        if one.dtype == torch.long or (policy.by == "beam" and not policy.noisy):
            assert torch.equal(one, other), name
        elif policy.noisy and policy.lines is None:  # fp64 throughout
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13, equal_nan=True)
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def well_conditioned(drawn: TopK, logits: torch.Tensor, policy: Policy) -> bool:
    """Whether values tell more than how a sum of fp32 exponentials was rounded.

    They are made of differences of what is left of 1 behind the children before, and divide by its square.
    """
    if policy.by == "beam" or (policy.noisy and policy.lines is None):
        return True
    logprobs = drawn.logprobs if policy.noisy else logprobs_at(logits, drawn.tokens, policy.temperature)
    left = 1 - logprobs.double().exp()[..., :-1].sum(-1)
    return bool((left.nan_to_num(1) > (0.1 if policy.lines is not None else 1e-4)).all())


def check_trees(slots, roots, level, nodes, trims):
    trees = [assemble(slots, roots, level, nodes, trims=trims, impl=impl) for impl in IMPLS]
    for name, native, reference in zip(trees[0]._fields, *trees, strict=True):
        for part, (one, other) in enumerate(zip(flat(native), flat(reference), strict=True)):
            assert torch.equal(one, other), (name, part)
            assert one.is_contiguous()
    return trees[0]


@pytest.mark.parametrize(("by", "noisy"), BY)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_are_those_of_the_references(shape, law, by, noisy):
    batch, width, depth, vocab = shape
    children = min(width, vocab)
    confidences = [None] if by == "beam" else [None, lines_of(children), lines_of(children, 0.25)]
    for case, (lines, threshold) in enumerate(product(confidences, (0.0, 0.02, 0.15))):
        policy = Policy(by, width, threshold, noisy, (0.6, 1.0)[case % 2], lines)
        generator = torch.Generator().manual_seed(case)
        roots = Roots(
            tokens=torch.randint(vocab, (batch,), generator=generator),
            lengths=torch.randint(40, (batch, 2), generator=generator)[:, 0],
            noise_rows=torch.randint(1 << 40, (batch,), generator=generator),
            left=torch.randint(1, depth + 3, (batch,), generator=generator),
        )
        slots = [Slots.room_for(batch, 1 + width * depth, torch.device("cpu")) for _ in IMPLS]
        for field in (*slots[0], *slots[1]):
            field.zero_()
        level = Level(0, 1, 0, torch.ones(batch, 2, 7, dtype=torch.bool)[:, 1:, :1])
        noise_rows = roots.noise_rows[:, None]
        for _ in range(depth):
            logits = random_logits((batch, level.size + 1, vocab), law, generator).to(DTYPES[case % 3])[:, 1:]
            drawn = gumbel_topk(
                logits, children, temperature=float(noisy), seed=case, rows=noise_rows.contiguous(), impl="torch"
            )
            (found, fed_natively), (below, fed) = (
                grow(own, level, drawn, logits, roots, policy, impl=impl)
                for own, impl in zip(slots, IMPLS, strict=True)
            )
            # Of equal rows values tie but for rounding from the third level on: (a b) c = (a c) b.
            rounding_decides = law == "equal" and not noisy and level.depth >= 2
            if rounding_decides or not well_conditioned(drawn, logits, policy):
                for own, other in zip(slots[0], slots[1], strict=True):
                    own.copy_(other)
            else:
                assert found[:3] == below[:3]
                assert torch.equal(found.mask, below.mask)
                for name, one, other in zip(fed._fields, fed_natively, fed, strict=True):
                    assert torch.equal(one, other), name
                check_slots(slots[0], slots[1], below.end, policy)
            level = below
            noise_rows = fed.noise_rows
        for nodes, trims in product({1, 2, (level.end + 1) // 2, level.end + 3}, (False, True)):
            check_trees(slots[1], roots, level, nodes, trims)


@pytest.mark.parametrize("batch", [1, 3])
def test_trees_of_many_nodes_are_numbered_as_by_the_reference(batch):
    """Any trees with any values that fall along their paths, many of them equal."""
    for case in range(60):
        generator = torch.Generator().manual_seed(case)
        count = int(torch.randint(2, 300, (), generator=generator))
        slots = Slots.room_for(batch, count + 4, torch.device("cpu"))
        for tree in range(batch):
            children = [0] * count
            for slot, (draw, value) in enumerate(torch.rand(count, 2, generator=generator).tolist()):
                parent = int(slot * draw) if case % 2 else max(0, slot - 1 - int(3 * draw))
                least = slots.values[tree, parent].item() if slot else math.inf
                there = slot == 0 or (least > 0 and value > 0.15)
                numbers = (
                    parent,
                    children[parent],
                    int(slots.depths[tree, parent]) + 1,
                    int(1000 * draw) if there else -1,
                )
                for field, number in zip(slots[:4], numbers if slot else (-1, 0, 0, 5), strict=True):
                    field[tree, slot] = number
                slots.values[tree, slot] = min(least, round(8 * value + 1) / 8 if slot else least) if there else 0
                children[parent] += slot > 0 and there
        roots = Roots(*torch.randint(1 << 33, (4, batch), generator=generator))
        level = Level(count - count // 3, count // 3, 1, torch.empty(0))
        check_trees(slots, roots, level, count, trims=bool(case % 3))


def test_levels_with_what_is_no_distribution_are_those_of_the_reference():
    logits = torch.randn(2, 1, 6)
    logits[0, 0, 2], logits[1, 0, 3] = torch.nan, torch.inf
    roots = Roots(*torch.ones(4, 2, dtype=torch.long))
    level = Level(0, 1, 0, torch.ones(2, 1, 1, dtype=torch.bool))
    for by, noisy in BY:
        drawn = gumbel_topk(logits, 3, temperature=float(noisy), rows=torch.zeros(2, 1, dtype=torch.long), impl="torch")
        for lines in (None, lines_of(3)):
            made = []
            for impl in IMPLS:
                slots = Slots.room_for(2, 4, torch.device("cpu"))
                made.append(grow(slots, level, drawn, logits, roots, Policy(by, 3, 0.0, noisy, 1.0, lines), impl=impl))
                assert slots.tokens[:, 1:].tolist() == [[-1] * 3] * 2
                assert not slots.values[:, 1:].any()
            assert all(map(torch.equal, made[0].fed, made[1].fed))


@torch.inference_mode()
def test_a_level_can_be_recorded_and_a_trimmed_tree_cannot():
    logits, roots = torch.randn(1, 1, 20), Roots(*torch.full((4, 1), 9))
    drawn = gumbel_topk(logits, 4, rows=torch.tensor([[3]]), impl="torch")
    slots = Slots.room_for(1, 5, torch.device("cpu"))
    level = Level(0, 1, 0, torch.ones(1, 1, 1, dtype=torch.bool))
    policy = Policy("slot", 4, 0.0, True, 1.0, lines_of(4))
    with recorded() as recording:
        found, fed = grow(slots, level, drawn, logits, roots, policy)
        tree = assemble(slots, roots, found, 4)
    assert recording.obstacle is None
    drawn.tokens.copy_(torch.tensor([[[7, 5, 3, 1]]]))
    roots.tokens.fill_(2)
    recording.replay()
    assert fed.tokens.tolist() == [[7, 5, 3, 1]]
    assert tree.tokens.tolist() == [[2, 7, 5, 3]]
    with recorded() as recording:
        assemble(slots, roots, found, 4, trims=True)
    assert recording.obstacle == "assemble"


def test_equal_values_go_by_rank_and_then_by_parent():
    """Two nodes of a slot's value 1/2: their first slots tie, and so do their second ones."""
    for impl in IMPLS:
        slots = Slots.room_for(1, 7, torch.device("cpu"))
        roots = Roots(*torch.tensor([[9], [7], [40], [5]]))
        level, policy = Level(0, 1, 0, torch.ones(1, 1, 1, dtype=torch.bool)), Policy("slot", 3, 0.0, True, 1.0, None)
        half = torch.tensor([[[0.5, 0.5]]]).log()
        level, _ = grow(
            slots, level, TopK(torch.tensor([[[3, 1]]]), half, half), torch.zeros(1, 1, 4), roots, policy, impl=impl
        )
        drawn = TopK(torch.tensor([[[0, 2], [1, 3]]]), half.expand(1, 2, 2), half.expand(1, 2, 2))
        level, fed = grow(slots, level, drawn, torch.zeros(1, 2, 4), roots, policy, impl=impl)
        assert fed.tokens.tolist() == [[0, 1, 2]]
        assert slots.ranks[:, 3:6].tolist() == [[0, 0, 1]]
        assert slots.parents[:, 3:6].tolist() == [[1, 2, 1]]
