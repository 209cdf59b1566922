"""LiLiCorr: its tensors and formulas, by both names of its tensors, and what is refused."""

import torch
from block_checkpoints import Oracle, tensors_of, zlab
from block_kinds import Kind
from head_checkpoints import rms
from torch.nn.functional import silu

WIDTH, HEADS, FACTORS, INNER = 12, 2, 5, 18
SCALE, FEATURES = 4.0, 5


def tensors(kind, scale=1.0, width=WIDTH):
    """By z-lab's names of the backbone, and SGLang's of the rest."""
    found = tensors_of(kind, scale=scale)

    def linear(name, rows, columns):
        found[f"lilicorr.{name}.weight"] = torch.randn(rows, columns) / columns**0.5
        found[f"lilicorr.{name}.bias"] = torch.randn(rows) / 2

    for name, rows, columns in (
        ("token_proj", width, kind.width), ("pass_hidden_proj", width, kind.width),
        ("context_proj", width, kind.width), ("feature_mlp.1", width, FEATURES), ("feature_mlp.3", width, width),
        ("factor_input_proj", width, 3 * width), ("out_head", FACTORS, width), ("in_head", FACTORS, width),
        ("anchor_out_head", FACTORS, width), ("layers.0.mlp.0", INNER, width), ("layers.0.mlp.2", width, INNER),
        ("layers.0.attn.out_proj", width, width),
    ):  # fmt: skip
        linear(name, rows, columns)
    found["lilicorr.layers.0.attn.in_proj_weight"] = torch.randn(3 * width, width) / width**0.5
    found["lilicorr.layers.0.attn.in_proj_bias"] = torch.randn(3 * width)
    for name in ("feature_mlp.0", "output_norm", "anchor_norm", "layers.0.attn_norm", "layers.0.mlp_norm"):
        found[f"lilicorr.{name}.weight"] = 1 + torch.randn(FEATURES if "feature" in name else width) / 4
    found["lilicorr.feature_mlp.0.bias"] = torch.randn(FEATURES)
    found["lilicorr.slot_embedding"] = torch.randn(1, 1, kind.block - 1, 1, width)
    found["lilicorr.rank_embedding"] = torch.randn(1, 1, 1, kind.selected, width)
    found["lilicorr.relative_slot_bias"] = torch.randn(HEADS, 2 * kind.block - 1)
    found["lilicorr.same_slot_bias"] = torch.randn(HEADS)
    return found


