"""tree_attention, PyTorch and kernel, against a dense softmax in fp64."""

import math
from functools import partial

import pytest
import torch
import triton
from attention_cases import DEVICE, inputs, masks, oracle, random_tree
from devices import placed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from heavypath.kernels import tree_attention as entry
from heavypath.kernels.attention import launch
from heavypath.kernels.attention.masks import pack_ancestors, unpack_ancestors
from heavypath.kernels.attention.prepared import prepared_attention
from heavypath.kernels.tree_attention import chain_attention, tree_attention
from heavypath.speculative.trees.tree import TokenTree

slow = pytest.mark.slow
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


def check(impl, tensors, lengths, trees, ways=(0,), within=2e-5, **options):
    """Of a tree, or a tree for each sequence, which is said in some of the ways of `masks`; returns the last output."""
    each = [trees] * len(lengths) if isinstance(trees, TokenTree) else trees
    exact = oracle(*tensors, lengths, torch.stack([tree.mask() for tree in each]).to(DEVICE), **options)
    prefix = torch.tensor(lengths, device=DEVICE)
    for way in ways:
        out = tree_attention(*tensors, prefix_length=prefix, **masks(trees)[way], **options, impl=impl)
        torch.testing.assert_close(out.double(), exact, atol=within, rtol=0)
    return out


@st.composite
def problems(draw):
    """A random problem: shapes, trees, prefix lengths, options, and how the mask is said."""
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    nodes = draw(st.one_of(st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65]), st.integers(1, 50)))
    each = draw(st.booleans())
    prefix = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 256, 257]), st.integers(0, 150))
    lengths = draw(
        st.lists(prefix, min_size=batch, max_size=batch) if each else prefix.map(lambda length: [length] * batch)
    )
    return {
        "batch": batch, "kv_heads": kv_heads, "group": draw(st.sampled_from([1, 2, 3, 7])), "nodes": nodes,
        "head_dim": draw(st.sampled_from([16, 24, 40, 64, 96, 136, 256])), "lengths": lengths, "each": each,
        "how": draw(st.integers(0, 3)), "own_trees": draw(st.booleans()), "seed": draw(st.integers(0, 99)),
        "scale": draw(st.sampled_from([None, 0.3])), "softcap": draw(st.sampled_from([None, None, 2.0])),
        "window": draw(st.sampled_from([None, None, 1, 5, 64, 300])), "spare": draw(st.integers(0, 70)),
        "padded": draw(st.sampled_from([False, False, True])),
    }  # fmt: skip


def solved(problem, dtype, impl):
    """Output and fp64 truth of a random problem; cache rows that nothing may read are NaN."""
    batch, nodes, lengths = problem["batch"], problem["nodes"], torch.tensor(problem["lengths"], device=DEVICE)
    rows = max(problem["lengths"]) + nodes + problem["spare"]
    heads = problem["kv_heads"] * problem["group"]
    tensors = inputs(batch, heads, problem["kv_heads"], nodes, rows, problem["head_dim"], dtype, problem["seed"])
    trees = [random_tree(nodes, problem["seed"] + b) for b in range(batch if problem["own_trees"] else 1)]
    first_row = None
    if problem["padded"]:
        first_row = torch.tensor([(5 * b + 3) % (length + nodes) for b, length in enumerate(problem["lengths"])])
        first_row = first_row.to(DEVICE)
    for b, length in enumerate(problem["lengths"]):
        for x in tensors[1:]:
            x[b, :, length + nodes :] = math.nan
            if first_row is not None:
                x[b, :, : first_row[b]] = math.nan
    options = {name: problem[name] for name in ("scale", "softcap", "window")} | {"first_row": first_row}
    prefix = lengths if problem["each"] else problem["lengths"][0]
    shape = masks(trees if problem["own_trees"] else trees[0])[problem["how"]]
    out = tree_attention(*tensors, prefix_length=prefix, **shape, **options, impl=impl)
    mask = torch.stack([tree.mask() for tree in trees]).to(DEVICE).expand(batch, -1, -1)
    return out, oracle(*tensors, lengths, mask, **options), tensors, mask


