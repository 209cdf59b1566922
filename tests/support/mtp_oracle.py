"""What an MTP layer says after a text and a path of drafted tokens, of the formulas and its published tensors alone.

In fp64, entry by entry from nothing, with none of the package's code and none of transformers' layers. The target gives
its hidden states.
"""

import torch
from head_checkpoints import turned
from torch.nn.functional import silu


class MtpOracle:
    """Of the tensors that a checkpoint has of the layer, by their published names without the target's prefix.

    names: of the norms of the embedding, of the hidden state and of the output, and of the first product; of the block
    """

    def __init__(self, target, tensors, names, rope, window=None, turns=True):
        self.config = target.config.get_text_config()
        self.target = target
        self.w = {name: tensor.double() for name, tensor in tensors.items()}
        *self.names, self.block = names
        self.rope, self.window, self.turns = rope, window, turns

    def laws(self, text, below):
        """Logits after the text and after each of the drafted tokens below it."""
        with torch.no_grad():
            states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, :-1].double()
            words = self.target.get_input_embeddings()(torch.tensor([*text, *below])).double()
            head = self.target.get_output_embeddings().weight.double()
        before, after, last, joining = self.names
        given, inputs, found = [*states], [], []
        for entry in range(len(text) - 1 + len(below)):
            both = torch.cat([self.norm(before, words[entry + 1]), self.norm(after, given[entry])])
            inputs.append(self.w[f"{joining}.weight"] @ both)
            if entry < len(text) - 2:
                continue
            out = self.norm(last, self.layer(inputs))
            found.append(head @ out)
            given.append(out)
        return torch.stack(found)

    def norm(self, name, x):
        weight = self.w[f"{name}.weight"]
        if self.config.model_type.startswith("qwen3"):
            weight = 1 + weight
        return weight * x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()

    def apply(self, name, x):
        return x @ self.w[f"{self.block}{name}.weight"].T

    def layer(self, inputs):
        """The output for the last entry."""
        normed = torch.stack([self.norm(f"{self.block}input_layernorm", each) for each in inputs])
        first = 0 if self.window is None else max(0, len(inputs) - self.window)
        attention = self.latent if f"{self.block}self_attn.kv_b_proj.weight" in self.w else self.attention
        hidden = inputs[-1] + attention(normed, first)
        return hidden + self.mlp(self.norm(f"{self.block}post_attention_layernorm", hidden))

    def attention(self, normed, first):
        config, width = self.config, self.config.head_dim
        query = self.apply("self_attn.q_proj", normed[-1]).view(config.num_attention_heads, -1)
        query, gate = query[:, :width], query[:, width:]
        keys, values = (self.apply(f"self_attn.{name}_proj", normed).view(len(normed), -1, width) for name in "kv")
        query, keys = (self.norm(f"{self.block}self_attn.{name}_norm", each) for name, each in
                       (("q", query), ("k", keys)))  # fmt: skip
        query = self.turned(query, len(normed) - 1)
        keys = torch.stack([self.turned(key, place) for place, key in enumerate(keys)])
        mixed = []
        for head in range(config.num_attention_heads):
            own = head * config.num_key_value_heads // config.num_attention_heads
            shares = (keys[first:, own] @ query[head] / width**0.5).softmax(0)
            mixed.append(shares @ values[first:, own])
        mixed = torch.stack(mixed)
        return self.apply("self_attn.o_proj", (mixed * torch.sigmoid(gate) if gate.numel() else mixed).flatten())

    def latent(self, normed, first):
        """DeepSeek's attention of latent vectors, whose rotary parts are of neighbouring pairs."""
        config, heads = self.config, self.config.num_attention_heads
        plain, turning = config.qk_nope_head_dim, config.qk_rope_head_dim
        query = self.norm(f"{self.block}self_attn.q_a_layernorm", self.apply("self_attn.q_a_proj", normed[-1]))
        query = self.apply("self_attn.q_b_proj", query).view(heads, plain + turning)
        both = self.apply("self_attn.kv_a_proj_with_mqa", normed)
        latents, shared = both[:, : config.kv_lora_rank], both[:, config.kv_lora_rank :]
        latents = self.norm(f"{self.block}self_attn.kv_a_layernorm", latents)
        whole = self.apply("self_attn.kv_b_proj", latents).view(len(normed), heads, -1)
        mixed = []
        for head in range(heads):
            scores = whole[:, head, :plain] @ query[head, :plain]
            asked = self.in_pairs(query[head, plain:], len(normed) - 1)
            scores += torch.stack([self.in_pairs(each, place) @ asked for place, each in enumerate(shared)])
            shares = (scores[first:] / (plain + turning) ** 0.5).softmax(0)
            mixed.append(shares @ whole[first:, head, plain:])
        return self.apply("self_attn.o_proj", torch.cat(mixed))

    def turned(self, heads, place):
        """The first columns of each head, turned."""
        if not self.turns:
            return heads
        columns = int(heads.shape[-1] * self.rope.get("partial_rotary_factor", 1))
        return torch.cat([turned(heads[:, :columns], place, self.rope["rope_theta"]), heads[:, columns:]], -1)

    def in_pairs(self, vector, place):
        return turned(torch.cat([vector[::2], vector[1::2]])[None], place, self.rope["rope_theta"])[0]

    def mlp(self, x):
        names = {name.removeprefix(f"{self.block}mlp.") for name in self.w if name.startswith(f"{self.block}mlp.")}
        if "gate_proj.weight" in names:
            return self.gated("", x)
        router = "router.gate" if "router.gate.weight" in names else "gate"
        scores = self.apply(f"mlp.{router}", x)
        biased = [name for name in names if name.endswith("bias")]
        shares = scores.sigmoid() if biased else scores.softmax(0)
        best = (shares + (self.w[f"{self.block}mlp.{biased[0]}"] if biased else 0)).topk(
            self.config.num_experts_per_tok
        )
        weights = shares[best.indices]
        if getattr(self.config, "norm_topk_prob", True):
            weights = weights / weights.sum()
        scale = getattr(self.config, "routed_scaling_factor", getattr(self.config, "router_scaling_factor", 1))
        out = sum(scale * weight * self.gated(f"experts.{int(index)}.", x) for weight, index in
                  zip(weights, best.indices, strict=True))  # fmt: skip
        for shared in ("shared_experts.", "shared_mlp.", "shared_expert."):
            if f"{shared}up_proj.weight" in names:
                gate = self.apply("mlp.shared_expert_gate", x).sigmoid() if shared == "shared_expert." else 1
                out = out + gate * self.gated(shared, x)
        return out

    def gated(self, part, x):
        inner = silu(self.apply(f"mlp.{part}gate_proj", x)) * self.apply(f"mlp.{part}up_proj", x)
        return self.apply(f"mlp.{part}down_proj", inner)
