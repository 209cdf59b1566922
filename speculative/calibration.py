"""Measure what planning a tree needs: what steps cost on this machine, and how often which child is accepted.

Costs are those of real decoding: trees of many sizes are decoded with, in turn and several rounds, and the phases of
their steps timed.

Acceptance [depth, child] is counted on a walk along text that the target itself writes. At every token the draft offers
`children` tokens and the verifier decides, as it would at a node of a tree:

    accepted child j  ->  the text goes on with it, one deeper; the next token is offered below it
    none accepted     ->  the text goes on with the recovered token, at a new root

A tree's nodes meet the same, as long as the tree has the children that are accepted; so nothing is assumed about how
depth and acceptance hang together (Sequoia measures one vector for all depths). After `depth` accepted ones the target
draws a bonus token, as it does below a tree's deepest leaves. Of sequences drawn apart (SpecInfer, SpecTr) those that
began with the accepted token go on together, one child each.
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
from heavypath.speculative.drafts import Draft, EarlyExit, PromptLookup, as_draft
from heavypath.speculative.methods import DEFAULT_ACCEPTANCE, METHODS
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.profile import Acceptance, Costs, Profile, describe
from heavypath.speculative.trees.planning import greedy_tree
from heavypath.speculative.trees.tree import TokenTree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DEPTH = 8
CHILDREN = 8
SEQUENCES = (2, 3, 4, 6, 8)  # of SpecInfer and SpecTr: how many are drawn decides how often one is accepted
ROUNDS = 3
Report = Callable[[str], object]


def calibrate(
    target: PreTrainedModel,
    draft: PreTrainedModel | PromptLookup | EarlyExit,
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
    """Costs and acceptance of a pair, for `SpeculativeDecoder(..., profile=)`.

    prompts: LongTensors [T], what is to be continued; as many as `sequences` are used. Without any, the target samples
        some of its own from its first token on.
    temperatures, top_k, top_p, min_p: how it will be sampled; temperature 0 takes no filters.
    sizes: of the trees timed; `tokens`, of each walk.

    Raises ValueError for models that don't fit, and settings out of range.
    """
    for temperature in temperatures:
        Filters(temperature, top_k, top_p, min_p).check()
    if tokens < 2 or sequences < 1 or not sizes or min(sizes) < 1:
        raise ValueError(f"expected tokens >= 2, sequences >= 1, sizes >= 1, got {tokens}, {sequences} and {[*sizes]}")
    report = on_progress or (lambda line: None)
    forward = forward_of(target, "target")
    source = as_draft(draft, forward, target)
    limits = [model.max_positions for model in (forward, source.forward) if model is not None]
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
        for number, (draw, verify, apart) in enumerate(ways := ways_to_draft(temperature), start=1):
            many = f", {apart} sequences" if apart else ""
            report(f"acceptance at temperature {temperature:g}: {verify}{many} ({number} of {len(ways)})")
            found = walk(
                forward, source, prompts, draw=draw, verify=verify, filters=sampling, children=apart or CHILDREN,
                apart=apart is not None, depth=DEPTH, tokens=tokens, sequences=sequences, seed=seed,
            )  # fmt: skip
            measured.append(Acceptance(draw, verify, apart, *sampling, *(field.tolist() for field in found)))
    return Profile(describe(target), describe(draft), environment(target), costs, tuple(measured))


def ways_to_draft(temperature: float) -> list[tuple[str, str, int | None]]:
    """(draw, verify, how many sequences) of all methods at a temperature; None for trees that branch."""
    kinds = dict.fromkeys(METHODS[name].kind(temperature) for name in METHODS if name != "autoregressive")
    return [(draw, verify, count) for draw, verify, apart in kinds for count in (SEQUENCES if apart else (None,))]


def environment(target: PreTrainedModel) -> dict[str, str | int]:
    """What costs depend on."""
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
    """Texts LongTensor[length] that the target samples behind its first token (bos, else eos, else 0)."""
    config = target.config
    known = (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id"))
    first = next((token for token in known if isinstance(token, int)), 0)
    start = torch.full((count, 1), first, device=target.device)
    plain = SpeculativeDecoder(target, None, "autoregressive")
    return list(plain.generate(start, length, temperature=1.0, seed=seed).sequences)


def measure_costs(
    target: PreTrainedModel,
    draft: PreTrainedModel | PromptLookup | EarlyExit,
    prompts: Sequence[Tensor],
    sizes: Sequence[int],
    tokens: int,
    report: Report,
) -> Costs:
    """Seconds of a step without its drafting, by tree size, and of drafting a level: the least of the rounds.

    Whatever else the machine does only adds to a round.
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
            stats = decoder.generate(prompt, tokens, temperature=1.0, seed=round_).stats
            if round_ == 0:  # a warm-up
                continue
            seconds = stats.seconds
            steps[size].append(sum(seconds[phase] for phase in ("target", "verification", "compaction")) / stats.steps)
            if size > 1:
                levels.append((seconds["draft"] + seconds["sampling"]) / stats.steps / decoder.tree.depth)
    return Costs({size: min(found) for size, found in steps.items()}, median(levels) if levels else 0.0)


