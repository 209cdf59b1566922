"""Checkpoints of block drafts as their authors lay them out, and what they compute, written down a second time.

`tensors_of` makes a draft's tensors by the names of z-lab's checkpoints; `LAYOUTS` has config.json and tensors of every
layout. `Oracle` computes such a draft's laws row by row, with none of the package's code; `driven` has the package
compute them.
"""

from types import SimpleNamespace

import torch
from head_checkpoints import LAYERS, VOCAB, WIDTH, rms, tiny_target, turned, write
from torch.nn.functional import silu

from heavypath.speculative.drafts.blocks.checkpoint import load_block
from heavypath.speculative.drafts.blocks.config import BlockConfig
from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models.forward_of import forward_of

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
IDS = (1, 3, 6)  # layers whose outputs are read
KEPT = 24  # tokens of a draft that has not all


def variant(**options):
    """A kind of draft: the defaults are z-lab's DFlash."""
    usual = {
        "width": WIDTH, "read": WIDTH, "vocab": VOCAB, "inner": 24, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "layers": 2, "drafted": VOCAB, "ids": IDS, "theta": 10000.0, "block": 5, "mask": 39, "shift": 0,
        "causal": (False, False), "windows": (None, None), "biases": False, "own_embedding": False,
        "own_lm_head": False, "multiplier": 1.0, "cap": None,
        "term": "", "rank": 4, "term_bias": True, "selected": 0, "conv": 0, "group": 4, "state": 6, "plain": 0,
    }  # fmt: skip
    assert not options.keys() - usual.keys()
    return SimpleNamespace(**(usual | options))


def tensors_of(kind, seed=1, scale=1.0):
    """Its tensors, of random numbers, by z-lab's names; norms are no ones either."""
    torch.manual_seed(seed)
    tensors = {}

    def linear(name, rows, columns, bias=False):
        tensors[f"{name}.weight"] = scale * torch.randn(rows, columns) / columns**0.5
        if bias:
            tensors[f"{name}.bias"] = torch.randn(rows) / 2

    def norm(name, size):
        tensors[f"{name}.weight"] = 1 + torch.randn(size) / 4

    linear("fc", kind.width, len(kind.ids) * kind.read)
    for name in ("hidden_norm", "norm"):
        norm(name, kind.width)
    for index in range(kind.layers):
        layer = f"layers.{index}"
        for part, heads in (("q", kind.heads), ("k", kind.kv_heads), ("v", kind.kv_heads)):
            linear(f"{layer}.self_attn.{part}_proj", heads * kind.head_dim, kind.width, kind.biases)
        linear(f"{layer}.self_attn.o_proj", kind.width, kind.heads * kind.head_dim, kind.biases)
        linear(f"{layer}.mlp.gate_proj", kind.inner, kind.width)
        linear(f"{layer}.mlp.up_proj", kind.inner, kind.width)
        linear(f"{layer}.mlp.down_proj", kind.width, kind.inner)
        for name, size in (("self_attn.q_norm", kind.head_dim), ("self_attn.k_norm", kind.head_dim),
                           ("input_layernorm", kind.width), ("post_attention_layernorm", kind.width)):  # fmt: skip
            norm(f"{layer}.{name}", size)
    if kind.own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(kind.vocab, kind.width)
    if kind.own_lm_head:
        linear("lm_head", kind.drafted, kind.width)
    for name in [f"layers.{i}.{part}_conv" for i in range(kind.layers) for part in ("attention", "mlp")]:
        if kind.conv:
            tensors[f"{name}.base_kernel"] = torch.randn(2, kind.conv, kind.width) / 2
            linear(f"{name}.kernel_projection", 2 * kind.conv * kind.width // kind.group, kind.width)
    if kind.term == "selector":
        linear("candidate_selector.hidden_projection", kind.rank, kind.width)
        for name in ("predecessor", "successor"):
            tensors[f"candidate_selector.{name}_codebook"] = torch.randn(kind.vocab, kind.rank)
    elif kind.term == "domino":
        for name, columns in (("ih", kind.width), ("hh", kind.state)):
            tensors[f"prefix_gru.weight_{name}_l0"] = torch.randn(3 * kind.state, columns) / 2
        linear("embed_proj.0", kind.rank, kind.width + kind.state)
        linear("embed_proj.2", kind.drafted, kind.rank)
    elif kind.term:
        tensors["markov_head.markov_w1.weight"] = torch.randn(kind.vocab, kind.rank)
        linear("markov_head.markov_w2", kind.drafted, kind.rank)
    if kind.term == "gated":
        linear("markov_head.gate_proj", kind.rank, kind.width + kind.rank, kind.term_bias)
    elif kind.term == "rnn":
        linear("markov_head.joint_proj", 3 * kind.rank, 2 * kind.rank + kind.width, kind.term_bias)
    if kind.drafted < kind.vocab:
        kept = torch.randperm(kind.vocab)[: kind.drafted].sort().values
        tensors["d2t"] = kept - torch.arange(kind.drafted)
        tensors["t2d"] = torch.isin(torch.arange(kind.vocab), kept)
    return tensors


def of_one_law(target, tensors, logits):
    """A block draft's tensors by which it says the same after every token, as the target does, which is changed to it.

    logits: a quarter of the target's, which has one 1 in its 16 columns before the last norm
    """
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight", "embed_tokens.weight")):
                weight.zero_()
        target.model.norm.weight.fill_(1)
        target.model.embed_tokens.weight[:, 0] = 1
        target.lm_head.weight[:, 0] = torch.tensor(logits)
    return {name: 0 * each if "o_proj" in name or "down_proj" in name else each for name, each in tensors.items()}


def layer_settings(kind):
    """What every config.json has of a Qwen3."""
    found = {
        "model_type": "qwen3", "num_hidden_layers": kind.layers, "hidden_size": kind.width,
        "num_attention_heads": kind.heads, "num_key_value_heads": kind.kv_heads, "head_dim": kind.head_dim,
        "intermediate_size": kind.inner, "rms_norm_eps": 1e-5, "rope_theta": kind.theta, "hidden_act": "silu",
        "attention_bias": kind.biases, "vocab_size": kind.vocab, "tie_word_embeddings": True,
        "max_position_embeddings": 4, "rope_scaling": None, "sliding_window": None,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in kind.windows],
    }  # fmt: skip
    windows = {*kind.windows} - {None}
    return found | ({"sliding_window": windows.pop()} if windows else {})


