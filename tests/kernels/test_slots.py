"""The kernels of growing trees, `grow` and `assemble`, against their references on random levels and whole trees."""

import math

import pytest
import torch
from slot_cases import DTYPES, FIELDS, flat, lines_of

from heavypath.kernels.sampling import TopK, gumbel_topk
from heavypath.kernels.trees.assembly import assemble
from heavypath.kernels.trees.growing import grow
from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def policy_of(case: int, width: int, children: int) -> Policy:
    """One of eight: by slot with DySpec's values, a confidence, ties or a threshold; by node; by beam."""
    by, noisy, lines, threshold = [
        ("slot", True, None, 0.0),
        ("slot", True, lines_of(children), 0.0),
        ("slot", True, lines_of(children, 0.25), 0.0),
        ("slot", True, lines_of(children), 0.15),
        ("slot", False, None, 0.0),
        ("node", False, None, 0.05),
        ("beam", True, None, 0.0),
        ("beam", False, None, 0.0),
    ][case % 8]
    return Policy(by, width, threshold, noisy, 0.6, lines)


def on_device(part):
    """The tensors of a tuple on the device that there is."""
    if isinstance(part, torch.Tensor):
        return part.to(DEVICE)
    return type(part)(*map(on_device, part)) if hasattr(part, "_fields") else part


def random_logits(batch, nodes, vocab, case, generator):
    """Rows of logits in three dtypes; some with ties, some with hardly any support, some with none."""
    logits = 2 * torch.randn(batch, nodes, vocab, generator=generator)
    if case % 3 == 1:
        logits = logits.round()  # ties
    if case % 5 == 2:
        logits[torch.rand(logits.shape, generator=generator) < 0.6] = -torch.inf  # absent tokens
    if case % 7 == 3:
        logits[0, 0] = -torch.inf
    return logits.to(DTYPES[case % 3])


def grown_by_both(case: int, batch: int, width: int, depth: int, vocab: int):
    """A random tree that grows by reference and kernel side by side; each level of the two must be equal.

    Yields the reference's slots and last level, the kernel's, and the roots.
    """
    generator = torch.Generator().manual_seed(case)
    children = min(width, vocab)
    policy = policy_of(case, width, children)
    roots = Roots(
        tokens=torch.randint(vocab, (batch,), generator=generator),
        lengths=torch.randint(40, (batch,), generator=generator),
        noise_rows=torch.randint(1 << 40, (batch,), generator=generator),
        left=torch.randint(1, depth + 3, (batch,), generator=generator),
    )
    slots = [Slots.room_for(batch, 1 + width * depth, device) for device in (torch.device("cpu"), DEVICE)]
    level = Level(0, 1, 0, torch.ones(batch, 1, 1, dtype=torch.bool))
    noise_rows = roots.noise_rows[:, None]
    for _ in range(depth):
        logits = random_logits(batch, level.size, vocab, case, generator)
        if case % 7 == 4 and level.depth == depth - 1:  # below, reference and kernel may differ in what is not there
            logits[-1, -1, 0] = torch.nan
        drawn = gumbel_topk(logits, children, temperature=float(policy.noisy), seed=case, rows=noise_rows, impl="torch")
        given = level._replace(mask=level.mask.to(DEVICE)), on_device(drawn), logits.to(DEVICE), on_device(roots)
        found, fed_by_kernel = grow(slots[1], *given, on_device(policy), impl="triton")
        level, fed = grow(slots[0], level, drawn, logits, roots, policy, impl="torch")
        assert (found.first, found.size, found.depth) == (level.first, level.size, level.depth)
        assert torch.equal(found.mask.cpu(), level.mask)
        for name, mine, theirs in zip(fed._fields, fed_by_kernel, fed, strict=True):
            assert torch.equal(mine.cpu(), theirs), name
        assert_same_slots(slots[1], slots[0], level.end, policy)
        noise_rows = fed.noise_rows
    return slots[0], level, slots[1], roots


