"""Visit real decoding, for a calibration: time its steps, and measure what methods accept beyond what is counted.

Decoding is run for a few steps with each tree, in turn and for several rounds, and the phases of its steps are timed.
`costs.timing` says how figures follow from that. A single sequence comes first. A larger batch wants no larger trees
than a single sequence does, and so needs few sizes.

Acceptance is counted for rejection and for trees that are planned once (`walking`). Held siblings and traversal accept
more, and by how much depends on the whole tree; so does what a grown tree accepts. Both are seen in decoding with the
method's own plan. Where the verifier alone differs, each of its steps is verified by rejection, too, with the same
coins. So both meet the same trees, and their ratio is known well after few steps. With m drafted tokens accepted a step

    factor = m / m by rejection        or, of trees that grow,        m / m by the ranks of texts for the planned tree
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxLengthCriteria

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes, Verified, VerifyInputs
from heavypath.kernels.noise import Noise
from heavypath.kernels.verification import verify_unchecked
from heavypath.speculative.costs.table import Costs, CostsByBatch
from heavypath.speculative.costs.timing import PACE, Pace, Timed, time_costs
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.decoding.run import StepRunner
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.drafts.kinds import AnyDraft
from heavypath.speculative.methods import LOSSLESS_METHODS, VERIFIERS
from heavypath.speculative.options import NOTHING
from heavypath.speculative.profile import MeasuredAcceptance, MethodGain, Profile
from heavypath.speculative.trees.growth import DEFAULT_ACCEPTANCE
from heavypath.speculative.trees.planning import greedy_tree, select_tree
from heavypath.speculative.trees.tree import ROOT, TokenTree

BATCH_SIZES = {"cpu": (1, 2, 4, 8, 16), "cuda": (1, 2, 4, 8, 16, 32, 64), "streamed": (1,)}
VISIT_SECONDS = 0.1  # of decoding, to time the steps with a tree: several time slices of a busy machine
VISIT_TOKENS = (4, 16)  # the least and the most that each sequence decodes in it
ALONE_SHARE = 0.5  # of the time for costs, for a single sequence
STREAMED_TOKENS = 2  # that a visit decodes where a pass reads its weights: then that is most of its time
STREAMED_PACE = Pace(rounds=2, least=2)
BESIDE = ("prefill", "host", "trace")  # phases that are no part of a step
SEQUENCES, TOKENS = 16, 32  # that a visit decodes for a method's gain
ROUNDS_OF_GAINS, SURE = 32, 0.01  # no more visits than these for a gain, nor where its error is below that


class Visits:
    """Decodes a few steps of a batch with a tree of some size, and tells what one of them took.

    The first visit finds how many tokens of plain decoding take `VISIT_SECONDS`; the others decode as many. Trees have
    at most `levels` levels.
    """

    pace = PACE
    graphs: bool | None = False  # whether steps on a GPU are CUDA graphs, which tell no phases

    def __init__(
        self, target: PreTrainedModel, draft: AnyDraft, prompts: Sequence[Tensor], levels: int,
        verifier: str | None = None, batch: int = 1,
    ):  # fmt: skip
        """batch: sequences that are decoded together."""
        self.target, self.draft, self.prompts, self.levels = target, draft, prompts, levels
        self.verifier, self.batch = verifier, batch
        self._decoders: dict[int, SpeculativeDecoder] = {}
        self._tokens = 0

    def of(self, batch: int) -> "Visits":
        """The same of so many sequences."""
        visits = type(self)(self.target, self.draft, self.prompts, self.levels, self.verifier, batch)
        visits._decoders = self._decoders
        return visits

    def __call__(self, size: int, round_: int) -> Timed:
        """The seconds of a step with a tree of `size` nodes, and of a level of its drafting.

        The texts could go on for another step when they are cut off, so that every step has the whole tree.
        """
        if not self._tokens:
            least, most = VISIT_TOKENS
            self._tokens = max(least, min(most, round(VISIT_SECONDS / self._visit(1, round_, least).step)))
        return self._visit(size, round_, self._tokens)

    def _visit(self, size: int, round_: int, tokens: int) -> Timed:
        decoder = self._decoder(size)
        assert decoder.tree is not None
        stats = self._decoded(decoder, round_, tokens)
        seconds, steps = stats.seconds, int(stats.steps_of.max())
        step = sum(seconds[phase] for phase in ("target", "verification", "compaction")) / steps
        level = (seconds["draft"] + seconds["sampling"]) / steps / decoder.tree.depth if size > 1 else None
        return Timed(step, level)

    def _decoded(self, decoder: SpeculativeDecoder, round_: int, tokens: int) -> Statistics:
        """The statistics of continuing a round's prompts by so many tokens."""
        assert isinstance(decoder.tree, TokenTree)
        depth, (prompts, mask) = decoder.tree.depth, self._batch_of(round_)
        end = MaxLengthCriteria(prompts.shape[1] + tokens)
        return decoder.generate(
            prompts, tokens + depth + 1, temperature=1.0, seed=round_, attention_mask=mask, stopping_criteria=[end],
            pad_token_id=0, **NOTHING,
        ).stats  # fmt: skip

    def _batch_of(self, round_: int) -> tuple[Tensor, Tensor]:
        """The prompts of a round, left-padded, and their mask; LongTensors [B, T]."""
        chosen = [self.prompts[(round_ + place) % len(self.prompts)] for place in range(self.batch)]
        return _together(chosen)

    def _decoder(self, size: int) -> SpeculativeDecoder:
        if size not in self._decoders:
            gpu = self.target.device.type == "cuda"
            options = {"verifier": self.verifier, "cuda_graphs": self.graphs if gpu else None}
            decoder = SpeculativeDecoder(self.target, self.draft, "sequoia", tree=self._tree(size), **options)
            if gpu:
                decoder.clock = _clock_of_gpu
            self._decoders[size] = decoder
        return self._decoders[size]

    def _tree(self, size: int) -> TokenTree:
        return greedy_tree(DEFAULT_ACCEPTANCE, size, self.levels) if size > 1 else ROOT


