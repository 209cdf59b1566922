"""EAGLE heads as drafts: what they draft is what a pass over the whole text would, and the text stays the target's."""

from itertools import pairwise

import pytest
import torch
from draft_checks import (
    assert_a_batch_is_each_alone,
    assert_greedy_text_is_that_of_transformers,
    assert_races_are_plain_sampling,
)
from head_cases import (
    drafted_any,
    embedding_of,
    features_of,
    head_of,
    inner_nodes,
    logits_of,
    logits_over,
    over,
    steps_of,
)
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import exact_law, tiny_llama
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from heavypath.kernels.commit import StateField
from heavypath.kernels.filtering import Filters
from heavypath.speculative import LOSSLESS_METHODS, METHODS, SpeculativeDecoder, load_demo_head
from heavypath.speculative.drafts import Feed, as_draft
from heavypath.speculative.drafts.heads import draft as head_module
from heavypath.speculative.models import forward as forward_module
from heavypath.speculative.models.forward import Taps, chain_mask
from heavypath.speculative.models.forward_of import forward_of

DRAFTED = [method for method in METHODS if method != "autoregressive"]
LOSSLESS = [method for method in DRAFTED if method in LOSSLESS_METHODS]
QUICK = ("specinfer", "sequoia", "dyspec")  # methods that stand for others where a test takes seconds
VARIANTS = {
    "eagle-1": {"generation": 1, "taps": (2,), "biases": frozenset({"fc"})},
    "eagle-1 of two layers": {"generation": 1, "taps": (2,), "layers": 2},
    "eagle-3": {"generation": 3},
    "eagle-3.1": {"generation": 3, "tap_norms": True, "feeds_back_normed": True, "owns_lm_head": True},
    "eagle-3, residual normed, biases": {"norm_before_residual": True, "biases": frozenset({"q_proj", "k_proj"})},
    "eagle-3, heads normed, taps normed together": {"head_norms": True, "norm_before_fc": True},
    "eagle-3, four tokens": {"draft_vocab_size": 4, "owns_lm_head": True},
    "eagle-3, another width": {"hidden_size": 24, "owns_embedding": True, "owns_lm_head": True},
}


@torch.no_grad()
def entries_over(head, target, text):
    """[L, V], in row i what the entry of tokens i and i + 1 says."""
    features = features_of(head, target, text)[:, :-1]
    return logits_of(head, target, over(head, features, embedding_of(head, target)(text[None, 1:])))


@pytest.fixture(scope="module")
def target():
    """In fp64: random weights with opinions make much of rounding."""
    return tiny_llama(0, max_position_embeddings=256).double()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["chain", "sequoia", "dyspec"])
def test_what_is_drafted_is_what_passes_over_the_whole_text_say(variant, method, target):
    head = head_of(target, **VARIANTS[variant])
    prompts, new = [torch.tensor([3, 1, 4, 1, 5, 2]), torch.tensor([2, 6, 5])], 12
    padded = torch.stack([prompts[0], torch.cat([torch.zeros(3, dtype=torch.long), prompts[1]])])
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    decoder = SpeculativeDecoder(target, head, method, tree_size=6)
    out, steps = steps_of(decoder, padded, attention_mask=mask, max_new_tokens=new, temperature=1.0)
    depths = []
    for before, drafted in drafted_any(steps):
        for slot in range(before.shape[1]):
            member, length = (int(before[field, slot]) for field in (StateField.MEMBER, StateField.LENGTHS))
            text = torch.cat([prompts[member], out.sequences[member, 6:]])[: length + 1]
            for node, path in inner_nodes(before, drafted, slot):
                expected = logits_over(head, target, text, path).float()
                torch.testing.assert_close(drafted.logits[slot, node], expected, atol=1e-4, rtol=1e-4)
                depths.append(len(path))
    assert max(depths) > 0, "there were only roots"
    assert out.stats.tokens_per_step > 1.1, "nothing is shown of entries behind accepted nodes"


