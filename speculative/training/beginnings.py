"""Drafts before their training: a head or a block draft of the target's width, or some of the target's own layers."""

import copy
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.blocks.terms import MARKOV_TERMS
from heavypath.speculative.drafts.heads.config import HeadConfig
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.training.documents import Document, check_tokens
from heavypath.speculative.training.teacher import layers_of

LARGEST_RANK = 256  # of a block draft's term, which is DSpark's; a quarter of the width where that is less
Head = TypeVar("Head", EagleHead, BlockHead)


def new_head(target: PreTrainedModel, tokens: Tensor | None = None, taps: tuple[int, ...] | None = None) -> EagleHead:
    """An EAGLE-3 head of a layer as wide as the target's, of random weights, with a norm for each tap (EAGLE-3.1).

    tokens: LongTensor[Vd] in ascending order, those of the target that it is to propose; default all. Its lm_head then
            has the target's rows of these tokens
    taps:   the hidden states that it reads, by transformers' numbers. Default: those of the official heads, 2, half of
            the layers, and the last but two. For a target of fewer than 7 layers: each third, up to the last

    Raises ValueError for a target whose layers cannot be found.
    """
    config = HeadConfig(
        **_shape(target, tokens),
        generation=3,
        taps=default_taps(len(layers_of(target))) if taps is None else taps,
        tap_norms=True,
    )
    return _with_tokens(EagleHead(config), target, tokens)


def new_block(
    target: PreTrainedModel,
    tokens: Tensor | None = None,
    taps: tuple[int, ...] | None = None,
    *,
    block_size: int = 7,
    layers: int = 3,
    term: str = "gated",
    mask_token_id: int | None = None,
) -> BlockHead:
    """A block draft as DSpark's (arXiv 2607.05147), as wide as the target, of random weights.

    tokens, taps:  as of `new_head`. It cannot read the last hidden state, which there is after the final norm alone
    block_size:    levels of a tree, which one pass of its layers drafts
    term:          what the law below a node takes from its token or its path: "gated", "vanilla", "rnn", as in
                   `drafts.blocks.terms`, or "" for nothing
    mask_token_id: the token whose embedding the masks have; default the last one, which many vocabularies reserve

    Raises ValueError for a target whose layers cannot be found, and for a term that is none.
    """
    if term not in ("", *MARKOV_TERMS):
        raise ValueError(f"term must be one of {', '.join(MARKOV_TERMS)}, or '' for none, got {term!r}")
    if block_size < 1 or layers < 1:
        raise ValueError(f"block_size and layers must be 1 or more, got {block_size} and {layers}")
    shape, count = _shape(target, tokens), len(layers_of(target))
    config = BlockConfig(
        **shape,
        kind="dspark" if term else "dflash",
        layers=layers,
        head_norms=True,
        taps=(tuple(tap for tap in default_taps(count) if tap < count) or (0,)) if taps is None else taps,
        block_size=block_size,
        mask_token_id=shape["vocab_size"] - 1 if mask_token_id is None else mask_token_id,
        from_root=True,
        causal=(False,) * layers,
        windows=(None,) * layers,
        term=term,
        rank=min(LARGEST_RANK, -(-shape["hidden_size"] // 4)) if term else 0,
        term_bias=term in ("gated", "rnn"),
    )
    return _with_tokens(BlockHead(config), target, tokens)


def default_taps(layers: int) -> tuple[int, ...]:
    """The hidden states that a head reads of a target of so many layers."""
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return tuple(sorted({-(-layers * third // 3) for third in (1, 2, 3)}))


def _shape(target: PreTrainedModel, tokens: Tensor | None) -> dict[str, Any]:
    """The fields of `TappedConfig` that a head takes from its target and from the tokens that it can propose."""
    text: Any = target.config.get_text_config(decoder=True)
    width, heads, ropes = text.hidden_size, text.num_attention_heads, getattr(text, "rope_parameters", None) or {}
    return {
        "hidden_size": width,
        "target_hidden_size": width,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or width // heads,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": text.vocab_size if tokens is None else len(tokens),
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(ropes.get("rope_theta", 10000.0))},
        "owns_lm_head": tokens is not None,
    }


def _with_tokens(head: Head, target: PreTrainedModel, tokens: Tensor | None) -> Head:
    """The head on the target's device; its lm_head has the target's rows of its tokens."""
    if tokens is not None and head.lm_head is not None:
        lm_head: Any = target.get_output_embeddings()
        head.lm_head.weight.data.copy_(lm_head.weight.detach()[tokens.to(lm_head.weight.device)])
        if head.d2t is not None:
            head.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
    return head.to(target.device)


def most_frequent(documents: Sequence[Document], count: int, vocab_size: int) -> Tensor:
    """The most frequent tokens of the documents, LongTensor[count] in ascending order; of equal ones the lowest."""
    if not 0 < count <= vocab_size:
        raise ValueError(f"a draft's vocabulary must have 1 .. {vocab_size} tokens, the target's, got {count}")
    check_tokens(documents, vocab_size)
    counts = torch.zeros(vocab_size, dtype=torch.long, device="cpu")
    for document in documents:
        for tokens in document:
            counts += torch.bincount(tokens, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def draft_of_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of some of the target's layers, from 0, with its embedding, final norm and lm_head.

    Embedding and lm_head do not learn: they are most of a small draft, and fit the target as they are.

    Raises ValueError for layers that the target does not have.
    """
    count = len(layers_of(target))
    if not layers or not all(0 <= layer < count for layer in layers) or len({*layers}) < len(layers):
        raise ValueError(f"expected different layers of the target's, 0 .. {count - 1}, got {[*layers]}")
    config = copy.deepcopy(target.config)
    text: Any = config.get_text_config(decoder=True)
    for name, value in vars(text).items():
        if value is not None and (name.endswith("layer_types") or name == "no_rope_layers"):  # one for each layer
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    draft: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {}
    for name, tensor in target.state_dict().items():
        found = re.match(r"(.*?\.(?:layers|h|blocks)\.)(\d+)(\..*)", name)
        if found is None:
            weights[name] = tensor
        elif int(found[2]) in layers:
            weights[f"{found[1]}{[*layers].index(int(found[2]))}{found[3]}"] = tensor
    draft.load_state_dict(weights)
    for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        module.requires_grad_(False)
    return draft.to(target.device).eval()
