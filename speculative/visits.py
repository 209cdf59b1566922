"""The time of steps in real decoding, for `calibrate`.

A visit decodes a few steps with one tree and times the phases of its steps. Trees are visited in turn, for several
rounds; `costs.timing` computes the costs from that. A single sequence is timed first. Larger batches never need larger
trees, so only sizes that were worth timing for the batch before are timed for them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxLengthCriteria

from heavypath.speculative.costs.measured import CostsByBatch
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.costs.timing import PACE, Pace, Timed, time_costs
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.decoding.run import StepRunner
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.drafts.kinds import AnyDraft
from heavypath.speculative.options import NOTHING
from heavypath.speculative.profile import MeasuredAcceptance
from heavypath.speculative.trees.growth import DEFAULT_ACCEPTANCE
from heavypath.speculative.trees.planning import greedy_tree, select_tree
from heavypath.speculative.trees.tree import ROOT, TokenTree

BATCH_SIZES = {"cpu": (1, 2, 4, 8, 16), "cuda": (1, 2, 4, 8, 16, 32, 64), "streamed": (1,)}
VISIT_SECONDS = 0.1  # duration of a visit: several time slices of a busy machine
VISIT_TOKENS = (2, 16)  # least and most tokens that each sequence decodes in a visit
VISIT_PROMPT = 16  # tokens of a prompt: reading it is not timed, and a longer one hardly changes a step
MORE = 1.1  # times the counted acceptance: more than verifiers gain
ALONE_SHARE = 0.5  # share of the time for costs that is spent on a single sequence
STREAMED_TOKENS = 2  # tokens of a visit of a streamed target, whose passes mostly wait for weights
STREAMED_PACE = Pace(rounds=2, least=2)
BESIDE = ("prefill", "host", "trace")  # phases that are not part of a step


class Visits:
    """A function that decodes a few steps of a batch with a tree of a given size, and returns the seconds of a step.

    The first call finds how many tokens of plain decoding take `VISIT_SECONDS`; all others decode this many. Trees have
    at most `levels` levels.

    prompts: LongTensors [T], taken in turn; levels: most levels of a tree
    """

    pace = PACE
    graphs: bool | None = False  # whether steps on a GPU are CUDA graphs, whose phases cannot be timed

    def __init__(
        self,
        target: PreTrainedModel,
        draft: AnyDraft,
        prompts: Sequence[Tensor],
        levels: int,
        verifier: str | None = None,
        batch: int = 1,
    ):
        """verifier: as in `SpeculativeDecoder`; batch: number of sequences decoded together"""
        self.target = target
        self.draft = draft
        self.prompts = prompts
        self.levels = levels
        self.verifier = verifier
        self.batch = batch
        self._decoders: dict[int, SpeculativeDecoder] = {}
        self._tokens = 0

    def of(self, batch: int) -> "Visits":
        """Visits with the same models and prompts for another batch size. They use the same decoders."""
        visits = type(self)(self.target, self.draft, self.prompts, self.levels, self.verifier, batch)
        visits._decoders = self._decoders
        return visits

    def __call__(self, size: int, round_: int) -> Timed:
        """Decode, and return the seconds of a step with a tree of `size` nodes, and of drafting one level.

        Sequences are stopped while there is still room for another step, so that every step has the whole tree.

        round_: number of the round, which selects prompts and seed
        """
        if not self._tokens:
            least, most = VISIT_TOKENS
            self._tokens = max(least, min(most, round(VISIT_SECONDS / self._visit(1, round_, least).step)))
        return self._visit(size, round_, self._tokens)

    def _visit(self, size: int, round_: int, tokens: int) -> Timed:
        decoder = self._decoder(size)
        assert decoder.tree is not None
        stats = self._decoded(decoder, round_, tokens)
        seconds = stats.seconds
        steps = int(stats.steps_of.max())
        step = sum(seconds[phase] for phase in ("target", "verification", "compaction")) / steps
        level = (seconds["draft"] + seconds["sampling"]) / steps / decoder.tree.depth if size > 1 else None
        return Timed(step, level)

    def _decoded(self, decoder: SpeculativeDecoder, round_: int, tokens: int) -> Statistics:
        """The statistics of decoding `tokens` new tokens for each prompt of a round."""
        assert isinstance(decoder.tree, TokenTree)
        depth = decoder.tree.depth
        prompts, mask = self._batch_of(round_)
        end = MaxLengthCriteria(prompts.shape[1] + tokens)
        return decoder.generate(
            prompts,
            tokens + depth + 1,
            temperature=1.0,
            seed=round_,
            attention_mask=mask,
            stopping_criteria=[end],
            pad_token_id=0,
            **NOTHING,
        ).stats

    def _batch_of(self, round_: int) -> tuple[Tensor, Tensor]:
        """The prompts of a round, left-padded, and their mask; LongTensors [B, T]."""
        chosen = [self.prompts[(round_ + place) % len(self.prompts)][-VISIT_PROMPT:] for place in range(self.batch)]
        return together(chosen)

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
    """Replaces a decoder's runner in order to observe its steps; subclasses override `run`."""

    def __init__(self, decoder: SpeculativeDecoder):
        self.runner = decoder.runner
        decoder.runner = cast(StepRunner, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, plan: StepPlan, workspace: Workspace, **where: Any) -> Stepped:
        """Run a step by the decoder's own runner. where: the keyword arguments of `StepRunner.run`."""
        return self.runner.run(plan, workspace, **where)


