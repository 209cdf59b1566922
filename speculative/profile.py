"""What was measured of a pair of models on a machine, and the trees that follow from it.

A profile is a small JSON file. It says what a step costs with a tree of n nodes, what a level of drafting costs, and
for each way to draw and verify, and each sampling, how often child j of a node at depth d is accepted. A plan is the
tree with the largest

    expected tokens(tree, acceptance) / (t(nodes) + depth * c),        t, c in steps of plain decoding

(Sequoia, Chen et al. 2024, sec. 3.3): over all trees for the methods that may have any, over the trees of their kind
for the others.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters
from heavypath.speculative.decoding.growth import Growth
from heavypath.speculative.decoding.slot_values import Confidence
from heavypath.speculative.drafts import EarlyExit, PromptLookup
from heavypath.speculative.methods import METHODS
from heavypath.speculative.trees.planning import Plan, expected_tokens, select_tree
from heavypath.speculative.trees.tree import TokenTree

VERSION = 1
PRIOR = 50  # nodes' worth of the mean over all depths in each depth's acceptance: deep nodes are seen seldom


@dataclass(frozen=True)
class Costs:
    """Seconds of a step without its drafting, by nodes of the tree (1 is plain decoding), and of drafting a level."""

    step: dict[int, float]
    level: float

    def steps_of(self, sizes: Sequence[int]) -> dict[int, float]:
        """Costs of sizes between those measured, in steps of plain decoding, on straight lines between them."""
        known = sorted(self.step.items())
        # A larger tree never costs less: what looks so is noise.
        rising = [(size, max(seconds for other, seconds in known if other <= size)) for size, seconds in known]
        costs = {}
        for size in sizes:
            for (low, at_low), (high, at_high) in pairwise(rising):
                if low <= size <= high:
                    costs[size] = (at_low + (at_high - at_low) * (size - low) / (high - low)) / self.step[1]
        return costs


@dataclass(frozen=True)
class Acceptance:
    """What `calibration.walk` counted for a way to draw and verify (`Method.kind`) under some sampling.

    apart: the number of sequences drawn apart; None for trees that branch everywhere
    accepted, reached, moments: as in `Walk`
    """

    draw: str
    verify: str
    apart: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    accepted: list[list[int]]
    reached: list[int]
    moments: list[list[float]]

    @property
    def filters(self) -> Filters:
        """The sampling."""
        return Filters(self.temperature, self.top_k, self.top_p, self.min_p)

    def rates(self) -> Tensor:
        """fp64 [depth, child]: the shares at each depth, drawn to those of all by `PRIOR` nodes' worth of them.

        For sequences drawn apart the first row stays as counted, and the others are drawn to their own mean.
        """
        accepted = torch.tensor(self.accepted, dtype=torch.float64)
        reached = torch.tensor(self.reached, dtype=torch.float64)[:, None]
        alike = slice(1 if self.apart else 0, None)
        overall = accepted[alike].sum(0) / reached[alike].sum().clamp(min=1)
        rates = accepted / reached.clamp(min=1)
        rates[alike] = (accepted[alike] + PRIOR * overall) / (reached[alike] + PRIOR)
        return rates

    def confidence(self) -> Confidence:
        """The lines of least squares through acceptance by the draft's share; seldom tried children have the last."""
        base, slope = [], []
        for tried, shares, squares, hits, products in self.moments:
            if tried < PRIOR and base:
                break
            tried = max(tried, 1.0)
            spread = squares / tried - (shares / tried) ** 2
            rise = 0.0 if spread < 1e-6 else (products / tried - hits * shares / tried**2) / spread
            start = min(1.0, max(0.0, (hits - max(0.0, rise) * shares) / tried))
            base.append(start)
            slope.append(min(max(0.0, rise), 1.0 - start))
        return Confidence(tuple(base), tuple(slope))


class Planned(NamedTuple):
    """A tree, and the acceptance that it is planned by."""

    plan: Plan
    acceptance: Acceptance


