"""Weights that are joined for one product: the model stays what it was, and gets its own memory back."""

import copy
import gc
import weakref

import pytest
import torch
from block_checkpoints import block_of
from head_cases import VARIANTS, head_of
from llama_cases import MODELS, made, sharpened
from tiny_models import tiny_llama
from torch import nn
from transformers import LlamaForCausalLM

from heavypath.speculative import EarlyExit, SpeculativeDecoder
from heavypath.speculative.models import joined, linear
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.joined import Joining
from heavypath.speculative.models.llama import LlamaForward

PROMPT = torch.tensor([[3, 1, 4, 1]])


@pytest.fixture(scope="module", autouse=True)
def nothing_of_other_tests():
    """Looks once through all that other tests have left; then each test looks through what is its own."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(joined, "choose_impl", lambda *_: "triton")
    monkeypatch.setattr(linear, "library", lambda: None)  # no compiled pass
    gc.collect()  # models of the tests before
    before = {*joined._shared}  # of other files, whose models may outlive them
    yield
    assert {*joined._shared} <= before, "a test left weights joined"


@pytest.fixture
def without_collector():
    gc.disable()
    yield
    gc.enable()


def storages(model):
    """How many different pieces of memory a model's parameters are in, and their bytes."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}
    return len(found), sum(found.values())


def values_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(model, values):
    torch.testing.assert_close(dict(model.state_dict()), values, rtol=0, atol=0)


def text(decoder, model):
    """A decoder's text, which must be that of the model."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(PROMPT, max_new_tokens=8, **options)
    assert torch.equal(decoder.generate(PROMPT, 8, eos_token_id=None).sequences, expected)
    return expected


@pytest.mark.parametrize(("name", "fewer"), [("llama with biases, tied", 6), ("qwen2", 5), ("qwen3", 3)])
def test_parameters_stay_the_same_objects_with_their_values_and_versions(name, fewer, without_collector):
    """fewer: pieces of memory that a layer has less, two for q, k and v, one for gate and up, the same for biases."""
    model = sharpened(made(MODELS[name][0], **MODELS[name][1]))
    before, own = values_of(model), storages(model)
    parameters, versions = dict(model.named_parameters()), [one._version for one in model.parameters()]
    forward = LlamaForward(model)
    state = forward.state()
    assert storages(model) == (own[0] - fewer * len(model.model.layers), own[1])
    assert_same(model, before)
    assert all(one is parameters[name] for name, one in model.named_parameters())
    assert [one._version for one in model.parameters()] == versions
    assert forward.is_current()
    assert all(one.is_contiguous() and one.requires_grad for one in model.parameters())
    gone = weakref.ref(forward)
    del forward
    assert gone() is None
    assert storages(model) == own
    assert_same(model, before)
    assert all(one is parameters[name] for name, one in model.named_parameters())
    assert LlamaForward(model).state() == state, "a cache of an earlier text still serves"


@pytest.mark.parametrize(("kind", "inferred"), [("eagle-3", True), ("block", False), ("eagle-3", False)])
def test_a_heads_products_are_joined_and_it_drafts_what_it_drafted(
    kind, inferred, tmp_path, monkeypatch, without_collector
):
    """inferred: whether its weights were made under inference_mode."""
    target = tiny_llama(seed=1)
    with torch.inference_mode(inferred):
        head = block_of(target, tmp_path) if kind == "block" else head_of(target, **VARIANTS[kind])
    values = values_of(head)
    own, _ = storages(head)
    found = []
    for fewer in (0, 3):  # pieces of memory of a layer
        with monkeypatch.context() as patch:
            if not fewer:
                patch.setattr(Joining, "products", lambda *_: None)
            decoder = SpeculativeDecoder(target, head, tree_size=6)
        assert storages(head)[0] == own - fewer * len(head.layers)
        out = decoder.generate(PROMPT, 12, eos_token_id=None)
        found.append((out.sequences.tolist(), out.stats.steps, out.stats.acceptance_by_rank))
        del decoder, out
    assert found[0] == found[1]
    assert storages(head)[0] == own
    assert_same(head, values)


def test_no_more_than_a_layers_weights_are_there_twice(monkeypatch):
    """Counted at each allocation of a joined tensor, when the layer's own weights are still there."""
    model = tiny_llama(1, layers=4, hidden_size=64, intermediate_size=96)
    own, most = storages(model)[1], []
    before = joined._Together.__init__

    def counted(self, parameters):
        twice = sum(one.nbytes for one in parameters)
        most.append(storages(model)[1] + twice)
        before(self, parameters)

    monkeypatch.setattr(joined._Together, "__init__", counted)
    forward = LlamaForward(model)
    assert len(most) == 8
    assert max(most) - own == 2 * 64 * 96 * 4, "gate and up of one layer, in fp32"
    assert storages(model)[1] == own
    del forward


