"""The compiled kernels for CPUs against PyTorch's operations, and how they come to be compiled."""

import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import needs_compiler
from layer_cases import MODELS, assert_as_near, model_of, passed

from heavypath.kernels.native import library as native_library
from heavypath.kernels.native.library import library
from heavypath.kernels.native.products import Blocks, product
from heavypath.speculative.models import native as native_pass
from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.llama import LlamaForward

pytestmark = needs_compiler
TYPES = [torch.float32, torch.bfloat16]
ROWS = (*range(1, 10), 13, 16, 17, 31, 33, 47, 48, 49, 64, 130, 257)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("columns", "outputs"), [(1, 1), (17, 5), (64, 64), (40, 100), (1300, 70)])
def test_products_are_those_of_pytorch(columns, outputs, dtype):
    weights = [torch.randn(count, columns).to(dtype) for count in (outputs, 3, outputs)]
    biases = [torch.randn(outputs).to(dtype), None, torch.randn(outputs).to(dtype)]
    blocks, plain = Blocks.of(weights, biases), Blocks.of(weights, [None] * 3)
    added = torch.cat([biases[0], torch.zeros(3, dtype=dtype), biases[2]])
    for rows in ROWS:
        hidden = torch.randn(rows, columns).to(dtype)
        expected = hidden.double() @ torch.cat(weights).double().T
        # A sum is about sqrt(columns) large, and so are its roundings: eight standard deviations.
        summed = 8 * columns * 2.0**-24
        close = {"rtol": 1e-5 if dtype == torch.float32 else 8e-3, "atol": summed if dtype == torch.float32 else 1e-2}
        torch.testing.assert_close(product(hidden, plain).double(), expected, **close)
        torch.testing.assert_close(product(hidden, blocks).double(), expected + added.double(), **close)


@pytest.mark.parametrize("hidden", [torch.zeros(3, 6), torch.zeros(3, 7).bfloat16()])
def test_a_product_of_other_rows_than_the_weights_is_refused(hidden):
    blocks = Blocks.of([torch.zeros(5, 6).bfloat16()], [None])
    with pytest.raises(ValueError, match=r"product needs rows \[\.\.\., 6\] of torch.bfloat16, got "):
        product(hidden, blocks)


def test_sixteen_bits_are_rounded_to_the_nearest():
    hidden, weight = (torch.randn(count, 1).bfloat16() for count in (60, 500))
    assert torch.equal(product(hidden, Blocks.of([weight], [None])), hidden * weight.T)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rows_product_is_the_same_to_the_bit_beside_any_others(threads, dtype, monkeypatch):
    blocks = Blocks.of([torch.randn(300, 700).to(dtype)], [torch.randn(300).to(dtype)])
    hidden = torch.randn(300, 700).to(dtype)
    alone = torch.cat([product(row[None], blocks) for row in hidden])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(native_library, "SHARE", 1)
    for rows in ROWS:
        assert torch.equal(product(hidden[:rows], blocks), alone[:rows])


def mapping_of(address):
    """What the kernel says of the memory at an address; None if there is none any more."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if limits := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(each, 16) for each in limits.groups())
            inside = begin <= address < end
            found = "" if inside else found
        elif inside:
            found += line + "\n"
    return found


def test_weights_lie_one_after_the_other_in_huge_pages_and_are_freed_together():
    weights = [torch.randn(1100, 1000 * count) for count in (20, 1, 1)]  # the first fills a region alone
    first, second, third = (Blocks.of([weight], [None]).weight for weight in weights)
    places = [each.data_ptr() for each in (first, second, third)]
    assert all(place % 64 == 0 for place in places)
    assert -(-second.nbytes // 64) * 64 == places[2] - places[1]
    assert all(re.search(r"^VmFlags:.* hg( |$)", mapping_of(place), re.M) for place in places)
    del first
    assert mapping_of(places[0]) is None
    assert mapping_of(places[1]) is not None


def both(forward, *arguments, **options):
    """What the compiled pass and PyTorch's give, each with a cache of its own: logits, tapped states, rows."""
    compiled = forward._native
    compiled.takes = lambda rows: True  # of 16 bits, too
    found = passed(forward, *arguments, **options)
    forward._native = None
    usual = passed(forward, *arguments, **options)
    forward._native = compiled
    return found, usual


@pytest.mark.parametrize("name", [name for name in MODELS if "yarn" not in name])
@torch.inference_mode()
def test_a_pass_is_that_of_pytorch(name):
    forward = LlamaForward(model_of(name))
    assert forward._native is not None
    cases = (([19, 3, 30], True), ([19, 3, 30], False), ([1], True), ([30], False))
    for *given, needs_logits in (*((*case, True) for case in cases), ([5], True, False)):
        for one, other in zip(*both(forward, *given, needs_logits=needs_logits), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["odd sizes", "biases", "head of 80", "head norms", "a window of 3", "long rope"])
