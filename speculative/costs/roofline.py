"""Costs of a step on a GPU, estimated from the device and the models, for trees of a decoder without a profile.

A forward pass over n tokens reads all weights once and multiplies them with n rows. The longer of the two decides, and
the other one delays it where they are alike, for which the root of their squares stands. Besides, kernels follow each
other one by one:

    t(n) = hypot(bytes / bandwidth, 2 n parameters / peak) + layers * small kernels of a layer * the time of one

Where a token goes through k of E experts, n tokens read E (1 - (1 - k / E)^n) of them, as if each chose by itself. A
pass reads the states of recurrent layers, and its acceptance reads and writes them.

A step adds the time of verifying, in which the logits of n nodes are read a few times, and of its own small kernels. A
level costs the draft's t(nodes of a level), a draw from each node's logits, and the small kernels around them. A pass
that drafts all levels is a part of the step. Where B sequences are decoded together, all of these are over B times as
many tokens. Reads of the caches by attention are left out: they are the same for trees of all sizes. In long texts they
hide some of the products of larger trees.

An estimate, and no measurement: so the tree follows from the models and the kind of GPU alone, and the same seed gives
the same text on every run. `heavypath calibrate` measures.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.costs.table import Costs
from heavypath.speculative.drafts.draft import Drafting
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.ranks.parts import part_owned

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # nodes of the trees whose costs are estimated
LEVEL_NODES = 8  # that a level has, about
REACHED = 0.85  # of the bandwidth, by products of few rows
REACHED_PEAK = 0.6  # of the tensor cores' peak
SMALL_KERNEL = 2e-6  # seconds of one that does little, after another one in a CUDA graph
LAYER_KERNELS = 6  # of a layer, beside the four products of its weights
STEP_KERNELS = 30  # of a step, beside the models and its levels
LEVEL_KERNELS = 6
DRAW = 10e-6  # seconds of a draw from a few rows
LOGIT_PASSES = 3  # over a step's logits
STATE_PASSES = 3  # over the states of recurrent layers
# Operations of a multiprocessor in a cycle, in fp16 and bf16 by compute capability, and those of fp32.
TENSOR_CORES = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
OTHER_TENSOR_CORES, PLAIN_CORES = 512, 256
# By the names of transformers' configs, some of which have a number for each layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")


class Device(NamedTuple):
    """A GPU's bytes in a second, and operations of its tensor cores and of its other cores in a second."""

    bandwidth: float
    tensor_peak: float
    plain_peak: float

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """The facts that CUDA gives of a device."""
        facts: Any = torch.cuda.get_device_properties(device)
        cycles = facts.multi_processor_count * facts.clock_rate * 1e3  # of all multiprocessors in a second
        tensor = TENSOR_CORES.get((facts.major, facts.minor), OTHER_TENSOR_CORES)
        # Memory moves data twice in a cycle.
        return cls(
            2 * facts.memory_clock_rate * 1e3 * facts.memory_bus_width / 8, cycles * tensor, cycles * PLAIN_CORES
        )