class CountedSteps(Watched):
    """Counts the steps that a decoder runs. On a GPU one more step than needed may run after all sequences ended."""

    steps = 0

    def run(self, plan: StepPlan, workspace: Workspace, **where: Any) -> Stepped:
        """Count a step, and run it. where: the keyword arguments of `StepRunner.run`."""
        self.steps += 1
        return super().run(plan, workspace, **where)


class GraphVisits(Visits):
    """Visits for steps that are CUDA graphs, whose phases cannot be timed; one decoder is used for all trees.

    Without graphs, the time of a draft's level is the host's time for launching many small kernels. So the time of a
    level is computed from two trees with equally many nodes. With T the seconds of a step with a tree, and L the
    largest number of levels:

        level = (T(a chain of L levels) - T(l levels)) / (L - l),     l = L / 4, rounded down
        step  = T(tree) - level * levels of the tree
    """

    graphs = None

    def __init__(
        self,
        target: PreTrainedModel,
        draft: AnyDraft,
        prompts: Sequence[Tensor],
        levels: int,
        verifier: str | None = None,
        batch: int = 1,
    ):
        super().__init__(target, draft, prompts, levels, verifier, batch)
        self._captured: set[TokenTree] = set()
        self._level: dict[int, float] = {}  # by round

    def _visit(self, size: int, round_: int, tokens: int) -> Timed:
        tree = self._tree(size)
        seconds = self._seconds(tree, round_, tokens)
        if tree.depth == 0:
            return Timed(seconds)
        if round_ not in self._level:
            few = self.levels // 4
            nodes = self.levels + 1
            flat = greedy_tree(DEFAULT_ACCEPTANCE, nodes, few) if few else ROOT
            deep, shallow = (self._seconds(one, round_, tokens) for one in (TokenTree.chain(self.levels), flat))
            self._level[round_] = (deep - shallow) / (self.levels - few)
        level = self._level[round_]
        return Timed(seconds - level * tree.depth, level)

    def _seconds(self, tree: TokenTree, round_: int, tokens: int) -> float:
        """The seconds of a step with a tree."""
        decoder = self._decoder(1)
        decoder.tree, runner = tree, cast(CountedSteps, decoder.runner)
        if tree not in self._captured:  # do not time compilation and capture
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
    """Visits of a target whose weights are read in each pass. Few passes are enough, because their times hardly differ.

    Prompts have one token, so that no prefill is needed. One decoder is used for all trees.
    """

    pace = STREAMED_PACE

    def __call__(self, size: int, round_: int) -> Timed:
        """The seconds of a step and of a level; the first round returns 0, because nothing needs a warm-up."""
        return self._visit(size, round_, STREAMED_TOKENS) if round_ else Timed(0.0)

    def _batch_of(self, round_: int) -> tuple[Tensor, Tensor]:
        prompts, mask = super()._batch_of(round_)
        return prompts[:, -1:], mask[:, -1:]

    def _decoder(self, size: int) -> SpeculativeDecoder:
        decoder = super()._decoder(1)
        decoder.tree, _ = self._tree(size).reordered("heavy_path")  # the order that decoders give to static trees
        return decoder