RANDOMISED = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("impl", "count"), [
    ("torch", 5), ("triton", 5), pytest.param("torch", 60, marks=slow), pytest.param("triton", 60, marks=slow)
])  # fmt: skip
def test_random_problems(impl, count):
    @given(problem=problems())
    @settings(RANDOMISED, max_examples=count)
    def check_each(problem):
        out, exact, *_ = solved(problem, torch.float32, impl)
        torch.testing.assert_close(out.double(), exact, atol=2e-4, rtol=0)

    check_each()


@IMPLS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(problem=problems())
@settings(RANDOMISED, max_examples=4)
def test_low_precision_errs_at_most_twice_as_much_as_pytorchs_own(impl, dtype, problem):
    problem |= {"softcap": None, "window": None, "padded": False, "each": False}
    problem["lengths"] = problem["lengths"][:1] * problem["batch"]
    out, exact, (query, key, value), mask = solved(problem, dtype, impl)
    length, nodes = problem["lengths"][0], problem["nodes"]
    dense = torch.cat([mask.new_ones(len(mask), nodes, length), mask], 2)[:, None]
    key, value = key[:, :, : length + nodes], value[:, :, : length + nodes]
    pytorch = scaled_dot_product_attention(query, key, value, attn_mask=dense, scale=problem["scale"], enable_gqa=True)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= 2 * (pytorch.double() - exact).abs().max() + 1e-5


BORDERS = {  # nodes, rows before them, options
    "a tree of three blocks": (130, 20, {}),
    "a chain of three blocks": (90, 20, {"order": "chain"}),
    "an order that is not depth first": (259, 3, {"order": "breadth_first"}),
    "a prefix that programs share": (20, 600, {}),
    "a long prefix": (5, 2_100, {}),
    "left padding that ends in the tree": (70, 30, {"first_row": torch.tensor([40], device=DEVICE)}),
    "a window that begins in the prefix": (20, 90, {"window": 50}),
    "a window of two blocks": (20, 200, {"window": 100}),
    "a window in the tree": (70, 0, {"window": 3}),
}
LARGE = {
    "the largest tree": (2048, 3, {}),
    "the largest tree in another order": (2047, 3, {"order": "breadth_first"}),
    "a long chain": (1024, 3, {"order": "chain"}),
    "a very long prefix": (5, 131_072, {}),
}


@IMPLS
@pytest.mark.parametrize("border", [*BORDERS, *(pytest.param(name, marks=slow) for name in LARGE)])
def test_blocks_are_masked_at_their_borders(border, impl):
    """Keys behind the tree would draw all attention."""
    nodes, length, options = (BORDERS | LARGE)[border]
    order, options = options.get("order", "heavy_path"), {k: value for k, value in options.items() if k != "order"}
    tree = TokenTree.chain(nodes - 1) if order == "chain" else random_tree(nodes, order=order)
    for dtype, within in ((torch.float32, 2e-5), (torch.float16, 5e-3)):  # blocks of 32 and of 64 keys
        tensors = inputs(1, 2, 1, nodes, length + nodes + 64, 16, dtype)
        tensors[1][:, :, length + nodes :] = 9.0
        check(impl, tensors, [length], tree, [3] if order == "breadth_first" else [0, 3], within, **options)


def test_rows_that_lie_past_two_to_the_31_elements():
    """Nearly all of that memory is never touched. Rows further apart than the kernel follows are copied."""
    for rows, apart in ((150, (1 << 24) - 8), (40, 1 << 26)):
        query, near, _ = inputs(1, 1, 1, 3, rows, 16, torch.float16)
        far = torch.empty(rows * apart, dtype=torch.float16, device=DEVICE).as_strided(near.shape, (0, 0, apart, 1))
        assert far.stride(2) * (rows - 1) > 1 << 31
        far.copy_(near)
        tree = random_tree(3)
        for impl in ("triton",) if DEVICE == "cuda" else ("torch", "triton"):
            attend = partial(tree_attention, prefix_length=rows - 3, **masks(tree)[0], impl=impl)
            assert torch.equal(attend(query, far, far), attend(query, near, near))
        del far


