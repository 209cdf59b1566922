"""The compiled pass over a target of a few shapes by its number of rows, and what this CPU could do at best.

    [HEAVYPATH_MARCH=x86-64-v3] python bench/native.py [--shape smollm2] [--dtype float32] [--prefix 128] [--json FILE]

The weights are random. A pass is of a chain of so many nodes behind a prefix. It reads all weights, and multiplies each
node by them:

    read      a dot product of the halves of every weight, from the copies that the pass reads (PyTorch)
    multiply  a product of two matrices of 1,024 x 1,024 in fp32, by oneDNN or MKL, the faster of the two
    bound     the longer of the two for this pass: the time to read the weights, and the time to multiply by them
    products  the products of the pass alone, by the compiled kernels
    pass      the whole pass, with norms, attention and logits

Times are medians, in milliseconds. All of a round is measured in turns. --processor-time counts the time that the
process has a core, by which one thread can be measured where other processes run, too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from common import Row, Run, argument_parser, environment, in_turns, options_of, report
from transformers import LlamaConfig, LlamaForCausalLM

from heavypath.kernels.native.library import compiled_for
from heavypath.kernels.native.products import Blocks, product
from heavypath.kernels.native.recording import recorded
from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.linear import Linears
from heavypath.speculative.models.llama import LlamaForward

SHAPES = {  # hidden, intermediate, layers, heads, key heads, tokens
    "miniature": (64, 128, 2, 4, 2, 200),
    "shipped": (320, 864, 8, 10, 5, 1024),
    "smollm2": (576, 1536, 30, 9, 3, 49152),
    "llama-1b": (2048, 8192, 16, 32, 8, 128256),
}
ROWS = (1, 2, 4, 8, 16, 32, 64)
SIDE = 1024


def model_of(shape: str, dtype: torch.dtype) -> Any:
    """A Llama of this shape with random weights, whose head is its embedding."""
    hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True, dtype=dtype,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def blocks_of(model: Any) -> list[Blocks]:
    """The copies of the weights that the pass reads, in the order of reading."""
    linears, found = Linears("the products", model.parameters()), []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [linears.copy_of([attention.q_proj, attention.k_proj, attention.v_proj])]
        found += [linears.copy_of([attention.o_proj]), linears.copy_of([mlp.gate_proj, mlp.up_proj], paired=True)]
        found += [linears.copy_of([mlp.down_proj])]
    return [each.blocks for each in [*found, linears.copy_of([model.lm_head])]]


def multiply_seconds(rounds: int, clock: Callable[[], float]) -> float:
    """Seconds of a multiplication and an addition, at the best rate of this CPU."""
    left = torch.randn(SIDE, SIDE)
    ways = {
        "MKL": lambda: left @ left,
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(left, left, None, "none", [], ""),
    }
    return min(map(min, in_turns(ways, rounds, clock=clock).values())) / SIDE**3


def pass_of(forward: LlamaForward, nodes: int, prefix: int) -> Run:
    """A pass of a chain of nodes behind a prefix of so many tokens, as steps repeat it."""
    cache = forward.new_cache(1, prefix + nodes)
    vocab = forward.model.config.vocab_size
    forward.prefill(torch.randint(vocab, (1, prefix)), cache)
    places = torch.arange(prefix, prefix + nodes)[None]
    end = torch.full((nodes,), nodes)
    mask = TreeMask(prefix_length=torch.tensor(prefix), visible_rows=prefix + nodes, subtree_end=end)
    tokens = torch.randint(vocab, (1, nodes))
    with recorded() as recording:
        forward(tokens, places, places, cache, mask)
    return recording.replay


def products_of(blocks: Sequence[Blocks], nodes: int) -> Run:
    """The products of a pass, without Python between them."""
    given = [torch.randn(nodes, each.struct.columns).to(each.weight.dtype) for each in blocks]
    with recorded() as recording:
        for hidden, each in zip(given, blocks, strict=True):
            product(hidden, each)
    return recording.replay


def rows_of(shape: str, dtype: torch.dtype, prefix: int, rounds: int, clock: Callable[[], float]) -> Iterator[Row]:
    """One row of results for each number of nodes."""
    model = model_of(shape, dtype)
    forward, blocks = LlamaForward(model), blocks_of(model)
    halves = [each.weight.view(2, -1).view(torch.float32) for each in blocks]
    nbytes, weights = sum(each.nbytes for each in halves), sum(each.weight.numel() for each in blocks)
    multiply = multiply_seconds(rounds, clock)
    runs: dict[str, Run] = {"read": lambda: [torch.dot(first, second) for first, second in halves]}
    for nodes in ROWS:
        runs[f"pass {nodes}"] = pass_of(forward, nodes, prefix)
        runs[f"products {nodes}"] = products_of(blocks, nodes)
    times = {name: median(every) for name, every in in_turns(runs, rounds, clock=clock).items()}
    read = times["read"]
    for nodes in ROWS:
        whole, products, multiplied = times[f"pass {nodes}"], times[f"products {nodes}"], nodes * weights * multiply
        yield {
            "instructions": compiled_for(),
            "shape": shape,
            "dtype": str(dtype).removeprefix("torch."),
            "prefix": prefix,
            "nodes": nodes,
            "read ms": round(1e3 * read, 2),
            "multiply ms": round(1e3 * multiplied, 2),
            "bound ms": round(1e3 * max(read, multiplied), 2),
            "products ms": round(1e3 * products, 2),
            "pass ms": round(1e3 * whole, 2),
            "pass of bound": round(max(read, multiplied) / whole, 2),
            "t(n) / t(1)": round(whole / times["pass 1"], 2),
            "bound(n) / read": round(max(read, multiplied) / read, 2),
            "GB/s": round(nbytes / whole / 1e9, 1),
            "GB/s read": round(nbytes / read / 1e9, 1),
            "GFLOP/s": round(2 * nodes * weights / whole / 1e9, 1),
            "GFLOP/s at best": round(2 / multiply / 1e9, 1),
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one shape in one type, and print or keep a row for each number of nodes."""
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prefix", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processor-time", action="store_true")
    given = options_of(parser, argv, shape="miniature", rounds=1)
    if given.prefix < 1:
        parser.error(f"--prefix must be at least 1, got {given.prefix}")
    clock = time.process_time if given.processor_time else time.perf_counter
    with torch.inference_mode():
        rows = rows_of(given.shape, getattr(torch, given.dtype), given.prefix, given.rounds, clock)
        facts, constant = environment("cpu", given, "processor_time"), ("instructions", "shape", "dtype", "prefix")
        report(rows, facts, given.json, without=constant, title=compiled_for())


if __name__ == "__main__":
    main()
