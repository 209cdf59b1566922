"""A layer for multi-token prediction (MTP), as in DeepSeek-V3, GLM-4.5 and Qwen3.5, as a draft.

With f_i the target's hidden state of token i after its final norm, and E its embedding, entry i is

    u_i = W_eh [norm_e(E[x_{i+1}]); norm_h(f_i)]     g_i = norm(layer(u_0 .. u_i))     logits of x_{i+2} = lm_head(g_i)

where the layer is of the target's own class, with its own keys and values. For drafted nodes the parent's g replaces f.
So one layer, which was trained to predict one token, drafts all levels. Source: DeepSeek-AI 2024, "DeepSeek-V3
Technical Report", sec. 2.2; transformers' `MtpModel` computes the first level.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn

from heavypath.kernels.layers.rotary import store_rows
from heavypath.speculative.drafts.draft import Draftable
from heavypath.speculative.drafts.heads.cache import HeadCache
from heavypath.speculative.drafts.heads.entries import EntriesDraft
from heavypath.speculative.models.attn_implementation import NAME
from heavypath.speculative.models.forward import Forward, TreeMask, as_logits


@dataclass(frozen=True)
class MtpConfig:
    """Shapes of an MTP layer.

    target_type: the target's `model_type`
    taps: the number of the target's last hidden state, after its final norm, which the layer reads
    mask_token_id: None, because levels are drafted one after the other, without masks
    """

    target_type: str
    hidden_size: int
    taps: tuple[int, ...]
    layers: int = 1
    mask_token_id: int | None = None

    @property
    def model_type(self) -> str:
        """Name of this kind of draft in traces."""
        return f"mtp-{self.target_type}"


class MtpHead(nn.Module, Draftable):
    """An MTP layer as transformers builds it, as a user gives it to a decoder.

    Embedding, rotary embedding and lm_head are the target's.
    """

    def __init__(self, config: MtpConfig, layer: nn.Module):
        super().__init__()
        self.config = config
        self.layer = layer


class MtpDraft(EntriesDraft):
    """An `MtpHead` as a draft, level by level, for the target in whose checkpoint it is.

    Raises ValueError as `TappedDraft` does, and for a target of another width or depth, or split over processes.
    """

    name = "mtp"

    def __init__(self, head: MtpHead, target: Forward):
        super().__init__(head, target)
        self.config = head.config
        self.layers = head.config.layers
        width = target.embedding.weight.shape[1]
        if (head.config.hidden_size, head.config.taps) != (width, (target.layers,)):
            raise ValueError(
                f"the MTP layer was made for a target of {head.config.taps[0]} layers of width "
                f"{head.config.hidden_size}, got one of {target.layers} layers of width {width}"
            )
        if target.ranks is not None:
            raise ValueError("an MTP layer drafts for a target in one process, got one that is split over several")
        self._layer: Any = head.layer
        config = self._layer.config
        kind = (getattr(config, "layer_types", None) or ["full_attention"])[0]
        self._window = config.sliding_window if kind == "sliding_attention" else None
        self._rotary: Any = target.model.get_decoder().rotary_emb
        if "layer_type" in signature(self._rotary.forward).parameters:
            self._rotary = partial(self._rotary, layer_type=kind)
        self._embedded = target.parts.embedded(target.embedding)

    def new_cache(self, batch: int, rows: int) -> HeadCache:
        """An empty cache of `rows` rows for each of `batch` sequences; keys and values have the shape of one target
        layer.
        """
        own: Any = self.target.new_cache(1, 1)
        width = self.config.hidden_size
        return HeadCache(
            batch,
            rows,
            (width, width),
            layers=1,
            kv_heads=own.keys.shape[1] // len(own),
            head_dim=own.keys.shape[3],
            like=self._layer.enorm.weight,
        )

    def run(
        self,
        features: Tensor,
        tokens: Tensor,
        rows: Tensor,
        cache: HeadCache,
        mask: TreeMask,
        positions: Tensor | None = None,
        last: int | None = None,
    ) -> Tensor:
        """The ends [B, last, H] of entries, see `EntriesDraft.run`. An entry has the position of its own token."""
        within = ((rows if positions is None else positions) + 1).clamp(max=self.max_positions - 1)
        embedded = self._embedded(tokens)
        attention_mask = None
        arguments = {}
        first_rows: list[int] = []
        if self._layer.config._attn_implementation == NAME:
            attend = mask.attention(self.dtype, {self._window})[self._window]
            arguments["tree_attend"] = lambda query, key, value, scale, window: attend(query, key, value, scale)
        else:
            biases = mask.biases(self.dtype, {self._window})[self._window]
            attention_mask = biases.expand(len(tokens), -1, -1, -1)
            first_rows = [mask.visible_rows - biases.shape[-1]]
        # Positional arguments: transformers 5.24 has another name for the cache.
        angles = self._rotary(embedded, within)
        kept = cache.at(rows, mask.visible_rows, first_rows)
        hidden = self._layer(embedded, features, angles, attention_mask, within, kept, **arguments)
        first = 0 if last is None else rows.shape[1] - last
        store_rows(cache.outputs[:, None], hidden[:, first:, None], rows[:, first:])
        return hidden[:, first:]

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """The target's hidden state after its final norm, [B, N, H], the only one of `taps`."""
        return taps[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [B, n, V] of outputs [B, n, H], by the target's lm_head."""
        return as_logits(self.target_lm_head(hidden))

    def level_weights(self) -> list[Tensor]:
        """All weights of the layer, and the target's lm_head."""
        return [*self.model.parameters(), self.target_lm_head.weight]