def zlab(kind, **inside):
    """As z-lab, JetSpec and SpecForge write it."""
    options = {"mask_token_id": kind.mask, "target_layer_ids": [*kind.ids]} | inside
    config = layer_settings(kind) | {
        "architectures": ["DFlashDraftModel"], "block_size": kind.block, "num_target_layers": LAYERS,
        "dflash_config": options,
    }  # fmt: skip
    if kind.cap is not None:
        config["final_logit_softcapping"] = kind.cap
    if kind.multiplier != 1:
        config["output_multiplier"] = kind.multiplier
    if kind.term == "selector":
        options |= {"selector_rank": kind.rank, "selector_top_k": kind.selected}
    elif kind.term == "domino":
        options |= {"projector_type": "domino", "emb_dim": kind.rank, "gru_hidden_dim": kind.state}
        options |= ({"pure_draft_prefix_len": kind.plain} if kind.plain else {}) | inside
    if kind.conv:
        options |= {"conv_kernel_size": kind.conv, "conv_group_size": kind.group}
    return config, tensors_of(kind)


def deepspec(kind, **more):
    """With its keys at the top level, frozen copies of the target's tensors, and an estimate of acceptance."""
    target = tiny_target()
    config = layer_settings(kind) | {
        "architectures": ["Qwen3DFlashModel"], "block_size": kind.block, "mask_token_id": kind.mask,
        "target_layer_ids": [*kind.ids], "num_target_layers": LAYERS, "markov_rank": 0,
    }  # fmt: skip
    if kind.term:
        config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": kind.rank, "markov_head_type": kind.term}
        config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    copies = {"embed_tokens.weight": target.model.embed_tokens.weight, "lm_head.weight": target.lm_head.weight}
    copies = {name: tensor.detach().clone() for name, tensor in copies.items()}
    if kind.term:
        copies |= {"confidence_head.proj.weight": torch.ones(1, kind.width), "confidence_head.proj.bias": torch.ones(1)}
    renamed = {f"model.{name}": tensor for name, tensor in (tensors_of(kind) | copies).items()}
    return config | more, renamed


