"""What mutants that survived showed: places that no other test looks at."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE, inputs, random_tree
from kernel_cases import NATIVE
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from heavypath.kernels.attention import variant
from heavypath.kernels.attention.launch import plan_launch
from heavypath.kernels.attention.layouts import Layouts, TensorLayout, in_place
from heavypath.kernels.attention.masks import PackedAncestors, pack_ancestors
from heavypath.kernels.filtering import Filters, filtered_logprobs, scores
from heavypath.kernels.native.library import library
from heavypath.kernels.native.recording import recorded
from heavypath.kernels.nodes import Nodes, VerifyInputs
from heavypath.kernels.noise import Noise, Stream, gumbel, gumbel_noise, gumbel_of, log2_below, noise_bits
from heavypath.kernels.sampling import TopK, gumbel_topk, stochastic_beam
from heavypath.kernels.sharing import counters, open_pass, take_chunk
from heavypath.kernels.step_kernels import StepKernels, step_kernels
from heavypath.kernels.tree_attention import tree_attention
from heavypath.kernels.trees.growing_kernel import _expm1, _log1p
from heavypath.kernels.trees.levels import CommonNodes, NodeInputs, Trees, place
from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots
from heavypath.kernels.verification import verify_tree
from heavypath.kernels.verifying.decision import help_at
from heavypath.kernels.verifying.distributions import FACTS, PIECE, Distribution, store_distributions, store_residual
from heavypath.speculative.decoding.drafted import Drafted, check_distributions
from heavypath.speculative.decoding.sequences import node_rows
from heavypath.speculative.drafts.lookahead import Lookahead, LookaheadDraft

LN2 = math.log(2)


@triton.jit
def _noise_kernel(bits_ptr, gumbel_ptr, below_ptr, INTERPRETED: tl.constexpr):
    at = tl.arange(0, 8)
    bits = tl.load(bits_ptr + at).to(tl.uint32)
    tl.store(gumbel_ptr + at, gumbel_of(bits))
    tl.store(below_ptr + at, log2_below(bits, INTERPRETED))


@triton.jit
def _logarithms_kernel(x_ptr, expm1_ptr, log1p_ptr):
    at = tl.arange(0, 8)
    x = tl.load(x_ptr + at)
    tl.store(expm1_ptr + at, _expm1(x))
    tl.store(log1p_ptr + at, _log1p(x))


@triton.jit
def _distribution(row_ptr, numbers_ptr):
    return Distribution(
        row_ptr, tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3),
        tl.load(numbers_ptr + 4).to(tl.int32),
    )  # fmt: skip


@triton.jit
def _help_kernel(
    tokens_ptr, parents_ptr, target_ptr, draft_ptr, left_out_ptr, facts_ptr, marks_ptr, sums_ptr, counters_ptr,
    numbers_ptr, rows, place, N, V, source, log_multiple, uniform_log_q, log_p_mass, PIECES: tl.constexpr,
):  # fmt: skip
    """A leader opens the pass of a node, and another program does all of it. numbers_ptr: fp32 [2, 5]."""
    fact_ptr = facts_ptr + place * FACTS
    target, draft = _distribution(target_ptr, numbers_ptr), _distribution(draft_ptr, numbers_ptr + 5)
    store_distributions(fact_ptr, marks_ptr + place * FACTS, target, draft, source)
    store_residual(fact_ptr, log_multiple, uniform_log_q, log_p_mass, 0.25)  # the share is for the draw after the walk
    open_pass(counters_ptr, place, PIECES)
    help_at(
        counters_ptr, rows, place, take_chunk(counters_ptr, place), tokens_ptr, parents_ptr, target_ptr, draft_ptr,
        left_out_ptr, facts_ptr, marks_ptr, sums_ptr, N, V, 0, N * V, V, N * V, V,
        target.temperature, draft.temperature, tl.arange(0, 16), True, True, True, PIECES,
    )  # fmt: skip


@pytest.mark.parametrize(("uniform", "p_offset"), [(1.0, 0.0), (-9.0, -0.5)], ids=["at first", "after a restart"])
def test_a_program_that_helps_sums_what_the_formulas_say(uniform, p_offset):
    """At node 1 of the second tree, of whose children the first is left out; filters cut among equal logits."""
    generator, (nodes, vocab, batch, node, source) = torch.Generator().manual_seed(1), (4, 3_000, 1, 1, 0)
    logits = torch.randint(-4, 4, (2, 2, nodes, vocab), generator=generator).float()
    logits[0, batch, node, [7, 2999]] = 3.0
    tokens, parents = torch.tensor([[0, 1, 2, 3], [0, 1, 7, 2999]]), torch.tensor([-1, 0, 1, 1])
    sides, logs = [], []
    for row, temperature, cut, end in (
        (logits[0, batch, node], 0.7, 1, 1500),
        (logits[1, batch, source], 1.3, -1, 900),
    ):
        kept = (row > cut) | ((row == cut) & (torch.arange(vocab) < end))
        scores = ((row.double() - 3) / (temperature * LN2)).where(kept, -math.inf)
        sides.append([3.0, float(scores.exp2().sum().log2()), temperature, cut, end])
        logs.append(scores - sides[-1][1])
    log_p, log_q = logs
    if uniform < 0:
        log_p[7], log_q = -math.inf, torch.tensor(uniform)
    p = (log_p - p_offset).exp2()
    uncovered = p - p.minimum((log_q - 0.3).exp2())
    expected = torch.stack([part.sum() for part in uncovered.split(PIECE.value)])
    rows, place, pieces = 2 * nodes, batch * nodes + node, len(expected)
    facts, sums, sides = torch.zeros(rows, FACTS.value), torch.zeros(rows, pieces), torch.tensor(sides)
    left_out, marks, counting = (torch.zeros(many).int() for many in (rows, facts.numel(), counters(rows)))
    left_out[batch * nodes + 2] = 1
    given = [each.to(DEVICE) for each in (tokens, parents, *logits, left_out, facts, marks, sums, counting, sides)]
    more = rows, place, nodes, vocab, source, -0.3, uniform, p_offset
    _help_kernel[(1,)](*given, *more, PIECES=pieces)
    torch.testing.assert_close(given[7][place].cpu().double(), expected, rtol=1e-5, atol=0)
    assert int(given[8][1 + rows + place]) == pieces


def test_noise_of_the_least_and_the_greatest_word():
    words = np.array([0, 1, 255, 256, 2**31, 2**32 - 256, 2**32 - 2, 2**32 - 1])
    found, below = torch.empty(2, 8, device=DEVICE)
    _noise_kernel[(1,)](torch.tensor(words, device=DEVICE), found, below, INTERPRETED=DEVICE == "cpu")
    assert gumbel(words)[0] == pytest.approx(33 * LN2)
    assert gumbel(words)[-1] == pytest.approx(-math.log(24 * LN2))  # 1 - u is at least 2^-24
    assert found.cpu().numpy() == pytest.approx(gumbel(words), rel=1e-6)
    uniform = (words + 0.5) / 2**32
    lost = uniform - 2.0 ** below.double().cpu().numpy()
    assert ((lost > -1e-9) & (lost < 2.0**-23 + 1e-9)).all()


def test_logarithms_of_a_beam_are_exact_near_0():
    x = torch.tensor([-0.5, -1e-3, -1e-9, -1e-17, 1e-17, 1e-9, 1e-3, 0.5], dtype=torch.float64, device=DEVICE)
    expm1, log1p = torch.empty(2, 8, dtype=torch.float64, device=DEVICE)
    _logarithms_kernel[(1,)](x, expm1, log1p)
    torch.testing.assert_close(expm1, torch.expm1(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(log1p, torch.log1p(x), rtol=1e-12, atol=0)


def test_noise_of_a_tensor_is_that_of_its_seed_stream_and_rows():
    rows = torch.tensor([5, 1 << 40])
    expected = gumbel(noise_bits(3, Stream.TARGET, rows.numpy(), 9))
    assert np.array_equal(gumbel_noise(3, Stream.TARGET, rows, 9).numpy(), expected)


@pytest.mark.parametrize("temperature", [0.5, 2.0, 3.0])
def test_logits_are_divided_by_the_temperature(temperature):
    logits = torch.randn(3, 9)
    expected = torch.log_softmax(logits.double() / temperature, -1)
    torch.testing.assert_close(filtered_logprobs(logits, Filters(temperature)), expected, rtol=1e-5, atol=1e-5)
    expected = (logits - 3) / np.float32(temperature)
    assert np.array_equal(scores(logits.numpy(), np.float32(3), temperature), expected.numpy())


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_of_equal_logits_top_p_keeps_the_first_ones(impl):
    drawn = gumbel_topk(torch.zeros(1, 8, device=DEVICE), 8, top_p=0.5, impl=impl if DEVICE == "cpu" else "triton")
    assert sorted(drawn.tokens[0].tolist()) == [-1, -1, -1, -1, 0, 1, 2, 3]


def test_a_beam_takes_the_implementation_that_is_named():
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="impl"):
        stochastic_beam(torch.zeros(1, 5), zero, zero, 2, impl="no such")


def test_attention_takes_trees_whose_numbers_lie_apart():
    tree = random_tree(9)
    query, key, value = inputs(2, 2, 1, 9, 24, 16)
    ends = tree.subtree_end.expand(2, -1).to(DEVICE)
    lengths, first = torch.tensor([15, 7], device=DEVICE), torch.tensor([2, 1], device=DEVICE)

    def apart(tensor):
        """The same numbers, with others between them."""
        return torch.stack([tensor, tensor * 0 + 3], -1)[..., 0]

    given = {"prefix_length": lengths, "first_row": first, "impl": "triton"}
    expected = tree_attention(query, key, value, subtree_end=ends, **given)
    given = {"prefix_length": apart(lengths), "first_row": apart(first), "impl": "triton"}
    assert torch.equal(tree_attention(query, key, value, subtree_end=apart(ends), **given), expected)
    words, *more = pack_ancestors(tree.mask().to(DEVICE))
    packed = PackedAncestors(apart(words), *more)
    assert torch.equal(tree_attention(query, key, value, ancestor_mask=packed, **given), expected)


def test_the_first_node_of_a_text_is_an_index():
    tokens = torch.tensor([[0, 6, 6]], device=DEVICE)
    trees = Trees(tokens, tokens[:, 0], tokens, tokens[0, :1], tokens[0, :1], torch.zeros_like(tokens))
    given = CommonNodes(*(torch.tensor(numbers, device=DEVICE) for numbers in ([1, 2], [0, 0], [1, 1])))
    torch.testing.assert_close(StepKernels("triton").alike(trees, given), torch.tensor([[0, 0]], device=DEVICE))


@pytest.mark.parametrize("apart", [False, True])
def test_a_steps_compaction_copies_rows_whose_numbers_lie_apart(apart):
    """Rows 3 and 4 of a cache [1, 1, 6, 2] come after two rows of a prefix and the root's."""
    cache = torch.arange(12.0).view(1, 1, 2, 6).mT if apart else torch.arange(12.0).view(1, 1, 6, 2)
    expected = cache[0, 0, [0, 1, 2, 4, 5, 5]]
    path, length = torch.tensor([[0, 2, 3]]), torch.tensor([2])
    step_kernels(cache.device).compact([cache], path, length, torch.tensor([2]))
    assert torch.equal(cache[0, 0], expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU runs kernels")
@pytest.mark.parametrize("name", ["verify", "place", "node_rows"])
def test_a_step_on_a_cpu_runs_compiled_code_where_there_is_some(name):
    """What takes a reference cannot be replayed."""
    numbers, logits, filters = torch.tensor([[5, 3], [6, 4]]), torch.zeros(2, 2, 9), Filters(0.0)
    nodes, ranks, chosen = (
        torch.tensor([-1, 0]),
        torch.tensor([0, 0]),
        CommonNodes(*torch.tensor([[0, 1], [-1, 0], [0, 1]])),
    )
    trees = Trees(numbers.clone(), numbers[:, 0], numbers, numbers[:, 1], numbers[:, 1], None)
    options = {
        "max_depth": 1,
        "target_filters": filters,
        "draft_filters": filters,
        "noise": Noise(numbers[0, 0], numbers),
    }
    call = {
        "verify": lambda: step_kernels(logits.device).verify(
            VerifyInputs(Nodes(numbers, nodes, ranks), logits, None, "greedy", False, **options)
        ),
        "place": lambda: place(trees, None, chosen, whole=True),
        "node_rows": lambda: node_rows(numbers[:, 0], numbers[:, 1:]),
    }[name]
    with recorded() as recording:
        call()
    assert (recording.obstacle is None) == (library() is not None)


def test_a_prefix_is_cut_where_it_is_longer_than_the_shortest_part():
    def parts(rows):
        query, key = (
            TensorLayout(torch.Size([1, 1, n, 64]), (n * 64, n * 64, 64, 1), torch.float32, "cpu") for n in (1, rows)
        )
        return plan_launch(Layouts(query, key, key, *[None] * 5), 1, False, False, False).parts

    assert [parts(rows) for rows in (256, 257, 513)] == [0, 2 * 66, 4 * 66]


def test_what_was_compiled_is_launched_on_its_grid():
    ran = []
    known = variant.Variant(SimpleNamespace(arg_names=["a", "b", "C"]), {})
    known.compiled = SimpleNamespace(run=lambda *given: ran.append(given), function="code", packed_metadata="packed")
    variant.Launch(known, (2, 3, 5), {"C": 7})(9, (1, None))
    assert ran == [(2, 3, 5, 9, "code", "packed", None, None, None, 1, None, 7)]


def test_a_stream_is_told_unless_a_profiler_wants_to_know_of_launches(monkeypatch):
    monkeypatch.setattr(
        variant, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: device))
    )
    assert variant.current_stream(3) == 3
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, hook, print)
            assert variant.current_stream(3) is None


