"""How long recurrent layers take over the nodes of a tree on a CPU, and acceptance, beside other ways.

    python bench/recurrent.py [--nodes 64] [--threads 1] [--json FILE]

A layer has 32 heads of 128 x 128, and products 4096 -> 12288 before it and 4096 -> 4096 behind it, all in fp32.

tree      `tree_delta`, `tree_kda` and `tree_ssd`, compiled: outputs of all nodes from one state
torch     their references
states    a state for each node, in compiled C++: it decays its parent's, reads, and writes its own
products  the layer's two products, by torch.nn.functional.linear
accept    the state behind the longest path

Then whole steps: a target of six layers and 256 columns, every second of them recurrent, and a tree of 16 nodes. Beside
it a target as wide whose layers are all attention, which runs by transformers' modules too.

All take turns. Each ratio is taken within a round, and given with its quartiles.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from common import (
    Row,
    argument_parser,
    environment,
    in_turns,
    options_of,
    random_tree,
    show,
    times_as_fast,
    write_results,
)
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from heavypath.kernels.native.library import compiler_path, flags
from heavypath.kernels.recurrent.acceptance import accept_state
from heavypath.kernels.recurrent.delta import tree_delta
from heavypath.kernels.recurrent.kda import tree_kda
from heavypath.kernels.recurrent.paths import Paths, unit
from heavypath.kernels.recurrent.ssd import tree_ssd
from heavypath.speculative import SpeculativeDecoder, TokenTree

HEADS, COLUMNS, WIDTH = 32, 128, 4096
TARGET = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
EVERY_SECOND = ["linear_attention", "full_attention"] * 3
TARGETS: dict[str, Row] = {
    "olmo2": {},
    "qwen3_5_text": {
        "layer_types": EVERY_SECOND, "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    },
    "granitemoehybrid": {
        "layer_types": EVERY_SECOND, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1,
        "num_local_experts": 0, "shared_intermediate_size": 512, "position_embedding_type": "rope",
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3, "block_auto_adjust_ff_dim": False},
}  # fmt: skip
RULES = {"delta": tree_delta, "kda": tree_kda, "ssd": tree_ssd}
STATES = """
#include <cmath>
#include <cstdint>
// Inputs [N, H, D], gates [N, H, D] and beta [N, H], as e^g; states [1 + N, H, D, D], the first of which is given.
extern "C" void states(int64_t nodes, int64_t heads, const int64_t* parents, const float* q, const float* k,
                       const float* v, const float* gates, const float* beta, float* states, float* out) {
    constexpr int D = 128;
    for (int64_t i = 0; i < nodes; i++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = i * heads + h;
            const float *before = states + ((parents[i] + 1) * heads + h) * D * D, *g = gates + at * D;
            float *own = states + ((i + 1) * heads + h) * D * D, *to = out + at * D, u[D] = {}, sum[D] = {};
            if (beta)
                for (int d = 0; d < D; d++)
                    for (int e = 0; e < D; e++) u[e] += k[at * D + d] * g[d] * before[d * D + e];
            for (int e = 0; e < D; e++) u[e] = beta ? beta[at] * (v[at * D + e] - u[e]) : v[at * D + e];
            for (int d = 0; d < D; d++)
                for (int e = 0; e < D; e++) {
                    own[d * D + e] = g[d] * before[d * D + e] + k[at * D + d] * u[e];
                    sum[e] += q[at * D + d] * own[d * D + e];
                }
            for (int e = 0; e < D; e++) to[e] = sum[e];
        }
}
"""


def compiled_states() -> Callable[..., None]:
    """The function of STATES, compiled as the package's own kernels are."""
    compiler = compiler_path()
    if compiler is None:
        raise SystemExit("a C++ compiler is needed, and none was found")
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "states.cpp", Path(folder) / "states.so"
        source.write_text(STATES)
        subprocess.run([compiler, *flags(), "-shared", str(source), "-o", str(made)], check=True)
        return ctypes.CDLL(str(made)).states


