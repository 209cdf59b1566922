"""Check samplers against their target's exact law: transformers' assisted generation, and a decoder with a mistake."""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from heavypath.speculative import check_losslessness, joint_law

SHAPE = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "initializer_range": 0.6}


def assisted(prompt, seed):
    """The text of transformers with the draft as its assistant: LongTensor[3]."""
    torch.manual_seed(seed)
    return target.generate(prompt[None], assistant_model=draft, max_new_tokens=3, do_sample=True, top_k=0)[0, 3:]


def with_a_mistake(texts, seed):
    """Accept drafts with probability min(1, P / Q), else draw from P, not from max(P - Q, 0): LongTensor[B, 3]."""
    torch.manual_seed(seed)
    while texts.shape[1] < 6:  # the prompt has three
        p, q = (model(texts).logits[:, -1].softmax(-1) for model in (target, draft))
        drafted = q.multinomial(1)
        accepted = torch.rand(len(texts), 1) < (p / q).gather(1, drafted)
        texts = torch.cat([texts, drafted.where(accepted, p.multinomial(1))], 1)
    return texts[:, -3:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1000, help="of assisted generation, which takes one at a time")
    sequences = parser.parse_args().sequences
    torch.manual_seed(0)
    configs = (LlamaConfig(**SHAPE, num_hidden_layers=layers, eos_token_id=None) for layers in (2, 1))
    target, draft = (AutoModelForCausalLM.from_config(config).eval() for config in configs)
    law = joint_law(target, prompt := torch.tensor([3, 1, 4]), 3)  # of 7 ** 3 texts
    print(f"assisted generation: {check_losslessness(assisted, law, prompt, sequences=sequences)}\n")
    print(f"with a mistake: {check_losslessness(with_a_mistake, law, prompt, batch_size=20_000)}")
