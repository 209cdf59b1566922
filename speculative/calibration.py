"""`calibrate`: measure what tree planning needs: the costs of steps on this machine, and how often children are
    accepted.

Costs are timed in real decoding, by `visits`. Acceptance is counted first, so that only tree sizes that could be
planned are timed.
"""

import logging
import math
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters
from heavypath.kernels.numbers import real, whole
from heavypath.speculative.costs.estimates import attention_by_length
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.drafts.kinds import AnyDraft, as_draft, describe, draft_parameter_count, parameter_count
from heavypath.speculative.drawing_temperatures import drawing_temperatures
from heavypath.speculative.gains import jobs_of, measure_gains
from heavypath.speculative.methods import METHODS, measured_row, row_of
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.models.forward_of import check_alone, forward_of
from heavypath.speculative.options import NOTHING
from heavypath.speculative.profile import Profile, streaming_of
from heavypath.speculative.visits import (
    GraphVisits,
    StreamedVisits,
    Visits,
    costs_by_batch,
    default_batch_sizes,
)
from heavypath.speculative.walking import (
    ACCEPTANCE_SHARE,
    DRAWING_SHARE,
    LEAST_TOKENS,
    Extent,
    Report,
    Way,
    as_measured,
    measure_ways,
    walk_together,
)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
TIMED_LEVELS = 8  # of the trees that are timed, at most
TIMED_CHILDREN = 8  # of a node in them, at most
SEQUENCE_COUNTS = (2, 3, 4, 6, 8)  # for SpecInfer and SpecTr: acceptance depends on the number of sequences
LIMIT = 45.0  # default time limit in seconds: with loading less than a minute
GAINS_SHARE = 0.2  # share of the limit for measuring gains in real decoding
STREAMED_SIZES = (1, 8, 32, 64, 96, 128, 192, 256, 384, 512, 768)
STREAMED_PASSES = 80  # default time limit for a streamed target, in forward passes
STREAMED_PROMPT = 16  # tokens of a prompt for a streamed target; short, because all ways have caches at the same time

logger = logging.getLogger(__name__)


