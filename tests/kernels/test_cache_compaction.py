"""compact_cache: by hand, and PyTorch and kernel against a loop over rows."""

import importlib.util
import inspect
from contextlib import nullcontext

import pytest
import torch
import triton
from compaction_cases import DEVICE, assert_right, assert_same_bits, drawn, loop, on_device

from heavypath.kernels import cache_compaction
from heavypath.kernels.cache_compaction import compact_cache

IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])
FP8 = torch.float8_e4m3fn


def random_bits(*shape, dtype=torch.bfloat16):
    """Any bits, so also NaNs with any payload."""
    size = dtype.itemsize
    return torch.randint(256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype).to(DEVICE)


@IMPLS
def test_accepted_rows_move_behind_the_prefix_and_nothing_else_changes(impl):
    for _ in range(50 if impl == "torch" else 10):
        caches = [random_bits(3, 2, 20, 4, dtype=torch.float32) for _ in range(6)]
        assert_right(caches, drawn(3, 9, 5, 11), impl)


@IMPLS
def test_overlapping_moves_read_before_they_write(impl):
    cache = torch.arange(8.0).view(1, 1, 8, 1)
    keys, values = on_device(cache, cache + 10)
    compact_cache([keys], [values], *on_device([[0, 2, 3, 5]], [3], [1]), impl=impl)
    assert keys.flatten().tolist() == [0, 1, 3, 4, 6, 5, 6, 7]
    assert values.flatten().tolist() == [10, 11, 13, 14, 16, 15, 16, 17]


@IMPLS
def test_a_path_that_does_not_rise_is_read_before_it_is_written(impl):
    (cache,) = on_device(torch.arange(8.0).view(1, 1, 8, 1))
    compact_cache([cache], [cache.clone()], *on_device([[0, 4, 1, 2, 3]], [4], [1]), impl=impl)
    assert cache.flatten().tolist() == [0, 1, 5, 2, 3, 4, 6, 7]


@IMPLS
def test_views_with_strides_are_compacted_in_place(impl):
    (storage,) = on_device(torch.arange(16.0).view(1, 8, 2, 1))
    problem = on_device([[0, 3]], [1], [2])
    compact_cache([storage.transpose(1, 2)], [storage.clone().transpose(1, 2)], *problem, impl=impl)
    assert storage[0, 3].flatten().tolist() == [10, 11]


@IMPLS
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, torch.float32, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("head_dim", [1, 5, 40, 64, 128, 256])
def test_all_bits_of_any_dtype_and_head_size_arrive(head_dim, dtype, impl):
    caches = [random_bits(2, 2, 14, head_dim, dtype=dtype) for _ in range(2)]
    assert_right(caches, drawn(2, 9, 6, 5), impl)


@pytest.mark.parametrize("payload", [0x7F81, 0xFFC1, 0x7FFF])
@IMPLS
def test_a_nan_keeps_its_payload(payload, impl):
    bits = torch.tensor(payload - 2**16 if payload >> 15 else payload, dtype=torch.int16)
    cache = torch.zeros(1, 1, 4, 8, dtype=torch.int16)
    cache[0, 0, 3] = bits
    (cache,) = on_device(cache)
    compact_cache([cache.view(torch.bfloat16)], [torch.zeros_like(cache)], *on_device([[0, 3]], [1], [0]), impl=impl)
    assert cache[0, 0, 1].tolist() == [int(bits)] * 8


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
    storage, view = [random_bits(13, 14, 13, 48) for _ in range(2)], LAYOUTS[layout]
    assert_right(storage, drawn(len(view(storage[0])), 9, 5, 4), impl, view)


@IMPLS
def test_layers_differ_in_rows_and_strides(impl):
    caches = [random_bits(2, 2, rows, 8) for rows in (17, 17, 40, 40)]
    caches += [random_bits(2, 30, 2, 8).transpose(1, 2), random_bits(2, 2, 30, 24)[..., 8:16]]
    assert_right(caches, drawn(2, 9, 5, 8), impl)


@IMPLS
@pytest.mark.parametrize("garbage", [-1, 2**62, -(2**62)])
def test_what_follows_the_path_does_not_matter(garbage, impl):
    assert_right([random_bits(8, 2, 24, 8) for _ in range(2)], drawn(8, 12, 9, 12, garbage), impl)


@IMPLS
@pytest.mark.parametrize(("places", "head_dim"), [(300, 64), (300, 5), (2048, 8)])
def test_long_paths(places, head_dim, impl):
    path = torch.arange(places) + (torch.arange(places) >= 7)  # one node is left out
    length = torch.tensor([places - 1, 5, places - 2])
    caches = [random_bits(3, 1, places + 8, head_dim) for _ in range(2)]
    assert_right(caches, on_device(path.repeat(3, 1), length, [6, 0, 3]), impl)


