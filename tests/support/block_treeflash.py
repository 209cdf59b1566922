"""TreeFlash: its tensors and formula, in its authors' layout, and what is refused."""

import torch
from block_checkpoints import Oracle, tensors_of, zlab
from block_kinds import Kind
from torch.nn.functional import silu

INNER = 12
NAME = "ar_approximation"


def tensors(kind, scale=1.0):
    """By z-lab's names of the backbone."""
    found = tensors_of(kind, scale=scale)
    found[f"{NAME}.ug.weight"] = scale * torch.randn(2 * INNER, 2 * kind.width) / kind.width**0.5
    found[f"{NAME}.ug.bias"] = torch.randn(2 * INNER) / 2
    found[f"{NAME}.d.weight"] = scale * torch.randn(kind.width, INNER) / INNER**0.5
    found[f"{NAME}.norm.weight"] = 1 + torch.randn(kind.width) / 4
    return found


class TreeFlashOracle(Oracle):
    """Each path's logits from the row that its last token corrects, which is normed afterwards."""

    def norm(self, name, x):
        if name == "norm" and self.rows is not None:
            self.rows.append(x)
        return super().norm(name, x)

    def block(self):
        self.rows = []  # before the last norm
        hidden = super().block()
        self.rows, rows = None, self.rows
        self.before = rows[-len(hidden) :]
        return hidden

    def after(self, path=()):
        if len(path) >= len(self.before) or f"{NAME}.d.weight" not in self.w:
            return super().after(path)
        row, word = self.before[len(path)], self.embedding[[self.text[-1], *path][-1]]
        word = word / (word.square().mean() + 1e-6).sqrt() * self.w[f"{NAME}.norm.weight"]
        inner = self.apply(f"{NAME}.ug", torch.cat([word, self.norm("norm", row)]))
        corrected = row + self.apply(f"{NAME}.d", silu(inner[INNER:]) * inner[:INNER])
        every = torch.full((self.kind.vocab,), -torch.inf, dtype=torch.double)
        every[self.tokens] = self.logits(self.norm("norm", corrected))
        return every


def treeflash(kind, given, inside=None, **changes):
    """As its authors save it."""
    config = zlab(kind)[0] | {"architectures": ["TreeFlashDraftModel"]}
    config["treeflash_config"] = {"ar_approximation": "swiglu", "candidate_tokens": 64} if inside is None else inside
    return config | changes, {
        name if name.startswith((NAME, "lm_head", "d2t")) else f"model.{name}": each for name, each in given.items()
    }


def plain(kind, scale=1.0):
    return {name: each for name, each in tensors(kind, scale).items() if NAME not in name}


KIND = Kind(tensors, treeflash, TreeFlashOracle, {})
LAYOUTS = {
    "its authors'": (KIND, {}),
    "by its other name, keys at the top": (KIND._replace(write=lambda *given: treeflash(
        *given, inside={}, architectures=["TreeFlash"], ar_approximation="swiglu")), {}),
    "windows, which are not causal": (KIND, {"windows": (4, None)}),
    "without a correction": (KIND._replace(
        tensors=plain, write=lambda *given: treeflash(*given, inside={"ar_approximation": None})), {}),
}  # fmt: skip

REFUSED = {
    "ar_approximation 'mlp', and the tensors are of 'swiglu'": {"inside": {"ar_approximation": "mlp"}},
    "gives ar_approximation None, and the tensors have one": {"inside": {}},
    "gives depth_bias: True, which is not known": {"inside": {"ar_approximation": "swiglu", "depth_bias": True}},
    "block_size is 5, and 16 in dflash_config": {
        "dflash_config": {"mask_token_id": 39, "target_layer_ids": [0, 1, 2], "block_size": 16}},
    "kind 'treeflash of speculators', which is not": {"speculators_model_type": "treeflash"},
}  # fmt: skip