@pytest.mark.parametrize("variant", ["eagle-1", "eagle-3", "eagle-3, four tokens"])
@pytest.mark.parametrize("chunk", [512, 7])
def test_in_a_long_text_each_root_has_the_logits_of_a_pass_over_the_text(variant, chunk, target, monkeypatch):
    for module in (forward_module, head_module):
        monkeypatch.setattr(module, "PREFILL_CHUNK", chunk)
    head = head_of(target, **VARIANTS[variant])
    prompt = torch.randint(0, 7, (1, 30), generator=torch.Generator().manual_seed(1))
    decoder = SpeculativeDecoder(target, head, "sequoia", tree_size=8)
    out, steps = steps_of(decoder, prompt, max_new_tokens=150, temperature=1.0)
    expected = entries_over(head, target, out.sequences[0])
    lengths = [int(before[StateField.LENGTHS, 0]) for before, _ in steps]
    assert lengths[0] == 29
    assert max(after - length for length, after in pairwise(lengths)) >= 3
    for length, (_, drafted) in zip(lengths, steps, strict=True):
        if drafted.logits is not None:
            torch.testing.assert_close(drafted.logits[0, 0], expected[length - 1].float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", DRAFTED)
def test_greedy_text_is_the_targets_own(method, target):
    head, prompt = head_of(target), torch.tensor([[3, 1, 4, 1, 5]])
    expected = SpeculativeDecoder(target, method="autoregressive").generate(prompt, max_new_tokens=60)
    out = SpeculativeDecoder(target, head, method, tree_size=8).generate(prompt, max_new_tokens=60)
    assert torch.equal(out.sequences, expected.sequences)


@pytest.mark.slow
def test_greedy_text_with_the_shipped_head_is_that_of_transformers(demo_pair):
    target, _, tokenizer = demo_pair
    head = load_demo_head(target)
    decoders = {method: SpeculativeDecoder(target, head, method, tree_size=16) for method in DRAFTED}
    assert_greedy_text_is_that_of_transformers([*decoders.values()], tokenizer)


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}])
def test_ersd_writes_what_plain_sampling_writes(sampling, target):
    head, prompt = head_of(target), torch.tensor([[3, 1, 4, 1, 5]])
    assert_races_are_plain_sampling(target, head, prompt, **sampling)


@pytest.mark.parametrize(
    "method", [method if method in QUICK else pytest.param(method, marks=pytest.mark.slow) for method in LOSSLESS]
)
@pytest.mark.parametrize("variant", [pytest.param("eagle-3", marks=pytest.mark.slow), "eagle-3, four tokens"])
def test_the_joint_law_of_four_tokens_is_exact(method, variant):
    target = tiny_llama(1)
    head, prompt = head_of(target, **VARIANTS[variant]), torch.tensor([3, 1, 4])
    law = exact_law(target, prompt, Filters(1.0), 4)
    decoder = SpeculativeDecoder(target, head, method, tree_size=6)
    out = decoder.generate(prompt.expand(20_000, -1), max_new_tokens=4, seed=11, temperature=1.0)
    assert chi_square_p_value(joint_counts(out.sequences[:, 3:], 7), law) > SIGNIFICANCE
    assert out.stats.tokens_per_step > 1.1


@pytest.mark.parametrize("method", DRAFTED)
def test_a_batch_of_different_prompts_is_decoded_as_each_alone(method, target):
    decoder = SpeculativeDecoder(target, head_of(target), method, tree_size=8)
    assert_a_batch_is_each_alone(decoder)


@pytest.mark.parametrize("variant", ["eagle-1", "eagle-3"])
def test_a_later_turn_drafts_the_same_with_and_without_what_is_cached(variant, target):
    decoder = SpeculativeDecoder(target, head_of(target, **VARIANTS[variant]), "sequoia", tree_size=8)
    first = decoder.generate(torch.tensor([[3, 1, 4, 1, 5, 2, 2]]), max_new_tokens=30, temperature=1.0)
    cache = first.cache
    for kept in (37, 20, 3):
        prompt = torch.cat([first.sequences[:, :kept], torch.tensor([[1, 6, 2]])], 1)
        fresh, fresh_steps = steps_of(decoder, prompt, max_new_tokens=20, temperature=1.0)
        again, again_steps = steps_of(decoder, prompt, max_new_tokens=20, temperature=1.0, past=cache)
        assert again.stats.reused_tokens >= kept - 12
        assert torch.equal(fresh.sequences, again.sequences)
        for (_, one), (_, other) in zip(fresh_steps, again_steps, strict=True):
            if one.logits is not None:
                torch.testing.assert_close(one.logits[:, 0], other.logits[:, 0])


def test_kept_rows_do_not_keep_the_memory_of_the_cache_that_they_were_in(target):
    cache = as_draft(head_of(target), forward_of(target, "target"), target).new_cache(2, 40)
    kept = cache.trimmed(1, 5)
    tensors = [[each for each in vars(one).values() if isinstance(each, torch.Tensor)] for one in (kept, cache)]
    held, whole = ({tensor.untyped_storage().data_ptr() for tensor in of} for of in tensors)
    assert held & whole <= {0, cache.rotary.untyped_storage().data_ptr()}  # a table that all caches share
    assert not kept._by_layer
    assert kept.nbytes < cache.nbytes / 4


