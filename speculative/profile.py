"""Profiles: measured costs and acceptance of a pair of models on one machine, and the trees planned from them.

A profile is a small JSON file. For several batch sizes it has the seconds of a step with a tree of n nodes, and of
drafting one level. For each combination of draw, verification and sampling, it has how often child j of a node at depth
d is accepted. It also has, for each token of the measured sequences, which child it was. A plan is the tree with the
largest

    expected tokens(tree, acceptance) / (t(nodes) + depth * c),        t, c in steps of plain decoding

at the same batch size (Sequoia, Chen et al. 2024, section 4.1). For methods that can have any tree, it is the best of
all trees. For the others, it is the best of the shapes that they can have. Where counts are few, acceptance is
extrapolated by a fitted formula (`tails`). The expected tokens reported for a plan are not extrapolated: they are the
tokens that its tree would have accepted in the measured sequences (`ranks`).
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters
from heavypath.kernels.ordering import MAX_NODES
from heavypath.speculative.costs.measured import CostsByBatch
from heavypath.speculative.costs.streamed import streamed_bytes
from heavypath.speculative.costs.table import Attention
from heavypath.speculative.drafts.kinds import AnyDraft, describe
from heavypath.speculative.drafts.tempered import Tempered
from heavypath.speculative.files.typed_json import parsed, typed
from heavypath.speculative.methods import METHODS, Method, measured_row, row_of
from heavypath.speculative.models.layer_weights import stream_of
from heavypath.speculative.tree_choice import as_drafted, best_plan
from heavypath.speculative.trees.counted import PRIOR, CountedTexts
from heavypath.speculative.trees.growth import Confidence, Growth
from heavypath.speculative.trees.planning import Plan
from heavypath.speculative.trees.tree import TokenTree

# Version of the file format. Older versions are refused: no release wrote one, and with 4 and 5 trees would silently be
# too small or too large. 5 counted 8 levels and 8 children and kept no sequences; 4 had only the costs of one sequence;
# 3 meant rejection if it named no verifier; 2 had no errors of its figures; 1 had no numbers of parameters.
VERSION = 6
STREAMED = "streamed_megabytes"  # key of the environment: what a pass reads if the target is streamed
_RANK = re.compile(r"-[12]|[0-9]{1,3}")
ALIKE = 0.25  # largest relative difference of STREAMED at which measured costs are still used
MATTERS = 1.05  # a cost counts as the limit if decoding without it would be at least this many times as fast
SHORTEST = 1e-9  # seconds of a step in a valid profile
LONGEST = 1e6  # seconds of a step in a valid profile


@dataclass(frozen=True)
class MeasuredAcceptance:
    """How often children were accepted, for one combination of draw, verification and sampling.

    draw, verification: names of how children are drawn and verified, as `Method.at` returns them
    sequence_count: number of independent sequences; None for trees that may branch at every node
    filters: how target and draft were sampled
    accepted: [depth][child], how often child j of a node at depth d was accepted
    reached: [depth], at how many nodes children were offered
    moments: [child][5], sums over the nodes at which the child was tried: of 1, q, q^2, y and q y. q is the draft's
        probability of the child among the tokens not yet drawn; y is 1 if the child was accepted, else 0
    texts: for each measured sequence the ranks of its tokens, separated by spaces: the accepted child's index, -1 if
        none was accepted, -2 if none was offered; empty if only counts are known
    moments_by_depth: moments of each of the first depths, for its first children; empty if not kept per depth
    temperatures: for each depth the number by which the draft's logits were divided; empty for 1 at all depths
    """

    draw: str
    verification: str
    sequence_count: int | None
    filters: Filters
    accepted: list[list[int]]
    reached: list[int]
    moments: list[list[float]]
    texts: list[str] = field(default_factory=list)
    moments_by_depth: list[list[list[float]]] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)

    def is_of(self, row: Method, temperature: float) -> bool:
        """Whether it holds for a method at this temperature: draw and verification are equal. row: of `METHODS`."""
        sequences = self.sequence_count is not None
        return (self.draw, self.verification, sequences) == (*row.at(temperature), row.independent_sequences)

    def check(self) -> None:
        """Raise ValueError for counts, moments, ranks or temperatures that no calibration can produce."""
        self.filters.check()
        if self.sequence_count is not None and self.sequence_count < 1:
            raise ValueError(f"sequence_count must be None or >= 1, got {self.sequence_count}")
        children = {len(row) for row in self.accepted}
        if len(self.reached) != len(self.accepted) or len(children) != 1 or children == {0}:
            raise ValueError("accepted must have a row of as many children for each depth, reached a number for each")
        for row, reached in zip(self.accepted, self.reached, strict=True):
            if min(row) < 0 or sum(row) > reached:
                raise ValueError(f"of {reached} nodes that were reached at a depth at most as many go on, got {row}")
        moments = [*self.moments, *(row for rows in self.moments_by_depth for row in rows)]
        if not all(len(row) == 5 and 0 <= min(row) <= max(row) <= 1.001 * min(row[0], 2**63) for row in moments):
            raise ValueError("moments must have rows of five numbers >= 0, none above the first")
        if not all(1e-3 <= each <= 1e3 for each in self.temperatures):
            raise ValueError(f"temperatures must be numbers above 0, one a depth, got {self.temperatures}")
        if not all(_RANK.fullmatch(rank) for text in self.texts for rank in text.split()):
            raise ValueError("texts must be ranks, numbers from -2 to 999, with spaces between them")
        if self.filters.temperature > 0:
            if not self.moments:
                raise ValueError(f"moments must have a row for each child at temperature {self.filters.temperature:g}")
            self.confidence()

    @cached_property
    def counts(self) -> CountedTexts:
        """The counts as `CountedTexts`, which computes rates and expected tokens."""
        ranks = [[int(rank) for rank in text.split()] for text in self.texts]
        return CountedTexts(self.accepted, self.reached, ranks, int(self.sequence_count is not None))

    def rates(self) -> Tensor:
        """The acceptance by which trees are planned, fp64 [depth, child], smoothed and extrapolated from the counts."""
        return self.counts.rates()

    def confidence(self) -> Confidence:
        """For each child a line, fitted by least squares, from its draft probability to its acceptance; within [0, 1].

        Children that were tried less than `PRIOR` times get the line of the last child before them. If moments were
        kept per depth, each depth gets its own lines, from its own nodes and a prior of `PRIOR` nodes with the averages
        of all depths.
        """
        often = takewhile(lambda row: row[0] >= PRIOR, self.moments[1:])
        every = np.array([*self.moments[:1], *often])
        by_depth = [every * PRIOR / np.maximum(every[:, :1], 1) for _ in self.moments_by_depth]
        for mixed, own in zip(by_depth, self.moments_by_depth, strict=True):
            mixed[: len(own)] += own[: len(mixed)]
        first, *deeper = map(_lines, by_depth or [every])
        return replace(first, deeper=tuple(deeper))


def _lines(moments: np.ndarray) -> Confidence:
    """The fitted line of each child, from moments [children, 5] at one depth."""
    base, slope = zip(*map(_line, moments.tolist()), strict=True)
    return Confidence(base, slope)


def _line(moments: Sequence[float]) -> tuple[float, float]:
    """Base and slope of the least-squares line from five moments; held so that acceptance rises within [0, 1]."""
    tried, shares, squares, hits, products = moments
    spread = squares * tried - shares**2
    if spread > 1e-6 * tried**2:
        slope = (products * tried - hits * shares) / spread
        base = (hits - slope * shares) / tried
        if 0 <= base <= base + slope <= 1:
            return base, slope
    flat = min(1.0, hits / max(tried, 1.0))
    from_0 = min(1.0, products / max(squares, 1e-12))
    to_1 = min(1.0, max(0.0, (hits - products - shares + squares) / max(tried - 2 * shares + squares, 1e-12)))

    def error(line: tuple[float, float]) -> float:
        base, slope = line
        return base * (base * tried + 2 * slope * shares - 2 * hits) + slope * (slope * squares - 2 * products)

    return min((flat, 0.0), (0.0, from_0), (to_1, 1 - to_1), key=error)


@dataclass(frozen=True)
class MethodGain:
    """How many drafted tokens a method accepts in real decoding, relative to what counts of acceptance predict.

    filters: how the target was sampled
    nodes: of the planned tree that was drafted
    factor, error: the ratio of accepted to predicted tokens, and its standard error
    """

    method: str
    filters: Filters
    nodes: int
    factor: float
    error: float


class Planned(NamedTuple):
    """A plan, the acceptance from which it was computed, and the gain that corrected its expected tokens, if any."""

    plan: Plan
    acceptance: MeasuredAcceptance
    gain: MethodGain | None = None

    @property
    def tokens_error(self) -> float:
        """The standard error of the plan's expected tokens."""
        counted = self.acceptance.counts.tokens_error(self.plan.tree)
        if self.gain is None:
            return counted
        accepted = self.acceptance.counts.tokens(self.plan.tree) - 1
        return math.hypot(counted * self.gain.factor, accepted * self.gain.error)


