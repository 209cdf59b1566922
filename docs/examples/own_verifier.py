"""Verify by a rule of your own, in plain PyTorch: sample the target after each node, and follow the drafts that fit."""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from heavypath.kernels.noise import Stream, gumbel_noise
from heavypath.speculative import SpeculativeDecoder, Verified, load_demo_pair


def sample_the_target(nodes, target_logits, draft_logits, *, max_depth, target_filters, draft_filters, noise):
    """Lossless, because each token is a sample of the target; without top-k, top-p and min-p, to be short."""
    assert not any(target_filters[1:])
    keys = target_logits.double() / (target_filters.temperature or 1)  # [B, N, V]
    if target_filters.temperature > 0:
        keys += gumbel_noise(int(noise.seed), Stream.TARGET, noise.rows.flatten(), keys.shape[-1]).view_as(keys)
    sample = keys.argmax(-1)  # [B, N], the token that the target wants after each node
    node, path = torch.zeros_like(nodes.tokens[:, :1]), [torch.zeros_like(nodes.tokens[:, :1])]
    while len(path) <= max_depth:
        fits = (nodes.parents == node) & (nodes.tokens == sample.gather(1, node)) & (path[-1] >= 0)  # [B, N]
        node = fits.int().argmax(1, keepdim=True).where(fits.any(1, keepdim=True), node)
        path.append(node.where(fits.any(1, keepdim=True), -1))
    return Verified(torch.cat(path, 1), (torch.cat(path, 1) >= 0).sum(1) - 1, sample.gather(1, node)[:, 0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="def read_lines(path):")
    parser.add_argument("--models", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, or names at Hugging Face")
    args = parser.parse_args()
    target, draft, tokenizer = load_demo_pair()
    if args.models:
        target, draft = map(AutoModelForCausalLM.from_pretrained, args.models)
        tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    prompt = tokenizer(args.prompt, return_tensors="pt").input_ids
    for name, verifier in {"built in": None, "of your own": sample_the_target}.items():
        out = SpeculativeDecoder(target, draft, "top-k", verifier=verifier).generate(prompt, 64, temperature=0.6)
        print(f"{name}: {out.stats.tokens_per_step:.2f} tokens per step\n{tokenizer.decode(out.sequences[0])}\n")