def _clock_of_gpu() -> float:
    """Seconds, once the GPU has done what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


class Walk(NamedTuple):
    """What was counted, on the CPU.

    accepted: LongTensor[depth, children], how often child j of a node at depth d was the accepted one; of sequences
              drawn apart, those below the root count as one child
    reached:  LongTensor[depth], how many such nodes there were
    moments:  fp64 [children, 5], over the nodes that tried child k: their number, the sums of q, q^2, y and q y, where
              q is the draft's share of the child among the tokens left, and y is 1 if it was accepted
    """

    accepted: Tensor
    reached: Tensor
    moments: Tensor


@torch.inference_mode()
def walk(
    target: Forward,
    draft: Draft,
    prompts: Sequence[Tensor],
    *,
    draw: str,
    verify: str,
    filters: Filters,
    children: int,
    apart: bool,
    depth: int,
    tokens: int,
    sequences: int,
    seed: int,
) -> Walk:
    """Count on texts of `tokens` tokens behind `sequences` prompts.

    prompts: LongTensors [T], taken in turn. draw, verify: as `Method`'s; children: offered at a node; apart: they begin
    as many sequences, each with a child a node.
    """
    chosen = [prompts[i % len(prompts)] for i in range(sequences)]
    lengths = torch.tensor([len(prompt) for prompt in chosen], device=target.device)
    padded = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
    rows = padded.shape[1] + tokens + 1
    target_cache, draft_cache = target.new_cache(sequences, rows), draft.new_cache(sequences, rows)
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

    children = min(children, target.vocab_size)
    star = torch.tensor([-1] + [0] * children, device=target.device)
    likeliest = draw == "top_k" or filters.temperature == 0
    drawing = filters._replace(temperature=0.0) if likeliest else filters
    at = torch.zeros_like(lengths)  # accepted in a row: the depth of the node
    accepted = torch.zeros(depth, children, dtype=torch.long, device=target.device)
    reached = torch.zeros(depth, dtype=torch.long, device=target.device)
    moments = torch.zeros(children, 5, dtype=torch.float64, device=target.device)
    place = torch.arange(children, device=target.device)
    alive = torch.full_like(lengths, children)  # children to be offered
    for _ in range(tokens):
        here = state.lengths[:, None]
        longest = int(state.lengths.max())
        after = draft(root_feed(state, longest, nodes=2), draft_cache)[:, -1]
        mask = TreeMask(prefix_length=state.lengths, visible_rows=longest + 1, subtree_end=torch.ones_like(star[:1]))
        logits = target(state.root[:, None], here, here, target_cache, mask)
        noise = root_rows(state.noise, state.lengths)
        drawn = gumbel_topk(
            after, children, **drawing._asdict(), seed=seed, rows=noise,
            replacement=draw == "with_replacement" and not likeliest,
        )  # fmt: skip
        check_distributions("draft", drawn.keys[:, None], state, 0)
        here_offered = (place < alive[:, None]) & (at < depth)[:, None]
        offered = torch.cat([state.root[:, None], drawn.tokens.where(here_offered, -1)], 1)
        verified = verify_tree(
            offered, star, logits.expand(-1, children + 1, -1), after[:, None].expand(-1, children + 1, -1),
            method=verify, max_depth=1, **filters._asdict(), draft_temperature=drawing.temperature, seed=seed,
            rows=noise[:, None].expand(-1, children + 1),
        )  # fmt: skip
        child = verified.path[:, 1]
        hit = verified.length > 0
        token = offered.gather(1, child.clamp(min=0)[:, None])
        counted = (child - 1).where(at == 0, 0) if apart else child - 1
        reached += torch.bincount(at[at < depth], minlength=depth)
        accepted += torch.bincount((at * children + counted)[hit], minlength=accepted.numel()).view_as(accepted)
        moments += _moments(drawn.logprobs.double().exp(), (child - 1).where(hit, children), at < depth)
        if apart:
            alive = (offered[:, 1:] == token).sum(1).where(hit, children)
        at = (at + 1).where(hit, 0)
        state.previous.copy_(state.root)
        state.root.copy_(token[:, 0].where(hit, verified.next_token))
        state.lengths.add_(1)
    return Walk(accepted.cpu(), reached.cpu(), moments.cpu())


def _moments(probs: Tensor, choice: Tensor, counted: Tensor) -> Tensor:
    """`Walk.moments` of one step. probs: fp64 [S, K], the children's; choice: LongTensor[S], K for none accepted."""
    left = (1 - pad(probs[:, :-1], (1, 0)).cumsum(1)).clamp(min=1e-12)
    share = (probs / left).clamp(max=1)
    index = torch.arange(probs.shape[1], device=probs.device)
    tried = ((index <= choice[:, None]) & counted[:, None] & (probs > 0)).double()
    hit = (index == choice[:, None]).double()
    return torch.stack([(tried * term).sum(0) for term in (1 + 0 * share, share, share**2, hit, share * hit)], 1)
