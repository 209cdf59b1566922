"""Measure what planning a tree needs: what steps cost on this machine, and how often which child is accepted.

Costs are those of real decoding: it is run with trees of many sizes, in turn and for several rounds, and the phases of
its steps are timed.

Acceptance [depth, child] is counted on a walk along text that the target itself writes. At every token the draft offers
`children` tokens, and the verifier decides as it would at a node of a tree:

    accepted child j  ->  the text goes on with it, one level deeper; the next token is offered below it
    none accepted     ->  the text goes on with the recovered token, which is a new root

The nodes of a tree meet the same, as long as the tree has the children that are accepted. So nothing is assumed about
how acceptance depends on depth (Sequoia measures one vector for all depths). After `depth` accepted tokens the target
draws a bonus token, as it does below the deepest leaves of a tree. Of independent sequences (SpecInfer, SpecTr) those
that began with the accepted token go on together, with one child each.
"""

import platform
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.decoding.drafted import check_distributions, root_feed
from heavypath.speculative.decoding.noise_rows import root_rows
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.drafts import AnyDraft, Draft, as_draft, model_of
from heavypath.speculative.generation_defaults import NOTHING
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE, METHODS, Kind
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.profile import (
    Costs,
    MeasuredAcceptance,
    Profile,
    describe,
    draft_parameter_count,
    parameter_count,
)
from heavypath.speculative.trees.planning import greedy_tree
from heavypath.speculative.trees.tree import TokenTree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DEPTH = 8
CHILDREN = 8
SEQUENCE_COUNTS = (2, 3, 4, 6, 8)  # of SpecInfer and SpecTr: how many are drawn decides how often one is accepted
ROUNDS = 3
Report = Callable[[str], object]


def calibrate(
    target: PreTrainedModel,
    draft: AnyDraft,
    *,
    prompts: Sequence[Tensor] = (),
    temperatures: Sequence[float] = (0.0, 0.6, 1.0),
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    sizes: Sequence[int] = SIZES,
    tokens: int = 48,
    sequences: int = 48,
    seed: int = 0,
    on_progress: Report | None = None,
) -> Profile:
    """Measure costs and acceptance of a pair of models, for `SpeculativeDecoder(..., profile=)`.

    prompts: LongTensors [T] to be continued, as many as `sequences` of them. Without any, the target samples some of
        its own, from its first token on.
    temperatures, top_k, top_p, min_p: how the target will be sampled; temperature 0 takes no filters.
    sizes: nodes of the trees that are timed, root included.
    tokens, sequences: length of each text that is decoded or walked along, and number of the texts walked along.

    Raises ValueError for models that do not fit each other, and for settings out of range.
    """
    for temperature in temperatures:
        Filters(temperature, top_k, top_p, min_p).check()
    if tokens < 2 or sequences < 1 or not sizes or min(sizes) < 1:
        raise ValueError(f"expected tokens >= 2, sequences >= 1, sizes >= 1, got {tokens}, {sequences} and {[*sizes]}")
    report = on_progress or (lambda line: None)
    forward = forward_of(target, "target")
    source = as_draft(draft, forward, target)
    models = [model for model in (forward, model_of(source)) if model is not None]
    limits = [model.rope_limit or model.max_positions for model in models]
    room = min(limits) - tokens - 2 * DEPTH
    if room < 1:
        raise ValueError(f"the models have {min(limits)} positions; tokens must leave some for a prompt, got {tokens}")
    if not prompts:
        report("sampling prompts from the target")
        prompts = own_prompts(target, min(sequences, 16), min(32, room), seed)
    prompts = [prompt[-room:] for prompt in prompts]

    costs = measure_costs(target, draft, prompts, sizes, tokens, report)
    measured = []
    for temperature in temperatures:
        sampling = Filters(temperature, top_k, top_p, min_p) if temperature > 0 else Filters(0.0)
        for number, way in enumerate(ways := ways_to_draft(temperature), start=1):
            report(f"acceptance at temperature {temperature:g}: {way} ({number} of {len(ways)})")
            extent = Extent(tokens=tokens, sequences=sequences)
            measured.append(measure_way(forward, source, prompts, way, sampling, extent, seed))
    return Profile(
        target=describe(target),
        draft=describe(draft),
        target_parameters=parameter_count(target),
        draft_parameters=draft_parameter_count(draft, target),
        environment=cost_environment(target),
        costs=costs,
        acceptance=tuple(measured),
    )


class Way(NamedTuple):
    """A way to draft and verify, whose acceptance is measured.

    sequence_count: the number of independent sequences; None for trees that may branch everywhere
    """

    kind: Kind
    sequence_count: int | None

    def __str__(self) -> str:
        sequences = "" if self.sequence_count is None else f", {self.sequence_count} sequences"
        return f"drawn {self.kind.draw}, verified by {self.kind.verification}{sequences}".replace("_", " ")