class LiLiCorrOracle(Oracle):
    """Candidate by candidate, over the whole block."""

    def __init__(self, *given):
        super().__init__(*given)
        said = [base - base.exp().sum().log() for base in self.base]
        self.best = [each.argsort(descending=True)[: self.kind.selected].tolist() for each in self.base]
        self.said = [[float(each[token]) for token in best] for each, best in zip(said, self.best, strict=True)]
        self.places = [(depth, rank) for depth in range(len(self.best)) for rank in range(self.kind.selected)]
        self.encode()

    def own(self, name, x):
        return self.apply(f"lilicorr.{name}", x)

    def part(self, name, x):
        return rms(x, self.w[f"lilicorr.{name}.weight"])

    def encode(self):
        states = [self.candidate(*place) for place in self.places]
        normed = [self.part("layers.0.attn_norm", state) for state in states]
        states = [state + mixed for state, mixed in zip(states, self.attended(normed), strict=True)]
        for i, state in enumerate(states):
            inner = silu(self.own("layers.0.mlp.0", self.part("layers.0.mlp_norm", state)))
            states[i] = self.part("output_norm", state + self.own("layers.0.mlp.2", inner))
        anchor = self.own("context_proj", self.context[-1]) if self.context else torch.zeros(WIDTH).double()
        anchor = self.part("anchor_norm", anchor)
        self.start, self.out, self.into = unit(self.own("anchor_out_head", anchor)), {}, {}
        for place, state in zip(self.places, states, strict=True):
            factor = silu(self.own("factor_input_proj", torch.cat([state, anchor, state * anchor])))
            self.out[place], self.into[place] = unit(self.own("out_head", factor)), unit(self.own("in_head", factor))

    def candidate(self, depth, rank):
        said = self.said[depth][rank]
        features = torch.tensor([
            said, torch.tensor(said).double().exp(), said - self.said[depth][0],
            rank / max(self.kind.selected - 1, 1), float(rank == 0),
        ]).double()  # fmt: skip
        features = (features - features.mean()) / (features.var(unbiased=False) + 1e-5).sqrt()
        features = features * self.w["lilicorr.feature_mlp.0.weight"] + self.w["lilicorr.feature_mlp.0.bias"]
        state = self.own("token_proj", self.embedding[self.best[depth][rank]])
        state = state + self.own("pass_hidden_proj", self.hidden[depth])
        state = state + self.own("feature_mlp.3", silu(self.own("feature_mlp.1", features)))
        slots, ranks = (self.w[f"lilicorr.{name}_embedding"].reshape(-1, WIDTH) for name in ("slot", "rank"))
        return state + slots[depth] + ranks[rank]

    def attended(self, states):
        weight, bias, size = (
            *(self.w[f"lilicorr.layers.0.attn.in_proj_{n}"] for n in ("weight", "bias")),
            WIDTH // HEADS,
        )
        parts = [(weight @ state + bias).view(3, HEADS, size) for state in states]
        found = []
        for (depth, _), (query, _, _) in zip(self.places, parts, strict=True):
            mixed = []
            for head in range(HEADS):
                scores = []
                for (other, _), (_, key, _) in zip(self.places, parts, strict=True):
                    score = query[head] @ key[head] / size**0.5
                    score = score + self.w["lilicorr.relative_slot_bias"][head, depth - other + self.kind.block - 1]
                    scores.append(score + (self.w["lilicorr.same_slot_bias"][head] if depth == other else 0))
                shares = torch.stack(scores).softmax(0)
                mixed.append(sum(share * part[2][head] for share, part in zip(shares, parts, strict=True)))
            found.append(self.own("layers.0.attn.out_proj", torch.cat(mixed)))
        return found

    def after(self, path=()):
        every = torch.full((self.kind.vocab,), -torch.inf, dtype=torch.double)
        depth = len(path)
        if depth < len(self.base):
            for rank, token in enumerate(self.best[depth]):
                into = self.into[depth, rank]
                if not depth:
                    every[token] = SCALE * self.start @ into
                elif path[-1] in self.best[depth - 1]:
                    every[token] = SCALE * self.out[depth - 1, self.best[depth - 1].index(path[-1])] @ into
                else:
                    every[token] = self.said[depth][rank]
        return every


def unit(vector):
    return vector / vector.square().sum().sqrt()


def published(kind, given, **inside):
    """As SGLang reads it."""
    sizes = {"candidate_topk": kind.selected, "hidden_size": WIDTH, "num_layers": 1, "num_heads": HEADS,
             "mlp_ratio": INNER / WIDTH, "factor_dim": FACTORS, "vector_eps": 1e-4, "logit_scale": SCALE}  # fmt: skip
    config = zlab(kind, **{f"lilicorr_{name}": value for name, value in sizes.items()} | inside)[0]
    return config | {"architectures": ["LiLiCorrDraftModel"]}, given


def by_other_names(kind, given):
    """As others export it: MLPs by name, and one dimension less."""
    names = {"feature_mlp.0.": "feature_norm.", "feature_mlp.1.": "feature_mlp.up_proj.", "mlp.0.": "mlp.up_proj.",
             "feature_mlp.3.": "feature_mlp.down_proj.", "mlp.2.": "mlp.down_proj."}  # fmt: skip
    found = {}
    for name, tensor in given.items():
        theirs = next((name.replace(ours, other) for ours, other in names.items() if ours in name), name)
        found[f"model.{theirs}"] = tensor[0] if "embedding" in name and tensor.dim() == 5 else tensor
    return published(kind, given)[0], found


KIND = Kind(tensors, published, LiLiCorrOracle, {"selected": 3})
LAYOUTS = {
    "SGLang's": (KIND, {}),
    "by other names": (KIND._replace(write=by_other_names), {}),
    "convolutions, multiplied": (KIND, {"conv": 2, "multiplier": 0.5}),
    "one level": (KIND, {"block": 2}),
}

REFUSED = {
    "must give lilicorr_factor_dim, a positive number, got None": {"lilicorr_factor_dim": None},
    "must give lilicorr_logit_scale, above 0, at most .*, got 0": {"lilicorr_logit_scale": None},
    r"anchor_out_head.bias has shape \[5\], expected \[6\]": {"lilicorr_factor_dim": 6},
    "causal True, and the tensors are of False": {"causal": True},
    "lilicorr_enabled False, and the tensors are of True": {"lilicorr_enabled": False},
    "gives lilicorr_depth: 2, which is not known": {"lilicorr_depth": 2},
    "no such LiLiCorr can be": {"lilicorr_num_heads": 5},
}
