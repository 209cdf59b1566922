"""Helpers of tests/drafts/test_heads.py and its neighbours."""

import torch

from heavypath.kernels.commit import StateField
from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead


def head_of(target, seed=0, **changes):
    """A random head for a tiny target."""
    torch.manual_seed(seed)
    width = target.config.hidden_size
    shape = {"hidden_size": width, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 8, "generation": 3, "taps": (0, 1, 2), "target_hidden_size": width}
    vocab = target.config.vocab_size
    head = EagleHead(HeadConfig(**(shape | {"vocab_size": vocab, "draft_vocab_size": vocab} | changes)))
    if head.d2t is not None:
        head.d2t.copy_(torch.tensor([1, 1, 2, 3]))  # tokens 1, 2, 4 and 6
    for name, weight in head.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    return head.eval().to(target.dtype)


@torch.no_grad()
def logits_over(head, target, text, path=()):
    """What follows a text and, below it, a path of drafted tokens, [V]: for each token a pass over all entries.

    A text of one token has no features before it, for which zeros stand.
    """
    features, embedding = features_of(head, target, text), embedding_of(head, target)
    features, tokens = (features[:, :-1], text[1:]) if len(text) > 1 else (0 * features, text)
    hidden = over(head, features, embedding(tokens[None]))
    for drafted in path:
        features = torch.cat([features, head.fed_back(hidden[:, -1:])], 1)
        tokens = torch.cat([tokens, torch.tensor([drafted])])
        hidden = over(head, features, embedding(tokens[None]))
    return logits_of(head, target, hidden)[-1]


def features_of(head, target, text):
    seen = target(text[None], output_hidden_states=True).hidden_states
    return head.features([seen[number] for number in head.config.taps])


def embedding_of(head, target):
    return target.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens


def over(head, features, embedded):
    turns = head.rotary_emb(features, torch.arange(features.shape[1])[None])
    return head(features, embedded, turns, causal)


def logits_of(head, target, hidden):
    lm_head = target.get_output_embeddings() if head.lm_head is None else head.lm_head
    logits = lm_head(head.before_lm_head(hidden[0]))
    if head.d2t is None:
        return logits
    every = logits.new_full((len(logits), head.config.vocab_size), -torch.inf)
    every[:, [1, 2, 4, 6]] = logits
    return every


def causal(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def steps_of(decoder, *arguments, **options):
    """What `generate` returns, and for each step the numbers of `StateField` before it, and what it drafted."""
    steps, run = [], decoder.runner.run

    def noting(plan, workspace, *, slots, **more):
        before = workspace.state.numbers[:, :slots].clone()
        stepped = run(plan, workspace, slots=slots, **more)
        steps.append((before, stepped.drafted))
        return stepped

    decoder.runner.run = noting
    try:
        return decoder.generate(*arguments, **options), steps
    finally:
        decoder.runner.run = run


def inner_nodes(before, drafted, slot):
    """The paths of drafted tokens to the nodes that have children; their nodes."""
    parents = drafted.parents if drafted.parents.dim() == 1 else drafted.parents[slot]
    there = {int(parent) for node, parent in enumerate(parents) if parent >= 0 and drafted.tokens[slot, node] >= 0}
    for node in there:
        path, at = [], node
        while at > 0:
            path.insert(0, int(drafted.tokens[slot, at]))
            at = int(parents[at])
        if len(path) < before[StateField.LEFT, slot]:
            yield node, path


def drafted_any(steps):
    """The steps that drafted anything."""
    return [step for step in steps if step[1].logits is not None]
