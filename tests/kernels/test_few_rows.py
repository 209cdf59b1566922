"""Products of few rows: against exact sums, and bits that depend on nothing but a row and the weight."""

import pytest
import torch
from bench_scripts import script
from devices import DEVICE, moved

from heavypath.kernels.layers import few_rows, measured
from heavypath.kernels.layers.few_rows import BLOCK_K, FP8, LEAST_BLOCKS, PROGRAMS, few_rows_product, parts_of

CUT = 2 * LEAST_BLOCKS * BLOCK_K + 8  # columns of two parts, the last block of which has eight


def tensors(rows, outputs, columns, dtype, gated=False):
    """Rows and a weight."""
    weight = torch.randn((2 if gated else 1) * outputs, columns) / columns**0.5
    return torch.randn(rows, columns).to(dtype), weight.to(dtype)


def by_kernel(x, weight, gated=False):
    return few_rows_product(x.to(DEVICE), weight.to(DEVICE), gated=gated, impl="triton").cpu()


def exact_product(x, weight, gated):
    product = x.double() @ weight.double().T
    if not gated:
        return product
    gate, up = product.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "columns", "dtype"), [
    (1, 40, 24, torch.bfloat16), (5, 70, CUT, torch.float16),
    *(pytest.param(rows, 200, 1536, dtype, marks=pytest.mark.slow)
      for rows in (16, 17, 64) for dtype in (torch.float16, torch.bfloat16)),
])  # fmt: skip
def test_the_sums_are_as_near_as_pytorchs(rows, outputs, columns, dtype, gated):
    x, weight = tensors(rows, outputs, columns, dtype, gated)
    ours, plain = by_kernel(x, weight, gated), few_rows_product(x, weight, gated=gated, impl="torch")
    exact = exact_product(x, weight, gated)
    error, allowed = ((each.double() - exact).abs().max() for each in (ours, plain))
    assert error <= 2 * allowed + 1e-4, (error, allowed)
    assert ours.dtype == dtype


@pytest.mark.parametrize("gated", [False, True])
def test_it_rounds_where_the_modules_round(gated):
    x, weight = tensors(3, 70, 64, torch.bfloat16, gated=True)
    x, weight = x.sign(), weight.sign()  # so that sums are exact in any order
    assert torch.equal(by_kernel(x, weight, gated), few_rows_product(x, weight, gated=gated, impl="torch"))


@pytest.mark.parametrize("gated", [False, True])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(gated):
    x, weight = tensors(60 if gated else 100, 48, CUT, torch.bfloat16, gated)
    whole = by_kernel(x, weight, gated)
    for rows in (1, 20):
        assert torch.equal(by_kernel(x[:rows], weight, gated), whole[:rows])


def test_what_lies_behind_the_rows_and_the_columns_is_not_read():
    x, weight = tensors(3, 40, 40, torch.float16)
    around = torch.full((9, 40), torch.nan, dtype=torch.float16)
    around[:3] = x
    assert torch.equal(by_kernel(around[:3], weight), by_kernel(x, weight))


def in_fp8(weight):
    """A weight [N, K] in fp8, and the scale of its rows."""
    scale = weight.float().abs().amax(1) / torch.finfo(FP8).max
    return (weight / scale[:, None]).to(FP8), scale


