"""Linear layers on a CPU: the products of the modules, by copies of the weights that are never out of date."""

import gc
import logging
import weakref

import pytest
import torch
from kernel_cases import needs_compiler
from tiny_models import tiny_llama
from torch import nn

from heavypath.speculative import EarlyExit, SpeculativeDecoder
from heavypath.speculative.models import linear
from heavypath.speculative.models.linear import Linears, free_memory

pytestmark = needs_compiler
ROWS = (1, 2, 5, 8, 13, 33, 130)  # more of them: test_native.py
TYPES = [torch.float32, torch.bfloat16]


def layers_of(biases, columns=40, dtype=torch.float32):
    return [nn.Linear(columns, rows, bias).to(dtype) for rows, bias in zip((24, 8, 56), biases, strict=True)]


def linears_of(layers):
    return Linears("model", [each for layer in layers for each in layer.parameters()])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("biases", [(False,) * 3, (True,) * 3, (True, False, True)])
@pytest.mark.parametrize("free", [0, 1 << 40])
@torch.inference_mode()
def test_products_are_those_of_the_modules(biases, dtype, free, monkeypatch):
    monkeypatch.setattr(linear, "free_memory", lambda: free)
    layers = layers_of(biases, dtype=dtype)
    linears = linears_of(layers)
    together, alone = linears.together(layers), [linears.one(layer) for layer in layers]
    for rows in ROWS:
        hidden = torch.randn(rows, 40, dtype=dtype)
        for layer, joined, one in zip(layers, together(hidden), alone, strict=True):
            assert joined.shape == one(hidden).shape == (rows, len(layer.weight))
            for found in (joined, one(hidden)):
                torch.testing.assert_close(found, layer(hidden))


CHANGES = {
    "a row": lambda layer: layer.weight.data[7].add_(1),
    "a column": lambda layer: layer.weight.data[:, 11].add_(1),
    "everything": lambda layer: layer.weight.data.mul_(2),
    "another tensor": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "the bias": lambda layer: layer.bias.data[3].fill_(1),
    "an element": lambda layer: layer.weight.detach()[5, 9].add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_change_of_the_weights_is_noticed(change, dtype):
    for rows, columns in ((8, 1), (24, 40), (9, 320), (60, 17)):
        if columns == 1 and change in ("a column", "an element"):
            continue
        layer = nn.Linear(columns, rows).to(dtype)
        linears = linears_of([layer])
        linears.one(layer)
        assert linears.is_current()
        CHANGES[change](layer)
        assert not linears.is_current()
        hidden = torch.randn(3, columns, dtype=dtype)
        with torch.inference_mode():
            torch.testing.assert_close(linears.one(layer)(hidden), layer(hidden))


def test_all_decoders_of_a_model_share_its_copies():
    target = tiny_llama(1)
    decoders = [SpeculativeDecoder(target, None, "autoregressive"), SpeculativeDecoder(target, EarlyExit(1), "chain")]
    copies = {id(copied) for decoder in decoders for copied in decoder._target._linears._copied}
    assert len(copies) == len(decoders[0]._target._linears._copied)
    assert {id(each) for each in decoders[1]._draft.forward._linears._copied} < copies
    one = weakref.ref(decoders[0]._target._linears._copied[0])
    del decoders
    gc.collect()
    assert one() is None


def test_a_copy_is_announced_and_made_once_and_a_lack_of_memory_is_said(monkeypatch, caplog):
    layer, hidden = nn.Linear(500, 1000), torch.randn(2, 500)
    with caplog.at_level(logging.INFO):
        first = linears_of([layer])
        product = first.one(layer)
    assert "model: its weights are copied in another order, at most 2 MB beside" in caplog.text
    caplog.clear()
    monkeypatch.setattr(linear, "free_memory", lambda: 3_900_000)
    assert linears_of([layer]).can_copy, "the copy is there"
    assert not caplog.records
    with torch.no_grad():
        layer.weight.add_(1)
    short = linears_of([layer])
    assert "model: no copy of its weights in another order (2 MB beside 4 MB that are free)" in caplog.text
    with torch.inference_mode():
        for multiply in (short.one(layer), lambda rows: short.together([layer])(rows)[0]):
            torch.testing.assert_close(multiply(hidden), layer(hidden))
            layer.weight.data.add_(1)
            torch.testing.assert_close(multiply(hidden), layer(hidden))
    assert short.is_current()
    del first, product


def test_copies_of_other_models_are_not_read(monkeypatch):
    """A process with many decoders would read more of them for each new one."""
    others = [layers_of((True,) * 3) for _ in range(3)]
    kept = [linears_of(layers).together(layers) for layers in others]
    read = []
    monkeypatch.setattr(linear.Packed, "is_current", lambda copied: read.append(copied) or True)
    linears_of(layers_of((True,) * 3))
    assert not read
    linears_of(others[1])
    assert len(read) == 1
    del kept


def test_what_the_kernels_cannot_do_is_left_to_the_module():
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, args, out: -out)
    for layer in (nn.Linear(4, 4).half(), nn.Linear(4, 4).double(), Own(4, 4), nn.Bilinear(4, 4, 4), hooked):
        assert linears_of([layer]).one(layer) is layer


def test_free_memory_is_bounded_by_the_control_group(monkeypatch, tmp_path):
    assert free_memory() > 1 << 20
    monkeypatch.setattr(linear, "CONTROL_GROUP", tmp_path)
    without = free_memory()
    for limit, used, expected in (("1000000", "400000", 600_000), ("1000", "4000", 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(used + "\n")
        assert free_memory() == expected
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == pytest.approx(without, rel=0.5)
