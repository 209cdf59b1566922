"""Estimate the time of a pass on a GPU from the device and the model; `gpu_step` has that of a step.

A forward pass over n tokens reads all weights once and multiplies them with n rows. The longer of these two times
counts most; if they are alike, each delays the other, which the root of the sum of their squares models. In addition,
small kernels run one after the other:

    t(n) = hypot(bytes / bandwidth, 2 n parameters / peak) + layers * small kernels of a layer * seconds of one

If a token uses k of E experts, n tokens read E (1 - (1 - k / E)^n) of them, as if each token chose independently. A
pass reads the states of recurrent layers, and the commit reads and writes them.

These are estimates, not measurements: so the tree depends on the models and the kind of GPU alone, and the same seed
gives the same output on every run. `heavypath calibrate` measures.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.drafts.draft import Drafting
from heavypath.speculative.ranks.peers import part_owned

REACHED = 0.85  # share of the bandwidth that products of few rows reach
REACHED_PEAK = 0.6  # share of the peak that products reach
SMALL_KERNEL = 2e-6  # seconds of a kernel that does little, after another one in a CUDA graph
LAYER_KERNELS = 6  # small kernels of a layer, besides the four products of its weights
# Operations of a multiprocessor per cycle: in fp16 and bf16, by compute capability, and in fp32.
TENSOR_CORES = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
OTHER_TENSOR_CORES = 512
PLAIN_CORES = 256
# Names in transformers' configs. The value is a number, or a list with a number for each layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")


class Device(NamedTuple):
    """The speed of a GPU.

    bandwidth: bytes of memory per second; tensor_peak, plain_peak: operations per second with and without tensor cores
    """

    bandwidth: float
    tensor_peak: float
    plain_peak: float

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """The figures of a CUDA device, computed from its properties."""
        facts: Any = torch.cuda.get_device_properties(device)
        cycles = facts.multi_processor_count * facts.clock_rate * 1e3  # of all multiprocessors per second
        tensor = TENSOR_CORES.get((facts.major, facts.minor), OTHER_TENSOR_CORES)
        # Memory transfers data twice per cycle.
        return cls(
            2 * facts.memory_clock_rate * 1e3 * facts.memory_bus_width / 8, cycles * tensor, cycles * PLAIN_CORES
        )


class Work(NamedTuple):
    """The size of a forward pass, for estimates of its time.

    weight_bytes, weights: bytes and numbers of the weights that it reads
    layers: number of layers; itemsize: bytes of an activation's number
    expert_bytes, expert_weights: what of weight_bytes and weights all experts have
    chosen: the share of the experts that a token uses
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
        """The work of a model's pass. For a trained head: of one level, without layers if a pass drafts all levels.

        The token embedding is not counted (only a few rows are read), unless it is also the output head's weight. If
        ranks share a model, this is one rank's part; communication is not counted.
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
            int(weight_bytes * share),
            int(weights * share),
            model.layers,
            model.dtype.itemsize,
            int(sum(weight.nbytes * part_owned(weight) for weight in experts)),
            int(sum(weight.numel() * part_owned(weight) for weight in experts)),
            chosen,
        )

    @classmethod
    def split(cls, model: Drafting) -> "tuple[Work, Work]":
        """A draft's work once per step, and once per level. A pass that drafts all levels at once counts per step."""
        nothing = cls(0, 0, 0, model.dtype.itemsize)
        if model.is_head:
            passed = model.pass_weights()
            return cls._with(passed, model.layers, model.dtype.itemsize) if passed else nothing, cls.of(model)
        return (cls.of(model), nothing) if model.drafts_at_once else (nothing, cls.of(model))

    @classmethod
    def _with(cls, weights: Sequence[Tensor], layers: int, itemsize: int) -> "Work":
        return cls(sum(one.nbytes for one in weights), sum(one.numel() for one in weights), layers, itemsize)

    def seconds(self, tokens: int, device: Device) -> float:
        """Estimated seconds of a pass over this many tokens, of all sequences together, on this GPU."""
        peak = REACHED_PEAK * (device.tensor_peak if self.itemsize <= 2 else device.plain_peak)
        unread = self.expert_bytes * (1 - self.chosen) ** tokens
        used = self.weights - self.expert_weights * (1 - self.chosen)
        reading = (self.weight_bytes - unread) / (REACHED * device.bandwidth)
        products = math.hypot(reading, 2 * tokens * used / peak)
        return products + self.layers * LAYER_KERNELS * SMALL_KERNEL


def experts_among(config: Any, weights: Iterable[tuple[str, Tensor]]) -> tuple[list[Tensor], float]:
    """The weights of all experts among (name, weight) pairs, and the share of the experts that a token uses.

    Without experts: an empty list and 1.
    """
    count, each = (_largest(config, names) for names in (_EXPERTS, _CHOSEN))
    found = [weight for name, weight in weights if ".experts." in name and weight.shape[:1] == (count,)]
    return (found, each / count) if found and 0 < each <= count else ([], 1.0)


def _largest(config: Any, names: Sequence[str]) -> int:
    """The number in a config under the first of these names that it has; of a list the largest; 0 without any."""
    found = next(filter(None, (getattr(config, name, None) for name in names)), 0)
    return found if isinstance(found, int) else max(found)
