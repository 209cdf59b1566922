"""Random EAGLE heads for tiny targets, and what they say by a pass over a whole text."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead

VARIANTS = {
    "eagle-1": {"generation": 1, "taps": (2,), "biases": frozenset({"fc"})},
    "eagle-1 of two layers": {"generation": 1, "taps": (2,), "layers": 2},
    "eagle-3": {"generation": 3},
    "eagle-3.1": {"generation": 3, "tap_norms": True, "feeds_back_normed": True, "owns_lm_head": True},
    "eagle-3, residual normed, biases": {"norm_before_residual": True, "biases": frozenset({"q_proj", "k_proj"})},
    "eagle-3, heads normed, taps normed together": {"head_norms": True, "norm_before_fc": True},
    "eagle-3, four tokens": {"draft_vocab_size": 4, "owns_lm_head": True},
    "p-eagle": {"mask_token_id": 6, "layers": 2, "tap_norms": True},
    "p-eagle, four tokens": {"mask_token_id": 6, "draft_vocab_size": 4, "owns_lm_head": True},
    "eagle-3, another width": {"hidden_size": 24, "owns_embedding": True, "owns_lm_head": True},
}


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
def logits_with_masks(head, target, text, masks):
    """What follows a text and so many masks, [V], of a head that drafts all levels at once (P-EAGLE)."""
    features, embedding = features_of(head, target, text), embedding_of(head, target)
    features, tokens = (features[:, :-1], text[1:]) if len(text) > 1 else (0 * features, text)
    read = head.mask_hidden.view(len(head.config.taps), 1, 1, -1).unbind()
    features = torch.cat([features, head.features(read).expand(1, masks, -1)], 1)
    tokens = torch.cat([tokens, torch.full((masks,), head.config.mask_token_id)])
    return logits_of(head, target, over(head, features, embedding(tokens[None])))[-1]


@torch.no_grad()
def entries_over(head, target, text, path=()):
    """What follows each two tokens of a text and, below it, of a path of drafted tokens, [L - 1 + P, V].

    For each drafted token a pass over all entries. A text of one token has no features before it: zeros stand for them.
    """
    features, embedding = features_of(head, target, text), embedding_of(head, target)
    features, tokens = (features[:, :-1], text[1:]) if len(text) > 1 else (0 * features, text)
    hidden = over(head, features, embedding(tokens[None]))
    for drafted in path:
        features = torch.cat([features, head.fed_back(hidden[:, -1:])], 1)
        tokens = torch.cat([tokens, torch.tensor([drafted])])
        hidden = over(head, features, embedding(tokens[None]))
    return logits_of(head, target, hidden)


def features_of(head, target, text):
    seen = target(text[None], output_hidden_states=True).hidden_states
    return head.features([seen[number] for number in head.config.taps])


def embedding_of(head, target):
    return target.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens


def over(head, features, embedded):
    def causal(query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    positions = torch.arange(features.shape[1])[None]
    return head(features, embedded, head.rotary_emb(features, positions), causal)


def logits_of(head, target, hidden):
    lm_head = target.get_output_embeddings() if head.lm_head is None else head.lm_head
    logits = lm_head(head.before_lm_head(hidden[0]))
    if head.d2t is None:
        return logits
    every = logits.new_full((len(logits), head.config.vocab_size), -torch.inf)
    every[:, drafted_by(head)] = logits
    return every


def drafted_by(head):
    """The target's tokens that a head drafts."""
    return torch.arange(len(head.d2t)) + head.d2t