class Watched:
    """Stands in the place of a decoder's runner from when it is made; a subclass has a `run` that looks at steps."""

    def __init__(self, decoder: SpeculativeDecoder):
        self.runner = decoder.runner
        decoder.runner = cast(StepRunner, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, plan: StepPlan, workspace: Workspace, **where: Any) -> Stepped:
        """A step; where: the keyword arguments of `StepRunner.run`."""
        return self.runner.run(plan, workspace, **where)


class CountedSteps(Watched):
    """Counts the steps that are run: on a GPU one more may follow the end of a text, see `decoding.run`."""

    steps = 0

    def run(self, plan: StepPlan, workspace: Workspace, **where: Any) -> Stepped:
        """As of `Watched`."""
        self.steps += 1
        return super().run(plan, workspace, **where)


class GraphVisits(Visits):
    """The same where steps are CUDA graphs, which do not tell their phases; by one decoder for all trees.

    Launched call by call, a level of a draft takes as long as the host needs for its many small kernels. So the level
    is told by two trees of as many nodes. T are the seconds of a step with a tree, L the most levels of any:

        level = (T(a chain of L levels) - T(l levels)) / (L - l),     l = L / 4, rounded down
        step  = T(tree) - level * levels of the tree
    """

    graphs = None

    def __init__(
        self, target: PreTrainedModel, draft: AnyDraft, prompts: Sequence[Tensor], levels: int,
        verifier: str | None = None, batch: int = 1,
    ):  # fmt: skip
        super().__init__(target, draft, prompts, levels, verifier, batch)
        self._captured: set[TokenTree] = set()
        self._level: dict[int, float] = {}  # by round

    def _visit(self, size: int, round_: int, tokens: int) -> Timed:
        tree = self._tree(size)
        seconds = self._seconds(tree, round_, tokens)
        if tree.depth == 0:
            return Timed(seconds)
        if round_ not in self._level:
            few, nodes = self.levels // 4, self.levels + 1
            flat = greedy_tree(DEFAULT_ACCEPTANCE, nodes, few) if few else ROOT
            deep, shallow = (self._seconds(one, round_, tokens) for one in (TokenTree.chain(self.levels), flat))
            self._level[round_] = (deep - shallow) / (self.levels - few)
        level = self._level[round_]
        return Timed(seconds - level * tree.depth, level)

    def _seconds(self, tree: TokenTree, round_: int, tokens: int) -> float:
        """The seconds of a step with a tree."""
        decoder = self._decoder(1)
        decoder.tree, runner = tree, cast(CountedSteps, decoder.runner)
        if tree not in self._captured:  # compiling and capturing are no part of a step
            self._captured.add(tree)
            self._decoded(decoder, round_, tokens)
        before = runner.steps
        seconds = self._decoded(decoder, round_, tokens).seconds
        return sum(seconds[phase] for phase in seconds if phase not in BESIDE) / (runner.steps - before)

    def _decoder(self, size: int) -> SpeculativeDecoder:
        decoder = super()._decoder(1)
        if not isinstance(decoder.runner, CountedSteps):
            CountedSteps(decoder)
        return decoder


