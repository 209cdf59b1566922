"""Growing trees: `grow` and `assemble` by hand; kernels and compiled code against their references on random levels."""

import math
import random

import pytest
import torch
from devices import DEVICE, moved
from kernel_cases import NATIVE, needs_compiler
from torch.utils._pytree import tree_map

from heavypath.kernels.sampling import TopK, gumbel_topk
from heavypath.kernels.step_kernels import StepKernels
from heavypath.kernels.trees.growing import logprobs_at
from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots

CPU = torch.device("cpu")
LINES = torch.tensor([[0.41, 0.16, 0.12, 0.09, 0.08], [0.5, 0.5, 0.4, 0.3, 0.3]], dtype=torch.float64)
FLAT = torch.tensor([[0.25], [0.0]], dtype=torch.float64)  # a confidence of slope 0, so that values tie
POLICIES = [  # by, noisy, confidence, threshold
    ("slot", True, None, 0.0), ("slot", True, LINES, 0.0), ("slot", True, FLAT, 0.0), ("slot", True, LINES, 0.15),
    ("slot", False, None, 0.0), ("slot", False, LINES, 0.02), ("node", False, None, 0.05), ("node", True, None, 0.0),
    ("node", False, FLAT, 0.15), ("beam", True, None, 0.0), ("beam", False, None, 0.0),
]  # fmt: skip
SHAPES = [  # batch, width, depth, tokens
    (1, 1, 4, 6), (1, 4, 3, 9), (2, 3, 3, 5), (3, 6, 2, 4), (2, 5, 2, 40), (1, 16, 2, 11), (2, 2, 4, 1), (1, 1, 2, 1),
]  # fmt: skip
LARGE = [(1, 8, 4, 1024), (1, 30, 3, 200), (3, 60, 4, 70)]
LAWS = ["normal", "tied", "sparse", "empty", "equal", "nan"]


def policy_of(number: int, width: int, children: int) -> Policy:
    by, noisy, lines, threshold = POLICIES[number]
    if lines is not None:
        lines = lines[:, torch.arange(children).clamp(max=lines.shape[1] - 1)].contiguous()
    return Policy(by, width, threshold, noisy, (0.6, 1.0)[number % 2], lines)


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


def compared(impl: str, mine: Slots, theirs: Slots, end: int, policy: Policy) -> None:
    """What an empty slot would have been worth is asked by nobody, nor is its rank."""
    close = {"rtol": 1e-4, "atol": 1e-6} if impl == "native" else {"rtol": 2e-6, "atol": 5e-7}
    if impl == "native" and policy.noisy and policy.lines is None:  # fp64 throughout
        close = {"rtol": 1e-12, "atol": 1e-13}
    there = theirs.tokens[:, :end] >= 0
    for name in Slots._fields if policy.by == "beam" else Slots._fields[:-1]:
        one, other = getattr(mine, name)[:, :end].cpu(), getattr(theirs, name)[:, :end]
        if name in ("ranks", "worths", "keys"):
            one, other = one[there], other[there]
        if one.dtype == torch.long:
            assert torch.equal(one, other), name
        else:  # what is left of 1 is as exact as the sum of the fp32 probabilities before
            torch.testing.assert_close(one, other, **close, msg=lambda text, name=name: f"{name}: {text}")


def rounding_decides(drawn: TopK, logits: torch.Tensor, policy: Policy, law: str, depth: int) -> bool:
    """Whether values tell little more than how a sum of fp32 exponentials was rounded.

    They are made of differences of what is left of 1 after the children before. By measured confidence they divide by
    its square, which at 0.2 makes 1.5e-6 of the rounding of a sum, 6e-8. Of equal rows they tie but for rounding from
    the third level on: (a b) c = (a c) b.
    """
    if law == "equal" and not policy.noisy and depth >= 2:
        return True
    if policy.by == "beam" or (policy.noisy and policy.lines is None):
        return False
    logprobs = drawn.logprobs if policy.noisy else logprobs_at(logits, drawn.tokens, policy.temperature)
    left = 1 - logprobs.double().exp()[..., :-1].sum(-1)
    return bool((left.nan_to_num(1) < (0.2 if policy.lines is not None else 1e-4)).any())


def given_to(impl, value):
    """Tensors where an implementation takes them, with the same strides."""
    return value if impl == "native" else moved(value, DEVICE)


def apart(value):
    """The same numbers with gaps between them."""
    return tree_map(lambda leaf: torch.stack([leaf, leaf], -1)[..., 0] if torch.is_tensor(leaf) else leaf, value)