def test_results_of_the_kernel_do_not_depend_on_the_rest_of_the_batch():
    lengths, trees = [0, 700, 300], [random_tree(9, seed) for seed in range(3)]
    tensors = inputs(3, 4, 2, 9, 720, 32)
    out = check("triton", tensors, lengths, trees)
    for b, tree in enumerate(trees):
        assert torch.equal(out[b : b + 1], check("triton", [x[b : b + 1] for x in tensors], lengths[b : b + 1], tree))


@IMPLS
@pytest.mark.parametrize("window", [None, 1, 3, 66])
def test_the_last_nodes_of_a_growing_tree_ask(impl, window):
    """And the last row of the prefix, which sees none of the tree; a draft is given it again together with the root."""
    lengths, padding = [60, 65, 2], torch.tensor([5, 63, 0], device=DEVICE)
    tree = random_tree(70, order="breadth_first")
    tensors = inputs(3, 2, 1, 12, 150, 32)
    for length, key, value in zip(lengths, *tensors[1:], strict=True):
        key[:, length + 70 :] = value[:, length + 70 :] = math.nan
    mask = torch.cat([torch.zeros(1, 70).bool(), tree.mask()[-11:]]).to(DEVICE)
    of_these = partial(oracle, *tensors, lengths, mask.expand(3, -1, -1), window=window, depths=tree.depths.to(DEVICE))
    exact = of_these(first_row=padding)
    options = {"prefix_length": torch.tensor(lengths, device=DEVICE), "window": window, "impl": impl}
    for ancestors in (mask, pack_ancestors(mask, window), pack_ancestors(mask.expand(3, -1, -1))):
        out = tree_attention(*tensors, ancestor_mask=ancestors, first_row=padding, **options)
        torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=0)
    attend = prepared_attention(ancestor_mask=mask, rows=135, dtype=torch.float32, **options)
    out = attend(*(x.nan_to_num(5.0) for x in tensors), 32**-0.5)
    torch.testing.assert_close(out.double(), of_these(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_nodes_that_are_not_drafted_yet_may_hold_nan(dtype, window):
    """A level of a tree is drafted with the mask of all nodes; the rows of those to come are of an earlier text."""
    query, key, value = inputs(2, 4, 2, 9, 130, 32, dtype=dtype)
    mask = random_tree(90).mask()[20:29].to(DEVICE)
    unseen = (~mask.any(0)).nonzero()[:, 0].tolist()
    assert 0 < len(unseen) < 90
    options = {"prefix_length": 40, "ancestor_mask": mask, "window": window, "impl": "triton"}
    expected = tree_attention(query, key, value, **options)
    for node in unseen:
        key[:, :, 40 + node] = value[:, :, 40 + node] = math.nan
    assert torch.equal(tree_attention(query, key, value, **options), expected)


@IMPLS
@pytest.mark.parametrize("window", [None, 70, 5])
def test_nodes_may_all_see_each_other(impl, window):
    """As the rows of a block do. With a window all of them then see as much of the prefix: window - nodes rows."""
    nodes, lengths = 4 if window == 5 else 17, [60, 65]
    query, key, value = inputs(2, 2, 1, nodes, 90, 32)
    mask = torch.ones(nodes, nodes, dtype=torch.bool, device=DEVICE)
    options = {"prefix_length": torch.tensor(lengths, device=DEVICE), "ancestor_mask": mask, "window": window}
    out = tree_attention(query, key, value, **options, impl=impl)
    for sequence, length in enumerate(lengths):
        first = 0 if window is None else max(0, length + nodes - window)
        seen = slice(first, length + nodes)
        weights = (query[sequence] @ key[sequence, :, seen].mT / 32**0.5).softmax(-1)
        torch.testing.assert_close(out[sequence], weights @ value[sequence, :, seen], atol=2e-5, rtol=0)


@IMPLS
def test_a_node_that_sees_nothing_gets_zeros(impl):
    query, key, value = inputs(1, 2, 1, 3, 300, 16)
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 1]], device=DEVICE).bool()
    out = tree_attention(query, key, value, prefix_length=0, ancestor_mask=mask, impl=impl)
    assert (out[:, :, 1] == 0).all()
    torch.testing.assert_close(out.double(), oracle(query, key, value, [0], mask[None]), atol=2e-5, rtol=0)
    query, key, value = inputs(1, 2, 1, 3, 80, 16)  # in a window it is the last row of the prefix, and sees that far
    out = tree_attention(query, key, value, prefix_length=70, ancestor_mask=mask, window=7, impl=impl)
    prefix = scaled_dot_product_attention(query[:, :, 1:2], key[:, :, 63:70], value[:, :, 63:70], enable_gqa=True)
    torch.testing.assert_close(out[:, :, 1:2], prefix, atol=2e-5, rtol=0)
    query, key, value = inputs(1, 2, 1, 3, 300, 16)
    blind = {"prefix_length": 290, "first_row": torch.tensor([293], device=DEVICE)}
    out = tree_attention(query, key, value, subtree_end=torch.full((3,), 3, device=DEVICE), **blind, impl=impl)
    assert (out == 0).all()


