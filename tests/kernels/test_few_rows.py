"""Products of few rows: against exact sums, and bits that depend on nothing but a row and the weight."""

import pytest
import torch
from devices import DEVICE, moved

from heavypath.kernels.layers import few_rows
from heavypath.kernels.layers.few_rows import BLOCK_K, LEAST_BLOCKS, PROGRAMS, few_rows_product, parts_of

CUT = 2 * LEAST_BLOCKS * BLOCK_K + 8  # columns of two parts, the last block of which has eight


def tensors(rows, outputs, columns, dtype, gated=False):
    """Rows, a weight and what is added."""
    x = torch.randn(rows, columns)
    weight = torch.randn((2 if gated else 1) * outputs, columns) / columns**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(rows, outputs).to(dtype)


def by_kernel(x, weight, added=None, gated=False):
    added = None if added is None else added.to(DEVICE)
    return few_rows_product(x.to(DEVICE), weight.to(DEVICE), gated=gated, added=added, impl="triton").cpu()


def exact_product(x, weight, added, gated):
    product = x.double() @ weight.double().T
    if gated:
        gate, up = product.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return product if added is None else added.double() + product


@pytest.mark.parametrize("kind", ["plain", "gated", "added"])
@pytest.mark.parametrize(("rows", "outputs", "columns", "dtype"), [
    (1, 40, 24, torch.bfloat16), (5, 70, CUT, torch.float16),
    *(pytest.param(rows, 200, 1536, dtype, marks=pytest.mark.slow)
      for rows in (16, 17, 64, 128) for dtype in (torch.float16, torch.bfloat16)),
])  # fmt: skip
def test_the_sums_are_as_near_as_pytorchs(rows, outputs, columns, dtype, kind):
    x, weight, added = tensors(rows, outputs, columns, dtype, kind == "gated")
    given = {"added": added if kind == "added" else None, "gated": kind == "gated"}
    ours, plain = by_kernel(x, weight, **given), few_rows_product(x, weight, **given, impl="torch")
    exact = exact_product(x, weight, **given)
    error, allowed = ((each.double() - exact).abs().max() for each in (ours, plain))
    assert error <= 2 * allowed + 1e-4, (error, allowed)
    assert ours.dtype == dtype


def test_it_rounds_where_the_modules_round():
    x, weight, added = tensors(3, 70, 64, torch.bfloat16, gated=True)
    x, weight = x.sign(), weight.sign()  # so that sums are exact in any order
    for given in ({"gated": True}, {"added": torch.cat([added, added], 1)}, {}):
        assert torch.equal(by_kernel(x, weight, **given), few_rows_product(x, weight, **given, impl="torch"))


@pytest.mark.parametrize("gated", [False, True])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(gated):
    x, weight, _ = tensors(20, 48, CUT, torch.bfloat16, gated)
    alone, whole = by_kernel(x[:1], weight, gated=gated), by_kernel(x, weight, gated=gated)
    assert torch.equal(alone, whole[:1])


def test_what_lies_behind_the_rows_and_the_columns_is_not_read():
    x, weight, added = tensors(3, 40, 40, torch.float16)
    around = torch.full((9, 40), torch.nan, dtype=torch.float16)
    around[:3] = x
    assert torch.equal(by_kernel(around[:3], weight, added), by_kernel(x, weight, added))


@pytest.mark.parametrize("gated", [False, True])
def test_parts_are_added_up_in_any_schedule(gated, adversary):
    x, weight, _ = tensors(2, 80, CUT, torch.float16, gated)
    given = {"gated": gated, "impl": "triton"}
    out = few_rows_product(x.to(DEVICE), weight.to(DEVICE), **given)
    torch.testing.assert_close(out.cpu().double(), exact_product(x, weight, None, gated), atol=1e-2, rtol=1e-2)
    adversary.met("_few_rows_kernel")


@pytest.mark.parametrize(("outputs", "columns"), [(12288, 4096), (4096, 4096), (11008, 4096), (4096, 11008), (768, 96)])
def test_every_column_is_in_a_part_and_multiprocessors_have_work(outputs, columns):
    parts, each = parts_of(outputs, columns)
    assert (parts - 1) * each < columns <= parts * each
    assert each % BLOCK_K == 0
    if columns > 96:
        assert parts * -(-outputs // few_rows.BLOCK_N) > 0.9 * PROGRAMS


def test_bad_input_is_refused():
    x, weight, added = tensors(2, 16, 32, torch.float16)
    for given, options in (
        ((x.float(), weight.float()), {}), ((x, weight.bfloat16()), {}), ((x[:, :16], weight), {}),
        ((x, weight.T.contiguous().T), {}), ((x.expand(2, 32).repeat(65, 1), weight), {}),
        ((x, weight), {"added": added[:1]}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="impl 'triton' takes at most 128 rows"):
            few_rows_product(*moved(given, DEVICE), impl="triton", **moved(options, DEVICE))
    with pytest.raises(ValueError, match="gated takes an even number of outputs and nothing added, got 16"):
        few_rows_product(x, weight, gated=True, added=added)
    assert few_rows_product(x[:0].to(DEVICE), weight.to(DEVICE), impl="triton").shape == (0, 16)
