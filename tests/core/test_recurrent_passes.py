"""Single passes through recurrent layers: which moves what, and Qwen3.5's own pass beside transformers'."""

import pytest
import torch
from played_steps import Launches
from recurrent_families import FOUR, RECURRENT, for_kernels, recurrent
from rounding import SMALL_MODEL
from torch import nn
from triton.runtime.interpreter import GridExecutor

from heavypath.speculative.models.forward import Taps, TreeMask
from heavypath.speculative.models.forward_of import forward_of, tolerance_of
from heavypath.speculative.models.recurrent.forward import RecurrentForward
from heavypath.speculative.models.recurrent.qwen import QwenForward, is_published_qwen

ENDS, DEPTHS = torch.tensor([6, 4, 3, 4, 6, 6]), torch.tensor([0, 1, 2, 2, 1, 2])
QWEN = "qwen3_5_text"


def begun(forward, lengths):
    """A cache of texts of these lengths, drawn at random."""
    torch.manual_seed(1)
    cache, lengths = forward.new_cache(len(lengths), 40), torch.tensor(lengths)
    cache.begin(lengths)
    forward.prefill(torch.randint(forward.vocab_size, (len(lengths), int(lengths.max()))), cache)
    return cache, lengths


def over_tree(forward, cache, lengths, taps=None):
    """The logits of a tree behind the texts."""
    torch.manual_seed(2)
    rows = lengths[:, None] + torch.arange(len(ENDS))
    mask = TreeMask(lengths, int(lengths.max()) + len(ENDS), subtree_end=ENDS)
    tokens = torch.randint(forward.vocab_size, rows.shape)
    return forward(tokens, lengths[:, None] + DEPTHS, rows, cache, mask, taps=taps)


@pytest.mark.parametrize("kind", FOUR)
def test_a_sequence_that_has_ended_stays_as_it_is(kind):
    """Whatever its path says, to the bit: alone among others that move on, and where all have ended."""
    forward, path = RecurrentForward(recurrent(kind)), torch.tensor([[0, 1, 3], [0, 4, 5], [0, 1, 2]])
    with torch.inference_mode():
        cache, lengths = begun(forward, [5, 3, 7])
        for produced, moved in (([2, 0, 1], [2, 0, 1]), ([5, 0, 1], [3, 0, 0]), ([5, 0, 1], [0, 0, 0])):
            over_tree(forward, cache, lengths)
            before = [each.clone() for each in cache.states.tensors()]
            cache.advance(path, torch.tensor(produced))
            for old, new in zip(before, cache.states.tensors(), strict=True):
                same = [torch.equal(one, other) for one, other in zip(old, new, strict=True)]
                assert same == [count == 0 for count in moved]
            assert (cache.states.position - before[0]).tolist() == moved
            lengths = lengths + torch.tensor(moved)


@pytest.mark.parametrize("kind", FOUR)
def test_texts_that_a_service_keeps_have_their_rows_and_states(kind):
    """The state behind a text, and the one behind its prompt; and their bytes are counted."""
    forward = RecurrentForward(recurrent(kind))
    with torch.inference_mode():
        cache, lengths = begun(forward, [5, 3, 7])
        over_tree(forward, cache, lengths)
        cache.advance(torch.tensor([[0, 1, 3]] * 3), torch.tensor([3, 2, 1]))
        parts = (*cache.states.tensors(), *cache.prompts.tensors(), cache.keys[:, :, :9], cache.values[:, :, :9])
        kept = cache.trimmed(slice(0, 2), 9)
        assert kept.nbytes == cache.trimmed_bytes(slice(0, 2), 9) == sum(part[:2].nbytes for part in parts)
        whole = (*cache.states.tensors(), *cache.prompts.tensors(), cache.keys, cache.values)
        assert cache.nbytes == sum(part.nbytes for part in whole)
        for most, length in ((8, 8), (7, 5), (4, 0)):
            other, _ = begun(forward, [9, 9])
            other.reads_to(torch.tensor([most, most]))
            assert other.take(1, kept, 0, 9) == length
            source = {8: cache.states, 5: cache.prompts, 0: None}[length]
            for states in (other.states, other.prompts) if source else ():
                for own, expected in zip(states.tensors(), source.tensors(), strict=True):
                    assert torch.equal(own[1], expected[0])
            assert torch.equal(other.keys[1, :, :length], cache.keys[0, :, :length]) or not length


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind == "granitemoehybrid" else pytest.mark.slow) for kind in RECURRENT
])  # fmt: skip
def test_in_16_bits_a_model_passes_its_probe(kind):
    for seed in range(3):
        forward = RecurrentForward(recurrent.__wrapped__(kind, seed).to(torch.bfloat16))
        assert forward.gap(forward.model) < tolerance_of(forward)


