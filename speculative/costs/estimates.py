"""Estimate the costs of a step from the models. Decoders without a profile choose their trees by these costs.

This file has the size of a pass, `Work`, and the formula for CPUs. `gpu_step` has the one for GPUs, and `streamed` the
one for streamed weights.

A compiled pass reads each weight once and multiplies it with all B n rows, for trees of n nodes and B sequences. It
fetches the next part of a weight while it multiplies, so that the longer of the two times counts most. If they are
alike, each delays the other. In addition, a layer has work besides its weights, and threads wait for each other:

    t(n) = (reading^OVERLAP + multiplying^OVERLAP)^(1 / OVERLAP)
         + (layers + 1) (LAYER + WAIT) + B layers SEQUENCE_LAYER
    reading = bytes / bandwidth,  multiplying = 2 weights B n / PEAK

The bandwidth is that of the CACHE, of the SHARED_CACHE or of MEMORY, by the bytes of the weights. One thread does not
WAIT, and reaches a share of the others' bandwidth and PEAK.

A step adds the time of verifying, and DRAFT if anything is drafted. A level costs the draft's t of about LEVEL_NODES
nodes and the time of drawing.

These are estimates, not measurements. LAYER, STEP and LEVEL were measured with the shipped pair on one and on two
threads of an AMD EPYC with AVX-512. Bandwidths, PEAK and OVERLAP lie between those of AVX2 and AVX-512
(`bench/native.py`). They are used for every machine: the trees depend on the models, the batch and the number of
threads alone, and a call has the same result on every CPU. `heavypath calibrate` measures.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.costs.table import Attention, Costs
from heavypath.speculative.drafts.draft import Drafting
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.names import load
from heavypath.speculative.ranks.peers import part_owned

# Bytes per second, with two or more threads, by the bytes of the weights: up to IN_CACHE, up to IN_SHARED_CACHE, and
# more. The smallest stay in a core's own caches between two levels, so that one thread reads them as fast.
CACHE = 40e9
IN_CACHE = 16e6
SHARED_CACHE = 48e9
IN_SHARED_CACHE = 64e6
MEMORY = 30e9
PEAK = 200e9  # operations per second, with two or more threads
ALONE = 0.5  # share of these that one thread reaches
OVERLAP = 2.5
DISK = 2e9  # bytes per second from a disk, for a target that is larger than the memory
LAYER = 10e-6  # seconds of a layer besides its weights
WAIT = 10e-6  # seconds in which threads wait for each other, for each layer
SEQUENCE_LAYER = 3e-6  # seconds of a layer for each sequence: its attention
STEP = 50e-6  # seconds of verifying and committing, for a step
STEP_SEQUENCE = 12e-6  # and for each sequence
DRAFT = 50e-6  # seconds of a step that drafts: begin a tree, pass new tokens to the draft, and order the nodes
LEVEL = 50e-6  # seconds of drawing a level's tokens, for a level
LEVEL_SEQUENCE = 10e-6  # and for each sequence
LEVEL_NODES = 2  # assumed number of nodes of a level
LONG = 4096  # tokens from which on attention counts
LONGEST_PROMPT = 1 << 20  # tokens up to which its costs are kept in a profile
SIZES = range(1, 25)  # nodes of the trees whose costs are estimated: larger ones do not pay
# Names in transformers' configs. The value is a number, or a list with a number for each layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")


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
        itemsize = model.dtype.itemsize
        if model.is_head:
            layers = 0 if model.levels else model.layers
            return cls._with(model.level_weights(), layers, itemsize)
        head: Any = model.model.get_output_embeddings()
        embedding = model.embedding.weight
        passed = [weight for _, weight in model.weights()]
        if getattr(head, "weight", None) is not embedding:
            passed = [weight for weight in passed if weight is not embedding]
        weights, weight_bytes = _owned(passed)
        config = model.config.get_text_config(decoder=True)
        share = model.layers / config.num_hidden_layers  # of an early exit
        experts, chosen = experts_among(config, model.weights())
        expert_weights, expert_bytes = _owned(experts)
        return cls(
            weight_bytes=int(weight_bytes * share),
            weights=int(weights * share),
            layers=model.layers,
            itemsize=itemsize,
            expert_bytes=int(expert_bytes),
            expert_weights=int(expert_weights),
            chosen=chosen,
        )

    @classmethod
    def split(cls, model: Drafting) -> "tuple[Work, Work]":
        """A draft's work once per step, and once per level. A pass that drafts all levels at once counts per step."""
        whole = cls.of(model)
        nothing = cls(0, 0, 0, model.dtype.itemsize)
        if model.is_head:
            passed = model.pass_weights()
            if not passed:
                return nothing, whole
            once = cls._with(passed, model.layers, model.dtype.itemsize)
            return once, whole
        if model.drafts_at_once:
            return whole, nothing
        return nothing, whole

    @classmethod
    def _with(cls, weights: Sequence[Tensor], layers: int, itemsize: int) -> "Work":
        weight_bytes = sum(weight.nbytes for weight in weights)
        count = sum(weight.numel() for weight in weights)
        return cls(weight_bytes, count, layers, itemsize)


