"""compact_cache: by hand, and PyTorch, kernel and compiled code against a loop over rows."""

import pytest
import torch
from devices import DEVICE
from kernel_cases import NATIVE, captured

from heavypath.kernels import cache_compaction
from heavypath.kernels.cache_compaction import compact_cache

IMPLS = pytest.mark.parametrize("impl", ["torch", "triton", NATIVE])


def random_bits(*shape, dtype=torch.bfloat16):
    """Any bits, so also NaNs with any payload."""
    size = dtype.itemsize
    return torch.randint(256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype).to(DEVICE)


def on_device(*values):
    return [torch.as_tensor(value).to(DEVICE) for value in values]


def assert_same_bits(got, expected):
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def drawn(batch, nodes, places, prefix, garbage=-1):
    """Paths, lengths and prefixes of a ragged batch."""
    length = torch.randint(0, places, (batch,))
    path = torch.full((batch, places), garbage)
    path[:, 0] = 0
    for b in range(batch):
        path[b, 1 : length[b] + 1] = torch.randperm(nodes - 1)[: length[b]].sort().values + 1
    return on_device(path, length, torch.randint(0, prefix, (batch,)))


def loop(caches, path, length, prefix):
    path, length, prefix = (values.tolist() for values in (path, length, prefix))  # which a GPU is asked for once
    for cache in caches:
        old = cache.clone()
        for b in range(len(path)):
            for j in range(1, length[b] + 1):
                cache[b, :, prefix[b] + j] = old[b, :, prefix[b] + path[b][j]]


def moved_by(impl, caches, *problem):
    compact_cache(caches[::2], caches[1::2], *problem, impl=impl)


def assert_right(storage, problem, impl, view=lambda tensor: tensor):
    """The caches are views of what is stored, all of which is looked at."""
    expected = [tensor.clone() for tensor in storage]
    loop(map(view, expected), *problem)
    moved_by(impl, [*map(view, storage)], *problem)
    for tensor, right in zip(storage, expected, strict=True):
        assert_same_bits(tensor, right)


@IMPLS
@pytest.mark.parametrize(("path", "moved"), [
    ([0, 2, 3, 5], [0, 1, 3, 4, 6, 5, 6, 7]),  # moves overlap
    ([0, 4, 1, 2, 3], [0, 1, 5, 2, 3, 4, 6, 7]),  # it does not rise
])  # fmt: skip
def test_rows_move_by_hand_and_are_read_before_they_are_written(path, moved, impl):
    keys = torch.arange(8.0).view(1, 1, 8, 1)
    caches = on_device(keys, keys + 10)
    moved_by(impl, caches, *on_device([path], [len(path) - 1], [1]))
    assert caches[0].flatten().tolist() == moved
    assert caches[1].flatten().tolist() == [10 + row for row in moved]


@IMPLS
def test_accepted_rows_move_behind_the_prefix_and_nothing_else_changes(impl):
    for garbage in (-1, 2**62, -(2**62)):  # after a path
        for _ in range(2 if impl == "triton" else 15):
            caches = [random_bits(3, 2, 20, 4, dtype=torch.float32) for _ in range(6)]
            assert_right(caches, drawn(3, 9, 5, 11, garbage), impl)


@IMPLS
@pytest.mark.parametrize(("dtype", "head_dim"), [
    (torch.bfloat16, 1), (torch.bfloat16, 64), (torch.float8_e4m3fn, 5), (torch.float32, 40), (torch.complex64, 40),
    (torch.complex128, 256),
], ids=str)  # fmt: skip
def test_all_bits_of_any_dtype_and_head_size_arrive(dtype, head_dim, impl):
    caches = [random_bits(2, 2, 14, head_dim, dtype=dtype) for _ in range(2)]
    if dtype == torch.bfloat16:  # NaNs with payloads
        caches[0][..., :1].view(torch.int16)[:] = torch.tensor([0x7F81, -0x3F, 0x7FFF] * 5)[:14, None]
    assert_right(caches, drawn(2, 9, 6, 5), impl)