def both_passes(model):
    """What Qwen3.5's own pass and transformers' give: logits of a tree, tapped hidden states, states and rows."""
    found = []
    for forward in (QwenForward(model), RecurrentForward(model)):
        tapped = []
        with torch.inference_mode():
            cache, lengths = begun(forward, [9, 2])
            taps = Taps((0, 1, 3), lambda states, *_, tapped=tapped: tapped.extend(states))
            logits = over_tree(forward, cache, lengths, taps)
            cache.advance(torch.tensor([[0, 1, 3], [0, 4, 5]]), torch.tensor([3, 1]))
        rows = [cache.keys[0, :, :9], cache.values[0, :, :9], cache.keys[1, :, :2], cache.values[1, :, :2]]
        found.append([logits, *tapped, *cache.states.tensors()[1:], *rows])
    return found


def test_qwens_own_pass_gives_what_transformers_gives():
    for own, theirs in zip(*both_passes(recurrent(QWEN, 5)), strict=True):
        assert (own - theirs).abs().max() <= SMALL_MODEL * theirs.abs().max()


def test_in_16_bits_qwens_own_pass_is_as_near_to_the_exact_one():
    model = recurrent.__wrapped__(QWEN, 5).to(torch.bfloat16)
    own, theirs = both_passes(model)
    _, exact = both_passes(model.float())
    for one, other, right in zip(own, theirs, exact, strict=True):
        assert one.dtype == other.dtype
        error, allowed = ((each.float() - right).square().mean().sqrt() for each in (one, other))
        assert error <= 1.3 * allowed + 1e-6 * right.abs().max()


def test_only_a_qwen_as_it_was_published_runs_by_its_own_pass():
    model = recurrent.__wrapped__(QWEN, 5)
    layer = model.model.layers[1]
    own = forward_of(model, "target")
    assert type(own) is QwenForward
    assert own.gap(model) < 1e-5
    hook = layer.post_attention_layernorm.register_forward_hook(lambda module, given, out: 0.5 * out)
    assert not own.is_current()
    changed = forward_of(model, "target")
    assert type(changed) is RecurrentForward
    assert changed.gap(model) < 1e-5
    assert own.gap(model) > 0.01
    hook.remove()
    assert is_published_qwen(model)
    layer.self_attn.q_norm = nn.Identity()
    assert not is_published_qwen(model)
    assert not is_published_qwen(recurrent("qwen3_next"))


def launched(forward, monkeypatch):
    """The names of what a tree's pass launches."""
    launches = Launches()
    with torch.inference_mode(), monkeypatch.context() as patch:
        cache, lengths = begun(forward, [9, 2])
        patch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launches.note(self.fn.__name__))
        with launches:
            over_tree(forward, cache, lengths)
    return launches.names


def test_on_a_gpu_qwens_layers_with_one_input_are_one_product(as_on_a_gpu, monkeypatch):
    as_on_a_gpu()
    model = recurrent.__wrapped__(QWEN, 5)
    names = [launched(make(model), monkeypatch) for make in (RecurrentForward, QwenForward)]
    products = [sum("linear" in name for name in each) for each in names]
    assert products == [2 * 8 + 7 + 1, 3 * 4 + 1]
    assert len(names[1]) < 0.7 * len(names[0]), names
    mixer = model.model.layers[0].linear_attn
    weights = mixer.in_proj_qkv.weight, mixer.in_proj_z.weight, mixer.in_proj_b.weight, mixer.in_proj_a.weight
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1


def test_on_a_gpu_gates_are_one_launch_of_a_layer(as_on_a_gpu, monkeypatch):
    model, found = for_kernels(QWEN, 5), []
    for by_kernels in (False, True):
        forward = QwenForward(model)
        if by_kernels:
            as_on_a_gpu()
            for name in ("by_kernel", "acceptance", "convolution"):
                monkeypatch.setattr(f"heavypath.kernels.recurrent.{name}.choose_impl", lambda *_, **__: "triton")
        with torch.inference_mode():
            cache, lengths = begun(forward, [9, 2])
            logits = over_tree(forward, cache, lengths)
            cache.advance(torch.tensor([[0, 1, 3], [0, 4, 5]]), torch.tensor([3, 1]))
            found.append([logits, *cache.states.tensors()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    names = launched(forward, monkeypatch)
    assert names.count("_totals_kernel") == 2
    assert not [name for name in names if "softplus" in name]
    assert sum("sigmoid" in name for name in names) == 1  # of the layer with attention