@IMPLS
def test_rows_in_place_and_paths_of_strides(impl):
    path = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 6], [0, 1, 2, 5], [0, 9, 9, 9]])
    length, prefix = torch.tensor([[3, 7], [3, 7], [3, 7], [0, 7]]).T[0], torch.tensor([1, 0, 3, 2])
    caches = [random_bits(4, 2, 12, 16) for _ in range(2)]
    first = caches[0].clone()
    assert_right(caches, on_device(path.T.contiguous().T, length, prefix), impl)
    assert_same_bits(caches[0][[0, 3]], first[[0, 3]])


@IMPLS
def test_nothing_to_do(impl):
    empty = torch.empty(0, dtype=torch.long, device=DEVICE)
    caches = [random_bits(2, 2, 4, 8) for _ in range(2)]
    compact_cache([caches[0][:0]], [caches[1][:0]], empty.view(0, 3), empty, empty, impl=impl)
    compact_cache([], [], *on_device([[0, 2]], [1], [0]), impl=impl)
    assert_right(caches, on_device([[0], [0]], [0, 0], [1, 2]), impl)
    assert_right([cache[:, :0] for cache in caches], on_device([[0, 2], [0, 1]], [1, 0], [1, 2]), impl)
    assert_right([cache[..., :0] for cache in caches], on_device([[0, 2], [0, 1]], [1, 0], [1, 2]), impl)