LAYOUTS = {
    "all of it": lambda storage: storage,
    "[B, S, H, D] transposed": lambda storage: storage.transpose(1, 2),
    "[S, B, H, D] permuted": lambda storage: storage.permute(1, 2, 0, 3),
    "sequences, heads, rows": lambda storage: storage[1:, 1::2, 1:],
    "columns 8 to 40": lambda storage: storage[..., 8:40],
    "columns 2 to 42": lambda storage: storage[..., 2:42],
    "columns 1 to 42": lambda storage: storage[..., 1:42],
}


@IMPLS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lies_around_a_view_is_untouched(layout, impl):
    storage, view = [random_bits(8, 8, 8, 48) for _ in range(2)], LAYOUTS[layout]
    assert_right(storage, drawn(len(view(storage[0])), 5, 4, 3), impl, view)


@IMPLS
def test_layers_and_paths_have_their_own_strides(impl):
    caches = [random_bits(2, 2, rows, 8) for rows in (17, 17, 40, 40)]
    caches += [random_bits(2, 30, 2, 8).transpose(1, 2), random_bits(2, 2, 30, 24)[..., 8:16]]
    path, length, prefix = drawn(2, 9, 5, 8)
    assert_right(caches, (path.T.contiguous().T, torch.stack([length, 9 - length]).T[:, 0], prefix), impl)


@IMPLS
@pytest.mark.parametrize(("places", "head_dim"), [(300, 5), (2048, 64)])
def test_long_paths(places, head_dim, impl):
    """The longest in two blocks of columns."""
    path = torch.arange(places) + (torch.arange(places) >= 7)  # one node is left out
    length = torch.tensor([places - 1, 5, places - 2])
    caches = [random_bits(3, 1, places + 8, head_dim) for _ in range(2)]
    assert_right(caches, on_device(path.repeat(3, 1), length, [6, 0, 3]), impl)


@IMPLS
def test_nothing_to_do(impl):
    empty = torch.empty(0, dtype=torch.long, device=DEVICE)
    caches = [random_bits(2, 2, 4, 8) for _ in range(2)]
    moved_by(impl, [cache[:0] for cache in caches], empty.view(0, 3), empty, empty)
    moved_by(impl, [], *on_device([[0, 2]], [1], [0]))
    assert_right(caches, on_device([[0], [0]], [0, 0], [1, 2]), impl)
    for none in ([cache[:, :0] for cache in caches], [cache[..., :0] for cache in caches]):
        assert_right(none, on_device([[0, 2], [0, 1]], [1, 0], [1, 2]), impl)


