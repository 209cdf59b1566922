"""How fast the weights of a target are read in a CUDA graph: by products alone, by a pass, by one with requests ahead.

    python bench/weight_stream.py [--shape llama-8b llama-7b] [--rows 64 16 1] [--prefix 512] [--json FILE]

The weights are random. They are 15 GB (llama-8b) and 13 GB (llama-7b) in bfloat16, so no pass finds any in a cache.

products   all products of a pass, one after another: queries, keys and values; output; gate and up; down; the logits
few rows   the same by the kernel in kernels/layers/few_rows.py, whether it is known to be faster or not
pass       the whole pass of a chain of nodes, with what is between products: norms, rotary embedding, attention, silu
ahead A/S  the pass, which requests A megabytes of the next weight during attention, and S during other small kernels
           (speculative/models/ahead.py)

copy       the share of a large copy's bytes a second at which the weights are read
gain       the time of the pass over this one's

At the end it prints a line for AHEAD in kernels/layers/measured.py: the amounts with the best geometric mean of the
gains over all rows and shapes, if that is at least LEAST_GAIN. Without a GPU only --miniature runs, with no requests.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from statistics import median
from typing import Any

import torch
from common import (
    DEVICE,
    Row,
    Run,
    argument_parser,
    captured,
    clock_of,
    copy_bandwidth,
    environment,
    in_turns,
    options_of,
    report,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from heavypath.kernels.layers import measured
from heavypath.kernels.layers.few_rows import few_rows_product
from heavypath.kernels.layers.measured import Amounts
from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.joined import rows_of as joined_rows
from heavypath.speculative.models.llama import LlamaForward

SHAPES = {  # hidden, intermediate, layers, heads, key heads, tokens
    "miniature": (64, 128, 2, 4, 2, 200),
    "llama-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-7b": (4096, 11008, 32, 32, 32, 32000),
}
AMOUNTS = [Amounts(attention * 10**6, small * 10**6) for attention, small in ((16, 6), (32, 6), (32, 12), (32, 16))]
LEAST_GAIN = 1.01  # below this, requests are not worth it


def model_of(shape: str) -> Any:
    """A Llama of this shape with random weights, made on the device in the dtype that it is measured in."""
    hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads,
    )  # fmt: skip
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    try:
        with torch.device(DEVICE):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)


def as_run(work: Run) -> Run:
    """Work as a CUDA graph where there is a GPU."""
    return captured(work) if DEVICE == "cuda" else work


def products_of(model: Any, rows: int, impl: str = "auto") -> Run:
    """All products of a pass, without what is between them. The model's weights are joined where a pass joined them.

    impl: of `few_rows_product`
    """
    together: list[list[Tensor]] = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        together += [[attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]]
        together += [[attention.o_proj.weight], [mlp.gate_proj.weight, mlp.up_proj.weight], [mlp.down_proj.weight]]
    together += [[model.lm_head.weight]]
    weights: list[Tensor] = []
    for each in together:
        joined = joined_rows(each)
        weights += each if joined is None else [joined]
    inputs = {width: torch.randn(rows, width).to(weights[0]) for width in {weight.shape[1] for weight in weights}}

    def run() -> None:
        for weight in weights:
            few_rows_product(inputs[weight.shape[1]], weight, impl=impl)

    return as_run(run)


def pass_of(forward: LlamaForward, rows: int, prefix: int) -> Run:
    """A pass of a chain of `rows` nodes behind a prefix."""
    cache = forward.new_cache(1, prefix + rows)
    tokens: Tensor = torch.randint(forward.config.vocab_size, (1, rows), device=DEVICE)
    places = torch.arange(prefix, prefix + rows, device=DEVICE)[None]
    end = torch.full((rows,), rows, device=DEVICE)
    mask = TreeMask(prefix_length=torch.tensor(prefix, device=DEVICE), visible_rows=prefix + rows, subtree_end=end)
    return as_run(lambda: forward(tokens, places, places, cache, mask))


def rows_of(given: argparse.Namespace) -> Iterator[Row]:
    """One row of results for each shape, number of rows and way."""
    copy = copy_bandwidth(given.miniature)
    for shape in given.shape:
        model = model_of(shape)
        embedding = model.get_input_embeddings().weight
        nbytes = sum(weight.nbytes for weight in model.parameters() if weight is not embedding)
        plain = LlamaForward(model)
        ways = {"pass": plain}
        for amounts in AMOUNTS if DEVICE == "cuda" else []:
            measured.AHEAD = {torch.cuda.get_device_name(): amounts}
            ways[f"ahead {amounts.attention // 10**6}/{amounts.small // 10**6}"] = LlamaForward(model)
        measured.AHEAD = {}
        for rows in given.rows:
            runs = {"products": products_of(model, rows)}
            if DEVICE == "cuda":
                runs["few rows"] = products_of(model, rows, "triton")
            runs |= {way: pass_of(forward, rows, given.prefix) for way, forward in ways.items()}
            times = {way: median(every) for way, every in in_turns(runs, given.rounds, clock=clock_of(DEVICE)).items()}
            for way, seconds in times.items():
                yield {
                    "shape": shape,
                    "rows": rows,
                    "way": way,
                    "ms": round(1e3 * seconds, 3),
                    "TB/s": round(nbytes / seconds / 1e12, 2),
                    "copy": round(nbytes / seconds / copy, 3),
                    "gain": round(times["pass"] / seconds, 3),
                }


def best_amounts(rows: Sequence[Row]) -> Amounts | None:
    """The amounts with the best geometric mean of the gains; None if that is below LEAST_GAIN."""
    gains: dict[Amounts, list[float]] = defaultdict(list)
    for row in rows:
        kind, _, numbers = row["way"].partition(" ")
        if kind == "ahead":
            gains[Amounts(*(10**6 * int(number) for number in numbers.split("/")))].append(row["gain"])
    means = {amounts: prod(every) ** (1 / len(every)) for amounts, every in gains.items()}
    chosen = max(means, key=lambda amounts: means[amounts], default=None)
    return chosen if chosen is not None and means[chosen] >= LEAST_GAIN else None


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a row for each way."""
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llama-8b", "llama-7b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 16, 1], help="nodes of a pass")
    parser.add_argument("--prefix", type=int, default=512, help="tokens of the prefix")
    parser.add_argument("--rounds", type=int, default=15)
    given = options_of(parser, argv, shape=["miniature"], rows=[4], prefix=8, rounds=1)
    if DEVICE != "cuda" and not given.miniature:
        parser.error("this needs a GPU; without one there is --miniature")
    kept: list[Row] = []
    with torch.inference_mode():
        measured_rows = (kept.append(row) or row for row in rows_of(given))
        report(measured_rows, environment(DEVICE, given, "shape", "rows", "prefix", "rounds"), given.json)
    if DEVICE == "cuda":
        print(f"AHEAD = {{{torch.cuda.get_device_name()!r}: {best_amounts(kept)}}}")


if __name__ == "__main__":
    main()