def _numbers(name: str, given: Any) -> list[int] | None:
    """The value of option `name` as a list of integers; None for None. Raises TypeError for anything else."""
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list of integers, got {given!r}")
    return [whole(name, number) for number in given]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings of decoders in the block, which also tries trees that do not pay."""
    decoders = logging.getLogger(SpeculativeDecoder.__module__)
    decoders.addFilter(_is_no_warning)
    try:
        yield
    finally:
        decoders.removeFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


@_without_warnings()
def calibrate(
    target: PreTrainedModel,
    draft: AnyDraft,
    *,
    prompts: Sequence[Tensor] = (),
    temperatures: Sequence[float] = (0.0, 0.6, 1.0),
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    sizes: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    tokens: int = 48,
    sequences: int = 48,
    seed: int = 0,
    on_progress: Report | None = None,
    limit: float | None = None,
    verifier: str | None = None,
) -> Profile:
    """Measure costs of steps and acceptance of a pair of models, for `SpeculativeDecoder(..., profile=)`.

    prompts: LongTensors [T] to be continued, reused until there are `sequences` of them. Default: the target samples
        some itself, starting with its first token
    temperatures, top_k, top_p, min_p: how the target will be sampled; temperature 0 ignores the filters
    sizes: nodes of the trees that are timed, root included. Default: up to 768, as far as they may pay
    batch_sizes: numbers of sequences decoded together, for each of which trees are timed; 1 is always added. Default:
        1, 2, 4, 8 and 16; on a GPU also 32 and 64 if they fit into memory; for a streamed target only 1. By default
        none are timed above the first for which no tree pays
    tokens, sequences: length and number of the sequences on which acceptance is counted. For a streamed target
        `sequences` is the total of all ways, with at least two for each
    on_progress: called with a line of text that says what is being done and about how long it will take
    limit: time limit in seconds. Half is for acceptance, a fifth for real decoding that measures the gains of verifiers
        and growing trees. The rest, and what acceptance leaves, is for costs: half of that for one sequence, the other
        half for larger batches in equal parts. A few rounds are timed in any case. Figures for which the time was short
        have a larger error in the profile. Default: 45; for a streamed target the time of 80 passes, if longer
    verifier: a name, as in `SpeculativeDecoder`, for the methods that accept it; default as there

    For a draft that gives the distributions of all levels in one pass, a drawing temperature is chosen for each depth
    and for each sampling temperature above 0, see `drafts.tempered`. That takes at most a fifth of the time for
    acceptance. A decoder with the profile uses these temperatures.

    A streamed target reads its weights in every pass, which may take seconds. So acceptance is counted for all ways in
    the same passes, and steps are timed in two rounds, after prompts of one token.

    Raises ValueError for models that do not fit each other, for `Lookahead` and `Merge` (their acceptance cannot be
    counted token by token), for settings out of range, for a limit too short to count acceptance, and if the machine is
    so busy that the measured costs are noise.
    """
    begin = time.perf_counter()
    tokens = whole("tokens", tokens)
    sequences = whole("sequences", sequences)
    seed = whole("seed", seed)
    limit = None if limit is None else real("limit", limit)
    sizes = _numbers("sizes", sizes)
    batch_sizes = _numbers("batch_sizes", batch_sizes)
    if isinstance(temperatures, str) or not isinstance(temperatures, Sequence):
        raise TypeError(f"temperatures must be a list of numbers, got {temperatures!r}")
    if not temperatures:
        raise ValueError("temperatures must be a list of at least one number, got none")
    for prompt in prompts:
        if not isinstance(prompt, Tensor) or prompt.dtype != torch.long or prompt.dim() != 1 or not prompt.numel():
            given = f"{prompt.dtype} {[*prompt.shape]}" if isinstance(prompt, Tensor) else repr(prompt)
            raise ValueError(f"prompts must be LongTensors [T] of at least one token, got {given}")
    for temperature in temperatures:
        Filters(temperature, top_k, top_p, min_p).check()
    if tokens < 2 or sequences < 1 or (sizes is not None and (not sizes or min(sizes) < 1)):
        raise ValueError(f"expected tokens >= 2, sequences >= 1, sizes >= 1, got {tokens}, {sequences} and {sizes}")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be a number of seconds above 0, got {limit}")
    if batch_sizes is not None and (not batch_sizes or min(batch_sizes) < 1):
        raise ValueError(f"batch_sizes must be numbers of sequences of at least 1, got {[*batch_sizes]}")
    row_of("sequoia", verifier)  # refuses a word that is none
    report = on_progress or (lambda line: None)
    forward = forward_of(target, "target")
    check_alone("calibrate", forward)  # how long it runs depends on timings, which differ between ranks
    source = as_draft(draft, forward, target)
    if why_not := source.why_not_measured:
        raise ValueError(
            f"acceptance is counted token by token, but {why_not}; "
            "give the decoder a tree or a tree_size in the place of a profile"
        )
    streamed = forward.stream is not None
    if streamed:
        limit = _limit_of_streamed(forward, limit, report)
    limit = LIMIT if limit is None else limit
    models = [forward, *source.models]
    limits = [model.rope_limit or model.max_positions for model in models]
    room = min(limits) - tokens - 2 * TIMED_LEVELS
    if room < 1:
        raise ValueError(f"the models have {min(limits)} positions; tokens must leave some for a prompt, got {tokens}")
    if not len(prompts):
        report("sampling prompts from the target")
        length = STREAMED_PROMPT // 2 if streamed else 32
        prompts = own_prompts(target, min(sequences, 16), min(length, room), seed)
    longest = min(room, STREAMED_PROMPT if streamed else room)
    prompts = [prompt[-longest:].to(target.device) for prompt in prompts]

    samplings = [Filters(each, top_k, top_p, min_p) if each > 0 else Filters(0.0) for each in temperatures]
    kind = target.device.type
    share = ACCEPTANCE_SHARE * limit
    now = time.perf_counter()
    extent = Extent(tokens, sequences, seconds=DRAWING_SHARE * share)
    drawn_at = drawing_temperatures(forward, source, prompts, samplings, extent, seed, report)
    wanted = [
        (way.drawn_at(drawn_at.get(each, ())), each)
        for each in samplings
        for way in ways_to_draft(each.temperature, kind, verifier)
    ]
    share = max(share / 2, share - (time.perf_counter() - now))
    if streamed:
        extent = Extent.of_trees(tokens, max(2, sequences // len(wanted)), source.levels, share)
        counts = walk_together(
            forward, source, prompts, [(way.counted, each) for way, each in wanted], extent, seed, report
        )
        measured = tuple(as_measured(way, each, found) for (way, each), found in zip(wanted, counts, strict=True))
    else:
        extent = Extent.of_trees(tokens, sequences, source.levels)
        measured = measure_ways(forward, source, prompts, wanted, extent, seed, share, report)
    levels = min(TIMED_LEVELS, source.levels or TIMED_LEVELS)
    sizes = (STREAMED_SIZES if streamed else SIZES) if sizes is None else sizes
    sizes = [size for size in sizes if size <= sum(TIMED_CHILDREN**depth for depth in range(levels + 1))]
    visits = StreamedVisits if streamed else GraphVisits if kind == "cuda" else Visits
    costs = costs_by_batch(
        visits(target, draft, prompts, levels, verifier),
        default_batch_sizes("streamed" if streamed else kind) if batch_sizes is None else batch_sizes,
        sizes,
        measured,
        limit=limit * (1 - GAINS_SHARE) - (time.perf_counter() - begin),
        report=report,
        every=batch_sizes is not None,
    )
    logger.debug("calibrated in %.1f s: %s", time.perf_counter() - begin, costs)
    profile = Profile(
        target=describe(target),
        draft=describe(draft),
        target_parameters=parameter_count(target),
        draft_parameters=draft_parameter_count(draft, target),
        environment=cost_environment(target),
        costs=costs,
        acceptance=measured,
        verifier=verifier,
        attention=attention_by_length(forward),
    )
    if streamed:
        return profile
    until = min(begin + limit, time.perf_counter() + GAINS_SHARE * limit)
    jobs = [*jobs_of(target, draft, profile)]
    gains = measure_gains(jobs, prompts, positions=min(limits), until=until, seed=seed, report=report)
    return replace(profile, gains=gains)


@torch.inference_mode()
def _limit_of_streamed(target: Forward, limit: float | None, report: Report) -> float:
    """The time limit in seconds for a streamed target: the given limit, or by default one by the time of a pass.

    Raises ValueError if the given limit is too low to count acceptance.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    report("the first pass, in which weights are looked at, too")
    target.prefill(token, target.new_cache(1, 2))
    begin = time.perf_counter()
    target.prefill(token, target.new_cache(1, 2))
    seconds = time.perf_counter() - begin
    least = seconds * LEAST_TOKENS / ACCEPTANCE_SHARE
    if limit is not None and limit < least:
        raise ValueError(
            f"a pass of this target, which reads its weights, takes {seconds:.2g} s, so that acceptance cannot be "
            f"counted in {limit:g} s; give a limit of at least {math.ceil(least)} s (limit=, --limit), or none"
        )
    chosen = max(LIMIT, STREAMED_PASSES * seconds) if limit is None else limit
    report(f"a pass takes {seconds:.2g} s, and calibrating up to {chosen:.0f} s")
    logger.debug("a pass of the streamed target takes %.2f s, the limit is %.0f s", seconds, chosen)
    return chosen


