"""DSpine: after each layer a row of the block gets a message from the one before; after the last, from a node's token.

Let h_r be row r after layer l, R_l the layer's readout, and c(a) the fixed code of token a, of n numbers, of length 1:

    feature  f_r = sqrt(n) R_l h_r / |R_l h_r|
    message  h_r + |h_r| / sqrt(H) W_l (sigmoid(G f_r + G' p + b) * M p),   p = f_(r-1);  sqrt(n) c(root) for r = 1

The root's row stays as it is. After the last layer's messages, the norm and lm_head give the logits of each depth.
Those below a node of token a come from the last layer's row with another message, that of p = sqrt(n) c(a). Only the
`top_k` best tokens of the depth have any. So distributions depend on the last token.

Source: the model of the authors' training, in SpecForge.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, normalize

from heavypath.kernels.layers.spread import spread_few
from heavypath.kernels.layers.units import message_unit
from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.term import BlockTerm, Parents, Pass, TokenLayers
from heavypath.speculative.files.checkpoint import check_config

_CODES = "transfer_codes"
_ALIGNED = 16  # columns that a row of what is kept is a multiple of, so that kernels load several at once


class DSpineTerm(BlockTerm):
    """DSpine's messages. Weights are named as in its checkpoints: "injection", and the codes next to it."""

    module = "injection"
    section = "dspine_config"
    of_speculators = False
    from_root = False
    causal = keeps_fp32 = True
    prefixes: ClassVar = {_CODES: f"injection.{_CODES}"}
    flags = ("transfer_ready", "model.transfer_ready")
    keys: ClassVar = {
        "transfer_rank": int,
        "message_size": int,
        "top_k": int,
        "ce_weight": float,
        "alignment_weight": float,
        "alignment_warmup_steps": int,
        "replacement_layers": int,
        "replacement_probability": float,
        "replacement_hold_ratio": float,
        "replacement_end_ratio": float,
        "candidate_mass_threshold": float,
    }

    @classmethod
    def usual(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """config.json's keys with DFlash's meaning: here rows always attend only to the rows up to themselves."""
        told = {key: settings[key] for key in ("is_causal", "causal", "causal_head") if key in settings}
        check_config(told, dict.fromkeys(told, True))
        return settings

    @classmethod
    def options(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Any]:
        """{"size": of codes, "message": size of messages, "selected": how many tokens of a depth have logits}."""
        codes, message = (tensors.get(f"injection.{name}") for name in (_CODES, "message.weight"))
        if codes is None or message is None:
            raise ValueError(
                f"{'message.weight' if codes is not None else _CODES} is missing: weights without codes are of the "
                "authors' own trainer, whose config.json gives another block_size than it was trained with; convert it "
                "by SpecForge's script first"
            )
        selected = settings.get("top_k", 16)
        sizes = {"transfer_rank": codes.shape[-1], "message_size": len(message)}
        check_config(settings, sizes)
        if not 1 <= selected <= config.draft_vocab_size:
            raise ValueError(f"config.json gives top_k {selected}, expected 1 to {config.draft_vocab_size} tokens")
        return {"size": sizes["transfer_rank"], "message": sizes["message_size"], "selected": selected}

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        size, message, self.selected = (config.options[name] for name in ("size", "message", "selected"))
        self.width = config.hidden_size
        used = self.width + message + self.selected
        self.lengths = _ALIGNED - used % _ALIGNED  # columns with the length: all but one only align the next row
        self.columns = used + self.lengths
        self.last = config.layers - 1
        layers = range(config.layers)
        width = config.hidden_size
        self.readouts = nn.ModuleList(nn.Linear(width, size, bias=False) for _ in layers)
        self.writes = nn.ModuleList(nn.Linear(message, width, bias=False) for _ in layers)
        self.message, self.receiver_gate, self.predecessor_gate = (nn.Linear(size, message, bias=False) for _ in "mgp")
        self.bias = nn.Parameter(torch.zeros(message))
        self.transfer_codes = nn.Parameter(torch.zeros(config.vocab_size, size))
        self.scale = size**0.5

    def after_layer(self, layer: int, rows: Tensor, roots: Tensor) -> Tensor:
        """The rows [B, R, H] after a layer's messages; those of the last layer unchanged: `finish` adds its messages.

        rows: [B, R, H], the layer's output, the root's row first; roots: LongTensor[B], tokens
        """
        return rows if layer == self.last else self._told(layer, rows, roots)

    def finish(self, rows: Tensor, given: Pass, ends: TokenLayers) -> tuple[Tensor, Tensor]:
        """The logits of each depth, and what `forward` needs of each; as `BlockTerm.finish`.

        Of each depth are kept: the last layer's row as it was before messages, G f + b of that row, the best tokens,
        and the row's length.
        """
        told = self._told(self.last, rows, given.roots)
        read = slice(self.first, self.first + given.levels)
        base = ends.logits(ends.norm(told[:, read]))
        row = rows[:, read]
        receiver = self.receiver_gate(self._feature(self.last, row)) + self.bias
        best = base.topk(self.selected, -1).indices
        lengths = self._length(row).expand(-1, -1, self.lengths)
        return base, torch.cat([row.float(), receiver.float(), best.float(), lengths], -1)

    def forward(self, base: Tensor, kept: Tensor, nodes: Parents, ends: TokenLayers) -> tuple[Tensor, None]:
        """The logits of the nodes' children after a message from each node's token; as `BlockTerm.forward`."""
        row, receiver, best, lengths = kept.split([self.width, len(self.bias), self.selected, self.lengths], -1)
        code = embedding(nodes.tokens, self.transfer_codes)
        said = message_unit(self.predecessor_gate(code), self.message(code), receiver, lengths[:, :1], self.scale)
        logits = ends.logits_of(row, self.writes[self.last](said), best)
        return spread_few(logits, best, base.shape[-1]), None

    def level_weights(self) -> list[Tensor]:
        """The weights that `forward` reads at each level, without the codes, of which only a few rows are read."""
        last: Any = self.writes[self.last]
        return [part.weight for part in (last, self.message, self.predecessor_gate)]

    def _told(self, layer: int, rows: Tensor, roots: Tensor) -> Tensor:
        """The rows [B, R, H] after a layer's messages from each row to the next; roots: LongTensor[B], tokens."""
        features = self._feature(layer, rows)
        before = torch.cat([self._code(roots[:, None]), features[:, 1:-1]], 1)[:, : rows.shape[1] - 1]
        return torch.cat([rows[:, :1], self._message(layer, rows[:, 1:], features[:, 1:], before)], 1)

    def _message(self, layer: int, rows: Tensor, features: Tensor, before: Tensor) -> Tensor:
        """The rows [B, r, H] after messages to them.

        features: [B, r, n], of the rows; before: [B, r, n], features or codes that the messages are made of
        """
        gate = torch.sigmoid(self.receiver_gate(features) + self.predecessor_gate(before) + self.bias)
        return rows + self._length(rows).to(rows.dtype) * self.writes[layer](gate * self.message(before))

    def _length(self, rows: Tensor) -> Tensor:
        """The root mean square of each row, fp32 [..., 1]."""
        return torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32) / rows.shape[-1] ** 0.5

    def _feature(self, layer: int, rows: Tensor) -> Tensor:
        return (self.scale * normalize(self.readouts[layer](rows).float(), dim=-1)).to(rows.dtype)

    def _code(self, tokens: Tensor) -> Tensor:
        return self.scale * self.transfer_codes[tokens]
