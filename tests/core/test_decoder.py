"""SpeculativeDecoder: the target's own text on both devices, where it ends, its statistics; and what it refuses."""

import pickle
from copy import deepcopy

import pytest
import torch
from families import tiny
from tiny_models import assert_same_text, tiny_llama

from heavypath.speculative import (
    METHODS,
    EarlyExit,
    Mixture,
    PromptLookup,
    Recall,
    Retrieval,
    SpeculativeDecoder,
    TokenTree,
    load_demo_pair,
)
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.methods import DEFAULT_VERIFIERS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", METHODS)
def test_text_on_a_gpu_is_the_text_on_a_cpu(method, demo_pair):
    target, draft, tokenizer = demo_pair
    size = None if method == "autoregressive" else 8  # the defaults of size and verifier are others on a GPU
    on_gpu = SpeculativeDecoder(*load_demo_pair(device="cuda")[:2], method, tree_size=size)
    verifier = "rejection" if method in DEFAULT_VERIFIERS["cpu"] else None
    on_cpu = SpeculativeDecoder(target, draft, method, tree_size=size, verifier=verifier)
    for prompt in demo_prompts()[:6]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = on_cpu.generate(ids, max_new_tokens=64).sequences
        assert_same_text(target, on_gpu.generate(ids.cuda(), max_new_tokens=64).sequences.cpu(), expected)
    sampled = [each.generate(ids.to(device), max_new_tokens=24, temperature=0.6, seed=3).sequences.cpu()
               for each, device in ((on_gpu, "cuda"), (on_cpu, "cpu"))]  # fmt: skip
    assert torch.equal(*sampled)


def test_a_batch_counts_the_steps_and_tokens_of_each_sequence(tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair, "sequoia", tree_size=8)
    prompts, ids = torch.tensor([[3, 1, 4], [1, 5, 2], [6, 5, 3]]), torch.tensor([4, 0, 7])
    options = {"max_new_tokens": 23, "temperature": 0.8, "eos_token_id": 6, "pad_token_id": 0}
    stats = decoder.generate(prompts, sequence_ids=ids, **options).stats
    alone = [decoder.generate(prompts[b : b + 1], sequence_ids=ids[b : b + 1], **options).stats for b in range(3)]
    assert stats.steps_of.tolist() == [each.steps for each in alone]
    assert stats.tokens_of.tolist() == [each.new_tokens for each in alone]
    assert stats.steps == sum(each.steps for each in alone)
    assert len({*stats.tokens_of.tolist()}) > 1
    assert "of each sequence" in str(stats)


def test_a_decoder_can_be_copied_and_sent_to_another_process(tiny_pair):
    prompt = torch.tensor([[3, 1, 4]])
    corpus = Retrieval([[3, 1, 4, 1, 5]])
    for draft in (tiny_pair[1], EarlyExit(1), PromptLookup(), corpus, Mixture([Recall(), corpus])):
        decoder = SpeculativeDecoder(tiny_pair[0], draft, "dyspec", tree_size=7, verifier="rejection")
        decoder.generate(prompt, 12, temperature=0.9)  # what steps use is made by the first of them; Recall learns
        copies = deepcopy(decoder), pickle.loads(pickle.dumps(decoder))
        out = decoder.generate(prompt, 12, temperature=0.9, seed=3)
        for other in copies:
            assert (repr(other), other.tree) == (repr(decoder), decoder.tree)
            assert other.target is not decoder.target
            assert torch.equal(other.generate(prompt, 12, temperature=0.9, seed=3).sequences, out.sequences)


def test_a_copy_has_the_tree_that_was_set_later(tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair)
    decoder.tree = TokenTree.chain(2)
    assert deepcopy(decoder).tree == pickle.loads(pickle.dumps(decoder)).tree == TokenTree.chain(2)


def test_statistics_add_up(demo_pair):
    target, draft, tokenizer = demo_pair
    ids = tokenizer(demo_prompts()[0], return_tensors="pt").input_ids
    stats = SpeculativeDecoder(target, draft, "sequoia").generate(ids, 40, temperature=0.7).stats
    assert stats.new_tokens == 40
    assert stats.tokens_per_step == pytest.approx(40 / stats.steps)
    phases = {"prefill", "draft", "sampling", "target", "verification", "compaction", "host"}
    assert set(stats.seconds) == phases
    assert sum(stats.seconds.values()) == pytest.approx(stats.total_seconds)
    assert phases < set(str(stats).replace("seconds, ", "").split())
    assert "tokens per step" in str(stats)
    rows = ids.shape[1] + 40 + 5
    assert stats.cache_bytes == 2 * 4 * rows * sum(
        model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
        for model in (target, draft)
    )
    plain = SpeculativeDecoder(target, None, "autoregressive").generate(ids, 12).stats
    assert (plain.steps, plain.new_tokens, plain.acceptance_by_rank) == (12, 12, [])