class Work(NamedTuple):
    """Reads and computations of a forward pass: bytes and elements of its weights, layers, bytes of an activation.

    expert_bytes, expert_weights: those of all experts among them; chosen: the share of these that a token goes through
    """

    weight_bytes: int
    weights: int
    layers: int
    itemsize: int
    expert_bytes: int = 0
    expert_weights: int = 0
    chosen: float = 1.0

    @classmethod
    def of(cls, model: Drafting) -> "Work":
        """The work of a model's pass. Of the token embedding a few rows are read, unless it is the head's weight, too.
        Of ranks that hold a model together each has its part; their messages to each other are not counted.

        Of a trained head it is the work of a level. Of Medusa heads a level takes one, and has no layers of its own.
        """
        if model.is_head:
            return cls._with(model.level_weights(), 0 if model.levels else model.layers, model.dtype.itemsize)
        head: Any = model.model.get_output_embeddings()
        own_head = getattr(head, "weight", None) is not model.embedding.weight
        passed = [weight for _, weight in model.weights() if not (own_head and weight is model.embedding.weight)]
        weights = sum(weight.numel() * part_owned(weight) for weight in passed)
        weight_bytes = sum(weight.nbytes * part_owned(weight) for weight in passed)
        config = model.config.get_text_config(decoder=True)
        share = model.layers / config.num_hidden_layers  # of an early exit
        experts, chosen = experts_among(config, model.weights())
        return cls(
            int(weight_bytes * share), int(weights * share), model.layers, model.dtype.itemsize,
            int(sum(weight.nbytes * part_owned(weight) for weight in experts)),
            int(sum(weight.numel() * part_owned(weight) for weight in experts)),
            chosen,
        )  # fmt: skip

    @classmethod
    def split(cls, model: Drafting) -> "tuple[Work, Work]":
        """A draft's work once a step, and for each level: nearly all is the first where one pass drafts all levels."""
        nothing = cls(0, 0, 0, model.dtype.itemsize)
        if model.is_head:
            passed = model.pass_weights()
            return cls._with(passed, model.layers, model.dtype.itemsize) if passed else nothing, cls.of(model)
        return (cls.of(model), nothing) if model.drafts_at_once else (nothing, cls.of(model))

    @classmethod
    def _with(cls, weights: Sequence[Tensor], layers: int, itemsize: int) -> "Work":
        return cls(sum(one.nbytes for one in weights), sum(one.numel() for one in weights), layers, itemsize)

    def seconds(self, tokens: int, device: Device) -> float:
        """Of a pass over so many tokens."""
        peak = REACHED_PEAK * (device.tensor_peak if self.itemsize <= 2 else device.plain_peak)
        unread = self.expert_bytes * (1 - self.chosen) ** tokens
        used = self.weights - self.expert_weights * (1 - self.chosen)
        reading = (self.weight_bytes - unread) / (REACHED * device.bandwidth)
        products = math.hypot(reading, 2 * tokens * used / peak)
        return products + self.layers * LAYER_KERNELS * SMALL_KERNEL


def experts_among(config: Any, weights: Iterable[tuple[str, Tensor]]) -> tuple[list[Tensor], float]:
    """The weights of all experts among a model's, given with their names, and the share that a token goes through."""
    count, each = (_largest(config, names) for names in (_EXPERTS, _CHOSEN))
    found = [weight for name, weight in weights if ".experts." in name and weight.shape[:1] == (count,)]
    return (found, each / count) if found and 0 < each <= count else ([], 1.0)


def _largest(config: Any, names: Sequence[str]) -> int:
    """The number by the first of these names that a config has, or the largest of several; 0 for none."""
    found = next(filter(None, (getattr(config, name, None) for name in names)), 0)
    return found if isinstance(found, int) else max(found)


def estimated_costs(
    target: Forward, drafting: Sequence[Drafting], device: Device, batch: int = 1, sizes: Sequence[int] = SIZES
) -> Costs:
    """The costs of steps and levels. What drafts without a model costs nothing but the kernels of a level.

    batch: sequences that are decoded together
    """
    work = Work.of(target)
    logits = batch * target.vocab_size * target.dtype.itemsize / device.bandwidth  # seconds to read a node's once
    states = batch * STATE_PASSES * target.state_bytes / device.bandwidth
    once, level = 0.0, LEVEL_KERNELS * SMALL_KERNEL + DRAW + LEVEL_NODES * logits
    for model in drafting:
        of_step, of_level = (each.seconds(batch * LEVEL_NODES, device) for each in Work.split(model))
        once, level = once + of_step, level + of_level
    beside = STEP_KERNELS * SMALL_KERNEL + states
    step = {
        size: work.seconds(batch * size, device) + size * LOGIT_PASSES * logits + beside + (size > 1) * once
        for size in sizes
    }
    return Costs(step, level)