@pytest.mark.parametrize(("rows", "dtype"), [(3, torch.bfloat16), (64, torch.float16)])
def test_a_weight_in_fp8_is_multiplied_exactly_and_scaled_at_the_end(rows, dtype):
    x, weight = tensors(rows, 70, CUT + 8, dtype)
    every = torch.arange(256, dtype=torch.uint8)
    packed, scale = in_fp8(weight)
    packed[1, :256] = torch.where(every % 128 == 127, 0, every).view(FP8)  # all numbers that there are
    out = few_rows_product(x.to(DEVICE), packed.to(DEVICE), scale=scale.to(DEVICE), impl="triton").cpu()
    exact = x.double() @ packed.double().T * scale.double()
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=2**-8 if dtype == torch.bfloat16 else 2**-10)
    plain = few_rows_product(x, packed, scale=scale, impl="torch")
    torch.testing.assert_close(plain.double(), exact, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("gated", [False, True])
def test_parts_are_added_up_in_any_schedule(gated, adversary):
    x, weight = tensors(2, 80, CUT, torch.float16, gated)
    torch.testing.assert_close(
        by_kernel(x, weight, gated).double(), exact_product(x, weight, gated), atol=1e-2, rtol=1e-2
    )
    adversary.met("_few_rows_kernel")


@pytest.mark.parametrize(("outputs", "columns"), [(12288, 4096), (4096, 4096), (11008, 4096), (4096, 11008), (768, 96)])
def test_every_column_is_in_a_part_and_multiprocessors_have_work(outputs, columns):
    parts, each = parts_of(outputs, columns)
    assert (parts - 1) * each < columns <= parts * each
    assert each % BLOCK_K == 0
    if columns > 96:
        assert parts * -(-outputs // few_rows.BLOCK_N) > 0.9 * PROGRAMS


def test_parts_cost_no_more_partial_sums_than_they_save():
    """Of Llama-3.1-8B's head 2,004 programs wait for each other's places without parts; its o_proj has 64, for 264."""
    assert parts_of(128_256, 4096) == (1, 4096)
    assert parts_of(4096, 4096) == (4, 1024)
    for outputs, columns in ((6144, 4096), (4096, 4096), (4096, 14336), (28_672, 4096), (32_000, 4096)):
        parts, _ = parts_of(outputs, columns)
        weights, partial = 2 * outputs * columns, 4 * outputs * few_rows.FEWER * parts
        assert (parts > 1) * 2 * partial <= 0.6 * weights, "written once and read once"


@pytest.mark.parametrize(("rows", "dtype", "gated", "device", "expected"), [
    (33, torch.bfloat16, True, "known", True), (64, torch.float16, True, "known", True),
    (32, torch.bfloat16, True, "known", False), (65, torch.bfloat16, True, "known", False),
    (33, torch.float32, True, "known", False), (33, torch.bfloat16, False, "known", False),
    (33, torch.bfloat16, True, "another", False),
])  # fmt: skip
def test_by_itself_it_takes_the_kernel_where_that_was_measured_to_be_faster(
    rows, dtype, gated, device, expected, monkeypatch
):
    monkeypatch.setattr(measured, "FASTER", {"known": {(96, 64, True): (33, 64)}})
    monkeypatch.setattr(measured, "_name", lambda _: device)
    monkeypatch.setattr(few_rows, "choose_impl", lambda name, impl, x: "triton")
    monkeypatch.setattr(few_rows, "_launch", lambda *_: "the kernel")
    monkeypatch.setattr(few_rows, "silu_product", lambda gate, up, impl: (gate, up))
    x, weight = tensors(rows, 48, 64, dtype, gated=True)
    assert (few_rows_product(x, weight, gated=gated) == "the kernel") == expected
    assert not measured.is_faster(x, weight.T.contiguous().T, gated)


def test_a_gpus_results_say_where_the_kernel_is_faster():
    times = {  # rows: by cuBLAS, by the kernel
        "96 x 64": {1: (2, 3), 16: (2, 3), 33: (3, 2), 64: (3, 2), 128: (3, 4)},
        "96 x 64, gated": {1: (3, 2), 16: (2, 3), 33: (3, 2), 64: (3, 1)},
        "32 x 64": {1: (1, 2), 16: (1, 1)},
    }
    results = [
        {"extra_info": {
            "device": "a GPU", "case": f"bfloat16, {weight}, {rows} rows", "way": way, "microseconds": microseconds
        }}
        for weight, of in times.items()
        for rows, both in of.items()
        for way, microseconds in zip(("linear", "few rows"), both, strict=True)
    ]  # fmt: skip
    found = script("bench_linear").faster(results)
    assert found == {"a GPU": {(96, 64, False): (33, 64), (96, 64, True): (33, 64)}}


def test_bad_input_is_refused():
    x, weight = tensors(2, 16, 32, torch.float16)
    for given in (
        (x.float(), weight.float()), (x, weight.bfloat16()), (x[:, :16], weight), (x, weight.T.contiguous().T),
        (x.expand(2, 32).repeat(65, 1), weight), (x[:, :12].contiguous(), weight[:, :12].contiguous()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="impl 'triton' takes at most 128 rows"):
            few_rows_product(*moved(given, DEVICE), impl="triton")
    packed, scale = in_fp8(weight)
    for given, options in (
        ((x[:1].expand(65, 32), weight), {"gated": True}), ((x[:1].expand(65, 32), packed), {"scale": scale}),
        ((x, packed), {}), ((x, packed), {"scale": scale[:1]}), ((x, packed), {"scale": scale.double()}),
        ((x, weight), {"scale": scale}), ((x[:, :24], packed[:, :24].contiguous()), {"scale": scale}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"at most 128 rows x \[R, K\], 64 if gated or in fp8"):
            few_rows_product(*moved(given, DEVICE), impl="triton", **moved(options, DEVICE))
    with pytest.raises(ValueError, match="gated takes an even number of outputs and no scale, got 15"):
        few_rows_product(x, weight[:15], gated=True)
    assert few_rows_product(x[:0].to(DEVICE), weight.to(DEVICE), impl="triton").shape == (0, 16)
