"""Helpers of tests/core/test_decoder.py and its neighbours."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heavypath.speculative import joint_law

TIE = 1e-4  # logits closer than this may swap between two exact fp32 programs


def tiny_llama(seed: int, vocab_size: int = 7, layers: int = 2, **changes) -> LlamaForCausalLM:
    """A random model with opinions: the usual initial range gives nearly uniform logits."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size, "hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 64, "initializer_range": 0.4,
        "eos_token_id": None,
    } | changes  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


def small_llama(seed: int) -> LlamaForCausalLM:
    """One that Triton's interpreter decodes in seconds."""
    return tiny_llama(seed, layers=1, hidden_size=32, num_attention_heads=2)


def transformers_greedy(model, ids, new_tokens):
    """transformers' own greedy text; the mask keeps it from taking prompt tokens for padding."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)


def assert_alike(one, other):
    """The same text of two generations, in the same steps."""
    assert torch.equal(one.sequences, other.sequences)
    assert torch.equal(one.stats.steps_of, other.stats.steps_of)
    assert torch.equal(one.stats.accepted, other.stats.accepted)


@torch.inference_mode()
def assert_same_text(model, ours, theirs):
    """Equal, or parted at a tie of the target's logits."""
    for mine, reference in zip(ours, theirs, strict=True):
        if torch.equal(mine, reference):
            continue
        place = int((mine != reference).nonzero()[0])
        logits = model(mine[None, :place]).logits[0, -1]
        gap = abs(float(logits[mine[place]] - logits[reference[place]]))
        assert gap < TIE, f"texts part at token {place}, where the candidates' logits differ by {gap}"


def exact_law(model, prompt, filters, length):
    """Joint probabilities [V ** length] of the next tokens after prompt LongTensor[T], by enumeration."""
    return joint_law(model, prompt, length, **filters._asdict()).flatten()
