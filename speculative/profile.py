"""What was measured of a pair of models on a machine, and the trees that follow from it.

A profile is a small JSON file. It says what a step costs with a tree of n nodes, what a level of drafting costs, and
for each way to draw and verify, and each sampling, how often child j of a node at depth d is accepted. A plan is the
tree with the largest

    expected tokens(tree, acceptance) / (t(nodes) + depth * c),        t, c in steps of plain decoding

(Sequoia, Chen et al. 2024, sec. 3.3): over all trees for the methods that may have any, over the trees of their kind
for the others.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters
from heavypath.speculative.drafts import EarlyExit, PromptLookup
from heavypath.speculative.growing import Growth
from heavypath.speculative.methods import METHODS
from heavypath.speculative.planning import Plan, expected_tokens, select_tree
from heavypath.speculative.tree import TokenTree

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
    """Counts for a way to draw and verify (as `Method`'s; "greedy" at temperature 0) under some sampling.

    accepted: [depth][child], how often the child was the accepted one; reached: [depth], nodes that offered children
    """

    draw: str
    verify: str
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    accepted: list[list[int]]
    reached: list[int]

    @property
    def filters(self) -> Filters:
        """The sampling."""
        return Filters(self.temperature, self.top_k, self.top_p, self.min_p)

    def rates(self) -> Tensor:
        """fp64 [depth, child]: each depth's shares, drawn to those of all depths by `PRIOR` nodes' worth of them."""
        accepted = torch.tensor(self.accepted, dtype=torch.float64)
        reached = torch.tensor(self.reached, dtype=torch.float64)
        overall = accepted.sum(0) / reached.sum().clamp(min=1)
        return (accepted + PRIOR * overall) / (reached[:, None] + PRIOR)


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
        """ValueError where it was measured for other models, or another kind of device."""
        for role, measured, given in (("target", self.target, target), ("draft", self.draft, draft)):
            if given is not None and describe(given) != measured:
                raise ValueError(f"the profile was measured with a {role} of {measured}, got {describe(given)}")
        dtype = str(target.dtype).removeprefix("torch.")
        if dtype != self.environment["dtype"]:
            raise ValueError(f"the profile was measured in {self.environment['dtype']}, got a target in {dtype}")

    def measured(self, method: str, filters: Filters) -> Acceptance:
        """The measurement nearest in temperature, of the same filters if there is one; ValueError if there is none."""
        how = METHODS[method].draw, METHODS[method].verify
        if filters.temperature == 0:
            fitting = [entry for entry in self.acceptance if entry.temperature == 0]
        else:
            fitting = [
                entry for entry in self.acceptance if entry.temperature > 0 and (entry.draw, entry.verify) == how
            ]
        if not fitting:
            given = f"{filters.temperature:g}"
            raise ValueError(
                f"the profile has no acceptance of method {method!r} for temperature {given}; "
                f"calibrate with --temperature {given}"
            )

        def distance(entry: Acceptance) -> tuple[bool, float]:
            return entry.filters[1:] != filters[1:], abs(entry.temperature - filters.temperature)

        return min(fitting, key=distance)

    def plan(self, method: str, filters: Filters) -> Plan:
        """The best tree of a method under some sampling; its `tree` is a `Growth` for methods whose trees grow.

        Growing trees take the nodes, levels and widest level of the best static tree, whose expected tokens are given:
        theirs depend on each step's draft, and are more.
        """
        rates = self.measured(method, filters).rates()
        sizes = range(1, max(self.costs.step) + 1)
        costs, level = self.costs.steps_of(sizes), self.costs.level / self.costs.step[1]
        trees = _FAMILIES.get(method)
        if trees is not None:
            return _best(trees(max(sizes), rates), rates, costs, level)
        return select_tree(rates, costs, level)

    def shape(self, method: str, filters: Filters) -> TokenTree | Growth:
        """What `SpeculativeDecoder` drafts by."""
        tree = self.plan(method, filters).tree
        how = METHODS[method].shape(8) if len(tree) > 1 else tree
        if not isinstance(how, Growth):
            return tree
        width = int(torch.bincount(tree.depths)[1:].max())
        return Growth(how.by, len(tree), width, tree.depth)


def describe(model: PreTrainedModel | PromptLookup | EarlyExit) -> str:
    """A model's kind and size, or a draft without one of its own."""
    if isinstance(model, (PromptLookup, EarlyExit)):
        return repr(model)
    parameters = sum(weight.numel() for weight in model.parameters())
    config = model.config
    return f"{config.model_type}, {config.num_hidden_layers} layers, {parameters} parameters"


def _best(trees: Iterator[TokenTree], rates: Tensor, costs: Mapping[int, float], level: float) -> Plan:
    """The tree that is expected to decode fastest."""
    plans = []
    for tree in trees:
        tokens, drafting = expected_tokens(tree, rates), tree.depth * level
        plans.append(Plan(tree, tokens, tokens / (costs[len(tree)] + drafting), tokens / (1 + drafting)))
    return max(plans, key=lambda plan: plan.speedup)


def _chains(size: int, rates: Tensor) -> Iterator[TokenTree]:
    yield from (TokenTree.chain(length) for length in range(min(size, len(rates) + 1)))


def _sequences(width: int | None) -> Callable[[int, Tensor], Iterator[TokenTree]]:
    def trees(size: int, rates: Tensor) -> Iterator[TokenTree]:
        yield TokenTree([-1])
        for count in range(1, rates.shape[1] + 1) if width is None else [width]:
            for length in range(1, len(rates) + 1):
                if 1 + count * length <= size:
                    yield TokenTree.independent(count, length)

    return trees


def _constant(size: int, rates: Tensor) -> Iterator[TokenTree]:
    yield TokenTree([-1])
    for branching in range(1, rates.shape[1] + 1):
        for depth in range(1, len(rates) + 1):
            if sum(branching**d for d in range(depth + 1)) <= size:
                yield TokenTree.k_ary(branching, depth)


# K-SEQ's acceptance is measured for three sequences, and depends on their number.
_FAMILIES: dict[str, Callable[[int, Tensor], Iterator[TokenTree]]] = {
    "chain": _chains,
    "specinfer": _sequences(None),
    "spectr": _sequences(3),
    "rsd-c": _constant,
}
