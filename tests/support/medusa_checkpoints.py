"""Checkpoints of Medusa heads as their authors lay them out, and what they compute, written down a second time."""

import json

import torch
from safetensors.torch import save_file

from heavypath.speculative.drafts.medusa.checkpoint import load_medusa

LAYOUTS = {"own lm_heads": True, "the target's lm_head": False}


def published(target, heads=3, layers=1, owns=True, seed=0, scale=1.0):
    """Tensors of random numbers by the names of the official checkpoints."""
    torch.manual_seed(seed)
    width, vocab = target.config.hidden_size, target.config.vocab_size
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = scale * torch.randn(width, width) / width**0.5
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(width) / 2
        if owns:
            tensors[f"{head}.{layers}.weight"] = scale * torch.randn(vocab, width) / width**0.5
    return tensors


def write(folder, tensors, file="medusa_lm_head.pt", **config):
    """A checkpoint. Its config.json names what Medusa's own code has as defaults, which need not be so."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "somebody/base"} | config
    (folder / "config.json").write_text(json.dumps(settings))
    if file.endswith(".pt"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder


@torch.no_grad()
def oracle(tensors, target, text):
    """Logits [L, K, V] of K heads after each token of a text LongTensor[L], head by head; nothing of the package."""
    return of_states(tensors, target, target(text[None], output_hidden_states=True).hidden_states[-1][0])


@torch.no_grad()
def of_states(tensors, target, states):
    """The same of hidden states [L, H] behind the target's final norm."""
    heads, logits = 1 + max(int(name.split(".")[0]) for name in tensors), []
    for head in range(heads):
        x, layer = states, 0
        while f"{head}.{layer}.linear.weight" in tensors:
            weight, bias = (tensors[f"{head}.{layer}.linear.{kind}"].to(x.dtype) for kind in ("weight", "bias"))
            inner = x @ weight.T + bias
            x, layer = x + inner * torch.sigmoid(inner), layer + 1
        lm_head = tensors.get(f"{head}.{layer}.weight", target.lm_head.weight)
        logits.append(x @ lm_head.to(x.dtype).T)
    return torch.stack(logits, 1)


def heads_of(target, tmp_path, **options):
    """Random heads for a tiny target, loaded from a checkpoint."""
    tensors = published(target, **({"heads": 4, "scale": 2.0} | options))
    return load_medusa(write(tmp_path / "heads", tensors), target), tensors
