"""How long should a step take on a GPU, and what of it? Arithmetic, to be held against what large.py measures.

A step of a static tree at batch 1 is a chain of kernels, each of which waits for the one before:

    product of few rows      weight bytes / bandwidth + PRODUCT     every weight is read once
    any other kernel         SMALL                                  a launch in a graph, and what it does
    draw of a level          + DRAW, verification + DECIDE          what these take beyond a small kernel

`before` is a layer as PyTorch's operations make it, with seven products and fourteen other kernels. `now` is with
joined products and fused kernels, as tests/kernels/test_layer_kernels.py and tests/core/test_step.py count them. The
limit is the time to read the target's weights once.
"""

from typing import NamedTuple

from common import argument_parser, write_results

BANDWIDTH = {"H200": 4.3e12, "H100": 3.0e12}  # bytes in a second of a copy: measured, and nine tenths of the data sheet
PRODUCT = 2.5e-6  # seconds of a product's start and end, in which it does not read at full speed
SMALL = 2e-6
DRAW, DECIDE = 5e-6, 12e-6  # at 32,000 tokens
BYTES = 2  # of a weight in bf16


class Model(NamedTuple):
    """The shape of a Llama with as many key heads as query heads."""

    layers: int
    hidden: int
    inner: int
    vocabulary: int = 32000


class Layer(NamedTuple):
    """Kernels of a layer."""

    products: int
    others: int


class Kernels(NamedTuple):
    """Kernels of a layer, of the rest of the target's and of the draft's pass, and of a step beside its passes."""

    layer: Layer
    target_ends: int
    draft_ends: int
    step: int


TARGETS = {"Llama-2-7B": Model(32, 4096, 11008)}
DRAFT = Model(2, 768, 3072)  # llama-68m
LEVELS, NODES = 5, 32
BEFORE = Kernels(Layer(products=7, others=14), target_ends=3, draft_ends=7, step=78)
NOW = Kernels(Layer(products=4, others=5), target_ends=2, draft_ends=3, step=23)


def read_bytes(model: Model) -> int:
    """Bytes of the weights that a pass reads: all but the token embedding."""
    layer = 4 * model.hidden**2 + 3 * model.hidden * model.inner
    return BYTES * (model.layers * layer + model.hidden * model.vocabulary)


def pass_seconds(model: Model, layer: Layer, ends: int, bandwidth: float) -> dict[str, float]:
    """A forward pass over few tokens, by what it spends its time on."""
    products = model.layers * layer.products + 1
    return {
        "reading weights": read_bytes(model) / bandwidth,
        "starts of products": products * PRODUCT,
        "other kernels": (model.layers * layer.others + ends) * SMALL,
    }


def step_seconds(target: Model, draft: Model, kernels: Kernels, bandwidth: float) -> dict[str, float]:
    """A step, by what it spends its time on."""
    of_target = pass_seconds(target, kernels.layer, kernels.target_ends, bandwidth)
    of_draft = pass_seconds(draft, kernels.layer, kernels.draft_ends, bandwidth)
    parts = {f"target: {name}": time for name, time in of_target.items()}
    parts |= {f"draft: {name}": LEVELS * time for name, time in of_draft.items()}
    parts["beside: launches"] = kernels.step * SMALL
    parts["beside: drawing"] = LEVELS * DRAW
    parts["beside: deciding"] = DECIDE
    return parts


def main() -> None:
    """Print the table."""
    args = argument_parser(__doc__).parse_args()
    found = {}
    for gpu, bandwidth in BANDWIDTH.items():
        for name, target in TARGETS.items():
            limit = read_bytes(target) / bandwidth
            columns = {
                "before": step_seconds(target, DRAFT, BEFORE, bandwidth),
                "now": step_seconds(target, DRAFT, NOW, bandwidth),
            }
            print(f"\n{name} with a draft of 68M on {gpu}, bf16, batch 1, {NODES} nodes in {LEVELS} levels; ms")
            print(f"{'':<32}" + "".join(f"{column:>9}" for column in columns))
            for part in columns["now"]:
                print(f"{part:<32}" + "".join(f"{parts[part] * 1e3:9.3f}" for parts in columns.values()))
            for column, parts in columns.items():
                total = sum(parts.values())
                rest = sum(time for part, time in parts.items() if part.startswith("beside"))
                found[f"{name}, {gpu}, {column}"] = {
                    "step_ms": total * 1e3, "limit_ms": limit * 1e3, "over_limit": total / limit, "rest": rest / total,
                }  # fmt: skip
                print(f"{column}: {total * 1e3:.2f} ms, {total / limit:.2f} times the limit of {limit * 1e3:.2f} ms, "
                      f"beside the models {rest / total:.1%}")  # fmt: skip
    write_results(args.json, {}, steps=found)


if __name__ == "__main__":
    main()