def estimates(
    target: Forward, drafting: Sequence[Drafting], batch: int = 1, sizes: Sequence[int] = SIZES, length: int = 0
) -> Costs:
    """The estimated costs of a step for `batch` sequences. drafting: the forward passes of the draft's models.

    sizes: numbers of nodes; used only for a target on a CPU whose weights are not streamed
    length: tokens of a sequence, as `estimated_length` rounds them; used only for a target whose weights are on a GPU
    """
    if target.stream is not None:
        return load("streamed_costs")(target, drafting, batch)
    if target.device.type == "cuda":
        device = load("Device").of(target.device)
        return load("estimated_costs")(target, drafting, device, batch, length=length)
    return host_costs(target, drafting, batch, sizes)


def estimated_length(target: Forward, length: int) -> int:
    """The length of a sequence as `estimates` takes it: rounded down to a power of two, so that there are few trees.

    0 for sequences of fewer than `LONG` tokens, and for targets whose costs are estimated without it.
    """
    if length < LONG or target.stream is not None or target.device.type != "cuda":
        return 0
    return 1 << (length.bit_length() - 1)


def attention_by_length(target: Forward) -> dict[int, Attention]:
    """What attention adds to a step, by the lengths that `estimated_length` may give; empty where that is always 0."""
    if target.stream is not None or target.device.type != "cuda":
        return {}
    device = load("Device").of(target.device)
    attention_to = load("attention_to")
    longest = min(target.max_positions, LONGEST_PROMPT)
    found: dict[int, Attention] = {}
    length = LONG
    while length <= longest:
        found[length] = attention_to(target, length, device)
        length *= 2
    return found


def estimated_for(target: Forward) -> str:
    """A description of the estimate's basis, for messages: the device, or the bytes of streamed weights."""
    if target.stream is not None:
        read = load("streamed_bytes")(target.stream)
        return f"{read / 1e9:.3g} GB that each pass reads"
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    return "a CPU"


def pass_seconds(work: Work, nodes: int, batch: int) -> float:
    """Estimated seconds of a pass on a CPU over trees of `nodes` nodes, of `batch` sequences."""
    if not work.weights:
        return 0.0
    is_alone = torch.get_num_threads() == 1
    share = ALONE if is_alone else 1.0
    bandwidth = share * MEMORY
    if work.weight_bytes <= IN_CACHE:
        bandwidth = CACHE
    elif work.weight_bytes <= IN_SHARED_CACHE:
        bandwidth = share * SHARED_CACHE
    reading = work.weight_bytes / bandwidth
    multiplying = 2 * work.weights * batch * nodes / (share * PEAK)
    products = (reading**OVERLAP + multiplying**OVERLAP) ** (1 / OVERLAP)
    layer = LAYER if is_alone else LAYER + WAIT
    layers = (work.layers + 1) * layer
    return products + layers + batch * work.layers * SEQUENCE_LAYER


def host_costs(target: Forward, drafting: Sequence[Drafting], batch: int, sizes: Sequence[int]) -> Costs:
    """The costs of steps and levels on a CPU for `batch` sequences decoded together.

    For a draft without a model, a level costs only the draws.
    """
    work = Work.of(target)
    once = 0.0
    level = LEVEL + batch * LEVEL_SEQUENCE
    for model in drafting:
        of_step, of_level = Work.split(model)
        once += pass_seconds(of_step, LEVEL_NODES, batch)
        level += pass_seconds(of_level, LEVEL_NODES, batch)
    step = {}
    for size in sizes:
        seconds = pass_seconds(work, size, batch) + STEP + batch * STEP_SEQUENCE
        if size > 1:
            seconds += once + DRAFT
        step[size] = seconds
    return Costs(step, level)


def experts_among(config: Any, weights: Iterable[tuple[str, Tensor]]) -> tuple[list[Tensor], float]:
    """The weights of all experts among (name, weight) pairs, and the share of the experts that a token uses.

    Without experts: an empty list and 1.
    """
    count = _largest(config, _EXPERTS)
    chosen = _largest(config, _CHOSEN)
    found = []
    for name, weight in weights:
        if ".experts." in name and weight.shape[:1] == (count,):
            found.append(weight)
    if not found or not 0 < chosen <= count:
        return [], 1.0
    return found, chosen / count


def _owned(weights: Iterable[Tensor]) -> tuple[float, float]:
    """The numbers in weights, and their bytes; of weights that ranks share, the part of this rank."""
    count = 0.0
    nbytes = 0.0
    for weight in weights:
        part = part_owned(weight)
        count += weight.numel() * part
        nbytes += weight.nbytes * part
    return count, nbytes


def _largest(config: Any, names: Sequence[str]) -> int:
    """The number in a config under the first of these names that it has; of a list the largest; 0 without any."""
    for name in names:
        found = getattr(config, name, None)
        if found:
            return found if isinstance(found, int) else max(found)
    return 0