class StreamedVisits(Visits):
    """The same for a target whose weights are read in each pass: few passes, since their times hardly differ.

    Prompts have one token, which no pass has to go through before the first step, and one decoder takes all trees.
    """

    pace = STREAMED_PACE

    def __call__(self, size: int, round_: int) -> Timed:
        """As of `Visits`; nothing is warmed up."""
        return self._visit(size, round_, STREAMED_TOKENS) if round_ else Timed(0.0)

    def _batch_of(self, round_: int) -> tuple[Tensor, Tensor]:
        prompts, mask = super()._batch_of(round_)
        return prompts[:, -1:], mask[:, -1:]

    def _decoder(self, size: int) -> SpeculativeDecoder:
        decoder = super()._decoder(1)
        decoder.tree, _ = self._tree(size).reordered("heavy_path")  # as decoders order trees that they are given
        return decoder


def costs_by_batch(
    visits: Visits,
    batches: Sequence[int],
    sizes: Sequence[int],
    measured: Sequence[MeasuredAcceptance],
    *,
    limit: float,
    report: Callable[[str], object],
) -> CostsByBatch:
    """The costs for each of some numbers of sequences, one among them; larger ones end where a GPU's memory does.

    sizes: nodes of trees that may be timed; limit: seconds for all of it

    Raises ValueError as `time_costs` does, and torch.OutOfMemoryError where there is no memory for a single sequence.
    """
    begin, larger = time.perf_counter(), sorted({*batches} - {1})
    worth = partial(sizes_worth_timing, measured, sizes)
    alone = time_costs(
        visits, sizes, worth, limit=limit * (ALONE_SHARE if larger else 1), clock=time.perf_counter, report=report,
        pace=visits.pace,
    )  # fmt: skip
    found, few = {1: alone}, [size for size in sizes if size <= max({1, *worth(alone)})]
    for place, batch in enumerate(larger):
        left = limit - (time.perf_counter() - begin)
        try:
            found[batch] = time_costs(
                visits.of(batch),
                few,
                partial(sizes_worth_timing, measured, few),
                limit=left / (len(larger) - place),
                clock=time.perf_counter,
                report=report,
                of=f" for {batch} sequences",
                pace=visits.pace,
            )
        except torch.OutOfMemoryError:
            report(f"there is no memory for {batch} sequences; costs are those of up to {max(found)}")
            break
    return CostsByBatch(found)


def default_batch_sizes(kind: str) -> tuple[int, ...]:
    """The numbers of sequences that costs are measured for, on a kind of device as torch names it, or "streamed"."""
    return BATCH_SIZES.get(kind, BATCH_SIZES["cpu"])


def sizes_worth_timing(measured: Sequence[MeasuredAcceptance], sizes: Sequence[int], costs: Costs) -> set[int]:
    """Of some sizes those that are planned by the costs known so far, and their neighbours.

    A tree larger than all that were timed is taken to cost as much as the largest of them, since it does not cost less.
    Where it could be planned by that cost, it is worth timing.
    """
    sizes, timed = sorted({1, *sizes}), max(costs.step)
    known = costs.steps_of([size for size in sizes if size <= timed])
    known |= {size: known[timed] for size in sizes if size > timed}
    level = costs.level / costs.step[1]
    found = set()
    for entry in measured:
        if entry.sequence_count is None:
            best = sizes.index(len(select_tree(_falling(entry.rates()), known, level).tree))
            found |= {*sizes[max(0, best - 1) : best + 2]}
    return found


def _falling(rates: Tensor) -> Tensor:
    """Acceptance with the children of each depth from the likeliest on, which no tree of the given ones exceeds."""
    return rates.sort(1, descending=True).values


