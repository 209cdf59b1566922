"""Costs of a step that are estimated from the models, for the trees of a decoder without a profile.

`roofline` has the formulas of GPUs, and `streamed` those of weights that each pass reads anew. Those of a CPU are here.

A compiled pass reads each weight once, and multiplies it with all rows: B n of them, for trees of n nodes in a batch of
B. Rows are multiplied in g = ceil(B n / GROUP) groups, each of which takes the weight from a cache again. So a further
row costs little while it fits a group, and a further group costs a good part of reading. Besides, threads wait for each
other after every product:

    t(n) = bytes / BANDWIDTH (1 + ROW (B n - 1) + MORE_GROUPS (g - 1)) + (layers + 1) LAYER + B layers SEQUENCE_LAYER

A step adds the time of verifying, and DRAFT if anything is drafted. A level adds, beside the draft's t of about
LEVEL_NODES nodes, the time of drawing.

An estimate, and no measurement: BANDWIDTH, LAYER, STEP and LEVEL are those of the shipped pair on one thread and on two
of an AMD EPYC with AVX-512, whatever the machine. So the trees follow from the models, the batch and the number of
threads alone, and the same call does the same on every CPU. `heavypath calibrate` measures.
"""

import math
from collections.abc import Sequence

import torch

from heavypath.speculative.costs.roofline import Device, Work, estimated_costs
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.drafts.draft import Drafting
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.names import load

GROUP = 6  # rows that the compiled products multiply at once, MOST_ROWS of kernels/native/vectors.h
# Of the time in which a weight is read: what each row costs, and each group of rows but the first. Weights of two bytes
# are read in half the time.
ROW = {"float32": 0.09, "bfloat16": 0.18}
MORE_GROUPS = {"float32": 0.5, "bfloat16": 1.0}
BANDWIDTH = 60e9  # bytes in a second, of two threads and more
ALONE = 0.5  # of it, of a single thread. A small draft has no more: the target's pass sends it out of the caches
DISK = 2e9  # bytes in a second that a disk brings, of a target that is larger than the memory
LAYER = 20e-6  # seconds of a layer beside its weights, most of which threads wait for each other
SEQUENCE_LAYER = 3e-6  # and of each sequence in it: its attention
STEP, STEP_SEQUENCE = 50e-6, 12e-6  # of verifying and committing: of a step, and of each sequence
DRAFT = 100e-6  # of a step that drafts: to begin a tree, to feed the draft what is new, and to order the nodes
LEVEL, LEVEL_SEQUENCE = 20e-6, 10e-6  # of drawing a level's tokens
LEVEL_NODES = 2  # that a level has, about
SIZES = range(1, 25)  # nodes of the trees whose costs are estimated: larger ones do not pay


def estimates(target: Forward, drafting: Sequence[Drafting], batch: int = 1, sizes: Sequence[int] = SIZES) -> Costs:
    """The costs of a step of `batch` sequences.

    drafting: the draft's models; sizes: of trees, for a target on a CPU whose weights are not streamed
    """
    if target.stream is not None:
        return load("streamed_costs")(target, drafting, batch)
    if target.device.type == "cuda":
        return estimated_costs(target, drafting, Device.of(target.device), batch)
    return host_costs(target, drafting, batch, sizes)


def estimated_for(target: Forward) -> str:
    """The models and device of the estimate, in words."""
    if target.stream is not None:
        read = load("streamed_bytes")(target.stream)
        return f"{read / 1e9:.3g} GB that each pass reads"
    return torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "a CPU"


def pass_seconds(work: Work, dtype: torch.dtype, nodes: int, batch: int) -> float:
    """Of a pass over trees of so many nodes; a type that the compiled pass does not have is taken for fp32."""
    name = str(dtype).removeprefix("torch.")
    row, more_groups = (share.get(name, share["float32"]) for share in (ROW, MORE_GROUPS))
    if not work.weights:
        return 0.0
    bandwidth = ALONE * BANDWIDTH if torch.get_num_threads() == 1 else BANDWIDTH
    rows = batch * nodes
    groups = math.ceil(rows / GROUP)
    products = work.weight_bytes / bandwidth * (1 + row * (rows - 1) + more_groups * (groups - 1))
    return products + (work.layers + 1) * LAYER + batch * work.layers * SEQUENCE_LAYER


def host_costs(target: Forward, drafting: Sequence[Drafting], batch: int, sizes: Sequence[int]) -> Costs:
    """The costs of steps and levels on a CPU, where `batch` sequences are decoded together.

    What drafts without a model costs the draws alone.
    """
    work = Work.of(target)
    once, level = 0.0, LEVEL + batch * LEVEL_SEQUENCE
    for model in drafting:
        of_step, of_level = (pass_seconds(each, model.dtype, LEVEL_NODES, batch) for each in Work.split(model))
        once, level = once + of_step, level + of_level
    step = {
        size: pass_seconds(work, target.dtype, size, batch) + STEP + batch * STEP_SEQUENCE + (size > 1) * (once + DRAFT)
        for size in sizes
    }
    return Costs(step, level)