@IMPLS
def test_rows_lie_beyond_two_to_the_31(impl):
    start, sequences = 2**31 + 5, 2
    caches = [torch.empty(sequences, 1, start + 8, 1, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    for cache in caches:
        cache[:, 0, start:, 0] = torch.arange(8)
    compact_cache(caches[:1], caches[1:], *on_device([[0, 2, 5]] * 2, [2, 1], [start, start + 1]), impl=impl)
    for cache in caches:
        assert cache[:, 0, start:, 0].tolist() == [[0, 2, 5, 3, 4, 5, 6, 7], [0, 1, 3, 3, 4, 5, 6, 7]]


def test_on_a_gpu_rows_outside_the_cache_stay():
    """There values are not checked."""
    caches = [random_bits(3, 1, 10, 4) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    path, length, prefix = on_device([[0, 2, 2**62], [0, -9, 5], [0, 3, 4]], [2, 9, 2], [3, 4, 8])
    for cache in expected:
        cache[0, :, 4] = cache[0, :, 5].clone()
        cache[1, :, 6] = cache[1, :, 9].clone()
    cache_compaction._launch(caches, path, length, prefix)
    for cache, right in zip(caches, expected, strict=True):
        assert_same_bits(cache, right)


LOAD_AND_STORE = inspect.getsource(cache_compaction._compact_kernel.fn).split("[None, :]\n")[-1]
ROW_BY_ROW = """\
    for j in range({}):
        tl.debug_barrier()
        one = mask & (place == j)[:, None]
        tl.store(destination_ptr, tl.load(source_ptr, mask=one), mask=one)
"""
MUTATIONS = {
    "upwards, row by row": (LOAD_AND_STORE, ROW_BY_ROW.format("1, BLOCK_P")),
    "downwards, row by row": (LOAD_AND_STORE, ROW_BY_ROW.format("BLOCK_P - 1, 0, -1")),
    "all that is drafted is accepted": ("& (place <= length)", ""),
    "the last accepted row stays": ("(place <= length)", "(place < length)"),
    "nodes count from the cache's beginning": ("source, destination = prefix + node", "source, destination = node"),
    "columns beyond the row move": ("& (column < ROW)[None, :]", ""),
    "the first block of columns only": ("% blocks * BLOCK_ROW", "% blocks * 0"),
    "every head is the first": ("+ head * head_stride", ""),
    "every sequence is the first": ("sequence * sequence_stride", "0"),
    "every cache is the first": ("table_ptr += tl.program_id(2) * 5", "table_ptr += 0"),
    "rows are as long as they are apart": ("tl.multiple_of(tl.load(table_ptr + 3), VECTOR)", "ROW"),
}


@pytest.mark.usefixtures("interpreter")  # on a GPU what reads or writes elsewhere would end the process
@pytest.mark.parametrize("name", MUTATIONS)
def test_each_bug_put_into_the_kernel_shows(name, tmp_path, monkeypatch):
    original, replacement = MUTATIONS[name]
    source = inspect.getsource(cache_compaction)
    assert original in source, f"{original!r} is not in the source: update the mutation"
    path = tmp_path / "mutated.py"  # Triton reads the source of its functions from a file
    path.write_text(source.replace(original, replacement))
    spec = importlib.util.spec_from_file_location("mutated", path)
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)

    #                     rises                   overlaps and does not rise
    problem = on_device([[0, 2, 3, 5, -1], [0, 4, 1, 2, 3]], [3, 4], [2, 3])
    for module in (cache_compaction, mutated):
        monkeypatch.setattr(module, "_TILE", 32)  # three blocks of columns
    storage = [random_bits(3, 16, 3, 12) for _ in range(2)]
    for function, finding in ((compact_cache, nullcontext()), (mutated.compact_cache, pytest.raises(AssertionError))):
        with finding:
            assert_right(storage, problem, "triton", lambda tensor: tensor.transpose(1, 2)[:2, :2, :, :11], function)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # when a capture ends that an error has cut short
def test_a_cuda_graph_moves_whatever_its_inputs_say_and_the_host_never_waits():
    caches = [random_bits(3, 4, 400, 128) for _ in range(8)]
    path, length, prefix = (torch.zeros_like(values) for values in drawn(3, 300, 200, 90))
    with pytest.raises(RuntimeError, match="must run once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        compact_cache(caches[::2], caches[1::2], path, length, prefix)
    compact_cache(caches[::2], caches[1::2], path, length, prefix)  # compiles, and copies the addresses
    torch.cuda.set_sync_debug_mode("error")
    try:
        compact_cache(caches[::2], caches[1::2], path, length, prefix)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compact_cache(caches[::2], caches[1::2], path, length, prefix)
    cache_compaction._table.cache_clear()  # as other caches would; the graph still needs its table
    for _ in range(20):  # a race would show as a difference sooner or later
        for given, values in zip((path, length, prefix), drawn(3, 300, 200, 90), strict=True):
            given.copy_(values)
        expected = [cache.clone() for cache in caches]
        loop(expected, path, length, prefix)
        graph.replay()
        for cache, right in zip(caches, expected, strict=True):
            assert_same_bits(cache, right)


@pytest.mark.parametrize(("change", "message"), [
    ({"values": []}, "one entry per layer, got 1 and 0"),
    ({"length": torch.tensor([1.0])}, r"length must be a LongTensor \[1\]"),
    ({"prefix_length": torch.tensor([1, 2])}, r"prefix_length must be a LongTensor \[1\]"),
    ({"path": torch.tensor([0, 2])}, r"path must be a LongTensor \[B, P\], got torch.int64 \[2\]"),
    ({"path": torch.tensor([[0, 9]])}, "rows 0 .. 7"),
    ({"length": torch.tensor([2])}, "length must be in 0 .. 1"),
    ({"keys": [torch.zeros(2, 1, 8, 4)]}, r"\[1, Hkv, S, D\]"),
    ({"keys": [torch.zeros(1, 1, 9, 4)]}, r"of one shape, got \[1, 1, 9, 4\] and \[1, 1, 8, 4\]"),
    ({"length": torch.tensor([1], device="meta")}, "length must be on the path's device, cpu, got meta"),
    ({"keys": [torch.zeros(1, 1, 8, 4, device="meta")]}, "on the path's device, cpu, got meta and cpu"),
    ({"impl": "x"}, "impl 'auto', 'triton' or 'torch', got 'x'"),
])  # fmt: skip
def test_bad_input_is_refused(change, message):
    arguments = {
        "keys": [torch.zeros(1, 1, 8, 4)], "values": [torch.zeros(1, 1, 8, 4)], "path": torch.tensor([[0, 2]]),
        "length": torch.tensor([1]), "prefix_length": torch.tensor([3]),
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        compact_cache(**arguments)


@pytest.mark.parametrize(("shapes", "message"), [
    (((1, 2, 8, 4), (1, 1, 8, 4)), r"got \(1, 4, 4\), \(2, 4, 4\); take impl 'torch'"),
    (((1, 2, 8, 4), (1, 2, 8, 6)), r"got \(2, 4, 4\), \(2, 6, 4\)"),
])  # fmt: skip
def test_layers_that_one_launch_cannot_serve_are_refused(shapes, message):
    caches = [torch.zeros(shape, device=DEVICE) for shape in shapes]
    problem = on_device([[0, 2]], [1], [3])
    with pytest.raises(ValueError, match=message):
        compact_cache(caches, caches, *problem, impl="triton")
    assert_right([caches[0], caches[0].clone(), caches[1], caches[1].clone()], problem, "torch")


def test_what_the_kernel_cannot_take_is_refused(monkeypatch):
    cache, problem = torch.zeros(1, 2, 8, 4, device=DEVICE), on_device([[0, 2]], [1], [3])
    with pytest.raises(ValueError, match=r"got \(2, 4, 2\), \(2, 4, 4\)"):
        compact_cache([cache], [cache.half()], *problem, impl="triton")
    strided = torch.zeros(1, 2, 4, 8, device=DEVICE).mT
    with pytest.raises(ValueError, match=r"a last stride of 1, got strides \[64, 32, 1, 8\] of \[1, 2, 8, 4\]; take"):
        compact_cache([cache], [strided], *problem, impl="triton")
    compact_cache([cache], [strided], *problem, impl="torch")
    with pytest.raises(ValueError, match="paths of at most 2048, got 2049; take impl 'torch'"):
        compact_cache([cache], [cache], *on_device(torch.arange(2049)[None], [1], [3]), impl="triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="needs CUDA tensors, got cpu; on a CPU take impl 'torch', or set TRITON_INT"):
        compact_cache([cache.cpu()], [cache.cpu()], *(values.cpu() for values in problem), impl="triton")
