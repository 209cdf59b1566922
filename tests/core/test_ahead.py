"""Weights that are requested while small kernels run: which, when, on which stream, and that texts are the same."""

import pytest
import torch
from played_graphs import capturing, current_stream
from played_steps import PROMPTS, Tape
from tiny_models import small_llama, tiny_llama
from torch import nn

from heavypath.kernels.layers.measured import Amounts
from heavypath.speculative import EarlyExit, SpeculativeDecoder
from heavypath.speculative.models import ahead

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has that of a GPU")


def model(seed):
    """With heads as large as the kernels take."""
    return tiny_llama(seed, hidden_size=32, num_attention_heads=2)


@pytest.fixture
def requested(as_on_a_gpu, monkeypatch):
    """What captured passes request: where each weight begins, its shape, and how many bytes."""
    as_on_a_gpu()
    found, loaded = [], set()

    def note(weight, nbytes):
        if capturing() is None:
            loaded.add(weight.shape[1])
        else:
            assert current_stream() in capturing().branches
            assert weight.shape[1] in loaded, "a capture must not load a kernel"
            found.append((weight.data_ptr(), [*weight.shape], nbytes))

    monkeypatch.setattr(ahead, "prefetch_weight", note)
    return found


def text(target, amounts, monkeypatch, draft=None):
    monkeypatch.setattr(ahead, "amounts_ahead", lambda device: amounts)
    decoder = SpeculativeDecoder(target, draft or small_llama(2), tree_size=2, cuda_graphs=True)
    return decoder, decoder.generate(PROMPTS[1:2], 4, temperature=0.8, seed=3, eos_token_id=None).sequences


@pytest.mark.slow
def test_every_product_is_followed_by_a_request_of_the_next_weight(requested, monkeypatch):
    target = model(1)
    _, plain = text(target, None, monkeypatch)
    assert not requested
    decoder, sequences = text(target, Amounts(640, 320), monkeypatch)
    assert torch.equal(sequences, plain)
    assert Tape.replays > 0
    expected = []
    for layer, following in zip(target.model.layers, [*target.model.layers[1:], None], strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        expected += [([attention.o_proj], 640), ([mlp.gate_proj, mlp.up_proj], 320), ([mlp.down_proj], 320)]
        if following is not None:
            own = following.self_attn
            expected.append(([own.q_proj, own.k_proj, own.v_proj], 320))
    once = [
        (modules[0].weight.data_ptr(), [sum(len(each.weight) for each in modules), modules[0].in_features], nbytes)
        for modules, nbytes in expected
    ]
    of_target = [each for each in requested if each in once]
    assert of_target[: len(once)] == once, "joined weights are one request"
    assert len(of_target) % len(once) == 0
    del decoder


@pytest.mark.slow
def test_weights_that_are_not_joined_are_not_requested(requested, monkeypatch):
    target = model(1)
    for layer in target.model.layers:
        layer.mlp.gate_proj.weight = nn.Parameter(layer.mlp.gate_proj.weight.detach().clone())
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight  # used twice, so it stays where it is
    decoder, _ = text(target, Amounts(640, 320), monkeypatch)
    mlp = target.model.layers[0].mlp
    places = {place for place, *_ in requested}
    assert target.model.layers[0].self_attn.o_proj.weight.data_ptr() in places
    assert mlp.down_proj.weight.data_ptr() not in places
    del decoder


@pytest.mark.slow
def test_the_last_layer_of_an_early_exit_joins_its_requests(requested, monkeypatch):
    target = model(1)
    decoder, _ = text(target, Amounts(640, 320), monkeypatch, EarlyExit([0]))
    assert requested
    assert Tape.replays > 0
    del decoder