@IMPLS
@pytest.mark.parametrize(("batch", "heads", "nodes"), [(0, 2, 2), (2, 0, 2), (2, 2, 0)])
def test_nothing_to_do(impl, batch, heads, nodes):
    tensors = inputs(batch, heads, 1, nodes, 8, 16)
    options = {"prefix_length": 3, "subtree_end": torch.full((nodes,), nodes, device=DEVICE), "impl": impl}
    assert tree_attention(*tensors, **options).shape == tensors[0].shape


def test_the_kernel_gets_a_soft_cap_as_a_float(monkeypatch):
    """It is compiled for the types of its arguments, and launched again without a look at them."""
    numbers, attend = [], launch.Launch.__call__

    def noted(self, stream, varying):
        numbers.append([(type(each), each) for each in varying if isinstance(each, int | float)])
        attend(self, stream, varying)

    monkeypatch.setattr(launch.Launch, "__call__", noted)
    tensors = inputs(1, 4, 2, 9, 30, 16)
    options = {"prefix_length": 20, "subtree_end": torch.full((9,), 9, device=DEVICE), "impl": "triton"}
    assert torch.equal(*(tree_attention(*tensors, **options, softcap=softcap) for softcap in (30, 30.0)))
    assert numbers[0] == numbers[1] == [(int, 20), (float, 0.25), (float, 30.0)]


@IMPLS
def test_memory_layouts(impl):
    """Transposed queries, slices of a larger cache, and strides that no 16-byte load can follow."""
    tree = random_tree(9)
    query, key, value = inputs(2, 4, 2, 9, 40, 24)
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    cache = torch.full((2, 6, 50, 24), math.nan, device=DEVICE)
    cache[:, 2:4, :40] = key
    odd = torch.full((2, 2, 41, 27), math.nan, device=DEVICE)
    odd[:, :, 1:, 2:26] = value
    assert torch.equal(odd[:, :, 1:, 2:26], value)
    check(impl, (turned, cache[:, 2:4, :40], odd[:, :, 1:, 2:26]), [20, 20], tree)


def test_gradients_are_pytorchs():
    tree = random_tree(9)
    tensors = [x.requires_grad_() for x in inputs(1, 4, 2, 9, 30, 16)]
    visible = {"prefix_length": 21, **masks(tree)[0]}
    tree_attention(*tensors, **visible).square().sum().backward()
    gradients = [x.grad for x in tensors]
    dense = torch.cat([torch.ones(9, 21), tree.mask()], 1).bool().to(DEVICE)
    again = [x.detach().clone().requires_grad_() for x in tensors]
    scaled_dot_product_attention(*again, attn_mask=dense, enable_gqa=True).square().sum().backward()
    for ours, theirs in zip(gradients, again, strict=True):
        torch.testing.assert_close(ours, theirs.grad, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="impl 'triton' has no gradient; take impl 'torch'"):
        tree_attention(*tensors, **visible, impl="triton")