def _clock_of_gpu() -> float:
    """The time in seconds, when the GPU has finished what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


class Both:
    """A `Verifier` that asks a verification and rejection, counts what each accepts, and does what the first one says.

    draw, verification: as `Method.at` gives them
    """

    def __init__(self, draw: str, verification: str):
        self._draw, self._verification = draw, verification
        self.accepted: list[Tensor] = []  # fp64 [2, B] of each step

    def __call__(
        self, nodes: Nodes, target_logits: Tensor, draft_logits: Tensor | None, *, max_depth: int,
        target_filters: Filters, draft_filters: Filters, noise: Noise,
    ) -> Verified:  # fmt: skip
        """See `Verifier`."""
        replacement = self._draw == "with_replacement"
        given = VerifyInputs(
            nodes, target_logits, draft_logits, self._verification, replacement, max_depth, target_filters,
            draft_filters, noise,
        )  # fmt: skip
        found, other = verify_unchecked(given), verify_unchecked(given._replace(method=self._draw))
        self.accepted.append(torch.stack([found.length, other.length]).double().cpu())
        return found


@dataclass
class GainJob:
    """The gain of a method under some sampling, as far as it is known."""

    method: str
    filters: Filters
    decoder: SpeculativeDecoder
    nodes: int
    counted: float  # tokens a step that are promised without the gain
    tokens: int  # of each text
    both: Both | None

    def visit(self, prompts: Tensor, mask: Tensor, seed: int, positions: int) -> Tensor | None:
        """Decode once more; accepted tokens of steps, and those by what is counted: fp64 [2, n]. None without room."""
        tree = self.decoder.tree
        assert tree is not None
        tokens = min(self.tokens, positions - prompts.shape[1] - tree.depth - 1)
        if tokens < 1:
            return None
        end = MaxLengthCriteria(prompts.shape[1] + tokens)
        given = {name: value for name, value in self.filters._asdict().items() if value is not None}
        out = self.decoder.generate(
            prompts, tokens + tree.depth + 1, **NOTHING | given, seed=seed, attention_mask=mask,
            stopping_criteria=[end], pad_token_id=0,
        )  # fmt: skip
        if self.both is not None:
            steps, self.both.accepted = torch.cat(self.both.accepted, 1), []
            return steps
        steps_of = out.stats.steps_of.double().cpu()
        kept = out.stats.tokens_of.double().cpu() - steps_of
        whole = float(out.stats.accepted.sum()) / max(1.0, float(kept.sum()))  # the last step of a text is cut
        return torch.stack([whole * kept, (self.counted - 1) * steps_of])


def measure_gains(
    jobs: Sequence[GainJob], prompts: Sequence[Tensor], *, positions: int, until: float, seed: int,
    report: Callable[[str], object],
) -> tuple[MethodGain, ...]:  # fmt: skip
    """The gains of methods, as far as the time goes.

    positions: that the models have; until: by time.perf_counter(); the visits of all methods take turns
    """
    gains: dict[int, MethodGain] = {}
    found: dict[int, list[Tensor]] = {number: [] for number in range(len(jobs))}
    for round_ in range(ROUNDS_OF_GAINS):
        padded, mask = _together([prompts[(round_ * SEQUENCES + place) % len(prompts)] for place in range(SEQUENCES)])
        for number, job in enumerate(jobs):
            sure = number in gains and gains[number].error <= SURE
            fresh = SEQUENCES if job.filters.temperature else max(0, len(prompts) - round_ * SEQUENCES)
            if time.perf_counter() >= until or sure or not fresh:  # greedy texts of the same prompt are the same
                continue
            report(f"decoding with {job.method} at temperature {job.filters.temperature:g}, round {round_ + 1}")
            seen = job.visit(padded[:fresh], mask[:fresh], seed + round_, positions)
            if seen is None:
                continue
            found[number].append(seen)
            own, counted = torch.cat(found[number], 1)
            if counted.sum() > 0:
                factor = float(own.sum() / counted.sum())
                error = math.sqrt(float((own - factor * counted).square().sum())) / float(counted.sum())
                gains[number] = MethodGain(job.method, job.filters, job.nodes, factor, error)
    return tuple(gains.values())


def jobs_of(
    target: PreTrainedModel, draft: AnyDraft, profile: Profile, methods: Sequence[str] = LOSSLESS_METHODS
) -> Iterator[GainJob]:
    """The jobs of the methods that may have a gain, under each sampling for which acceptance was counted."""
    for filters in dict.fromkeys(entry.filters for entry in profile.acceptance):
        for method in methods:
            row = profile.row(method)
            counted = any(
                entry.filters == filters and entry.is_of(row, filters.temperature) for entry in profile.acceptance
            )
            if method == "autoregressive" or not counted:
                continue
            draw, verification = row.at(filters.temperature)
            (planned, entry, _), tree = profile.plan(method, filters), profile.tree_for(method, filters)
            as_counted = verification not in VERIFIERS
            if len(tree) == 1 or (as_counted and not tree.grows):
                continue
            both = None if tree.grows else Both(draw, verification)
            word = profile.verifier if profile.verifier in row.verifiers else None
            options: dict[str, Any] = {"verifier": both or word} if row.verifiers else {}
            decoder = SpeculativeDecoder(target, draft, method, tree_size=2, **options)
            decoder.tree, decoder.profile = tree, profile  # which has the drawing temperatures
            tokens = max((len(text) for text in entry.counts.texts), default=TOKENS)
            yield GainJob(method, filters, decoder, len(tree), planned.expected_tokens, tokens, both)


def _together(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask; LongTensors [B, T]."""
    longest = max(map(len, prompts))
    padded = torch.stack([torch.cat([prompt.new_zeros(longest - len(prompt)), prompt]) for prompt in prompts])
    first = torch.tensor([longest - len(prompt) for prompt in prompts], device=padded.device)
    return padded, (torch.arange(longest, device=padded.device) >= first[:, None]).long()