def speculators(kind, **more):
    """As vllm-project/speculators writes it: numbers of hidden states in place of layers, and copies to be left out."""
    config = {
        "speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "block_size": kind.block,
        "mask_token_id": kind.mask, "aux_hidden_state_layer_ids": [each + 1 for each in kind.ids],
        "draft_vocab_size": kind.drafted, "transformer_layer_config": layer_settings(kind),
        "sliding_window_non_causal": False, "speculators_config": {"algorithm": "dflash"},
    }  # fmt: skip
    extra = {"verifier_norm.weight": torch.ones(kind.width), "verifier_lm_head.weight": torch.ones(2, kind.width)}
    return config | more, tensors_of(kind) | extra


def assistant(kind):
    """As transformers' own class saves it."""
    config = layer_settings(kind) | {
        "model_type": "muse_glimmer_assistant", "architectures": ["MuseGlimmerAssistantModel"],
        "block_size": kind.block, "mask_token_id": kind.mask, "target_layer_ids": [*kind.ids],
        "rope_parameters": {"rope_type": "default", "rope_theta": kind.theta},
    }  # fmt: skip
    renamed = {
        name.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc."): tensor
        for name, tensor in tensors_of(kind).items()
    }
    return config, renamed


def zlab_with(kind, **top):
    """With other keys at the top level of config.json; None leaves one out, or takes it from inside."""
    config, tensors = zlab(kind)
    return config | top, tensors


def early_domino(kind):
    """With the term's tensors in a part of their own, and one of its sizes at the top level of config.json."""
    config, tensors = zlab(kind, shift_label=False)
    config["emb_dim"] = config["dflash_config"].pop("emb_dim")
    nested = {f"logit_head.{name}": tensors.pop(name) for name in [*tensors] if name[:6] in ("prefix", "embed_")}
    return config, tensors | nested


def inside(kind):
    """As of Qwen3.5 on: block_size in dflash_config."""
    config, tensors = zlab(kind, block_size=kind.block)
    del config["block_size"]
    return config, tensors


OWN = {"own_embedding": True, "own_lm_head": True}
SLIDING = {"windows": (4, None), "causal": (True, False)}
DFLASH2 = {"windows": (4, 4), "term": "selector", "selected": 6, "conv": 2, "multiplier": 0.5}
LAYOUTS = {  # what the draft is, and who writes it
    "z-lab": ({}, zlab),
    "z-lab, block_size inside": ({}, inside),
    "z-lab, sliding layers are causal": (SLIDING, zlab),
    "z-lab, a window that is not causal": ({"windows": (None, 4)}, lambda kind: zlab(kind, causal=False)),
    "z-lab, of 8 layers that read 3": ({"layers": 8, "causal": (False,) * 8, "windows": (None,) * 8}, zlab),
    "z-lab, biases, multiplied and capped": ({"biases": True, "multiplier": 1.5, "cap": 3.0}, zlab),
    "z-lab, is_causal at the top counts first": ({}, lambda kind: zlab_with(kind, is_causal=False, causal=True)),
    "z-lab, no layer ids": ({"ids": (1, 5)}, lambda kind: zlab(kind, target_layer_ids=None)),
    "JetSpec": ({"causal": (True, True)}, lambda kind: zlab(kind, causal_head=True)),
    "JetSpec, windows": ({"causal": (True, True), "windows": (3, None)}, lambda kind: zlab(kind, causal_head=True)),
    "DeepSpec": ({"shift": 1, "ids": (-1, 2, 5)}, deepspec),
    "SpecForge, shift_label": ({"shift": 1}, lambda kind: zlab(kind, shift_label=True)),
    "DeepSpec's DSpark without a term": ({"shift": 1}, lambda kind: deepspec(
        kind, architectures=["Qwen3DSparkModel"], markov_head_type="vanilla")),
    "DSpark": ({"shift": 1, "term": "vanilla"}, deepspec),
    "DSpark, gated": ({"shift": 1, "term": "gated"}, deepspec),
    "DSpark, rnn": ({"shift": 1, "term": "rnn", "term_bias": False}, deepspec),
    "DSpark of SpecForge": ({"shift": 1, "term": "gated", "term_bias": False}, lambda kind: zlab(
        kind, projector_type="dspark", markov_rank=kind.rank)),
    "DSpark of SpecForge, by its class": ({"shift": 1, "term": "vanilla"}, lambda kind: zlab_with(
        kind, architectures=["DSparkDraftModel"])),
    "DSpark of SpecForge's class by DeepSpec's keys": ({"shift": 1, "term": "vanilla"}, lambda kind: deepspec(
        kind, architectures=["DSparkDraftModel"])),
    "DSpark of speculators": (OWN | {"drafted": KEPT, "shift": 1, "term": "rnn"}, lambda kind: speculators(
        kind, speculators_model_type="dspark", architectures=["DSparkDraftModel"], markov_rank=kind.rank)),
    "DSpark of speculators, not from the anchor": ({"term": "vanilla"}, lambda kind: speculators(
        kind, speculators_model_type="dspark", sample_from_anchor=False)),
    "DFlash2": (DFLASH2, lambda kind: zlab_with(kind, architectures=["DFlash2DraftModel"], is_causal=False)),
    "DFlash2 of speculators": (DFLASH2, lambda kind: speculators(
        kind, speculators_model_type="dflash2", is_causal=False, selector_top_k=kind.selected, output_multiplier=0.5)),
    "Domino": ({"shift": 1, "term": "domino", "plain": 1}, lambda kind: zlab(kind, shift_label=True)),
    "Domino by its class, a window that is not causal": (
        {"term": "domino", "windows": (4, None)}, lambda kind: (
            zlab(kind, projector_type=None)[0] | {"architectures": ["DominoDraftModel"]}, tensors_of(kind))),
    "Domino, early": ({"term": "domino", "plain": 2}, early_domino),
    "speculators": (OWN | {"drafted": KEPT}, speculators),
    "speculators, from the anchor": (OWN | {"shift": 1}, lambda kind: speculators(kind, sample_from_anchor=True)),
    "speculators, windows": (SLIDING, speculators),
    "speculators, windows, not causal": (
        {"windows": (4, None)}, lambda kind: speculators(kind, sliding_window_non_causal=True),
    ),
    "an assistant of transformers": ({"windows": (4, None)}, assistant),
}  # fmt: skip