def test_a_target_by_transformers_own_forward_pass(target):
    torch.manual_seed(3)
    config = GPTNeoXConfig(
        vocab_size=7, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=128, initializer_range=0.4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().double()
    head, prompt = head_of(model), torch.tensor([[3, 1, 4, 1, 5]])
    out, steps = steps_of(SpeculativeDecoder(model, head, "sequoia", tree_size=8), prompt, max_new_tokens=40)
    expected = entries_over(head, model, out.sequences[0])
    for before, drafted in drafted_any(steps):
        root = expected[int(before[StateField.LENGTHS, 0]) - 1]
        torch.testing.assert_close(drafted.logits[0, 0], root.float(), atol=1e-4, rtol=1e-4)
    plain = SpeculativeDecoder(model, method="autoregressive").generate(prompt, max_new_tokens=40)
    assert torch.equal(out.sequences, plain.sequences)


@torch.inference_mode()
def test_to_be_read_changes_no_logits_of_the_target(target):
    forward, states = forward_of(target, "target"), []
    tokens = torch.tensor([[3, 1, 4]])
    rows, cache = torch.arange(3)[None], forward.new_cache(1, 8)
    mask = chain_mask(torch.tensor(0), 3, visible_rows=3)
    taps = Taps((0, 1, 2), lambda read, tokens, rows: states.extend(read))
    plain, read = (forward(tokens, rows, rows, cache, mask, taps=each) for each in (None, taps))
    assert torch.equal(plain, read)
    for ours, theirs in zip(states, target(tokens, output_hidden_states=True).hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # transformers norms in fp32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": (0, 1, 3)}, r"reads the hidden states \[0, 1, 3\], the target has 0 .. 2"),
        ({"target_hidden_size": 32}, "for a target of width 32 with 7 tokens, got one of width 16 with 7"),
        ({"vocab_size": 9, "draft_vocab_size": 9}, "with 9 tokens, got one of width 16 with 7"),
        ({"hidden_size": 24}, "a head of width 24 needs an embedding of its own"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(changes, message, target):
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(target, head_of(target, **changes))


def test_a_head_in_training_mode_or_of_another_dtype_is_refused(target):
    with pytest.raises(ValueError, match="training mode"):
        SpeculativeDecoder(target, head_of(target).train())
    with pytest.raises(ValueError, match=r"one dtype, got torch\.float64 and torch\.float32"):
        SpeculativeDecoder(target, head_of(target).float())


def test_a_head_with_nan_weights_is_refused(target):
    head = head_of(target)
    with torch.no_grad():
        head.fc.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"draft has NaN or infinite weights in fc\.weight"):
        SpeculativeDecoder(target, head)


@pytest.mark.parametrize("variant", ["eagle-1", "eagle-3"])
@torch.inference_mode()
def test_acceptance_at_a_depth_is_that_of_a_head_which_reads_itself(variant, target):
    """Calibration walks along texts token by token, and counts a token as drafted at the depth it would have."""
    head = head_of(target, **VARIANTS[variant])
    forward = forward_of(target, "target")
    draft, text = as_draft(head, forward, target), torch.tensor([3, 1, 4, 1, 5, 2, 6])
    cache, target_cache = draft.new_cache(1, 32), forward.new_cache(1, 32)
    forward.prefill(text[None], target_cache, taps=draft.taps(cache))
    draft.prefill(text[None], cache)
    for length, drafted in ((3, 0), (4, 1), (5, 2), (6, 0)):
        at = torch.tensor([length])
        feed = Feed(
            tokens=text[None, length - 1 : length + 1], positions=at[:, None], cache_rows=at[:, None],
            parent_rows=at[:, None] - 1, prefix_lengths=at, visible_rows=length + 2,
            ancestor_mask=torch.ones(1, 1, 1).bool(), news=4, drafted=torch.tensor([drafted]),
        )  # fmt: skip
        known = length - drafted
        expected = logits_over(head, target, text[: known + 1], text[known + 1 : length + 1].tolist())
        torch.testing.assert_close(draft(feed, cache)[0, -1], expected.float(), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_acceptance_is_measured_beside_a_text_as_long_that_is_at_another_depth(target):
    """The last rows of the cache are then one text's only entry, and another's last of several."""
    head = head_of(target)
    forward = forward_of(target, "target")
    draft, text = as_draft(head, forward, target), torch.tensor([3, 1, 4, 1, 5, 2, 6])
    cache, target_cache = draft.new_cache(2, 7), forward.new_cache(2, 7)
    forward.prefill(text.expand(2, -1), target_cache, taps=draft.taps(cache))
    draft.prefill(text.expand(2, -1), cache)
    for length, drafted in ((3, (0, 0)), (4, (1, 1)), (5, (2, 2)), (6, (0, 3))):
        at = torch.tensor([length, length])
        feed = Feed(
            tokens=text[length - 1 : length + 1].expand(2, -1), positions=at[:, None], cache_rows=at[:, None],
            parent_rows=at[:, None] - 1, prefix_lengths=at, visible_rows=length + 1,
            ancestor_mask=torch.ones(1, 1, 1).bool(), news=4, drafted=torch.tensor(drafted),
        )  # fmt: skip
        logits = draft(feed, cache)[:, -1]
        for sequence, known in enumerate(length - torch.tensor(drafted)):
            expected = logits_over(head, target, text[: known + 1], text[known + 1 : length + 1].tolist())
            torch.testing.assert_close(logits[sequence], expected.float(), atol=1e-4, rtol=1e-4)
