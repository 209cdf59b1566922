"""Costs of a step on a CPU, estimated from the models, for the trees of a decoder without a profile.

A compiled pass reads each weight once, and multiplies it with all rows: B n of them, for trees of n nodes in a batch of
B. Up to FREE rows the products take no longer than reading; from there on each MORE rows take as long as reading again
(bench/kernels/bench_linear.py has the figures). Besides, threads wait for each other after every product:

    t(n) = bytes / BANDWIDTH (1 + max(0, B n - FREE) / MORE) + (layers + 1) LAYER + B layers SEQUENCE_LAYER

A step adds the time of verifying, and a level, beside the draft's t of about LEVEL_NODES nodes, that of drawing.

An estimate, and no measurement: BANDWIDTH, LAYER, STEP and LEVEL are those of the shipped pair on two threads of an AMD
EPYC with AVX-512, whatever the machine. So the trees follow from the models and the batch alone, and the same call does
the same on every CPU. `heavypath calibrate` measures.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from heavypath.speculative.costs.roofline import Work
from heavypath.speculative.costs.table import Costs

if TYPE_CHECKING:  # `heavypath simulate` reads the figures below, and starts no PyTorch for them
    import torch

    from heavypath.speculative.drafts.draft import Drafting
    from heavypath.speculative.models.forward import Forward

FREE = {"float32": 4, "bfloat16": 2}  # rows that are multiplied while a weight is read
MORE = {"float32": 8, "bfloat16": 4}  # rows whose products take as long as reading it
BANDWIDTH = 60e9  # bytes in a second, of all threads
DISK = 2e9  # bytes in a second that a disk brings, of a target that is larger than the memory
LAYER = 20e-6  # seconds of a layer beside its weights, most of which threads wait for each other
SEQUENCE_LAYER = 3e-6  # and of each sequence in it: its attention
STEP, STEP_SEQUENCE = 50e-6, 12e-6  # of verifying and committing: of a step, and of each sequence
LEVEL, LEVEL_SEQUENCE = 30e-6, 10e-6  # of drawing a level's tokens
LEVEL_NODES = 2  # that a level has, about


def pass_seconds(work: Work, dtype: "torch.dtype", nodes: int, batch: int) -> float:
    """Of a pass over trees of so many nodes; a type that the compiled pass does not have is taken for fp32."""
    name = str(dtype).removeprefix("torch.")
    free, more = FREE.get(name, FREE["float32"]), MORE.get(name, MORE["float32"])
    if not work.weights:
        return 0.0
    products = work.weight_bytes / BANDWIDTH * (1 + max(0, batch * nodes - free) / more)
    return products + (work.layers + 1) * LAYER + batch * work.layers * SEQUENCE_LAYER


def host_costs(target: "Forward", drafting: "Sequence[Drafting]", batch: int, sizes: Sequence[int]) -> Costs:
    """The costs of steps and levels on a CPU, where `batch` sequences are decoded together.

    What drafts without a model costs the draws alone.
    """
    work = Work.of(target)
    once, level = 0.0, LEVEL + batch * LEVEL_SEQUENCE
    for model in drafting:
        of_step, of_level = (pass_seconds(each, model.dtype, LEVEL_NODES, batch) for each in Work.split(model))
        once, level = once + of_step, level + of_level
    step = {
        size: pass_seconds(work, target.dtype, size, batch) + STEP + batch * STEP_SEQUENCE + (size > 1) * once
        for size in sizes
    }
    return Costs(step, level)