@IMPLS
def test_rows_lie_beyond_two_to_the_31(impl):
    start, sequences = 2**31 + 5, 2
    caches = [torch.empty(sequences, 1, start + 8, 1, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    for cache in caches:
        cache[:, 0, start:, 0] = torch.arange(8)
    moved_by(impl, caches, *on_device([[0, 2, 5]] * 2, [2, 1], [start, start + 1]))
    for cache in caches:
        assert cache[:, 0, start:, 0].tolist() == [[0, 2, 5, 3, 4, 5, 6, 7], [0, 1, 3, 3, 4, 5, 6, 7]]


def test_on_a_gpu_rows_outside_the_cache_stay():
    caches = [random_bits(3, 1, 10, 4) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    path, length, prefix = on_device([[0, 2, 2**62], [0, -9, 5], [0, 3, 4]], [2, 9, 2], [3, 4, 8])
    for cache in expected:
        cache[0, :, 4] = cache[0, :, 5].clone()
        cache[1, :, 6] = cache[1, :, 9].clone()
    cache_compaction.launch(caches, path, length, prefix)
    for cache, right in zip(caches, expected, strict=True):
        assert_same_bits(cache, right)


@pytest.mark.parametrize("sequences", [4, pytest.param(217, marks=pytest.mark.slow)])
def test_rows_are_moved_in_any_schedule(sequences, adversary):
    storage = [torch.randn(sequences, 20, 2, 70, device=DEVICE) for _ in range(2)]  # [B, S, H, D]
    adversary.knows(*storage)  # the kernel finds them by their addresses in a table
    path, length, prefix = drawn(sequences, 9, 6, 11)
    path[0, 1:4], length[0] = torch.tensor([2, 3, 5]), 3  # row 2 is written and read
    assert_right(storage, (path, length, prefix), "triton", lambda cache: cache.transpose(1, 2))
    adversary.met("_compact_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # when a capture ends that an error has cut short
def test_a_cuda_graph_moves_whatever_its_inputs_say_and_the_host_never_waits():
    caches = [random_bits(3, 4, 400, 128) for _ in range(8)]
    given = [torch.zeros_like(values) for values in drawn(3, 300, 200, 90)]
    with pytest.raises(RuntimeError, match="must run once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        moved_by("triton", caches, *given)
    graph, _ = captured(lambda: moved_by("triton", caches, *given))
    cache_compaction._table.cache_clear()  # as other caches would; the graph still needs its table
    for _ in range(20):  # a race would show as a difference sooner or later
        for each, values in zip(given, drawn(3, 300, 200, 90), strict=True):
            each.copy_(values)
        expected = [cache.clone() for cache in caches]
        loop(expected, *given)
        graph.replay()
        for cache, right in zip(caches, expected, strict=True):
            assert_same_bits(cache, right)


@pytest.mark.parametrize(("change", "message"), [
    ({"values": []}, "one entry per layer, got 1 and 0"),
    ({"length": torch.tensor([1.0])}, r"length must be a LongTensor \[1\]"),
    ({"path": torch.tensor([0, 2])}, r"path must be a LongTensor \[B, P\], got torch.int64 \[2\]"),
    ({"path": torch.tensor([[0, 9]])}, "rows 0 .. 7"),
    ({"length": torch.tensor([2])}, "length must be in 0 .. 1"),
    ({"keys": [torch.zeros(2, 1, 8, 4)]}, r"\[1, Hkv, S, D\]"),
    ({"keys": [torch.zeros(1, 1, 9, 4)]}, r"of one shape, got \[1, 1, 9, 4\] and \[1, 1, 8, 4\]"),
    ({"length": torch.tensor([1], device="meta")}, "length must be on the path's device, cpu, got meta"),
    ({"keys": [torch.zeros(1, 1, 8, 4, device="meta")]}, "on the path's device, cpu, got meta and cpu"),
    ({"impl": "x"}, "impl 'auto', 'native', 'triton' or 'torch', got 'x'"),
])  # fmt: skip
def test_bad_input_is_refused(change, message):
    arguments = {
        "keys": [torch.zeros(1, 1, 8, 4)], "values": [torch.zeros(1, 1, 8, 4)], "path": torch.tensor([[0, 2]]),
        "length": torch.tensor([1]), "prefix_length": torch.tensor([3]),
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        compact_cache(**arguments)


def test_what_the_kernel_cannot_take_is_refused_by_it_alone():
    problem = on_device([[0, 2]], [1], [3])
    whole, other, wide = (torch.zeros(shape, device=DEVICE) for shape in ((1, 2, 8, 4), (1, 1, 8, 4), (1, 2, 8, 6)))
    strided = torch.zeros(1, 2, 4, 8, device=DEVICE).mT
    for given, message in (
        ([whole, other], r"got \(1, 4, 4\), \(2, 4, 4\); take impl 'torch'"),
        ([whole, wide], r"got \(2, 4, 4\), \(2, 6, 4\)"),
        ([whole, whole.half()], r"got \(2, 4, 2\), \(2, 4, 4\)"),
        ([strided], r"a last stride of 1, got strides \[64, 32, 1, 8\] of \[1, 2, 8, 4\]; take"),
    ):
        with pytest.raises(ValueError, match=message):
            compact_cache(given, given, *problem, impl="triton")
        compact_cache(given, given, *problem, impl="torch")
    with pytest.raises(ValueError, match="paths of at most 2048, got 2049; take impl 'torch'"):
        compact_cache([whole], [whole], *on_device(torch.arange(2049)[None], [1], [3]), impl="triton")