@IMPLS
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 2.0, "first_row": [3, 0]}], ids=str)
def test_a_chain_is_a_tree_that_no_tensor_describes(impl, options):
    query, key, value = inputs(2, 4, 2, 9, 60, 16)
    options = {name: torch.tensor(x, device=DEVICE) if name == "first_row" else x for name, x in options.items()}
    lengths, end = torch.tensor([30, 41], device=DEVICE), torch.full((9,), 9, device=DEVICE)
    expected = tree_attention(query, key, value, prefix_length=lengths, subtree_end=end, **options, impl=impl)
    out = chain_attention(query, key, value, lengths, **options, impl=impl)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("nodes", [1, 33, 64, 300])
@pytest.mark.parametrize("window", [None, 3, 40])
def test_the_kernel_packs_ancestors_as_pytorch_does(nodes, window):
    mask = torch.randn(2, 3, nodes) > 0
    mask[0, 0], mask[0, 1] = False, True
    for each in (mask, mask[0], mask.transpose(0, 1)):
        expected = pack_ancestors(each, window, impl="torch")
        assert expected.words.shape[-1] == 2 * math.ceil(nodes / 64)
        assert window is not None or torch.equal(unpack_ancestors(expected), each)
        packed = pack_ancestors(each.to(DEVICE), window, impl="triton")
        assert (packed.nodes, packed.window) == (expected.nodes, expected.window)
        assert torch.equal(packed.words.cpu(), expected.words)
        if window is not None:
            assert torch.equal(packed.counts.cpu(), expected.counts)
    assert pack_ancestors(mask[:0].to(DEVICE), window, impl="triton").words.shape[0] == 0


@pytest.mark.parametrize(("change", "message"), [
    ({"key": torch.zeros(1, 3, 8, 16), "value": torch.zeros(1, 3, 8, 16)}, "multiple of key heads, got 4 and 3"),
    ({"value": torch.zeros(1, 2, 7, 16)}, r"expected query \[B, Hq, N, D\]"),
    ({"query": torch.zeros(1, 4, 3, 16).half()}, "one floating-point dtype, got torch.float16"),
    ({"subtree_end": None}, "exactly one of subtree_end and ancestor_mask"),
    ({"subtree_end": torch.tensor([3, 3])}, r"subtree_end must be .* \[3\] or \[1, 3\]"),
    ({"subtree_end": None, "ancestor_mask": torch.ones(3, 3)}, "ancestor_mask must be torch.bool"),
    ({"subtree_end": None, "ancestor_mask": torch.ones(3, 2).bool()}, "3 queries of a tree of 2 nodes"),
    ({"subtree_end": None, "ancestor_mask": pack_ancestors(torch.ones(3, 4).bool(), 2), "window": 3},
     "packed for a window of 2, got window 3"),
    ({"window": 0}, "window must be above 0, or None, got 0"),
    ({"scale": -1.0}, "scale must be above 0, or None, got -1.0"),
    ({"softcap": 0.0}, "softcap must be above 0, or None, got 0.0"),
    ({"first_row": torch.tensor([0, 0])}, r"first_row must be torch.int64 \[1\], got torch.int64 \[2\]"),
    ({"prefix_length": torch.tensor([6])}, r"prefix_length \+ 3 nodes must lie in 0 .. 8, got prefix_length \[6\]"),
    ({"prefix_length": -1}, "prefix_length"),
    ({"prefix_length": 1.5}, "prefix_length must be an int or a LongTensor, got float"),
    ({"subtree_end": torch.empty(3, dtype=torch.long, device="meta")},
     "subtree_end must be on the query's device, cpu, got meta"),
    ({"prefix_length": torch.tensor([1, 2])}, r"prefix_length must be an int, or torch.int64 \[\] or \[1\]"),
    ({"subtree_end": [3, 2, 3]}, "subtree_end must be a tensor, got list; make it one by torch.as_tensor"),
    ({"subtree_end": None, "ancestor_mask": [3]}, "ancestor_mask must be a tensor, got list"),
    ({"impl": "flash"}, "impl 'auto', 'triton' or 'torch', got 'flash'"),
    ({"query": torch.zeros(1, 4, 3, 20), "key": torch.zeros(1, 2, 8, 20), "value": torch.zeros(1, 2, 8, 20),
      "impl": "triton"}, "head sizes 16 to 256 in steps of 8, got 20; take impl 'torch'"),
    ({"query": torch.zeros(1, 4, 3, 16).double(), "key": torch.zeros(1, 2, 8, 16).double(),
      "value": torch.zeros(1, 2, 8, 16).double(), "impl": "triton"}, "got torch.float64; take impl 'torch'"),
    ({"query": torch.zeros(1, 4, 2049, 16), "key": torch.zeros(1, 2, 2060, 16), "value": torch.zeros(1, 2, 2060, 16),
      "subtree_end": torch.full((2049,), 2049), "impl": "triton"}, "at most 2048 nodes and 32767 .*, got 2049 and 1"),
    ({"query": torch.zeros(1, 4, 3, 16).expand(32768, -1, -1, -1), "impl": "triton",
      **dict.fromkeys(("key", "value"), torch.zeros(1, 2, 8, 16).expand(32768, -1, -1, -1))},
     "32767 sequences of 2 key heads, got 3 and 32768; take impl 'torch'"),
])  # fmt: skip
def test_bad_input_is_refused(change, message):
    arguments = {
        "query": torch.zeros(1, 4, 3, 16), "key": torch.zeros(1, 2, 8, 16), "value": torch.zeros(1, 2, 8, 16),
        "prefix_length": 2, "subtree_end": torch.tensor([3, 3, 3]),
    } | change  # fmt: skip
    arguments = placed(arguments)
    with pytest.raises(TypeError if "must be a tensor" in message else ValueError, match=message):
        tree_attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