def a_state_for_each_node(
    function: Callable[..., None], kind: str, inputs: Sequence[Tensor], state: Tensor, parents: Tensor
) -> Callable[[], Tensor]:
    """A call that computes outputs [N, H, D] so; what is asked of it is prepared before."""
    query, key, value, gate, *rest = (each[0] for each in inputs)
    if rest:
        query, key = unit(query) * COLUMNS**-0.5, unit(key)
    kept = gate.exp().view(len(gate), HEADS, -1).expand(-1, -1, COLUMNS).contiguous()
    states, out = torch.empty(len(gate) + 1, *state.shape[1:]), torch.empty_like(value)
    states[0] = state[0]
    given = [query.contiguous(), key.contiguous(), value.contiguous(), kept, rest[0] if rest else None, states, out]

    def run() -> Tensor:
        pointers = [ctypes.c_void_p(each if each is None else each.data_ptr()) for each in (parents, *given)]
        function(ctypes.c_int64(len(gate)), ctypes.c_int64(HEADS), *pointers)
        return out

    return run


def measured(kind: str, nodes: int, width: int, rounds: int, function: Callable[..., None]) -> Row:
    """One rule over a tree. width: columns of the layer's input."""
    parents, mask = torch.tensor([*random_tree(nodes).parents]), torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask[node] |= mask[parents[node]]
    paths, (query, key, value) = Paths(mask[None]), torch.randn(3, 1, nodes, HEADS, COLUMNS)
    gate = -torch.rand(1, nodes, HEADS, *[COLUMNS] * (kind == "kda"))
    inputs = (query, key, value, gate, torch.rand(1, nodes, HEADS))[: 4 if kind == "ssd" else 5]
    state, rule = torch.randn(1, HEADS, COLUMNS, COLUMNS), RULES[kind]
    before, behind = torch.randn(3 * HEADS * COLUMNS, width) / 64, torch.randn(width, HEADS * COLUMNS) / 64
    hidden = torch.randn(nodes, width)
    out, kept = rule(*inputs, state, paths)
    each = a_state_for_each_node(function, kind, inputs, state, parents)
    torch.testing.assert_close(each(), out[0], rtol=1e-4, atol=1e-4)
    longest = paths.mask[0].sum(1).argmax()
    path = paths.mask[0, longest].nonzero()[:, 0][None]
    count, moved = torch.tensor([path.shape[1]]), state.clone()
    times = in_turns(
        {
            "tree": partial(rule, *inputs, state, paths),
            "torch": partial(rule, *inputs, state, paths, impl="torch"),
            "states": each,
            "products": lambda: linear(linear(hidden, before)[:, : HEADS * COLUMNS], behind),
            "accept": partial(accept_state, moved, kept, path, count, normalised=kind != "ssd"),
        },
        rounds,
    )
    row: Row = {"rule": kind, "nodes": nodes, "depth": path.shape[1]}
    for name, seconds in times.items():
        row[f"{name}_ms"] = 1000 * median(seconds)
    row["of_states"] = times_as_fast(times, "states", "tree")  # what part of the time of a state for each node
    row["of_layer"] = times_as_fast(
        {"tree": times["tree"], "layer": [sum(pair) for pair in zip(times["tree"], times["products"], strict=True)]},
        "layer", "tree",
    )  # fmt: skip
    return row


def random_model(kind: str, **settings: object) -> PreTrainedModel:
    """A model of a family with the sizes of `TARGET`, but for these settings."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**TARGET, **settings})).eval()


def steps(rounds: int, new_tokens: int) -> list[Row]:
    """Milliseconds of a step of each target, and how many times as long it takes as the one of attention alone."""
    draft = random_model("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    tree, prompt = TokenTree.from_branching([3, 2, 1, 1]), torch.arange(40)[None]
    decoders = {
        kind: SpeculativeDecoder(random_model(kind, **own), draft, "sequoia", tree=tree)
        for kind, own in TARGETS.items()
    }
    counts = {kind: each.generate(prompt, new_tokens).stats.steps for kind, each in decoders.items()}
    times = in_turns({kind: partial(each.generate, prompt, new_tokens) for kind, each in decoders.items()}, rounds)
    a_step = {kind: [one / counts[kind] for one in seconds] for kind, seconds in times.items()}
    return [
        {"target": kind, "step_ms": 1000 * median(each), "of_dense": times_as_fast(a_step, "olmo2", kind)}
        for kind, each in a_step.items()
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    arguments = options_of(parser, words)
    torch.manual_seed(0)
    facts, function = environment("cpu"), compiled_states()
    size = (9, 64, 1) if arguments.miniature else (arguments.nodes, WIDTH, 15)
    rows = [measured(kind, *size, function) for kind in RULES]
    show(rows)
    whole = steps(*((1, 2) if arguments.miniature else (15, 24)))
    show(whole)
    write_results(arguments.json, facts, rows=rows, steps=whole)


if __name__ == "__main__":
    main()