def test_nodes_that_a_draft_adds_come_after_those_of_each_sequences_own_tree():
    fed = NodeInputs(*(torch.zeros(2, 3, dtype=torch.long) for _ in NodeInputs._fields))
    drafted = Drafted(
        fed.tokens, fed.tokens, fed.tokens, fed.tokens, torch.tensor([[3, 2, 3], [3, 3, 3]]), fed, None, None
    )
    draft = LookaheadDraft(Lookahead(1, 6), 50, torch.device("cpu"))  # a column, of the root and four guesses
    (window,) = draft.changes(draft.new_cache(2, 30))
    state = SimpleNamespace(root=torch.ones(2).long(), lengths=torch.tensor([10, 20]))
    given = window.before_scoring(drafted.target_inputs, state)
    assert given.cache_rows[:, 3:].tolist() == [[13, 14, 15, 16], [23, 24, 25, 26]]
    assert given.subtree_end.tolist() == [[7, 2, 3, 7, 7, 7, 7], [7, 3, 3, 7, 7, 7, 7]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes tensors of the host to the kernels")
def test_a_step_on_a_gpu_draws_with_and_without_replacement():
    logits, noise = torch.randn(2, 300), Noise(torch.tensor(7), torch.tensor([4, 9]))
    likely, two = Filters(0.7, top_p=0.9), Filters(0.7, top_k=2)
    for filters, replacement, fill in ((likely, False, False), (likely, True, False), (two, False, True)):
        options = {"noise": noise, "replacement": replacement, "uniform_fill": fill}
        (found, *_), (expected, *_) = (
            StepKernels(impl).draw(logits, 4, filters, **options) for impl in ("triton", "torch")
        )
        assert torch.equal(found, expected)
        if fill:
            assert (found >= 0).all(), "two tokens have a probability, and two others fill up"


@pytest.mark.parametrize("impl", ["torch", "triton", NATIVE])
def test_the_first_slot_below_a_draft_that_is_certain_has_the_value_base_plus_slope(impl):
    """If a single token can be drawn, the sum of Q(v)^2 is 1."""
    logits = torch.full((1, 1, 6), -torch.inf, device=DEVICE)
    logits[..., 3] = 2.0
    lines = torch.tensor([[0.25, 0.25], [0.5, 0.5]], dtype=torch.float64, device=DEVICE)
    roots = Roots(*torch.tensor([[9], [7], [4096], [5]], device=DEVICE))
    level = Level(0, 1, 0, torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE))
    slots = Slots.room_for(1, 3, torch.device(DEVICE))
    logprobs = torch.tensor([[[0.0, -torch.inf]]], device=DEVICE)
    draws = TopK(torch.tensor([[[3, -1]]], device=DEVICE), logprobs, logprobs)
    StepKernels(impl).grow(slots, level, draws, logits, roots, Policy("slot", 2, 0.0, True, 1.0, lines))
    assert slots.values[0, 1].item() == pytest.approx(0.75)