def assert_same_slots(mine: Slots, theirs: Slots, end: int, policy: Policy):
    """What an empty slot would have been worth is asked by nobody, nor is its rank."""
    there = theirs.tokens[:, :end] >= 0
    for name in FIELDS if policy.by == "beam" else FIELDS[:-1]:
        one, other = getattr(mine, name)[:, :end].cpu(), getattr(theirs, name)[:, :end]
        if name in ("ranks", "worths", "keys"):
            one, other = one[there], other[there]
        if one.dtype == torch.long:
            assert torch.equal(one, other), name
        else:  # what is left of 1 is as exact as the sum of the fp32 probabilities before
            torch.testing.assert_close(one, other, rtol=2e-6, atol=5e-7, msg=lambda text, name=name: f"{name}: {text}")


SHAPES = [(1, 1, 4, 6), (1, 4, 3, 9), (2, 3, 3, 5), (3, 6, 2, 4), (2, 5, 3, 40), (1, 16, 2, 11), (2, 2, 4, 1)]


@pytest.mark.parametrize("case", range(0, 56, 5))
def test_kernels_grow_and_assemble_the_references_trees(case):
    batch, width, depth, vocab = SHAPES[case % len(SHAPES)]
    slots, level, by_kernel, roots = grown_by_both(case, batch, width, depth, vocab)
    for nodes in {2, (level.end + 1) // 2, level.end + 3}:
        expected = assemble(slots, roots, level, nodes, impl="torch")
        got = assemble(by_kernel, on_device(roots), level, nodes, impl="triton")
        for name, mine, theirs in zip(expected._fields, got, expected, strict=True):
            for part, (one, other) in enumerate(zip(*map(flat, (mine, theirs)), strict=True)):
                assert torch.equal(one.cpu(), other), (name, part, nodes)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(224))
def test_kernels_grow_and_assemble_hundreds_of_the_references_trees(case):
    test_kernels_grow_and_assemble_the_references_trees(case)


def test_a_level_by_hand():
    """The root's slots are worth 1, 0.5 and 0.2, of which width 2 leaves two; below them are eight, of which two stay.

    First child, worth 0.5: slots 0.5, 0.5 * 0.4. Second, worth 0.3, in a slot of 0.5: slots 0.3, 0.3 * 0.1.
    """
    roots = on_device(Roots(*(torch.tensor([number]) for number in (9, 7, 4096, 5))))
    policy = Policy("slot", 2, 0.0, True, 1.0, None)
    slots = Slots.room_for(1, 5, DEVICE)
    level = Level(0, 1, 0, torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE))
    logits = torch.zeros(1, 1, 6, device=DEVICE)

    def draws(tokens, probs):
        logprobs = torch.tensor([probs], device=DEVICE).log()
        return TopK(torch.tensor([tokens], device=DEVICE), logprobs, logprobs)

    level, fed = grow(slots, level, draws([[3, 1]], [[0.5, 0.3]]), logits, roots, policy, impl="triton")
    assert level[:3] == (1, 2, 1)
    assert fed.tokens.tolist() == [[3, 1]]
    assert slots.values[0, :3].tolist() == pytest.approx([math.inf, 1.0, 0.5])
    level, fed = grow(
        slots, level, draws([[2, 4], [5, 0]], [[0.6, 0.4], [0.9, 0.1]]), logits.expand(1, 2, 6), roots, policy,
        impl="triton",
    )  # fmt: skip
    assert slots.values[0].tolist() == pytest.approx([math.inf, 1.0, 0.5, 0.5, 0.3])
    assert slots.worths[0].tolist() == pytest.approx([1.0, 0.5, 0.3, 0.3, 0.27])
    assert slots.parents.tolist() == [[-1, 0, 0, 1, 2]]
    assert fed.tokens.tolist() == [[2, 5]]
    assert (fed.positions.tolist(), fed.cache_rows.tolist()) == ([[9, 9]], [[10, 11]])
    assert (fed.parent_rows.tolist(), fed.noise_rows.tolist()) == ([[8, 9]], [[4099, 4100]])
    assert level.mask[0].int().tolist() == [[1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    tree = assemble(slots, roots, level, 4, impl="triton")
    assert tree.tokens.tolist() == [[9, 3, 2, 1]]
    assert (tree.parents.tolist(), tree.depths.tolist()) == ([[-1, 0, 1, 0]], [[0, 1, 2, 1]])
    assert (tree.slots.tolist(), tree.inner.tolist()) == ([[0, 1, 3, 2]], [[0, 1, 2, 2]])