class Limit(NamedTuple):
    """What limits the speed of a plan.

    limited_by: "compute": the cost of further nodes in a pass; "drafting": the cost of levels; or "acceptance" if
        neither matters
    without_that: the speed-up of the best tree if this cost were zero; for acceptance: if the likeliest path were
        always accepted
    free_nodes: nodes of the largest tree whose step takes at most a tenth longer than one of a single token. Up to this
        size a step is limited by memory bandwidth, that is, by reading the weights
    """

    limited_by: str
    without_that: float
    free_nodes: int


@dataclass(frozen=True)
class Profile:
    """Measured costs and acceptance of a pair of models on one machine, and the trees planned from them.

    target, draft: descriptions of the models, as `describe` makes them, by which a profile of other models is refused
    target_parameters, draft_parameters: numbers of parameters
    environment: what else costs depend on: device, threads, precision, versions, as `cost_environment` returns it
    costs: seconds of steps, for several batch sizes
    acceptance: one entry for each combination of draw, verification and sampling
    verifier: a value of `methods.VERIFIERS` that verified the methods that accept it; None for each method's default on
        that device type
    gains: for methods that accept more or fewer tokens than counts predict, because of their verifier or because trees
        grow
    attention: tokens of a prompt -> what attention to it adds to a step, as estimated for a GPU; empty on a CPU. Costs
        are measured with short prompts
    """

    target: str
    draft: str
    target_parameters: int
    draft_parameters: int
    environment: dict[str, str | int]
    costs: CostsByBatch
    acceptance: tuple[MeasuredAcceptance, ...]
    verifier: str | None = None
    gains: tuple[MethodGain, ...] = ()
    attention: dict[int, Attention] = field(default_factory=dict)

    def for_length(self, length: int) -> "Profile":
        """The profile for prompts of `length` tokens: with costs that have attention to the longest known prefix."""
        known = max((each for each in self.attention if each <= length), default=None)
        if known is None:
            return self
        costs = {
            batch: self.costs.at(batch).with_attention(self.attention[known], batch) for batch in self.costs.batches
        }
        return replace(self, costs=CostsByBatch(costs), attention={})

    def save(self, path: str | Path) -> None:
        """Write the profile as a JSON file, which `load` reads."""
        acceptance = [asdict(entry) | {"filters": entry.filters._asdict()} for entry in self.acceptance]
        costs = {batch: asdict(self.costs.at(batch)) for batch in self.costs.batches}
        gains = [asdict(gain) | {"filters": gain.filters._asdict()} for gain in self.gains]
        content = {"heavypath profile": VERSION, **asdict(self), "costs": costs, "acceptance": acceptance}
        content["gains"] = gains
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read a profile from JSON.

        Raises FileNotFoundError if there is no file, and ValueError for a file that is no profile or has another
        version. Both messages say how to make one.
        """
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no profile {str(path)!r}; `heavypath calibrate --out {path}` makes one")
        try:
            content = typed(parsed(Path(path).read_text(encoding="utf-8")), dict[str, Any])
            version = content.pop("heavypath profile", None)
            if version is None:
                raise ValueError("it has no version")
            if version == VERSION:
                costs = {"by_batch": content.get("costs")}
                return typed({"attention": {}} | content | {"costs": costs}, cls)._checked()
        except ValueError as error:
            raise ValueError(
                f"{str(path)!r} is no profile that `heavypath calibrate` writes ({error}); make it again"
            ) from error
        raise ValueError(
            f"{str(path)!r} is a profile of version {version}, expected {VERSION}; make it again with "
            f"`heavypath calibrate --out {path}`"
        )

    def _checked(self) -> "Profile":
        """Return the profile itself. Raises ValueError for figures that no calibration can produce."""
        for batch in self.costs.batches:
            costs = self.costs.at(batch)
            sizes = {*costs.step, *costs.step_error}
            if 1 not in costs.step or not 1 <= min(sizes) <= max(sizes) <= MAX_NODES:
                raise ValueError(f"costs of {batch} sequences must be of trees of 1 to {MAX_NODES} nodes, 1 among them")
            steps = [*costs.step.values()]
            others = [*costs.step_error.values(), costs.level, costs.level_error]
            if min(steps) < SHORTEST or min(others) < 0 or max(steps + others) > LONGEST:
                raise ValueError(f"costs of {batch} sequences must be seconds, a step {SHORTEST} to {LONGEST}")
        if "device_type" not in self.environment or type(self.environment.get(STREAMED, 0)) is not int:
            raise ValueError(f"its environment must have a device_type, and as {STREAMED} a number if it has that")
        if self.target_parameters < 1 or self.draft_parameters < 0 or not self.acceptance:
            raise ValueError("target_parameters must be >= 1, draft_parameters >= 0, and some acceptance be counted")
        for entry in self.acceptance:
            entry.check()
        for length, attention in self.attention.items():
            seconds = attention.reading, attention.node
            if length < 1 or min(seconds) < 0 or max(seconds) > LONGEST:
                raise ValueError(f"attention must be seconds from 0 to {LONGEST} for 1 token or more, got {attention}")
        for gain in self.gains:
            gain.filters.check()
            if (
                gain.method not in METHODS
                or not 0 <= min(gain.factor, gain.error) <= max(gain.factor, gain.error) < 1e6
            ):
                raise ValueError(f"a gain must be of a method, its factor and error at least 0, got {gain}")
        return self

    def row(self, method: str) -> Method:
        """The row of a method in `METHODS`, with the verification by which this profile measured its acceptance."""
        return measured_row(method, self.verifier, str(self.environment["device_type"]))

    def check(self, target: PreTrainedModel, draft: AnyDraft | None, method: str, verification: str) -> None:
        """Raise ValueError if the profile was measured with other models, precision, device type or verification.

        target, draft: the models of a decoder; draft None for a method that has no draft
        method: whose trees are wanted
        verification: the name of how they will be verified
        """
        measured_by = self.row(method).verification
        if measured_by != verification:
            raise ValueError(
                f"the profile was measured with method {method!r} verified by {measured_by!r}, got {verification!r}: "
                "give the decoder and `heavypath calibrate` the same verifier"
            )
        for role, measured, given in (("target", self.target, target), ("draft", self.draft, draft)):
            if given is not None and describe(given) != measured:
                raise ValueError(f"the profile was measured with a {role} of {measured}, got {describe(given)}")
        given = {"dtype": str(target.dtype).removeprefix("torch."), "device_type": target.device.type}
        for name, value in given.items():
            if self.environment.get(name) != value:
                raise ValueError(f"the profile was measured with {name} {self.environment.get(name)}, got {value}")
        read, reads = (int(facts.get(STREAMED, 0)) for facts in (self.environment, streaming_of(target)))
        if abs(read - reads) > ALIKE * max(read, reads):
            raise ValueError(
                f"the profile was measured with a target of which a pass reads {read} MB, got one that reads {reads} "
                "MB: give `heavypath calibrate` the same memory"
            )

    def measured(self, method: str, filters: Filters) -> list[MeasuredAcceptance]:
        """The measurements of a method with the same filters if possible, and at the nearest temperature.

        The list has one measurement, or one for each number of independent sequences. Raises ValueError if the method
        was not measured, and for a method that is not lossless.
        """
        if not row_of(method).is_lossless:
            raise ValueError(f"a profile measures methods that keep the target's law, got {method!r}")
        row = self.row(method)
        fitting = [entry for entry in self.acceptance if entry.is_of(row, filters.temperature)]
        if not fitting:
            given = f"{filters.temperature:g}"
            raise ValueError(
                f"the profile has no acceptance of method {method!r} for temperature {given}; "
                f"calibrate with --temperature {given}"
            )

        def distance(entry: MeasuredAcceptance) -> tuple[bool, float]:
            return entry.filters[1:] != filters[1:], abs(entry.filters.temperature - filters.temperature)

        nearest = min(map(distance, fitting))
        return [entry for entry in fitting if distance(entry) == nearest]

    def changes(self, method: str, filters: Filters) -> tuple[Tempered, ...]:
        """The drawing temperatures with which a method was measured, as changes of each step's logits; may be empty."""
        if not any(entry.temperatures for entry in self.acceptance):
            return ()
        temperatures = self.measured(method, filters)[0].temperatures
        return (Tempered(tuple(temperatures)),) if temperatures else ()

    def plan(self, method: str, filters: Filters, batch: int = 1) -> Planned:
        """Plan the fastest tree of a method. Returns it with the acceptance from which it was computed.

        filters: how the target is sampled
        batch: number of sequences decoded together

        For methods whose trees grow, it is the best static tree, because how many tokens a grown tree yields depends on
        the draft's probabilities in each step. For methods whose siblings may have equal tokens, the expected tokens
        are slightly too low: of equal siblings only the first one's children are counted. If the method's gain was
        measured, the expected drafted tokens are multiplied by it.
        """
        known = self.costs.at(batch)
        costs = known.steps_of(range(1, max(known.step) + 1))
        level = known.level / known.step[1]
        plans = []
        for entry in self.measured(method, filters):
            plan = best_plan(method, entry.rates(), costs, level, entry.sequence_count)
            gain = self._gain(method, entry.filters)
            tokens = 1 + (entry.counts.tokens(plan.tree) - 1) * (gain.factor if gain else 1)
            plans.append(Planned(Plan(plan.tree, tokens, plan.speedup * tokens / plan.expected_tokens), entry, gain))
        return max(plans, key=lambda planned: planned.plan.speedup)

    def _gain(self, method: str, filters: Filters) -> MethodGain | None:
        return next((gain for gain in self.gains if (gain.method, gain.filters) == (method, filters)), None)

    def limit(self, method: str, planned: Planned, batch: int = 1) -> Limit:
        """What limits the speed of a method's plan, for `batch` sequences decoded together."""
        known = self.costs.at(batch)
        entry = planned.acceptance
        costs = known.steps_of(range(1, max(known.step) + 1))
        level = known.level / known.step[1]
        free = max(size for size, cost in costs.items() if cost <= 1.1)
        rates = entry.rates()
        count = entry.sequence_count
        found = {
            "compute": best_plan(method, rates, dict.fromkeys(costs, 1.0), level, count).speedup,
            "drafting": best_plan(method, rates, costs, 0.0, count).speedup,
        }
        modelled = best_plan(method, rates, costs, level, count).speedup
        found = {name: speedup * planned.plan.speedup / modelled for name, speedup in found.items()}
        by = max(found, key=lambda name: found[name])
        if found[by] >= MATTERS * planned.plan.speedup:
            return Limit(by, found[by], free)
        plan = planned.plan
        return Limit("acceptance", (plan.tree.depth + 1) * plan.speedup / plan.expected_tokens, free)

    def speedup_error(self, planned: Planned, batch: int = 1) -> float:
        """The standard error of a plan's speed-up, from the errors of its expected tokens and of its costs.

        batch: number of sequences decoded together
        """
        plan = planned.plan
        cost = self.costs.at(batch).relative_error(len(plan.tree), plan.tree.depth)
        return plan.speedup * math.hypot(planned.tokens_error / plan.expected_tokens, cost)

    def tree_for(self, method: str, filters: Filters, batch: int = 1) -> TokenTree | Growth:
        """The tree, or for trees that grow their `Growth`, that a decoder with this profile drafts.

        filters: how the target is sampled
        batch: number of sequences decoded together
        """
        plan, entry, _ = self.plan(method, filters, batch)
        return as_drafted(method, plan.tree, entry.confidence() if filters.temperature > 0 else None)

    def mbsu(self, plan: Plan) -> float:
        """The memory-bound speed-up (MBSU) of a plan: assumes that a pass takes time in proportion to its parameters.

        MBSU = expected tokens / (1 + L r), with L levels of drafting, and r the draft's parameters / the target's (RSD,
        Jeon et al. 2024). No measured time enters it.
        """
        return plan.expected_tokens / (1 + plan.tree.depth * self.draft_parameters / self.target_parameters)


def streaming_of(target: PreTrainedModel) -> dict[str, str | int]:
    """The megabytes that each pass of a streamed target reads, as an entry of a profile's environment; else empty."""
    stream = stream_of(target)
    return {} if stream is None else {STREAMED: round(streamed_bytes(stream) / 1e6)}
