"""`stream_from`: a function brings weights; texts are those of the whole model, and wrong weights are refused."""

import time
from copy import deepcopy
from functools import partial

import pytest
import torch
from families import tiny
from in_time import in_time
from tiny_models import tiny_llama, transformers_greedy

from heavypath.speculative import SpeculativeDecoder, stream_from, stream_of

PROMPTS = torch.tensor([[3, 1, 4], [1, 5, 2]])


def stored_layers(layers):
    return [{name: weight.detach().clone() for name, weight in layer.named_parameters()} for layer in layers]


@pytest.mark.parametrize("make", [lambda: tiny_llama(1, layers=3), lambda: tiny("gpt_neox")], ids=["llama", "gpt_neox"])
def test_texts_are_those_of_the_whole_model_which_reads_each_layer_once_in_a_pass(make):
    target = make()
    whole, asked = deepcopy(target), []
    layers = target.model.layers if hasattr(target, "model") else target.gpt_neox.layers
    stored = stored_layers(layers)

    def read(layer):
        asked.append(layer)
        return stored[layer]

    stream = stream_from(target, read)
    assert stream_of(target) is stream
    memories = {weight.data_ptr() for layer in layers for weight in layer.parameters()}
    assert len(memories) == len([*layers[0].parameters()]), "layers of one shape share one memory"
    draft = tiny_llama(2, layers=1) if whole.config.vocab_size == 7 else tiny("gpt_neox")
    options = {"max_new_tokens": 20, "temperature": 0.8, "eos_token_id": None}
    decoder = SpeculativeDecoder(target, draft, tree_size=5)
    asked.clear()
    out = decoder.generate(PROMPTS, **options)
    expected = SpeculativeDecoder(whole, draft, tree_size=5).generate(PROMPTS, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert asked == [*range(len(layers))] * (len(asked) // len(layers))
    assert out.stats.streaming.bytes_read == len(asked) * sum(weight.nbytes for weight in stored[0].values())
    assert torch.equal(transformers_greedy(target, PROMPTS, 9), transformers_greedy(whole, PROMPTS, 9))


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda own: own.pop("mlp.up_proj.weight"), ValueError, r"read\(1\) must return .* unknown: mlp.up_proj.weight"),
    (lambda own: own.update(other=torch.zeros(2)), ValueError, r"read\(1\) must return .* missing or unknown: other"),
    (lambda own: own.update({"mlp.up_proj.weight": torch.zeros(1, 2)}), ValueError,
     r"read\(1\) must return mlp.up_proj.weight as torch.float32 \[\d+, \d+\], got torch.float32 \[1, 2\]"),
    (lambda own: own["mlp.up_proj.weight"].fill_(torch.nan), ValueError, "mlp.up_proj.weight of layer 1"),
    (lambda own: own.clear(), ValueError, r"read\(1\) must return"),
])  # fmt: skip
def test_weights_that_are_not_the_layers_are_refused(change, error, message):
    target = tiny_llama(1, layers=2)
    stored = stored_layers(target.model.layers)
    change(stored[1])
    stream_from(target, stored.__getitem__)
    with pytest.raises(error, match=message):
        SpeculativeDecoder(target, tiny_llama(2)).generate(PROMPTS, 4)


def test_an_error_of_the_source_is_passed_on_and_the_decoder_goes_on():
    target = tiny_llama(1, layers=2)
    whole, stored, fails = deepcopy(target), stored_layers(target.model.layers), []

    def read(layer):
        if fails:
            raise OSError(fails.pop())
        return stored[layer]

    stream_from(target, read)
    decoder = SpeculativeDecoder(target, tiny_llama(2))
    fails.append("no connection")
    with pytest.raises(OSError, match="no connection"):
        decoder.generate(PROMPTS, 8)
    assert torch.equal(decoder.generate(PROMPTS, 8).sequences, transformers_greedy(whole, PROMPTS, 8))


def test_a_model_whose_weights_cannot_be_brought_is_refused():
    target = tiny_llama(1, layers=2)
    target.model.layers[1].mlp = target.model.layers[0].mlp
    with pytest.raises(ValueError, match=r"the weights of each layer in model\.layers must be its own"):
        stream_from(target, lambda layer: {})
    target = tiny_llama(1, layers=2)
    stream_from(target, stored_layers(target.model.layers).__getitem__)
    with pytest.raises(ValueError, match="are streamed already"):
        stream_from(target, lambda layer: {})


@pytest.mark.parametrize("make", [lambda: tiny_llama(1, layers=3), lambda: tiny("granite")], ids=["llama", "granite"])
def test_threads_may_decode_by_one_source_and_transformers_beside_them(make):
    """All layers share one memory, which another thread's pass must not overwrite while a layer computes."""
    target = make()
    whole, stored = deepcopy(target), stored_layers(target.model.layers)

    def read(layer):
        time.sleep(1e-4)  # another thread goes on
        return stored[layer]

    stream_from(target, read)
    decoder = SpeculativeDecoder(target, tiny_llama(2, vocab_size=whole.config.vocab_size), tree_size=5)
    generate = partial(transformers_greedy, target, PROMPTS, 12)
    texts = in_time(lambda: decoder.generate(PROMPTS, 12, temperature=0).sequences, generate, generate)
    for text in texts:
        assert not isinstance(text, BaseException), text
        assert torch.equal(text, transformers_greedy(whole, PROMPTS, 12))


def test_ctrl_c_within_a_layer_leaves_it_to_other_threads():
    """PyTorch calls no hook after it, so nothing says that the layer is free."""
    target = tiny_llama(1, layers=3)
    whole = deepcopy(target)
    stream_from(target, stored_layers(target.model.layers).__getitem__)
    decoder = SpeculativeDecoder(target, tiny_llama(2), tree_size=5)

    def interrupt(*given):
        raise KeyboardInterrupt

    hook = target.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        transformers_greedy(target, PROMPTS, 8)
    hook.remove()
    (text,) = in_time(lambda: decoder.generate(PROMPTS, 8, temperature=0).sequences)
    assert torch.equal(text, transformers_greedy(whole, PROMPTS, 8))