def test_the_kernel_needs_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    tensors = [x.cpu() for x in inputs(1, 2, 1, 3, 8, 16)]
    with pytest.raises(
        ValueError, match="needs CUDA tensors, got cpu; on a CPU take impl 'torch', or set TRITON_INTER"
    ):
        tree_attention(*tensors, prefix_length=0, subtree_end=torch.full((3,), 3), impl="triton")


@pytest.fixture
def no_kept_plans(monkeypatch):
    """Plans of attention know where its prefix is cut."""
    monkeypatch.setattr(entry, "_plan", entry._plan.__wrapped__)


@pytest.mark.usefixtures("no_kept_plans")
@pytest.mark.parametrize("batch", [4, pytest.param(217, marks=slow)])
def test_attention_is_right_in_any_schedule(batch, adversary):
    trees = [random_tree(9, batch * adversary.seed + tree) for tree in range(batch)]
    lengths = [280, 0, *torch.randint(0, 300, (batch - 2,)).tolist()]  # two parts, and one
    check("triton", inputs(batch, 2, 1, 9, 310, 16, seed=adversary.seed), lengths, trees, [0, 3] if batch == 4 else [0])
    for window in (None, 3):
        test_the_kernel_packs_ancestors_as_pytorch_does(300, window)
    adversary.met("tree_attention_kernel", "_pack_kernel")


@pytest.mark.usefixtures("no_kept_plans")
def test_programs_that_share_a_tile_are_right_in_any_schedule(adversary, monkeypatch):
    """Up to six programs share each of two tiles, and the last of them merges their parts, in two times 16 rows."""
    trees = [random_tree(20, adversary.seed + tree) for tree in range(3)]
    tensors = inputs(3, 2, 1, 20, 170, 64, seed=adversary.seed)
    monkeypatch.setattr(launch, "MIN_SPLIT", 32)
    out, again = (check("triton", tensors, [150, 0, 70], trees) for _ in range(2))
    assert torch.equal(out, again), "it depends on which program is the last one"
