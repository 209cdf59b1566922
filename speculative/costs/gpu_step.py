"""Estimate the costs of a step on a GPU from the device and the models, for a decoder without a profile.

A step adds the time of verifying, in which the logits of n nodes are read a few times, and its own small kernels. A
level costs the draft's t(nodes of a level), a draw from each node's logits, and the small kernels around them. A draft
pass that drafts all levels at once is counted for the step. If B sequences are decoded together, all of this is for B
times as many tokens.

Over a prefix of L tokens, attention reads keys and values once, and every node multiplies with all of them:

    a(n) = max(4 Hkv D L / bandwidth, 4 Hq D L n / peak)    seconds of a layer, with two bytes a number

With G = Hq / Hkv query heads for each key head the second is longer from some 160 / G nodes on. So long prefixes make
nodes of models with groups dear, and their trees small.

`roofline` has the time of a pass.
"""

from collections.abc import Sequence
from typing import Any

from heavypath.speculative.costs.estimates import Work
from heavypath.speculative.costs.roofline import SMALL_KERNEL, Device
from heavypath.speculative.costs.table import Attention, Costs
from heavypath.speculative.drafts.draft import Drafting
from heavypath.speculative.models.forward import Forward

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # nodes of the trees whose costs are estimated
LEVEL_NODES = 8  # assumed number of nodes of a level
ATTENTION_READ = 0.75  # share of the bandwidth at which attention reads
ATTENTION_PEAK = 0.45  # share of the peak that its products reach, which wait for the softmax between them
STEP_KERNELS = 30  # small kernels of a step, besides those of the models and the levels
LEVEL_KERNELS = 6
DRAW = 10e-6  # seconds of a draw from a few rows
LOGIT_PASSES = 3  # how often a step reads its logits
STATE_PASSES = 3  # how often a step reads or writes the states of recurrent layers


def estimated_costs(
    target: Forward,
    drafting: Sequence[Drafting],
    device: Device,
    batch: int = 1,
    sizes: Sequence[int] = SIZES,
    length: int = 0,
) -> Costs:
    """The estimated costs of steps and levels on a GPU for `batch` sequences of `length` tokens decoded together.

    drafting: the forward passes of the draft's models; sizes: numbers of nodes of the trees

    For a draft without a model, a level costs only the draws and the small kernels.
    """
    work = Work.of(target)
    logits = batch * target.vocab_size * target.dtype.itemsize / device.bandwidth  # seconds to read one node's logits
    states = batch * STATE_PASSES * target.state_bytes / device.bandwidth
    once = 0.0
    level = LEVEL_KERNELS * SMALL_KERNEL + DRAW + LEVEL_NODES * logits
    for model in drafting:
        of_step, of_level = (device.pass_seconds(each, batch * LEVEL_NODES) for each in Work.split(model))
        once += of_step
        level += of_level
    fixed = STEP_KERNELS * SMALL_KERNEL + states
    step = {
        size: device.pass_seconds(work, batch * size) + size * LOGIT_PASSES * logits + fixed + (size > 1) * once
        for size in sizes
    }
    costs = Costs(step, level)
    return costs.with_attention(attention_to(target, length, device), batch) if length else costs


def attention_to(target: Forward, length: int, device: Device) -> Attention:
    """What attention to `length` tokens costs on a GPU."""
    config: Any = target.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = [window for window in target.windows if window is not None]
    whole = kinds.count("full_attention") if None in target.windows else 0
    rows = length * whole + min([length, *windows]) * (sum("attention" in kind for kind in kinds) - whole)
    rows *= target.layers / len(kinds)  # of an early exit
    itemsize = target.dtype.itemsize
    columns = itemsize * head_dim
    peak = device.tensor_peak if itemsize <= 2 else device.plain_peak
    reading = 2 * getattr(config, "num_key_value_heads", heads) * columns * rows / (ATTENTION_READ * device.bandwidth)
    return Attention(reading, 4 * heads * head_dim * rows / (ATTENTION_PEAK * peak))
