"""Checkpoints of heads as their authors lay them out, and what they compute, written down a second time.

`official` makes a head's tensors by the names of the official checkpoints; `as_speculators` renames them. `oracle`
computes such a head's logits token by token, with none of the package's code; `driven` has an `EagleHead` compute them.
"""

import json
from types import SimpleNamespace

import torch
from head_cases import drafted_by, entries_over
from safetensors.torch import save_file
from tiny_models import tiny_llama
from torch.nn.functional import silu

LAYERS, WIDTH, VOCAB = 8, 16, 40
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
DRAFTED = [8, 9]  # two levels below the root


def tiny_target(width=WIDTH, vocab=VOCAB, layers=LAYERS):
    shape = {"hidden_size": width, "num_key_value_heads": 2, "intermediate_size": 32}
    return tiny_llama(7, vocab, layers, **shape, rope_theta=5e5, initializer_range=0.2)


def variant(**options):
    """A kind of head: the defaults are an official EAGLE-3 of fewer tokens than the target."""
    usual = {
        "generation": 3, "width": WIDTH, "read": WIDTH, "inner": 24, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "layers": 1, "drafted": 24, "taps": (2, LAYERS // 2, LAYERS - 3), "theta": 10000.0, "biases": (),
        "head_norms": False, "tap_norms": False, "norm_before_fc": False, "norm_before_residual": False,
        "feeds_back_normed": False, "own_embedding": False, "own_lm_head": True,
    }  # fmt: skip
    if options.get("generation") == 1:
        usual |= {"drafted": VOCAB, "taps": (LAYERS,), "own_embedding": True, "own_lm_head": False}
    assert not options.keys() - usual.keys()
    return SimpleNamespace(**(usual | options))


def official(kind):
    """Its tensors, of random numbers, by the names of the official checkpoints; norms are no ones either."""
    torch.manual_seed(1)
    third, width = kind.generation == 3, kind.width
    tensors = {}

    def linear(name, rows, columns):
        tensors[f"{name}.weight"] = torch.randn(rows, columns) / columns**0.5
        if name.split(".")[-1] in kind.biases:
            tensors[f"{name}.bias"] = torch.randn(rows) / 2

    def norm(name, size):
        tensors[f"{name}.weight"] = 1 + torch.randn(size) / 4

    linear("fc", width, len(kind.taps) * kind.read + (0 if third else width))
    for index in range(kind.layers):
        first = index == 0
        layer = "midlayer" if third and first else f"layers.{index}"
        columns = 2 * width if third and first else width
        for part, heads in (("q", kind.heads), ("k", kind.kv_heads), ("v", kind.kv_heads)):
            linear(f"{layer}.self_attn.{part}_proj", heads * kind.head_dim, columns)
        linear(f"{layer}.self_attn.o_proj", width, kind.heads * kind.head_dim)
        linear(f"{layer}.mlp.gate_proj", kind.inner, width)
        linear(f"{layer}.mlp.up_proj", kind.inner, width)
        linear(f"{layer}.mlp.down_proj", width, kind.inner)
        norm(f"{layer}.post_attention_layernorm", width)
        if third or not first:
            norm(f"{layer}.input_layernorm", width)
        if third and first:
            norm(f"{layer}.hidden_norm", width)
        for part in "qk" if kind.head_norms else "":
            norm(f"{layer}.self_attn.{part}_norm", kind.head_dim)
    for tap in range(3 if kind.tap_norms else 0):
        norm(f"fc_norm.{tap}", kind.read)
    if kind.norm_before_fc:
        norm("input_norm", len(kind.taps) * kind.read)
    if third:
        norm("norm", width)
    if kind.own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, width)
    if kind.own_lm_head:
        linear("lm_head", kind.drafted, width)
    if kind.drafted < VOCAB:
        kept = torch.randperm(VOCAB)[: kind.drafted].sort().values
        tensors["d2t"] = kept - torch.arange(kind.drafted)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), kept)
    return tensors


def settings(kind, **more):
    """config.json of the official layout."""
    found = {
        "architectures": ["LlamaForCausalLMEagle3" if kind.generation == 3 else "LlamaForCausalLM"],
        "model_type": "llama", "hidden_size": kind.width, "intermediate_size": kind.inner, "head_dim": kind.head_dim,
        "num_attention_heads": kind.heads, "num_key_value_heads": kind.kv_heads, "num_hidden_layers": 1,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 4,
        "rope_theta": kind.theta,
    }  # fmt: skip
    found |= {"draft_vocab_size": kind.drafted} if kind.generation == 3 else {"bias": "fc" in kind.biases}
    return found | more