@dataclass(frozen=True)
class Profile:
    """target, draft: what they are, see `describe`; environment: where it was measured."""

    target: str
    draft: str
    environment: dict[str, str | int]
    costs: Costs
    acceptance: tuple[Acceptance, ...]

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        content = {"heavypath profile": VERSION, **asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read JSON; ValueError for a file that is no profile, OSError for none."""
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no profile {str(path)!r}; `heavypath calibrate --out {path}` makes one")
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("heavypath profile") != VERSION:
                raise ValueError("it is of another version")
            costs = content.pop("costs")
            step = {int(size): float(seconds) for size, seconds in costs["step"].items()}
            measured = tuple(Acceptance(**entry) for entry in content.pop("acceptance"))
            return cls(**content, costs=Costs(step, float(costs["level"])), acceptance=measured)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{str(path)!r} is no profile that `heavypath calibrate` writes ({type(error).__name__}: {error}); "
                "make it again"
            ) from error

    def check(self, target: PreTrainedModel, draft: PreTrainedModel | PromptLookup | EarlyExit | None) -> None:
        """ValueError where it was measured for other models, another precision or another kind of device."""
        for role, measured, given in (("target", self.target, target), ("draft", self.draft, draft)):
            if given is not None and describe(given) != measured:
                raise ValueError(f"the profile was measured with a {role} of {measured}, got {describe(given)}")
        given = {"dtype": str(target.dtype).removeprefix("torch."), "device_type": target.device.type}
        for name, value in given.items():
            if self.environment.get(name) != value:
                raise ValueError(f"the profile was measured with {name} {self.environment.get(name)}, got {value}")

    def measured(self, method: str, filters: Filters) -> list[Acceptance]:
        """The measurements nearest in temperature, of the same filters if there are such; ValueError for none.

        One, or one for each number of sequences drawn apart.
        """
        draw, verify, apart = METHODS[method].kind(filters.temperature)
        fitting = [entry for entry in self.acceptance if (entry.temperature == 0) == (filters.temperature == 0)]
        fitting = [e for e in fitting if (e.draw, e.verify, e.apart is not None) == (draw, verify, apart)]
        if not fitting:
            given = f"{filters.temperature:g}"
            raise ValueError(
                f"the profile has no acceptance of method {method!r} for temperature {given}; "
                f"calibrate with --temperature {given}"
            )

        def distance(entry: Acceptance) -> tuple[bool, float]:
            return entry.filters[1:] != filters[1:], abs(entry.temperature - filters.temperature)

        nearest = min(map(distance, fitting))
        return [entry for entry in fitting if distance(entry) == nearest]

    def plan(self, method: str, filters: Filters) -> "Planned":
        """The best tree of a method under some sampling, and the acceptance that it is planned by.

        For methods whose trees grow it is the best static tree: how many tokens theirs yield depends on each step's
        draft.
        """
        sizes = range(1, max(self.costs.step) + 1)
        costs, level = self.costs.steps_of(sizes), self.costs.level / self.costs.step[1]
        plans = []
        for entry in self.measured(method, filters):
            rates = entry.rates()
            trees = _trees(method, max(sizes), rates, entry.apart)
            found = select_tree(rates, costs, level) if trees is None else _best(trees, rates, costs, level)
            plans.append(Planned(found, entry))
        return max(plans, key=lambda planned: planned.plan.speedup)

    def shape(self, method: str, filters: Filters) -> TokenTree | Growth:
        """What `SpeculativeDecoder` drafts by.

        Growing trees take the nodes and levels of the best static tree, and twice its widest level.
        """
        plan, entry = self.plan(method, filters)
        tree = plan.tree
        usual = METHODS[method].shape(8) if len(tree) > 1 else tree
        if not isinstance(usual, Growth):
            return tree
        width = min(len(tree) - 1, 2 * int(torch.bincount(tree.depths)[1:].max()))
        known = entry.confidence() if filters.temperature > 0 and usual.by == "slot" else None
        return Growth(usual.by, len(tree), width, tree.depth, confidence=known)


def describe(model: PreTrainedModel | PromptLookup | EarlyExit) -> str:
    """A model's kind and size, or a draft without one of its own."""
    if isinstance(model, (PromptLookup, EarlyExit)):
        return repr(model)
    parameters = sum(weight.numel() for weight in model.parameters())
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return f"{model.config.model_type}, {layers} layers, {parameters} parameters"


def _best(trees: Iterator[TokenTree], rates: Tensor, costs: Mapping[int, float], level: float) -> Plan:
    """The tree that is expected to decode fastest."""
    plans = []
    for tree in trees:
        tokens, drafting = expected_tokens(tree, rates), tree.depth * level
        plans.append(Plan(tree, tokens, tokens / (costs[len(tree)] + drafting), tokens / (1 + drafting)))
    return max(plans, key=lambda plan: plan.speedup)


def _trees(method: str, size: int, rates: Tensor, apart: int | None) -> Iterator[TokenTree] | None:
    """The trees of at most `size` nodes that a method may have, [-1] among them; None for all there are."""
    depth = len(rates)
    if apart is not None:
        lengths = range(min(depth, (size - 1) // apart) + 1)
        return (TokenTree.independent(apart, length) for length in lengths)
    if method == "chain":
        return (TokenTree.chain(length) for length in range(min(size - 1, depth) + 1))
    if method == "rsd-c":
        shapes = [(1, 0)]
        shapes += [(width, levels) for width in range(1, rates.shape[1] + 1) for levels in range(1, depth + 1)]
        fitting = [shape for shape in shapes if sum(shape[0] ** d for d in range(shape[1] + 1)) <= size]
        return (TokenTree.k_ary(*shape) for shape in fitting)
    return None