def ways_to_draft(temperature: float, device_type: str, verifier: str | None = None) -> list[Way]:
    """The combinations of draw and verification that lossless methods use at a temperature, each once.

    device_type: of the target, on which the default verification depends
    verifier: for the methods that accept it; None for each method's default
    """
    drafting = [name for name, row in METHODS.items() if name != "autoregressive" and row.is_lossless]
    rows = [measured_row(name, verifier, device_type) for name in drafting]
    ways = [
        Way(*row.at(temperature), count)
        for row in rows
        for count in (SEQUENCE_COUNTS if row.independent_sequences else (None,))
    ]
    return list(dict.fromkeys(ways))


def cost_environment(target: PreTrainedModel) -> dict[str, str | int]:
    """What costs depend on besides the models: device, threads, precision, versions, megabytes that a pass reads."""
    device = target.device
    return streaming_of(target) | {
        "device_type": device.type,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def own_prompts(target: PreTrainedModel, count: int, length: int, seed: int) -> list[Tensor]:
    """Sample `count` prompts, LongTensors [1 + length], from the target; they begin with bos, else eos, else 0."""
    config = target.config
    known = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
    first = next((token for token in known if isinstance(token, int)), 0)
    start = torch.full((count, 1), first, device=target.device)
    plain = SpeculativeDecoder(target, None, "autoregressive")
    return list(plain.generate(start, length, temperature=1.0, seed=seed, **NOTHING).sequences)