class Oracle:
    """The laws of a draft with these tensors after a text, whose last token is the root. All in fp64."""

    def __init__(self, kind, tensors, target, text):
        self.kind = kind
        self.w = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}
        self.tokens = torch.arange(kind.drafted) + tensors.get("d2t", 0)
        self.embedding = self.w.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
        self.head = self.w.get("lm_head.weight", target.get_output_embeddings().weight.double())
        self.text = [*map(int, text)]
        with torch.no_grad():
            states = target(torch.tensor([self.text]), output_hidden_states=True).hidden_states
            self.context = [
                self.norm(
                    "hidden_norm", self.apply("fc", torch.cat([states[id_ + 1][0, t].double() for id_ in kind.ids]))
                )
                for t in range(len(self.text) - 1)
            ]
            self.hidden = self.block()
            self.base = [self.logits(hidden) for hidden in self.hidden]

    def apply(self, name, x):
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def norm(self, name, x):
        return rms(x, self.w[f"{name}.weight"])

    def block(self):
        """The rows that are read, after the last norm, that of depth 1 first."""
        kind, start = self.kind, len(self.text) - 1
        rows = [self.embedding[self.text[-1]]] + [self.embedding[kind.mask]] * (kind.block - 1)
        for index in range(kind.layers):
            rows = self.layer(f"layers.{index}", rows, start, kind.causal[index], kind.windows[index])
        rows = [self.norm("norm", row) for row in rows]
        return rows if kind.shift else rows[1:]

    def layer(self, layer, rows, start, causal, window):
        normed = [self.norm(f"{layer}.input_layernorm", row) for row in rows]
        seen = self.convolved(f"{layer}.attention_conv", 0, normed, normed)
        places = [*enumerate(self.context)] + [(start + r, y) for r, y in enumerate(seen)]
        keys = [turned(self.heads(layer, "k", y), at, self.kind.theta) for at, y in places]
        values = [self.heads(layer, "v", y) for _, y in places]
        out = []
        for r in range(len(rows)):
            query = turned(self.heads(layer, "q", seen[r]), start + r, self.kind.theta)
            last = start + r if causal else start + len(rows) - 1
            first = 0 if window is None else (start + r if causal else start) - window + 1
            picked = [i for i, (at, _) in enumerate(places) if first <= at <= last]
            mixed = []
            for head in range(self.kind.heads):
                own = head * self.kind.kv_heads // self.kind.heads
                scores = torch.stack([keys[i][own] @ query[head] for i in picked]) / self.kind.head_dim**0.5
                mixed.append(sum(p * values[i][own] for p, i in zip(scores.softmax(0), picked, strict=True)))
            out.append(self.apply(f"{layer}.self_attn.o_proj", torch.cat(mixed)))
        out = self.convolved(f"{layer}.attention_conv", 1, out, normed)
        rows = [row + each for row, each in zip(rows, out, strict=True)]
        normed, out = [self.norm(f"{layer}.post_attention_layernorm", row) for row in rows], []
        for inner in self.convolved(f"{layer}.mlp_conv", 0, normed, normed):
            gated = silu(self.apply(f"{layer}.mlp.gate_proj", inner)) * self.apply(f"{layer}.mlp.up_proj", inner)
            out.append(self.apply(f"{layer}.mlp.down_proj", gated))
        out = self.convolved(f"{layer}.mlp_conv", 1, out, normed)
        return [row + each for row, each in zip(rows, out, strict=True)]

    def convolved(self, name, which, given, normed):
        """Row by row and column by column, by the kernels that the sublayer's input makes."""
        size = self.kind.conv
        if not size:
            return given
        base, found = self.w[f"{name}.base_kernel"], []
        for r, row in enumerate(given):
            own, new = self.apply(f"{name}.kernel_projection", normed[r]).view(2, size, -1), torch.zeros_like(row)
            for back in range(min(size, r + 1)):
                for column in range(len(row)):
                    factor = base[which, back, column] + own[which, back, column // self.kind.group]
                    new[column] += factor * given[r - back][column]
            found.append(new)
        return found

    def heads(self, layer, part, y):
        found = self.apply(f"{layer}.self_attn.{part}_proj", y).view(-1, self.kind.head_dim)
        return found if part == "v" else self.norm(f"{layer}.self_attn.{part}_norm", found)

    def logits(self, hidden):
        found = self.kind.multiplier * (self.head @ hidden)
        return found if self.kind.cap is None else self.kind.cap * (found / self.kind.cap).tanh()

    def after(self, path=()):
        """Logits [V] below a path of drafted tokens; of nothing but -inf where it is as deep as the block."""
        every = torch.full((self.kind.vocab,), -torch.inf, dtype=torch.double)
        if len(path) < len(self.base):
            every[self.tokens] = self.base[len(path)] + self.term(path)
        return every

    def term(self, path):
        """What the last of these tokens, or all of them from the root on, add."""
        if not self.kind.term:
            return 0
        if self.kind.term == "selector":
            asked = self.w["candidate_selector.predecessor_codebook"][path[-1] if path else self.text[-1]]
            asked = asked * self.apply("candidate_selector.hidden_projection", self.hidden[len(path)])
            found = torch.full_like(self.base[len(path)], -torch.inf)
            for token in self.base[len(path)].argsort(descending=True)[: self.kind.selected]:
                found[token] = asked @ self.w["candidate_selector.successor_codebook"][token]
            return found
        if self.kind.term == "domino":
            return self.domino([self.text[-1], *path])
        words = [self.w["markov_head.markov_w1.weight"][token] for token in [self.text[-1], *path]]
        word, state = words[-1], torch.zeros(self.kind.rank).double()
        if self.kind.term == "gated":
            beside = torch.cat([self.hidden[len(path)], word])
            word = word * torch.sigmoid(self.apply("markov_head.gate_proj", beside))
        elif self.kind.term == "rnn":
            for each, hidden in zip(words, self.hidden, strict=False):
                z = self.apply("markov_head.joint_proj", torch.cat([state, each, hidden]))
                g, c, o = z.view(3, -1)
                state, word = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh(), o.tanh()
        return self.w["markov_head.markov_w2.weight"] @ word

    def domino(self, tokens):
        """What a path from the root on adds, by PyTorch's own recurrent unit."""
        if len(tokens) <= self.kind.plain:
            return 0
        unit = torch.nn.GRU(self.kind.width, self.kind.state, batch_first=True, bias=False).double()
        with torch.no_grad():
            for name, weight in unit.named_parameters():
                weight.copy_(self.w[f"prefix_gru.{name}"])
            state = unit(torch.stack([self.embedding[token] for token in tokens])[None])[1].flatten()
        return self.apply(
            "embed_proj.2", silu(self.apply("embed_proj.0", torch.cat([self.hidden[len(tokens) - 1], state])))
        )


def loaded(folder, target, kind, config, tensors):
    """The draft, with what it was made of for an `Oracle`."""
    head = load_block(write(folder, config, tensors), target)
    SAID[head] = kind, tensors_of(kind), Oracle
    return head


LAWS = {  # of what drafts of each depend on
    "of depths": {},
    "of tokens": {"term": "vanilla", "shift": 1},
    "of paths": {"term": "rnn", "shift": 1},
    "of paths from depth 2 on": {"term": "domino", "plain": 1, "shift": 1},
    "of few tokens": {"term": "selector", "selected": 3, "conv": 2, "drafted": 7, "own_lm_head": False},
}
SAID = {}  # of drafts that were loaded here: their kinds, tensors, and oracles
ORACLES = {}  # of texts that have been asked about


def said_of(head, target, text):
    """The oracle of a draft that was loaded here, after a text."""
    key = head, tuple(map(int, text))
    if key not in ORACLES:
        kind, tensors, oracle = SAID[head]
        ORACLES[key] = oracle(kind, tensors, target, text)
    return ORACLES[key]


def block_of(target, folder, seed=1, scale=2.0, **options):
    """A random draft for a tiny target, of few tokens and of opinions."""
    text = target.config.get_text_config()
    layers = {"ids": (0, 1)[: text.num_hidden_layers - 1], "mask": text.vocab_size - 1, "vocab": text.vocab_size}
    layers |= {"width": text.hidden_size, "read": text.hidden_size, "drafted": text.vocab_size}
    kind = variant(**(layers | options))
    config, _ = zlab(kind, causal=all(kind.causal), shift_label=bool(kind.shift))
    tensors = tensors_of(kind, seed, scale)
    config["num_target_layers"] = text.num_hidden_layers
    head = load_block(write(folder, config, tensors), target)
    SAID[head] = kind, tensors, Oracle
    return head


def random_block(target, head_dim=8, **changes):
    """A random draft without a checkpoint: half causal, with windows, of all tokens but one, and laws by path."""
    config = target.config.get_text_config()
    width, vocab = config.hidden_size, config.vocab_size
    shape = {
        "kind": "dflash", "hidden_size": width, "target_hidden_size": width, "intermediate_size": 24,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim, "vocab_size": vocab,
        "draft_vocab_size": vocab - 1, "taps": (0, 1), "layers": 2, "head_norms": True, "owns_lm_head": True,
        "block_size": 8, "mask_token_id": 3, "from_root": True, "causal": (True, False), "windows": (4, 6),
        "term": "dspark", "options": {"variant": "rnn", "rank": 4, "bias": False},
    }  # fmt: skip
    head = BlockHead(BlockConfig(**shape | changes))
    torch.manual_seed(2)
    for name, part in head.named_parameters():
        torch.nn.init.normal_(part, mean=float("norm" in name), std=0.3)
    if head.d2t is not None:
        head.d2t.fill_(1)  # all but token 0
    return head.requires_grad_(False).eval().to(target.dtype)


def driven(head, target, text, path=()):
    """Logits [1 + len(path), V] of the package below the root and each token of a path, as a step asks for them."""
    forward = forward_of(target, "target")
    draft = as_draft(head, forward, target)
    length, nodes = len(text) - 1, max(2, 1 + len(path))
    rows = len(text) + nodes
    cache, found = draft.new_cache(1, rows), []
    if length:
        forward.prefill(torch.tensor([text[:-1]]), forward.new_cache(1, rows), taps=draft.taps(cache))
    at = torch.tensor([length])
    for level, token in enumerate([text[-1], *path]):
        here = at[:, None] + level
        seen = torch.ones(1, 1 + level).bool()
        feed = Feed(
            tokens=torch.tensor([[token]]), positions=here, cache_rows=here, parent_rows=here - 1, prefix_lengths=at,
            visible_rows=length + nodes, ancestor_mask=seen, news=3 * (level == 0), levels=len(path) + 1, level=level,
        )  # fmt: skip
        found.append(draft(feed, cache)[0, -1])
    return torch.stack(found)