def as_speculators(kind, **more):
    """config.json and tensors as vllm-project/speculators writes them."""
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in official(kind).items()}
    layer = settings(kind)
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    written = {"transformer_layer_config": layer, "speculators_config": {"algorithm": "eagle3"}}
    if kind.generation == 1:
        renamed.pop("embed_tokens.weight", None)
        renamed = {name.replace("layers.0.", "transformer."): tensor for name, tensor in renamed.items()}
        renamed = {name.replace("fc.", "fusion_fc."): tensor for name, tensor in renamed.items()}
        written |= {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": "fc" in kind.biases}
    else:
        written |= {
            "speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], "target_hidden_size": None,
            "draft_vocab_size": layer.pop("draft_vocab_size"), "eagle_aux_hidden_state_layer_ids": list(kind.taps),
            "norm_before_residual": kind.norm_before_residual, "norm_before_fc": kind.norm_before_fc,
            "fc_norm": kind.tap_norms, "norm_output": kind.feeds_back_normed,
        }  # fmt: skip
    return written | more, renamed


def write(folder, config, tensors, how="model.safetensors"):
    """A checkpoint; how: the file of its weights, or the index of two files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    file = how.removesuffix(".index.json")
    parts, names = {file: tensors}, sorted(tensors)
    if how.endswith(".index.json"):
        stem, _, end = file.rpartition(".")
        parts = {f"{stem}-{i + 1:05}-of-00002.{end}": {name: tensors[name] for name in names[i::2]} for i in range(2)}
        map_of_files = {name: part for part, found in parts.items() for name in found}
        (folder / how).write_text(json.dumps({"metadata": {}, "weight_map": map_of_files}))
    for part, found in parts.items():
        if part.endswith((".bin", ".pt")):
            torch.save(found, folder / part)
        else:
            save_file(found, folder / part)
    return folder


def rms(x, weight, eps=1e-5):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x, position, theta):
    """x [heads, D] by the angles of a position: dimension j and j + D/2 turn by position / theta ** (2 j / D)."""
    half = x.shape[-1] // 2
    angle = position / theta ** (torch.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@torch.no_grad()
def oracle(kind, w, target, text=TEXT):
    """Logits [entries, drafted] of a head with the official tensors w, entry by entry: over the text, then DRAFTED."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    third, caches, logits = kind.generation == 3, [[] for _ in range(kind.layers)], []

    def apply(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    for i, token in enumerate([*text[1:], *DRAFTED]):
        e = w.get("embed_tokens.weight", target.model.embed_tokens.weight)[token]
        if i < len(text) - 1:
            f = [states[tap][0, i] for tap in kind.taps]
            f = [rms(tap, w[f"fc_norm.{j}.weight"]) for j, tap in enumerate(f)] if kind.tap_norms else f
            f = torch.cat(f)
            f = rms(f, w["input_norm.weight"]) if kind.norm_before_fc else f
            f = apply("fc", f) if third else f
        x = f if third else apply("fc", torch.cat([e, f]))
        for index, cache in enumerate(caches):
            layer = "midlayer" if third and index == 0 else f"layers.{index}"
            seen = x if index == 0 else rms(x, w[f"{layer}.input_layernorm.weight"])
            if third and index == 0:
                normed = rms(x, w["midlayer.hidden_norm.weight"])
                seen = torch.cat([rms(e, w["midlayer.input_layernorm.weight"]), normed])
                x = normed if kind.norm_before_residual else x
            q, k, v = (apply(f"{layer}.self_attn.{part}_proj", seen).view(-1, kind.head_dim) for part in "qkv")
            if kind.head_norms:
                q, k = rms(q, w[f"{layer}.self_attn.q_norm.weight"]), rms(k, w[f"{layer}.self_attn.k_norm.weight"])
            cache.append((turned(k, i, kind.theta), v))
            shared = (torch.stack(rows, 1) for rows in zip(*cache, strict=True))
            keys, values = (rows.repeat_interleave(kind.heads // kind.kv_heads, 0) for rows in shared)
            scores = keys @ turned(q, i, kind.theta)[:, :, None] / kind.head_dim**0.5
            x = x + apply(f"{layer}.self_attn.o_proj", (scores.softmax(1) * values).sum(1).flatten())
            inner = rms(x, w[f"{layer}.post_attention_layernorm.weight"])
            inner = silu(apply(f"{layer}.mlp.gate_proj", inner)) * apply(f"{layer}.mlp.up_proj", inner)
            x = x + apply(f"{layer}.mlp.down_proj", inner)
        last = rms(x, w["norm.weight"]) if third else x
        f = last if kind.feeds_back_normed else x
        logits.append(w.get("lm_head.weight", target.lm_head.weight) @ last)
    return torch.stack(logits)


def driven(head, target, text=TEXT):
    """The same of an EagleHead."""
    found = entries_over(head, target, torch.tensor(text), DRAFTED)
    return found if head.d2t is None else found[:, drafted_by(head)]
