"""The part of papers.py for what the survey article describes and no other part has: Medusa heads."""

import torch
from batches import more_per_forward, tokens_per_forward
from demo_pair.corpus import encode_documents, read_corpus, training_batches
from papers_setting import Row, Setting
from torch import Tensor
from torch.nn.functional import cross_entropy

from heavypath.speculative import greedy_tree
from heavypath.speculative.drafts.medusa.heads import MedusaConfig, MedusaHeads
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE

HEADS, LENGTH, ROWS, STEPS, RATE = 4, 256, 4, 1500, 2e-3


def trained(setting: Setting) -> MedusaHeads:
    """Medusa heads of the shipped target, which stays as it is: cross-entropy of the token each head is to say.

    Heads begin as the target's own lm_head, and learn from the text that the target was trained on. The loss of head k
    weighs 0.8^k (Cai et al. 2024, section 2.2.1).
    """
    torch.manual_seed(setting.seed)
    target = setting.pair.target
    shape = MedusaConfig(HEADS, 1, target.config.hidden_size, target.config.vocab_size, owns_lm_heads=True)
    heads = MedusaHeads(shape)
    assert heads.lm_heads is not None
    heads.lm_heads.data.copy_(target.lm_head.weight.expand(HEADS, -1, -1))
    documents = texts(setting)
    steps = 2 if setting.small else STEPS
    optimizer = torch.optim.AdamW(heads.parameters(), lr=RATE, weight_decay=0.0)
    slower = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1)
    for _, tokens in zip(range(steps), training_batches(documents, LENGTH, ROWS, setting.seed), strict=False):
        optimizer.zero_grad()
        loss(setting, heads, tokens.long()).backward()
        optimizer.step()
        slower.step()
    return heads.eval().requires_grad_(False)


def loss(setting: Setting, heads: MedusaHeads, tokens: Tensor) -> Tensor:
    """The weighted sum over heads: head k at place i says token i + 2 + k. tokens: LongTensor[rows, T]"""
    with torch.no_grad():
        hidden = setting.pair.target.model(tokens).last_hidden_state[:, : -1 - HEADS]
    logits = heads(hidden.flatten(0, 1), setting.pair.target.lm_head)  # [R, K, V]
    ahead = [tokens[:, 2 + head : tokens.shape[1] - HEADS + 1 + head].flatten() for head in range(HEADS)]
    parts = [0.8**head * cross_entropy(logits[:, head], each) for head, each in enumerate(ahead)]
    return torch.stack(parts).sum()


def texts(setting: Setting) -> list[Tensor]:
    """The tokens of the files that the shipped target was trained on."""
    return encode_documents(setting.pair.tokenizer, [each.text for each in read_corpus() if not each.held_out])


def medusa(setting: Setting) -> Row:
    """Trees of Medusa heads beside those of the shipped draft: 64 nodes and four levels, at T = 0 and 0.6."""
    heads, rows = trained(setting), []
    tree = greedy_tree(DEFAULT_ACCEPTANCE, 8 if setting.small else 64, HEADS)
    for temperature in (0.0, 0.6):
        own, shipped = (
            setting.decode("sequoia", temperature=temperature, draft=each, tree=tree) for each in (heads, None)
        )
        (tokens, error), more = tokens_per_forward(own), [*more_per_forward(own, shipped)]
        rows.append({"temperature": temperature, "tokens": tokens, "error": error, "over the draft": more})
    return {"heads": HEADS, "steps": STEPS, "rows": rows}


PARTS = {"survey-medusa": medusa}