def ways_to_draft(temperature: float) -> list[Way]:
    """The ways of all methods at a temperature."""
    kinds = dict.fromkeys(method.kind(temperature) for name, method in METHODS.items() if name != "autoregressive")
    return [
        Way(kind, count) for kind in kinds for count in (SEQUENCE_COUNTS if kind.independent_sequences else (None,))
    ]


def cost_environment(target: PreTrainedModel) -> dict[str, str | int]:
    """What costs depend on besides the models: device, threads, precision and the libraries' versions."""
    device = target.device
    return {
        "device_type": device.type,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def own_prompts(target: PreTrainedModel, count: int, length: int, seed: int) -> list[Tensor]:
    """`count` texts LongTensor[1 + length] that the target samples after its first token (bos, else eos, else 0)."""
    config = target.config
    known = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
    first = next((token for token in known if isinstance(token, int)), 0)
    start = torch.full((count, 1), first, device=target.device)
    plain = SpeculativeDecoder(target, None, "autoregressive")
    return list(plain.generate(start, length, temperature=1.0, seed=seed, **NOTHING).sequences)


def measure_costs(
    target: PreTrainedModel,
    draft: AnyDraft,
    prompts: Sequence[Tensor],
    sizes: Sequence[int],
    tokens: int,
    report: Report,
) -> Costs:
    """Seconds of a step without its drafting, for each size of tree, and of drafting a level.

    A step's seconds are the least of several rounds, since whatever else the machine does only adds to a round. A
    level's are the median over sizes and rounds.
    """
    decoders = {}
    for size in sorted({1, *sizes}):
        tree = greedy_tree(DEFAULT_ACCEPTANCE, size, DEPTH) if size > 1 else TokenTree([-1])
        gpu = target.device.type == "cuda"
        decoders[size] = SpeculativeDecoder(target, draft, "sequoia", tree=tree, cuda_graphs=False if gpu else None)
        if gpu:
            decoders[size].clock = _clock_of_gpu
    steps: dict[int, list[float]] = {size: [] for size in decoders}
    levels: list[float] = []
    for round_ in range(ROUNDS + 1):
        for size, decoder in decoders.items():
            report(f"timing trees of {size} nodes, round {round_ + 1} of {ROUNDS + 1}")
            prompt = prompts[round_ % len(prompts)][None]
            stats = decoder.generate(prompt, tokens, temperature=1.0, seed=round_, **NOTHING).stats
            if round_ == 0:  # a warm-up
                continue
            seconds = stats.seconds
            steps[size].append(sum(seconds[phase] for phase in ("target", "verification", "compaction")) / stats.steps)
            if size > 1:
                levels.append((seconds["draft"] + seconds["sampling"]) / stats.steps / decoder.tree.depth)
    return Costs({size: min(found) for size, found in steps.items()}, median(levels) if levels else 0.0)


def _clock_of_gpu() -> float:
    """The time in seconds, when the GPU has finished what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


class Extent(NamedTuple):
    """How much is counted: on `sequences` texts of `tokens` tokens, `children` at each node, down to `depth` levels."""

    tokens: int
    sequences: int
    depth: int = DEPTH
    children: int = CHILDREN


class Counts(NamedTuple):
    """What was counted, on the CPU.

    accepted: LongTensor[depth, children], how often child j of a node at depth d was the accepted one, the first of
              siblings with equal tokens. Of independent sequences those below the first level count as one child
    reached:  LongTensor[depth], how many nodes there were at depth d
    moments:  fp64 [children, 5], over the nodes that tried child k: their number, and the sums of q, q^2, y and q y,
              where q is the draft's share of the child among the tokens left, and y is 1 if it was accepted, else 0
    """

    accepted: Tensor
    reached: Tensor
    moments: Tensor


def measure_way(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], way: Way, filters: Filters, extent: Extent, seed: int
) -> MeasuredAcceptance:
    """The acceptance of one way to draft and verify under one sampling, counted by `walk`."""
    counts = walk(target, draft, prompts, way, filters, extent, seed)
    return MeasuredAcceptance(
        draw=way.kind.draw,
        verification=way.kind.verification,
        sequence_count=way.sequence_count,
        filters=filters,
        accepted=counts.accepted.tolist(),
        reached=counts.reached.tolist(),
        moments=counts.moments.tolist(),
    )


@torch.inference_mode()
def walk(
    target: Forward, draft: Draft, prompts: Sequence[Tensor], way: Way, filters: Filters, extent: Extent, seed: int
) -> Counts:
    """Count what is offered and accepted along texts that the target writes.

    prompts: LongTensors [T], taken in turn until there are extent.sequences of them. Of independent sequences as many
        begin as `way` says, whatever extent.children is.
    """
    tokens, sequences, depth = extent.tokens, extent.sequences, extent.depth
    chosen = [prompts[i % len(prompts)] for i in range(sequences)]
    lengths = torch.tensor([len(prompt) for prompt in chosen], device=target.device)
    padded = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
    cache_rows = padded.shape[1] + tokens + 1
    target_cache, draft_cache = target.new_cache(sequences, cache_rows), draft.new_cache(sequences, cache_rows)
    target.prefill(padded, target_cache)
    draft.prefill(padded, draft_cache)
    state = Sequences.room_for(sequences, new_tokens=tokens, stops=1, vocab_size=0, count_slots=0, device=target.device)
    state.begin(
        padded,
        lengths,
        new_tokens=tokens,
        stops=lengths.new_zeros(0),
        sequence_ids=torch.arange(sequences, device=target.device),
        seed=seed,
    )

    children = min(way.sequence_count or extent.children, target.vocab_size)
    star = torch.tensor([-1] + [0] * children, device=target.device)
    drawing = way.kind.drawing_filters(filters)
    at = torch.zeros_like(lengths)  # the depth of the node: how many tokens in a row were accepted
    accepted = torch.zeros(depth, children, dtype=torch.long, device=target.device)
    reached = torch.zeros(depth, dtype=torch.long, device=target.device)
    moments = torch.zeros(children, 5, dtype=torch.float64, device=target.device)
    place = torch.arange(children, device=target.device)
    alive = torch.full_like(lengths, children)  # how many children are offered
    for _ in range(tokens):
        here = state.lengths[:, None]
        longest = int(state.lengths.max())
        after = draft(root_feed(state, longest, nodes=2), draft_cache)[:, -1]
        mask = TreeMask(prefix_length=state.lengths, visible_rows=longest + 1, subtree_end=torch.ones_like(star[:1]))
        logits = target(state.root[:, None], here, here, target_cache, mask)
        noise = root_rows(state.noise, state.lengths)
        drawn = gumbel_topk(
            after, children, **drawing._asdict(), seed=seed, rows=noise, replacement=way.kind.replacement
        )
        check_distributions("draft", drawn.keys[:, None], state, 0)
        here_offered = (place < alive[:, None]) & (at < depth)[:, None]
        offered = torch.cat([state.root[:, None], drawn.tokens.where(here_offered, -1)], 1)
        verified = verify_tree(
            offered, star, logits.expand(-1, children + 1, -1), after[:, None].expand(-1, children + 1, -1),
            method=way.kind.verification, max_depth=1, **filters._asdict(), draft_temperature=drawing.temperature,
            seed=seed, rows=noise[:, None].expand(-1, children + 1),
        )  # fmt: skip
        child = verified.path[:, 1]
        hit = verified.length > 0
        token = offered.gather(1, child.clamp(min=0)[:, None])
        counted = (child - 1).where(at == 0, 0) if way.kind.independent_sequences else child - 1
        reached += torch.bincount(at[at < depth], minlength=depth)
        accepted += torch.bincount((at * children + counted)[hit], minlength=accepted.numel()).view_as(accepted)
        moments += _moments(drawn.logprobs.double().exp(), (child - 1).where(hit, children), at < depth)
        if way.kind.independent_sequences:
            alive = (offered[:, 1:] == token).sum(1).where(hit, children)
        at = (at + 1).where(hit, 0)
        state.previous.copy_(state.root)
        state.root.copy_(token[:, 0].where(hit, verified.next_token))
        state.lengths.add_(1)
    return Counts(accepted.cpu(), reached.cpu(), moments.cpu())


def _moments(probs: Tensor, choice: Tensor, counted: Tensor) -> Tensor:
    """`Counts.moments` of one step, fp64 [K, 5].

    probs: fp64 [S, K], the draft's probabilities of the children; choice: LongTensor[S], the accepted child, K if there
    is none; counted: bool [S], which sequences count.
    """
    left = (1 - pad(probs[:, :-1], (1, 0)).cumsum(1)).clamp(min=1e-12)
    share = (probs / left).clamp(max=1)
    index = torch.arange(probs.shape[1], device=probs.device)
    tried = ((index <= choice[:, None]) & counted[:, None] & (probs > 0)).double()
    hit = (index == choice[:, None]).double()
    return torch.stack([(tried * term).sum(0) for term in (1 + 0 * share, share, share**2, hit, share * hit)], 1)