def test_what_is_written_into_a_weight_is_seen():
    model = tiny_llama(1)
    decoder = SpeculativeDecoder(model, None, "autoregressive")
    before, target = text(decoder, model), decoder._target
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    assert not torch.equal(text(decoder, model), before)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.neg_()
    text(decoder, model)
    assert decoder._target is target, "values may change at any time"


CHANGES = {
    "layer": lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Linear(16, 24, bias=False)),
    "parameter": lambda model: setattr(
        model.model.layers[0].self_attn.k_proj, "weight", nn.Parameter(torch.randn(8, 16))
    ),
    "data": lambda model: setattr(model.model.layers[0].self_attn.q_proj.weight, "data", torch.randn(16, 16)),
    "type": lambda model: model.double(),
    "hook": lambda model: model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *given: -given[-1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_change_is_noticed(change, without_collector):
    model = tiny_llama(1)
    own = storages(model)
    decoder = SpeculativeDecoder(model, None, "autoregressive")
    before, target = text(decoder, model), decoder._target
    CHANGES[change](model)
    assert torch.equal(text(decoder, model), before) == (change == "type")
    assert decoder._target is not target
    assert isinstance(decoder._target, TransformersForward) == (change == "hook")
    del target
    decoder.runner.step.cache_clear()
    del decoder
    assert storages(model) == (own[0], own[1] * (1 + (change == "type")))


def test_decoders_share_what_is_joined(without_collector):
    model, draft = tiny_llama(1), tiny_llama(2)
    own = storages(model)
    one = SpeculativeDecoder(model, draft)
    together, places = storages(model), [each.data_ptr() for each in model.parameters()]
    other = SpeculativeDecoder(model, EarlyExit(1), "chain")
    for decoder in (one, other):
        text(decoder, model)
        assert decoder._target.is_current()
    assert [each.data_ptr() for each in model.parameters()] == places
    del one, decoder
    assert storages(model) == together
    text(other, model)
    del other
    assert storages(model) == own
    text(SpeculativeDecoder(model, draft), model)


def test_a_model_can_be_saved_copied_and_moved_meanwhile(tmp_path):
    model = tiny_llama(1)
    before = values_of(model)
    model.save_pretrained(tmp_path / "apart")
    decoder = SpeculativeDecoder(model, None, "autoregressive")
    model.save_pretrained(tmp_path / "saved")
    assert len({(tmp_path / name / "model.safetensors").stat().st_size for name in ("apart", "saved")}) == 1
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "saved"), before)
    alike, fresh = copy.deepcopy(model), tiny_llama(2)
    assert_same(alike, before)
    assert storages(alike)[0] == len([*alike.parameters()])
    torch.save(model.state_dict(), tmp_path / "weights")
    fresh.load_state_dict(torch.load(tmp_path / "weights"))
    assert_same(fresh, before)
    model.load_state_dict(tiny_llama(3).state_dict())
    text(decoder, model)
    model.to(torch.float64).to(torch.float32)
    assert storages(model)[0] == len([*model.parameters()]), "as after model.to, which frees the device"
    text(decoder, model)


def test_what_others_use_is_not_moved():
    tied, buffer, flat = tiny_llama(1, num_key_value_heads=2), tiny_llama(2), torch.randn(2, 24, 16)
    tied.model.layers[0].self_attn.k_proj.weight = tied.model.layers[1].self_attn.q_proj.weight
    for part, name in zip(flat, ("gate_proj", "up_proj"), strict=True):
        buffer.model.layers[0].mlp.get_submodule(name).weight.data = part
    for model, expected in ((tied, [(False, True), (False, True)]), (buffer, [(True, False), (True, True)])):
        places = [each.data_ptr() for each in flat]
        layers = [(layer.project, getattr(layer.gated, "__self__", None)) for layer in LlamaForward(model)._layers]
        assert [tuple(isinstance(one, joined.JoinedProducts) for one in layer) for layer in layers] == expected
        assert [each.data_ptr() for each in flat] == places
    del layers
    mlp = tiny_llama(3).model.layers[0].mlp
    mlp.up_proj.forward = torch.zeros_like  # adapted
    assert Joining(mlp).products((mlp.gate_proj, mlp.up_proj)) is None
    assert Joining(mlp).products([nn.Bilinear(2, 2, 2), nn.Linear(2, 2)]) is None


def test_where_memory_is_short_weights_stay_together(monkeypatch):
    model = tiny_llama(1)
    before = values_of(model)
    forward = LlamaForward(model)
    together = storages(model)

    def short(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "clone", short)
    del forward
    monkeypatch.undo()
    assert storages(model) == together
    assert_same(model, before)