def with_nan(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    return model


@pytest.mark.parametrize(("build", "message"), [
    (lambda t, d: SpeculativeDecoder(t, d, "medusa"), "method must be one of autoregressive, .* got 'medusa'"),
    (lambda t, d: SpeculativeDecoder(t, None, "sequoia"), "method 'sequoia' needs a draft, got None; only"),
    (lambda t, d: SpeculativeDecoder(t, tiny_llama(0, 9)), "share one vocabulary, got 7 and 9 tokens"),
    (lambda t, d: SpeculativeDecoder(t, with_nan(tiny_llama(0))), "draft has NaN"),
    (lambda t, d: SpeculativeDecoder(t, d, tree_size=1), "tree_size counts the root and must be in 2 .. 2048, got 1"),
    (lambda t, d: SpeculativeDecoder(t, d, draft_top_p=0.0), "draft_top_p must be"),
    (lambda t, d: SpeculativeDecoder(t, d, acceptance=[]), "not empty"),
    (lambda t, d: SpeculativeDecoder(t, d, acceptance=[[0.9, 0.4]]), "rows that sum to at most 1"),
    (lambda t, d: SpeculativeDecoder(t, d, "autoregressive", width=2), "it has none but tree_size"),
    (lambda t, d: SpeculativeDecoder(t, d, "chain", width=2), "'chain' has no option 'width'; it has threshold"),
    (lambda t, d: SpeculativeDecoder(t, d, "dyspec", threshold=1.5), r"threshold must be in \[0, 1\], got 1.5"),
    (lambda t, d: SpeculativeDecoder(t, d, "rsd-c", width=0), "width must be at least 1, got 0"),
    (lambda t, d: SpeculativeDecoder(t, d, "specinfer", width=0), "width must be at least 1, got 0"),
    (lambda t, d: SpeculativeDecoder(t, d, "rsd-c", branching=[2] * 40), "at most 2048 nodes, got 2199023255551"),
    (lambda t, d: SpeculativeDecoder(t, d, acceptance=0.5), r"\[child\] or \[depth, child\], .* got shape \[\]"),
    (lambda t, d: SpeculativeDecoder(t, d, tree=TokenTree.chain(2), tree_size=4), "leave out tree_size"),
    (lambda t, d: SpeculativeDecoder(t, d, "dyspec", tree=TokenTree.chain(2)), "'dyspec' grows its trees"),
    (lambda t, d: SpeculativeDecoder(t, EarlyExit(2)), r"must leave 1 .. 1 layers, got 2"),
    (lambda t, d: SpeculativeDecoder(tiny("gpt2"), EarlyExit(1)), "needs a target of type llama, .*; got 'gpt2'"),
    (lambda t, d: PromptLookup(2, 3), "min_ngram <= max_ngram, got 3 and 2"),
    (lambda t, d: PromptLookup(2.5), "max_ngram must be an integer, got 2.5"),
    (lambda t, d: PromptLookup("3"), "max_ngram must be an integer, got '3'"),
    (lambda t, d: PromptLookup(3, True), "min_ngram must be an integer, got True"),
])  # fmt: skip
def test_models_and_options_that_do_not_fit_are_refused(build, message, tiny_pair):
    with pytest.raises((ValueError, TypeError), match=message):
        build(*tiny_pair)


@pytest.mark.parametrize(("options", "message"), [
    ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
    ({"input_ids": torch.tensor([[7]])}, r"input_ids must be in 0 .. 6, got 7 .. 7"),
    ({"max_new_tokens": 64}, r"need 65 positions \(2 \+ 64 - 1: .*\), but target has 64"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ({"temperature": -0.5}, "temperature must be .* got -0.5"),
    ({"attention_mask": torch.tensor([[1, 0]])}, r"attention_mask must .* \(left padding\)"),
    ({"attention_mask": torch.tensor([[-1, 1]])}, r"attention_mask must have zeros .* and ones alone, got -1"),
    ({"attention_mask": torch.tensor([[0.5, 1]])}, r"attention_mask must have zeros .* and ones alone, got 0.5"),
    ({"attention_mask": torch.tensor([[torch.nan, 1]])}, r"attention_mask must have zeros .* alone, got nan"),
    ({"attention_mask": torch.tensor([[1, 2]])}, r"attention_mask must have zeros .* and ones alone, got 2"),
    ({"sequence_ids": torch.tensor([1, 2])}, r"sequence_ids must be a LongTensor \[1\], got torch.int64 \[2\]"),
    ({"sequence_ids": torch.tensor([-1])}, "sequence_ids must be in 0 .. "),
    ({"eos_token_id": 7}, "eos_token_id must be in 0 .. 6, got 7"),
    ({"pad_token_id": -1}, "pad_token_id must be in 0 .. 6, got -1"),
    ({"do_sample": True}, "no option 'do_sample'; temperature above 0 samples"),
    ({"beams": 1}, "no option 'beams'; it has max_new_tokens, temperature, top_k"),
    ({"input_ids": torch.tensor([[1], [1]]), "streamer": object()}, "got one streamer for a batch of 2"),
])  # fmt: skip
def test_bad_arguments_are_refused_before_any_work(options, message, tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair)
    with pytest.raises((ValueError, TypeError), match=message):
        decoder.generate(**{"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 4} | options)


@pytest.mark.parametrize("kind", ["llama", "granite"])
def test_the_models_are_left_as_they_were_and_the_text_can_be_trained_on(kind):
    target = tiny(kind)
    before, config = {name: value.clone() for name, value in target.state_dict().items()}, target.config.to_dict()
    attributes, state = {name: {*vars(module)} for name, module in target.named_modules()}, torch.get_rng_state()
    places = [each.data_ptr() for each in target.parameters()]  # on a CPU no weights are joined
    decoder = SpeculativeDecoder(target, target)
    ids = decoder.generate(torch.tensor([[1, 2]]), 10).sequences
    assert [each.data_ptr() for each in target.parameters()] == places
    assert torch.equal(torch.get_rng_state(), state)
    assert target.config.to_dict() == config
    assert {name: {*vars(module)} for name, module in target.named_modules()} == attributes
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert not any(parameter.is_inference() or parameter.grad is not None for parameter in target.parameters())
    target(ids, labels=ids).loss.backward()