def costs_by_batch(
    visits: Visits,
    batches: Sequence[int],
    sizes: Sequence[int],
    measured: Sequence[MeasuredAcceptance],
    *,
    limit: float,
    report: Callable[[str], object],
    every: bool = True,
) -> CostsByBatch:
    """Measure the costs of steps for 1 and each of `batches` sequences; on a GPU up to the largest that fits in memory.

    visits: run and time the steps
    sizes: nodes of the trees that may be timed, root included
    measured: acceptance, by which the sizes worth timing are chosen
    limit: seconds for everything
    report: called with lines of text about the progress
    every: whether larger batches are also timed after one for which no tree pays. If not, its costs stand for theirs

    Raises ValueError as `time_costs` does, and torch.OutOfMemoryError if not even a single sequence fits into memory.
    """
    begin = time.perf_counter()
    larger = sorted({*batches} - {1})
    worth = partial(sizes_worth_timing, measured, sizes)
    alone = time_costs(
        visits,
        sizes,
        worth,
        limit=limit * (ALONE_SHARE if larger else 1),
        clock=time.perf_counter,
        report=report,
        pace=visits.pace,
    )
    found = {1: alone}
    few = [size for size in sizes if size <= max({1, *worth(alone)})]
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
        few = [size for size in few if size <= max({1, *worth(found[batch])})]
        if not every and not any_pays(measured, few, found[batch]):
            report(f"no tree pays for {batch} sequences, so that larger batches are not timed")
            break
    return CostsByBatch(found)


def default_batch_sizes(kind: str) -> tuple[int, ...]:
    """The batch sizes for which costs are measured. kind: "streamed", or a device type of torch"""
    return BATCH_SIZES.get(kind, BATCH_SIZES["cpu"])


def sizes_worth_timing(measured: Sequence[MeasuredAcceptance], sizes: Sequence[int], costs: Costs) -> set[int]:
    """The sizes of trees worth timing: those of the best trees by measured acceptance and the costs known so far.

    The next smaller and larger of `sizes` belong to them, too. Sizes that are timed already are not left out, and 1 may
    be among them. Measurements of independent sequences are ignored.

    For a tree larger than all timed ones, the cost of the largest timed one is a lower bound. If the tree would be
    planned at that cost, it is worth timing.
    """
    sizes = sorted({1, *sizes})
    found = set()
    for size in _planned(measured, sizes, costs):
        best = sizes.index(size)
        found |= {*sizes[max(0, best - 1) : best + 2]}
    return found


def any_pays(measured: Sequence[MeasuredAcceptance], sizes: Sequence[int], costs: Costs) -> bool:
    """Whether a tree of one of these sizes would be faster than plain decoding, if a verifier accepted `MORE` times
    what was counted.
    """
    return max(_planned(measured, sorted({1, *sizes}), costs, MORE), default=1) > 1


def _planned(
    measured: Sequence[MeasuredAcceptance], sizes: Sequence[int], costs: Costs, more: float = 1.0
) -> Iterator[int]:
    """The size of the best tree for each acceptance, times `more`. sizes: in rising order, 1 among them"""
    timed = max(costs.step)
    level = costs.level / costs.step[1]
    known = costs.steps_of([size for size in sizes if size <= timed])
    known |= {size: known[timed] for size in sizes if size > timed}
    for entry in measured:
        if entry.sequence_count is None:
            rates = _falling(entry.rates()) * more
            rates /= rates.sum(1, keepdim=True).clamp(min=1)  # no node goes on more often than it was reached
            yield len(select_tree(rates, known, level).tree)


def _falling(rates: Tensor) -> Tensor:
    """Acceptance [depth, child] with each row sorted from the most accepted child: an upper bound for each tree."""
    return rates.sort(1, descending=True).values


def _clock_of_gpu() -> float:
    """The time in seconds after all work on the GPU has finished."""
    torch.cuda.synchronize()
    return time.perf_counter()


def together(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask; LongTensors [B, T]."""
    longest = max(map(len, prompts))
    padded = torch.stack([torch.cat([prompt.new_zeros(longest - len(prompt)), prompt]) for prompt in prompts])
    first = torch.tensor([longest - len(prompt) for prompt in prompts], device=padded.device)
    return padded, (torch.arange(longest, device=padded.device) >= first[:, None]).long()
