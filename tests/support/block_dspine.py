"""DSpine: its tensors and formulas, in SpecForge's layout, and what is refused."""

import torch
from block_checkpoints import Oracle, tensors_of, zlab
from block_kinds import Kind

SIZE, MESSAGE = 6, 5


def tensors(kind, scale=1.0):
    """By z-lab's names of the backbone."""
    found = tensors_of(kind, scale=scale)
    for layer in range(kind.layers):
        found[f"injection.readouts.{layer}.weight"] = torch.randn(SIZE, kind.width)
        found[f"injection.writes.{layer}.weight"] = torch.randn(kind.width, MESSAGE) / 2
    for name in ("message", "receiver_gate", "predecessor_gate"):
        found[f"injection.{name}.weight"] = torch.randn(MESSAGE, SIZE) / SIZE**0.5
    found["injection.bias"] = torch.randn(MESSAGE)
    codes = torch.randn(kind.vocab, SIZE)
    found["transfer_codes"] = codes / codes.norm(dim=-1, keepdim=True)
    return found


class DSpineOracle(Oracle):
    """Row by row: the message that each gets of the one before, after each layer; at last, of a path's last token."""

    def message(self, layer, row, before):
        feature = self.feature(layer, row)
        gate = self.apply("injection.receiver_gate", feature) + self.apply("injection.predecessor_gate", before)
        gate = 1 / (1 + (-gate - self.w["injection.bias"]).exp())
        change = self.apply(f"injection.writes.{layer}", gate * self.apply("injection.message", before))
        return row + row.square().mean().sqrt() * change

    def feature(self, layer, row):
        found = self.apply(f"injection.readouts.{layer}", row)
        return SIZE**0.5 * found / found.square().sum().sqrt()

    def code(self, token):
        return SIZE**0.5 * self.w["transfer_codes"][token]

    def layer(self, layer, rows, start, causal, window):
        rows, index = super().layer(layer, rows, start, causal, window), int(layer.split(".")[1])
        before = [self.code(self.text[-1]), *(self.feature(index, row) for row in rows[1:-1])]
        self.last = index, rows[1:]
        told = [self.message(index, row, each) for row, each in zip(rows[1:], before, strict=True)]
        return [rows[0], *told]

    def after(self, path=()):
        every = torch.full((self.kind.vocab,), -torch.inf, dtype=torch.double)
        if len(path) < len(self.base):
            index, rows = self.last
            token = [self.text[-1], *path][-1]
            told = self.logits(self.norm("norm", self.message(index, rows[len(path)], self.code(token))))
            for best in self.base[len(path)].argsort(descending=True)[: self.kind.selected]:
                every[best] = told[best]
        return every


def specforge(kind, given, inside=(), **changes):
    """As its script packages a checkpoint, block sizes and all; the default top_k is 16."""
    config = zlab(kind, block_size=kind.block)[0] | {"architectures": ["DSpineDraftModel"]}
    config["dspine_config"] = {
        "transfer_rank": SIZE, "message_size": MESSAGE, "top_k": kind.selected, "ce_weight": 0.1,
        "alignment_warmup_steps": 146, "replacement_hold_ratio": 1 / 6,
    } | dict(inside)  # fmt: skip
    return config | changes, given | {"transfer_ready": torch.tensor(True)}


KIND = Kind(tensors, specforge, DSpineOracle, {"causal": (True, True), "selected": 3})
LAYOUTS = {
    "SpecForge's": (KIND, {}),
    "a default top_k, and names within a model": (KIND._replace(write=lambda kind, given: (
        specforge(kind, given, {"top_k": None})[0],
        {f"model.{name}": each for name, each in given.items()} | {"model.transfer_ready": torch.tensor(True)},
    )), {"selected": 16}),
    "windows": (KIND, {"windows": (4, None)}),
    "a block of two rows": (KIND, {"block": 2}),
    "one layer": (KIND, {"layers": 1, "causal": (True,), "windows": (None,)}),
    "multiplied and capped": (KIND, {"multiplier": 1.5, "cap": 3.0}),
}  # fmt: skip

REFUSED = {
    "causal False, and the tensors are of True|causal: False": {"is_causal": False},
    "transfer_rank 1024, and the tensors are of 6": {"inside": {"transfer_rank": 1024}},
    "message_size 512, and the tensors are of 5": {"inside": {"message_size": 512}},
    "top_k 41, expected 1 to 40": {"inside": {"top_k": 41}},
    "gives heads: 2, which is not known": {"inside": {"heads": 2}},
    "block_size is 8, and 5 in dflash_config": {"block_size": 8},
    "kind 'dspine of speculators', which is not": {"speculators_model_type": "dspine"},
    "'transfer_ready' in .* is a single number; no tensor of a": {"architectures": ["DFlashDraftModel"]},
}
