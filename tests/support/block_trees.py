"""How many tokens a step brings with a tree of 64 nodes, and with a chain, of block drafts that make errors.

The target has one distribution after every text, and each draft a wrong one: its lm_head has random errors, and what
its kind adds is random, too. `python tests/support/block_trees.py` prints the ratio for each kind.
"""

import tempfile
from pathlib import Path

import block_dfly
import block_dspine
import block_lilicorr
import block_treeflash
import torch
from block_checkpoints import Oracle, of_one_law, tensors_of, zlab
from block_kinds import Kind, drafted
from tiny_models import tiny_llama

from heavypath.speculative import SpeculativeDecoder

VOCAB, WIDTH, BLOCK = 24, 16, 8
SEQUENCES, TOKENS = 96, 33  # the first token is drawn before the first step
PUBLISHED = {  # settings of `variant`, and of config.json
    "DFlash": ({}, {}),
    "DSpark": ({"shift": 1, "term": "vanilla"}, {"projector_type": "dspark"}),
    "DSpark, gated": ({"shift": 1, "term": "gated"}, {"projector_type": "dspark"}),
    "DSpark, rnn": ({"shift": 1, "term": "rnn"}, {"projector_type": "dspark"}),
    "Domino": ({"shift": 1, "term": "domino"}, {"shift_label": True}),
    "DFlash2": ({"term": "selector", "selected": 8, "conv": 2}, {"is_causal": False}),
}
KINDS = {
    **{name: Kind(tensors_of, lambda kind, own, more=more: (zlab(kind, **more)[0], own), Oracle, options)
       for name, (options, more) in PUBLISHED.items()},
    "DFly": block_dfly.KIND,
    "TreeFlash": block_treeflash.KIND,
    "DSpine": block_dspine.KIND,
    "LiLiCorr": block_lilicorr.KIND,
}  # fmt: skip


def with_errors(kind, folder, errors=0.2):
    """A target of one law, and a draft of this kind whose lm_head has errors of this size."""
    noise = torch.Generator().manual_seed(4)
    target = tiny_llama(0, VOCAB, 4, num_key_value_heads=2, max_position_embeddings=128)
    logits = (0.4 * torch.randn(VOCAB, generator=noise)).tolist()
    form = KINDS[kind]

    def tensors(shape, scale):
        given = form.tensors(shape, scale)
        found = of_one_law(target, given, logits)
        found |= {name: given[name] for name in given if "correction" in name}  # its own down_proj is not a layer's
        found["norm.weight"] = torch.ones(WIDTH)
        found["lm_head.weight"] = target.lm_head.weight.detach().clone()
        found["lm_head.weight"] += errors * torch.randn(VOCAB, WIDTH, generator=noise)
        with torch.no_grad():  # other tokens have other embeddings, all of one length
            words = torch.randn(VOCAB, WIDTH - 1, generator=noise)
            target.model.embed_tokens.weight[:, 1:] = words / words.norm(dim=-1, keepdim=True) / 2
            target.model.norm.weight.fill_(1.25**0.5)
        return found

    options = {"width": WIDTH, "read": WIDTH, "block": BLOCK, "own_lm_head": True}
    return target, drafted(form._replace(tensors=tensors), Path(folder), target, scale=0.3, **options)


def tokens_per_step(target, head, method, nodes):
    """The mean number of new tokens a step, and its standard error, over sequences."""
    decoder = SpeculativeDecoder(target, head, method, tree_size=nodes)
    prompts = (1 + torch.arange(SEQUENCES) % (VOCAB - 2))[:, None].expand(-1, 2)
    out = decoder.generate(prompts, TOKENS, temperature=1.0, seed=3)
    steps = out.stats.steps_of.double()
    mean = (TOKENS - 1) * len(steps) / float(steps.sum())
    return mean, mean * float(steps.std()) / float(steps.mean()) / len(steps) ** 0.5


def gain(kind, folder):
    """Tokens a step of a chain as long as the block, of a tree of 64 nodes, their ratio, and its standard error."""
    target, head = with_errors(kind, folder)
    chain, of_chain = tokens_per_step(target, head, "chain", head.config.depths + 1)
    tree, of_tree = tokens_per_step(target, head, "sequoia", 64)
    ratio = tree / chain
    return chain, tree, ratio, ratio * ((of_chain / chain) ** 2 + (of_tree / tree) ** 2) ** 0.5


if __name__ == "__main__":
    print("kind            chain   tree of 64   ratio")
    for each in KINDS:
        with tempfile.TemporaryDirectory() as place:
            found = gain(each, Path(place) / "draft")
        print(f"{each:15} {found[0]:5.2f}   {found[1]:10.2f}   {found[2]:.2f} +- {found[3]:.2f}")
