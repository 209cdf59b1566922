"""Make untrained drafts for a target: heads of three kinds, or a model of some of the target's layers."""

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
from heavypath.speculative.drafts.medusa.heads import MedusaConfig, MedusaHeads
from heavypath.speculative.training.documents import Document, check_tokens
from heavypath.speculative.training.teacher import layers_of

LARGEST_RANK = 256  # of a block draft's term, as in DSpark; or a quarter of the hidden size if that is less
Head = TypeVar("Head", EagleHead, BlockHead)


def new_head(target: PreTrainedModel, tokens: Tensor | None = None, taps: tuple[int, ...] | None = None) -> EagleHead:
    """An EAGLE-3 head of one layer with random weights, the target's shapes, and a norm for each tap (EAGLE-3.1).

    tokens: LongTensor[Vd], ascending: the target's tokens that the head can propose; default all. With tokens, the
            head gets its own lm_head, which begins as the target's rows of these tokens
    taps:   numbers (in transformers' numbering) of the target's hidden states that the head reads. Default: 2, L // 2
            and L - 3 for a target of L layers, as in the official heads; L / 3, 2 L / 3 and L if L < 7

    In a trial of 65,000 tokens for SmolLM2-135M, the held-out overlaps at the first two depths were 0.390 and 0.329
    with random weights, and 0.300 and 0.233 with copies of the target's last layer, its final norm, and the last tap
    passed through `fc`. With the last hidden state as a fourth tap they were 0.387 and 0.322.

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
    """A block draft like DSpark's (arXiv 2607.05147), with random weights and the target's shapes.

    tokens, taps:  as in `new_head`, but the last hidden state (after the final norm) cannot be a tap
    block_size:    number of levels of a tree that one pass drafts
    layers:        number of layers
    term:          the term that depends on a node's token or path, see `drafts.blocks.terms`: "gated", "vanilla" or
                   "rnn"; "" for none
    mask_token_id: the token whose embedding masks get; default the vocabulary's last token, which is often unused

    Raises ValueError for a target whose layers cannot be found, for an unknown term, and for a block_size or layers
    below 1.
    """
    if term not in ("", *MARKOV_TERMS):
        raise ValueError(f"term must be one of {', '.join(MARKOV_TERMS)}, or '' for none, got {term!r}")
    if block_size < 1 or layers < 1:
        raise ValueError(f"block_size and layers must be 1 or more, got {block_size} and {layers}")
    shape = _shape(target, tokens)
    count = len(layers_of(target))
    rank = min(LARGEST_RANK, -(-shape["hidden_size"] // 4))
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
        term="dspark" if term else "dflash",
        options={"variant": term, "rank": rank, "bias": term in ("gated", "rnn")} if term else {},
    )
    return _with_tokens(BlockHead(config), target, tokens)


def new_medusa(target: PreTrainedModel, heads: int = 5, layers: int = 1, *, own_lm_heads: bool = True) -> MedusaHeads:
    """Medusa heads (arXiv 2401.10774) that begin as the target's lm_head: their layers add nothing.

    heads:        number of heads, which is the largest number of levels of a tree that they draft
    layers:       number of layers of each head
    own_lm_heads: whether each head has an lm_head, of V * H weights, which begins as the target's; if not, all use
                  the target's, which does not learn

    Raises ValueError for heads or layers below 1.
    """
    if heads < 1 or layers < 1:
        raise ValueError(f"heads and layers must be 1 or more, got {heads} and {layers}")
    text: Any = target.config.get_text_config(decoder=True)
    config = MedusaConfig(heads, layers, text.hidden_size, text.vocab_size, own_lm_heads)
    medusa = MedusaHeads(config).to(target.device)
    if medusa.lm_heads is not None:
        lm_head: Any = target.get_output_embeddings()
        medusa.lm_heads.data.copy_(lm_head.weight.detach().expand_as(medusa.lm_heads))
    return medusa


def default_taps(layers: int) -> tuple[int, ...]:
    """The numbers of the hidden states that a head reads by default. layers: number of the target's layers."""
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return tuple(sorted({-(-layers * third // 3) for third in (1, 2, 3)}))


def _shape(target: PreTrainedModel, tokens: Tensor | None) -> dict[str, Any]:
    """The fields of `TappedConfig` that follow from the target and from the tokens that the draft can propose."""
    text: Any = target.config.get_text_config(decoder=True)
    width = text.hidden_size
    heads = text.num_attention_heads
    ropes = getattr(text, "rope_parameters", None) or {}
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
    """The head, moved to the target's device. If it proposes only `tokens`, LongTensor[Vd], these are set in it.

    Its own lm_head then gets the rows that the target's lm_head has for these tokens.
    """
    if tokens is not None and head.lm_head is not None:
        lm_head: Any = target.get_output_embeddings()
        head.lm_head.weight.data.copy_(lm_head.weight.detach()[tokens.to(lm_head.weight.device)])
        if head.d2t is not None:
            head.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
    return head.to(target.device)


def most_frequent(documents: Sequence[Document], count: int, vocab_size: int) -> Tensor:
    """The `count` most frequent tokens of the documents' answers, LongTensor[count], ascending.

    All tokens of a document count if it has no answers. Of equally frequent tokens the lowest are chosen. Raises
    ValueError for a count below 1 or above vocab_size, and for tokens that are not in the vocabulary.
    """
    if not 0 < count <= vocab_size:
        raise ValueError(f"a draft's vocabulary must have 1 .. {vocab_size} tokens, the target's, got {count}")
    check_tokens(documents, vocab_size)
    counts = torch.zeros(vocab_size, dtype=torch.long, device="cpu")
    for document in documents:
        counts += torch.bincount(document.answered(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def draft_of_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A draft model, fp32, that consists of some of the target's layers and its embedding, final norm and lm_head.

    layers: their indices in the target, from 0

    Embedding and lm_head are frozen: they are most of a small draft's weights, and already fit the target.

    Raises ValueError for layers that the target does not have, for repeated ones, and for layers with an MLP of another
    kind than the draft's config gives a layer in their new place.
    """
    count = len(layers_of(target))
    if not layers or not all(0 <= layer < count for layer in layers) or len({*layers}) < len(layers):
        raise ValueError(f"layers must be different indices of the target's layers, 0 .. {count - 1}, got {[*layers]}")
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
    try:
        draft.load_state_dict(weights)
    except RuntimeError as error:  # names every tensor
        raise ValueError(
            f"a {text.model_type} of the layers {[*layers]} alone would have other tensors than these layers of the "
            "target: whether a layer is dense or has experts follows from its number; take other layers"
        ) from error
    for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        module.requires_grad_(False)
    return draft.to(target.device).eval()