@torch.inference_mode()
def test_a_pass_of_16_bits_is_as_near_as_that_of_pytorch(name):
    """PyTorch's operations round less often, some of them."""
    model = model_of(name, torch.bfloat16)
    found, usual = both(LlamaForward(model), [19, 3, 30], True)
    assert_as_near(found, usual, passed(LlamaForward(model.double()), [19, 3, 30], True), 1.6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
@torch.inference_mode()
def test_a_sequences_logits_are_the_same_to_the_bit_in_any_batch(threads, dtype, monkeypatch):
    forward = LlamaForward(model_of("odd sizes", dtype))
    together = passed(forward, [30, 30, 30, 30], True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(native_library, "SHARE", 1)
    again = passed(forward, [30, 30, 30, 30], False)
    assert all(map(torch.equal, together, again))
    # The first sequence of a batch gets the random numbers that a single one gets in part.
    cache = [forward.new_cache(batch, 40) for batch in (1, 3)]
    tokens = torch.randint(77, (3, 33))
    rows = torch.arange(33).expand(3, -1)
    mask = TreeMask(prefix_length=torch.tensor(0), visible_rows=33, subtree_end=torch.full((33,), 33))
    every = forward(tokens, rows, rows, cache[1], mask)
    alone = forward(tokens[:1], rows[:1], rows[:1], cache[0], mask)
    assert torch.equal(every[:1], alone)
    for row in range(20, 33):  # token by token
        one = TreeMask(prefix_length=torch.tensor(row), visible_rows=row + 1, subtree_end=torch.tensor([1]))
        given = rows[:1, row : row + 1]
        assert torch.equal(forward(tokens[:1, row : row + 1], given, given, cache[0], one)[:, 0], alone[:, row])


@torch.inference_mode()
def test_nan_and_infinity_come_out():
    model = model_of("odd sizes")
    for bad in (torch.nan, torch.inf):
        model.model.embed_tokens.weight[5, 3] = bad
        forward = LlamaForward(model)
        rows = torch.arange(4).expand(2, -1)
        mask = TreeMask(prefix_length=torch.tensor(0), visible_rows=4, subtree_end=torch.full((4,), 4))
        logits = forward(torch.tensor([[1, 2, 5, 3], [1, 2, 4, 3]]), rows, rows, forward.new_cache(2, 4), mask)
        assert logits[0, 2:].isnan().all()
        assert logits[1].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_that_is_not_finite_makes_no_other_row_so(dtype):
    weight = torch.randn(70, 50).to(dtype)
    hidden = torch.randn(40, 50).to(dtype)
    usual = product(hidden, Blocks.of([weight], [None]))
    for bad in (torch.nan, torch.inf):
        hidden[7, 3] = bad
        found = product(hidden, Blocks.of([weight], [None]))
        assert not found[7].isfinite().any()
        others = torch.arange(40) != 7
        assert torch.equal(found[others], usual[others])


@torch.inference_mode()
@pytest.mark.parametrize("in_tiles", [False, True])
def test_only_with_amx_many_rows_of_bf16_are_left_to_pytorch(in_tiles, monkeypatch):
    assert LlamaForward(model_of("odd sizes"))._native.takes(1000)
    monkeypatch.setattr(native_library, "has_tiles", lambda: in_tiles)
    forward = LlamaForward(model_of("odd sizes", torch.bfloat16))
    assert forward._native.takes(256)
    assert forward._native.takes(257) == (not in_tiles)
    monkeypatch.setattr(native_pass, "FEW_ROWS", 8)
    found = passed(forward, [19, 3, 30], True)
    forward._native = None
    by_pytorch = passed(forward, [19, 3, 30], True)
    assert all(map(torch.equal, found, by_pytorch)) == in_tiles


def test_what_is_not_compiled_is_left_to_pytorch():
    mixed = model_of("odd sizes")
    mixed.model.norm.to(torch.bfloat16)
    others = [model_of("odd sizes", torch.float16), model_of("odd sizes", torch.float64)]
    for model in (*others, model_of("odd sizes", hidden_act="gelu"), mixed):
        assert LlamaForward(model)._native is None


@pytest.mark.parametrize(("variable", "value", "message"), [
    ("HEAVYPATH_NATIVE", "0", "HEAVYPATH_NATIVE=0: no compiled kernels"),
    ("CXX", "no-such-compiler", "no C\\+\\+ compiler: .* install g\\+\\+"),
    ("CXX", sys.executable, "cannot compile the CPU kernels"),
])  # fmt: skip
def test_without_compiled_kernels_the_log_says_why(variable, value, message, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.INFO):
        assert library.__wrapped__() is None
    assert re.search(message, caplog.records[-1].getMessage())
    assert [*tmp_path.rglob("*.so")] == []


def test_the_kernels_share_pytorchs_threads():
    """With two OpenMP runtimes in a process the threads of one would spin where those of the other work."""
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "gomp" in line or "libomp" in line}) == 1
