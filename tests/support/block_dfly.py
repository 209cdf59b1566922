"""DFly: its tensors and formulas, in the layouts of AngelSpec and of speculators, and what is refused."""

import torch
from block_checkpoints import Oracle, layer_settings, tensors_of
from block_kinds import Kind
from head_checkpoints import rms
from torch.nn.functional import silu

INNER = 12


def tensors(kind, scale=1.0):
    """By z-lab's names of the backbone; the rest is named as in both layouts."""
    found = tensors_of(kind, scale=scale)
    found["layer_fusion_weights"] = torch.randn(kind.layers, len(kind.ids))
    for name, size in (("hidden_norm", kind.width), ("embed_norm", kind.width)):
        found[f"hidden_correction.{name}.weight"] = 1 + torch.randn(size) / 4
    for name, rows, columns in (("gate_proj", INNER, 2 * kind.width), ("up_proj", INNER, 2 * kind.width),
                                ("down_proj", kind.width, INNER)):  # fmt: skip
        found[f"hidden_correction.{name}.weight"] = scale * torch.randn(rows, columns) / columns**0.5
    return found


class DFlyOracle(Oracle):
    """Layer by layer its own context; and each path's logits from the hidden state that its last token corrects."""

    def __init__(self, kind, given, target, text):
        with torch.no_grad():
            states = target(torch.tensor([[*map(int, text)]]), output_hidden_states=True).hidden_states
        self.read = [[states[id_ + 1][0, t].double() for id_ in kind.ids] for t in range(len(text) - 1)]
        super().__init__(kind, given, target, text)

    def layer(self, layer, rows, start, causal, window):
        scores = self.w["layer_fusion_weights"][int(layer.split(".")[1])].exp()
        self.context = []
        for read in self.read:
            mean = sum(score * state for score, state in zip(scores, read, strict=True)) / scores.sum()
            self.context.append(self.norm("hidden_norm", self.apply("fc", torch.cat(read)) + mean))
        return super().layer(layer, rows, start, causal, window)

    def after(self, path=()):
        if len(path) >= len(self.hidden) or "hidden_correction.up_proj.weight" not in self.w:
            return super().after(path)
        hidden, word = self.hidden[len(path)], self.embedding[[self.text[-1], *path][-1]]
        name = "hidden_correction"
        both = torch.cat([rms(hidden, self.w[f"{name}.hidden_norm.weight"]), self.norm(f"{name}.embed_norm", word)])
        inner = silu(self.apply(f"{name}.gate_proj", both)) * self.apply(f"{name}.up_proj", both)
        every = torch.full((self.kind.vocab,), -torch.inf, dtype=torch.double)
        every[self.tokens] = self.logits(hidden + self.apply(f"{name}.down_proj", inner))
        return every


def angelspec(kind, given, **changes):
    """As its trainer saves it; num_target_layers is the number of hidden states that are read."""
    config = layer_settings(kind) | {
        "architectures": ["Qwen3DFlyModel"], "block_size": kind.block, "mask_token_id": kind.mask,
        "target_layer_ids": [*kind.ids], "num_target_layers": len(kind.ids), "target_num_hidden_layers": 4,
        "target_hidden_size": kind.width, "enable_hidden_correction": True,
        "hidden_correction_intermediate_size": INNER,
    }  # fmt: skip
    names = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}

    def theirs(name):
        return next((name.replace(ours, other, 1) for ours, other in names.items() if name.startswith(ours)), name)

    return config | changes, {theirs(name): tensor for name, tensor in given.items()}


def converted(kind, given, **changes):
    """With the published names of DFlash, and its settings in dflash_config."""
    config = angelspec(kind, given)[0] | {"model_arch": "dfly", "hidden_correction_type": "swiglu"}
    inside = {key: config.pop(key) for key in ("mask_token_id", "target_layer_ids")}
    return config | {"dflash_config": inside} | changes, given


def speculators(kind, given, **changes):
    """With hidden states instead of layers."""
    config = {
        "speculators_model_type": "dfly", "architectures": ["DFlyDraftModel"], "block_size": kind.block,
        "mask_token_id": kind.mask, "aux_hidden_state_layer_ids": [each + 1 for each in kind.ids],
        "draft_vocab_size": kind.drafted, "transformer_layer_config": layer_settings(kind),
        "sliding_window_non_causal": True, "hidden_correction_intermediate_size": None,
    }  # fmt: skip
    return config | changes, given


def plain(kind, scale=1.0):
    return {name: each for name, each in tensors(kind, scale).items() if "correction" not in name}


KIND = Kind(tensors, angelspec, DFlyOracle, {})
LAYOUTS = {
    "AngelSpec": (KIND, {}),
    "AngelSpec, windows, which are not causal": (KIND._replace(write=converted), {"windows": (4, None)}),
    "speculators": (KIND._replace(write=speculators), {"drafted": 24, "own_lm_head": True, "own_embedding": True}),
    "speculators, from the anchor": (
        KIND._replace(write=lambda *given: speculators(*given, sample_from_anchor=True)), {"shift": 1}),
    "without a correction": (
        KIND._replace(tensors=plain, write=lambda *given: angelspec(
            *given, enable_hidden_correction=False, hidden_correction_intermediate_size=None)), {}),
}  # fmt: skip

REFUSED = {
    "num_target_layers 4, and the tensors are of 3": {"num_target_layers": 4},
    "num_target_layers 36, the target has 4": {"target_num_hidden_layers": 36},
    "must give target_layer_ids": {"target_layer_ids": None},
    "hidden_correction_intermediate_size 9, and the tensors are of 12": {"hidden_correction_intermediate_size": 9},
    "enable_hidden_correction False, and the tensors are of True": {"enable_hidden_correction": False},
    "hidden_correction_type 'mlp', and the tensors are of 'swiglu'": {"hidden_correction_type": "mlp"},
    "must give block_size, a positive number, got None": {"block_size": None},
    "kind 'Qwen3DFly2Model', which is not supported": {"architectures": ["Qwen3DFly2Model"]},
    "kind 'dfly2 of speculators', which is not": {"speculators_model_type": "dfly2"},
    "gives markov_rank: 8, which is not known": {"markov_rank": 8},
}