def grown(impl, seed, policy_number, law, shape, dtype=torch.float32):
    """A random tree that grows by the reference and another implementation; each level of the two must be equal.

    Returns the reference's slots, the roots and the last level.
    """
    generator, (batch, width, depth, vocab) = torch.Generator().manual_seed(seed), shape
    children = min(width, vocab)
    policy = policy_of(policy_number, width, children)
    roots = Roots(
        tokens=torch.randint(vocab, (batch,), generator=generator),
        lengths=torch.randint(40, (batch, 2), generator=generator)[:, 0],
        noise_rows=torch.randint(1 << 40, (batch,), generator=generator),
        left=torch.randint(1, depth + 3, (batch,), generator=generator),
    )
    slots = [Slots.room_for(batch, 1 + width * depth, CPU)]
    slots.append(given_to(impl, Slots(*map(torch.empty_like, slots[0]))))
    level = Level(0, 1, 0, torch.ones(batch, 2, 7, dtype=torch.bool)[:, 1:, :1])
    noise_rows = roots.noise_rows[:, None]
    for _ in range(depth):
        logits = random_logits((batch, level.size + 1, vocab), law, generator).to(dtype)[:, 1:]
        if law == "nan" and level.depth == depth - 1:  # below, the two may differ in what is not there
            logits[-1, -1, 0] = torch.nan
        drawn = gumbel_topk(
            logits, children, temperature=float(policy.noisy), seed=seed, rows=noise_rows.contiguous(), impl="torch"
        )
        given = given_to(impl, apart((level.mask, drawn, logits, roots, policy)))
        found, fed_by_other = StepKernels(impl).grow(slots[1], level._replace(mask=given[0]), *given[1:])
        below, fed = StepKernels("torch").grow(slots[0], level, drawn, logits, roots, policy)
        if rounding_decides(drawn, logits, policy, law, level.depth):
            for own, other in zip(slots[1], slots[0], strict=True):
                own.copy_(other)
        else:
            assert found[:3] == below[:3]
            assert torch.equal(found.mask.cpu(), below.mask)
            for name, mine, theirs in zip(fed._fields, fed_by_other, fed, strict=True):
                assert torch.equal(mine.cpu(), theirs), name
            compared(impl, slots[1], slots[0], below.end, policy)
        level, noise_rows = below, fed.noise_rows
    return slots[0], roots, level


def flat(field):
    return field if isinstance(field, tuple) else (field,)


def check_assembled(impl, slots, roots, level, nodes, trims=False):
    expected = StepKernels("torch").assemble(slots, roots, level, nodes, trims)
    got = StepKernels(impl).assemble(*given_to(impl, (slots, apart(roots))), level, nodes, trims)
    for name, mine, theirs in zip(expected._fields, got, expected, strict=True):
        for part, (one, other) in enumerate(zip(flat(mine), flat(theirs), strict=True)):
            assert torch.equal(one.cpu(), other), (name, part, nodes)
            assert one.is_contiguous()


def check_case(impl, case):
    """The tree of a case, any policy on any law, grows and is assembled as by the references."""
    chosen = random.Random(case)
    slots, roots, level = grown(
        impl, case, case % len(POLICIES), chosen.choice(LAWS), chosen.choice(SHAPES + LARGE * (impl == "native")),
        chosen.choice([torch.float32, torch.bfloat16, torch.float16]),
    )  # fmt: skip
    for nodes in {*((1, 2) if impl == "native" else ()), (level.end + 1) // 2, level.end + 3}:
        for trims in (False, True) if impl == "native" else (False,):
            check_assembled(impl, slots, roots, level, nodes, trims)


@pytest.mark.parametrize("case", [
    *range(len(POLICIES)), *(pytest.param(case, marks=pytest.mark.slow) for case in range(len(POLICIES), 220))
])  # fmt: skip
def test_kernels_grow_and_assemble_the_references_trees(case):
    check_case("triton", case)


@pytest.mark.parametrize("impl", ["triton", NATIVE])
def test_a_beam_that_is_wider_than_all_that_can_be_drawn_has_each_child_once(impl):
    for shape in ((1, 6, 3, 2), (2, 12, 2, 3)):
        slots, _, level = grown(impl, 2, 9, "normal", shape)
        for parents, tokens in zip(slots.parents[:, : level.end].tolist(), slots.tokens.tolist(), strict=True):
            children = [(parent, token) for parent, token in zip(parents, tokens, strict=False) if token >= 0]
            assert len(children) == len({*children})


@needs_compiler
@pytest.mark.parametrize("policy", range(len(POLICIES)))
def test_compiled_code_grows_and_assembles_the_references_trees(policy):
    for case in range(policy, 16 * len(POLICIES), len(POLICIES)):
        check_case("native", case)


def begun(slots, *root):
    """Slots, a root and the level that it is alone."""
    roots = Roots(*(torch.tensor([number], device=DEVICE) for number in root))
    level = Level(0, 1, 0, torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE))
    return Slots.room_for(1, slots, torch.device(DEVICE)), roots, level


def draws(tokens, probs):
    logprobs = torch.tensor([probs], device=DEVICE).log()
    return TopK(torch.tensor([tokens], device=DEVICE), logprobs, logprobs)