def test_attention_by_a_kernel_is_one_operator_for_whoever_records_operators():
    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    given = inputs(1, 2, 1, 2, 16, 16)
    for impl, is_one in (("triton", True), ("torch", False)):
        names = []
        with Recorded(), torch.no_grad():
            tree_attention(*given, prefix_length=3, subtree_end=torch.tensor([2, 2], device=DEVICE), impl=impl)
        assert ("heavypath::tree_attention" in names) == is_one


def test_only_numbers_of_float16_are_said_to_be_too_large_for_it():
    state = SimpleNamespace(lengths=torch.tensor([4]), member=torch.tensor([0]))
    for dtype, is_said in ((torch.float16, True), (torch.float32, False), (torch.bfloat16, False)):
        with pytest.raises(ValueError, match=r"the target's logits after position 5 of sequence 0 hold NaN") as found:
            check_distributions("target", torch.tensor([[[1.0, torch.nan]]], dtype=dtype), state, 1)
        assert ("need bfloat16 or float32" in str(found.value)) == is_said


def test_attention_reads_tensors_where_they_are_unless_it_cannot():
    whole = torch.zeros(2, 3, 5, 34)
    for tensor, is_read in (
        (whole[..., :32].contiguous(), True), (whole[..., :16].contiguous()[..., ::2], False), (whole, False),
        (whole.flatten()[1 : 1 + 2 * 3 * 5 * 32].view(2, 3, 5, 32), False),
        (whole.flatten().as_strided((1, 3, 5, 32), (3, 160, 32, 1)), True),  # of one sequence no next one is read
    ):  # fmt: skip
        assert (in_place(tensor) is tensor) == is_read
        assert torch.equal(in_place(tensor), tensor)


def verified_alike(tokens, parents, method, vocab_size, **options):
    """Whether the kernel accepts what the reference accepts, of 16 sequences with random laws."""
    generator = torch.Generator().manual_seed(7)
    batch, nodes = 16, len(tokens)
    logits = [2 * torch.randn(batch, nodes, vocab_size, generator=generator) for _ in range(2)]
    given = torch.tensor(tokens).expand(batch, -1), torch.tensor(parents)
    found = [
        verify_tree(*(each.to(device) for each in (*given, *logits)), method=method, seed=5, impl=impl, **options)
        for impl, device in (("triton", DEVICE), ("torch", "cpu"))
    ]
    return all(torch.equal(one.cpu(), other) for one, other in zip(*found, strict=True))


def test_children_of_another_token_are_not_offered_as_an_accepted_nodes_own():
    """Independent siblings of equal tokens share their children, and no others do."""
    assert verified_alike([0, 1, 2, 1, 3, 4, 3], [-1, 0, 0, 0, 1, 2, 3], "with_replacement", 6)
