"""A block draft's outputs for training: rows are cut into blocks, and one pass computes all blocks of all rows.

A block of B positions begins at each B-th token x_a, which is its root. As in decoding, it attends to the context
before a and to itself. So its position k, at token a + k, predicts token a + k + 1. The term reads the row's own
tokens. Each token is in one block, and costs the layers one position. `distil` cuts s mod B tokens off the beginning of
the rows in training step s, so that over time every token is at every depth.

Source: Chen et al. 2026, "DFlash", arXiv 2602.06036, and "DSpark", arXiv 2607.05147. They, too, compute all blocks of a
row in one pass with a mask over [context | blocks], but choose the roots at random.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import rotate_half

from heavypath.kernels.layers.side_by_side import FieldRows
from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.blocks.term import Parents
from heavypath.speculative.drafts.blocks.terms import MarkovTerm
from heavypath.speculative.training.chains import for_all_heads
from heavypath.speculative.training.teacher import Taught


def check_trains(head: BlockHead) -> None:
    """Raise ValueError for a block draft with parts that cannot be trained here, with their names."""
    config = head.config
    strange = {
        "rows that predict their own token": not config.from_root,
        "an embedding of masks": config.owns_mask,
        "windows": any(window is not None for window in config.windows),
        "convolutions": config.conv_size > 0,
        f"the term {config.term!r}": config.term not in ("dflash", "dspark"),
    }
    found = [name for name, has in strange.items() if has]
    if found:
        raise ValueError(f"a block draft with {' and '.join(found)} is not trained here; make one by new_block(target)")


def block_outputs(head: BlockHead, rows: Taught, embed: Callable[[Tensor], Tensor], depths: int) -> list[Tensor]:
    """The draft's outputs for all blocks of B positions, a tensor [R, L // B, H + r] for each of `depths` depths.

    The first H columns are the block's output after the last norm, the other r those of `MarkovTerm.latent` (r = 0 if
    there is no term).

    rows:   R rows of L tokens, with the target's hidden states
    embed:  a function from tokens LongTensor[R, N] to their embeddings [R, N, H]
    depths: at most B
    """
    config = head.config
    dtype = head.fc.weight.dtype
    size = head.config.block_size
    blocks = rows.tokens.shape[1] // size
    at = torch.arange(blocks * size, device=head.fc.weight.device)
    tokens = rows.tokens[:, : len(at)].long()
    context = head.hidden_norm(head.fc(rows.taps[:, : len(at)].to(dtype).flatten(2)))
    hidden = embed(tokens.where(at % size == 0, config.mask_token_id)).to(dtype)
    turns = head.rotary_emb(hidden, at[None])
    seen = {causal: _seen(at, size, causal) for causal in {*config.causal}}
    layers: Any = head.layers
    for layer, causal in zip(layers, config.causal, strict=True):
        attend = _attention(layer.self_attn, context, turns, seen[causal])
        hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), turns, attend)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    by_depth = head.norm(hidden).unflatten(1, (blocks, size)).unbind(2)[:depths]
    if not isinstance(head.term, MarkovTerm):
        return [*by_depth]
    outputs = []
    state = hidden.new_zeros(len(tokens) * blocks, 1, head.term.state_size)
    for normed, parents in zip(by_depth, tokens.unflatten(1, (blocks, size)).unbind(2), strict=False):
        nodes = Parents(
            parents.flatten()[:, None], len(outputs), FieldRows(state, None) if head.term.state_size else None
        )
        latent, new = head.term.latent(normed.flatten(0, 1), nodes, impl="torch")
        state = state if new is None else new
        outputs.append(torch.cat([normed, latent.view(*normed.shape[:2], -1)], -1))
    return outputs


def block_logits(head: BlockHead, outputs: Tensor, lm_head: Any) -> Tensor:
    """The logits [R, N, Vd] for outputs of `block_outputs` [R, N, H + r]. lm_head: the draft's, or the target's."""
    config = head.config
    term = head.term
    logits = config.multiplier * lm_head(outputs[..., : config.hidden_size].to(lm_head.weight.dtype))
    if config.softcap is not None:
        logits = config.softcap * torch.tanh(logits / config.softcap)
    if not isinstance(term, MarkovTerm):
        return logits
    return logits + term.markov_w2(outputs[..., config.hidden_size :].to(term.markov_w2.weight.dtype))


def _seen(at: Tensor, size: int, causal: bool) -> Tensor:
    """The attention mask, bool [L, 2 L]: the context before a position's block, and the positions of its block.

    at: LongTensor[L], positions; size: those of a block
    """
    block = at // size
    own = block[:, None] == block
    return torch.cat([at < (block * size)[:, None], own.tril() if causal else own], 1)


def _attention(
    attention: Any, context: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of query, key and value of all blocks, [R, heads, L, D], that does a layer's attention.

    The blocks also attend to the context [R, L, H], whose keys and values are computed here.

    turns: cosine and sine [1, L, D]; seen: the mask from `_seen`
    """
    by_head = *context.shape[:2], -1, attention.head_dim
    keys = attention.k_proj(context).view(by_head)
    values = attention.v_proj(context).view(by_head)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    keys = keys.transpose(1, 2)
    values = values.transpose(1, 2)
    cos, sin = (each[:, None] for each in turns)
    keys = keys * cos + rotate_half(keys) * sin

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (for_all_heads(torch.cat(pair, 2), groups) for pair in ((keys, key), (values, value)))
        return scaled_dot_product_attention(query, key, value, seen)

    return attend