EACH = pytest.mark.parametrize("impl", ["torch", "triton", NATIVE])


@EACH
def test_a_level_by_hand(impl):
    """The root's slots are worth 1, 0.5 and 0.2, of which width 2 leaves two; below them are eight, of which two stay.

    First child, worth 0.5: slots 0.5, 0.5 * 0.4. Second, worth 0.3, in a slot of 0.5: slots 0.3, 0.3 * 0.1.
    """
    slots, roots, level = begun(5, 9, 7, 4096, 5)
    policy, logits = Policy("slot", 2, 0.0, True, 1.0, None), torch.zeros(1, 2, 6, device=DEVICE)
    kernels = StepKernels(impl)
    level, fed = kernels.grow(slots, level, draws([[3, 1]], [[0.5, 0.3]]), logits[:, :1], roots, policy)
    assert level[:3] == (1, 2, 1)
    assert fed.tokens.tolist() == [[3, 1]]
    assert slots.values[0, :3].tolist() == pytest.approx([math.inf, 1.0, 0.5])
    drawn = draws([[2, 4], [5, 0]], [[0.6, 0.4], [0.9, 0.1]])
    level, fed = kernels.grow(slots, level, drawn, logits, roots, policy)
    assert slots.values[0].tolist() == pytest.approx([math.inf, 1.0, 0.5, 0.5, 0.3])
    assert slots.worths[0].tolist() == pytest.approx([1.0, 0.5, 0.3, 0.3, 0.27])
    assert slots.parents.tolist() == [[-1, 0, 0, 1, 2]]
    assert fed.tokens.tolist() == [[2, 5]]
    assert (fed.positions.tolist(), fed.cache_rows.tolist()) == ([[9, 9]], [[10, 11]])
    assert (fed.parent_rows.tolist(), fed.noise_rows.tolist()) == ([[8, 9]], [[4099, 4100]])
    assert level.mask[0].int().tolist() == [[1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    tree = kernels.assemble(slots, roots, level, 4, False)
    assert tree.tokens.tolist() == [[9, 3, 2, 1]]
    assert (tree.parents.tolist(), tree.depths.tolist()) == ([[-1, 0, 1, 0]], [[0, 1, 2, 1]])
    assert (tree.slots.tolist(), tree.inner.tolist()) == ([[0, 1, 3, 2]], [[0, 1, 2, 2]])


@EACH
@pytest.mark.parametrize("policy", [1, 4, 6, 9])
def test_below_what_is_no_distribution_all_slots_are_empty(policy, impl):
    logits = torch.randn(2, 1, 6)
    logits[0, 0, 2], logits[1, 0, 3] = torch.nan, torch.inf
    policy = policy_of(policy, 3, 3)
    rows = torch.zeros(2, 1, dtype=torch.long)
    drawn = gumbel_topk(logits, 3, temperature=float(policy.noisy), rows=rows, impl="torch")
    slots = Slots.room_for(2, 4, torch.device(DEVICE))
    level = Level(0, 1, 0, torch.ones(2, 1, 1, dtype=torch.bool))
    roots = Roots(*torch.ones(4, 2, dtype=torch.long))
    _, fed = StepKernels(impl).grow(slots, *given_to(impl, (level, drawn, logits, roots, policy)))
    assert slots.tokens[:, 1:].tolist() == [[-1] * 3] * 2
    assert not slots.values[:, 1:].any()
    assert fed.tokens.tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("impl", ["triton", NATIVE])
def test_slots_with_gaps_are_refused(impl):
    slots, roots, level = begun(5, 9, 7, 4096, 5)
    gaps = slots._replace(ranks=apart(slots.ranks))
    message = r"slots must be contiguous, as `Slots.room_for` makes them, got ranks \[1, 5\] with strides \[10, 2\]"
    policy, logits = Policy("slot", 2, 0.0, True, 1.0, None), torch.zeros(1, 1, 6, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        StepKernels(impl).grow(gaps, level, draws([[3, 1]], [[0.5, 0.3]]), logits, roots, policy)
    with pytest.raises(ValueError, match=message):
        StepKernels(impl).assemble(gaps, roots, level, 1, False)


@pytest.mark.parametrize(("policy", "shape"), [(1, (1, 4, 3, 9)), (4, (3, 6, 2, 4)), (9, (2, 3, 3, 5)),
                                               (1, (1, 66, 1, 70))])  # fmt: skip
def test_trees_grow_right_in_any_schedule(policy, shape, adversary):
    slots, roots, level = grown("triton", adversary.seed, policy, "normal", shape)
    check_assembled("triton", slots, roots, level, level.end // 2 + 1)
    adversary.met("_grow_kernel", "_keep_kernel", "_heavy_path_kernel", "_number_kernel")
    if policy == 1:
        adversary.met("_sums_kernel")
