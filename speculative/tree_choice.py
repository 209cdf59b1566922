"""Choose the tree of a decoder: as its options say, or by default the one that is fastest by estimated costs.

The fastest tree has the largest

    expected tokens(tree, acceptance) / (t(nodes) + depth * c),        t, c in steps of plain decoding

(Sequoia, Chen et al. 2024, section 4.1). For methods that can have any tree, it is the best of all trees. For the
others, it is the best of the shapes that they can have.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heavypath.kernels.attention.layouts import MAX_NODES
from heavypath.kernels.numbers import whole
from heavypath.speculative.costs.estimates import Work, estimated_for, estimates
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.methods import METHODS
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.trees.growth import DEFAULT_CONFIDENCE, Confidence, Growth
from heavypath.speculative.trees.tails import DEPTH, SMALL_MODEL, Usual
from heavypath.speculative.trees.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from heavypath.speculative.costs.table import Costs
    from heavypath.speculative.trees.planning import Plan

logger = logging.getLogger(__name__)

SEQUENCES = 3  # default number of independent sequences
TOY_BYTES = 1e6  # a model with fewer bytes of weights is a toy
TOY_SIZE = 5  # nodes of a toy's trees, in any batch
SURE = 1.1  # batches draft only if the estimated gain is at least this; measured, their trees gain up to 0.03 less


def chosen_tree(
    method: str, given: Mapping[str, Any], target: Forward, draft: Draft, length: int = 0
) -> tuple[TokenTree | Growth, str]:
    """The tree that a decoder's options set, or the default tree; and in words what it was chosen by.

    given: the tree options that are not None; length: of the sequences, see `estimates`

    A static tree is in heavy-path order. Raises TypeError or ValueError for options that do not fit method or draft.
    """
    if given:
        size = TOY_SIZE
        if not is_toy(target) and not {"tree", "tree_size", "branching"} & given.keys():
            estimated = tree_by_estimates(method, target, draft, length=length)
            size = max(2, len(estimated))
        tree = tree_of_options(method, given, size, draft.levels)
        chosen_by = "by the options given"
    elif is_toy(target):
        tree = tree_of_options(method, given, TOY_SIZE, draft.levels)
        chosen_by = "the default of models of less than a megabyte"
    else:
        tree = tree_by_estimates(method, target, draft, length=length)
        chosen_by = f"by costs estimated for {estimated_for(target)}"
        if length > 0:
            chosen_by += f" and {length:,} tokens"
    if isinstance(tree, TokenTree):
        tree, _ = tree.reordered("heavy_path")
    elif draft.root_distributions > 1:
        raise ValueError(
            f"trees of method {method!r} grow, and a Merge needs to know which of its drafts draws a node; take a "
            "method with static trees, as specinfer, or Mixture for Merge"
        )
    return tree, chosen_by


def is_toy(target: Forward) -> bool:
    """Whether the target is a CPU model so small that a step takes mostly host time, which the estimates ignore."""
    if target.device.type != "cpu" or target.stream is not None:
        return False
    return Work.of(target).weight_bytes < TOY_BYTES


def best_plan(
    method: str, rates: Tensor, costs: Mapping[int, float], level: float, sequence_count: int | None
) -> "Plan":
    """The static tree of a method with which decoding is expected to be fastest.

    rates: acceptance fp64 [depth, child]
    costs: number of nodes, 1, 2, ... -> cost of a step, in steps of plain decoding
    level: cost of drafting a level, in steps of plain decoding
    sequence_count: number of independent sequences; None for trees that may branch at every node

    For methods whose trees grow, it is the best static tree, because how many tokens a grown tree yields depends on the
    draft's probabilities in each step.
    """
    from heavypath.speculative.trees.planning import select_tree

    if method == "rsd-c":
        from heavypath.speculative.trees.branching import select_branching

        return select_branching(rates, costs, level)
    trees = _trees(method, max(costs), rates, sequence_count)
    if trees is None:
        return select_tree(rates, costs, level)
    return _best(trees, rates, costs, level)


def as_drafted(method: str, tree: TokenTree, confidence: Confidence | None) -> TokenTree | Growth:
    """Turn a planned tree into what the method drafts: the tree itself, or for methods whose trees grow a `Growth`.

    A growth has as many nodes and levels, and up to twice the widest level. confidence: predicts a slot's acceptance
    """
    if len(tree) == 1:
        return tree
    usual = METHODS[method].tree_of(8)
    if not isinstance(usual, Growth):
        return tree
    size = len(tree)
    widths = torch.bincount(tree.depths)[1:]  # of the levels below the root
    widest = int(widths.max())
    width = min(size - 1, 2 * widest)
    if usual.by != "slot":
        confidence = None
    return Growth(usual.by, size, width, tree.depth, confidence=confidence)


def tree_by_estimates(
    method: str, target: Forward, draft: Draft, batch: int = 1, usual: Usual | None = None, length: int = 0
) -> TokenTree | Growth:
    """The fastest tree of a method for `batch` sequences, in heavy-path order, by costs estimated for the device.

    usual: how often the draft's tokens are accepted; default: as usual at temperature 1
    length: of the sequences, see `estimates`
    """
    costs = estimates(target, draft.models, batch, length=length)
    usual = usual or usual_acceptance(method, draft, 1.0)
    tree = default_tree(method, costs, draft.levels, batch, usual)
    if isinstance(tree, TokenTree):
        tree, _ = tree.reordered("heavy_path")
    return tree


def usual_acceptance(method: str, draft: Draft, temperature: float) -> Usual:
    """How often a method usually accepts the tokens of a draft of this kind, if the target has this temperature."""
    usual = draft.usual_acceptance(temperature)
    if temperature > 0 and METHODS[method].verification == "target_sample":
        return usual.by_a_sample()
    return usual


def tokens_of_tree(tree: TokenTree | Growth, usual: Usual) -> float:
    """The expected tokens of a step by usual acceptance. A growth counts as the best static tree of this size."""
    from heavypath.speculative.trees.planning import expected_tokens

    if isinstance(tree, Growth):
        tree = METHODS["sequoia"].tree_of(len(tree), max_depth=tree.depth)
    assert isinstance(tree, TokenTree)
    return expected_tokens(tree, usual.rates())


def default_tree(
    method: str, costs: "Costs", levels: int | None = None, batch: int = 1, usual: Usual = SMALL_MODEL
) -> TokenTree | Growth:
    """The fastest tree of a method for models that were not measured, by estimated costs and usual acceptance.

    levels: most levels that the draft can draft; None for any number
    batch: number of sequences that the costs are for

    If no tree is expected to be SURE times as fast as plain decoding, a batch gets the root alone. A single sequence
    still drafts one token, because it is not known how well these models agree. It drafts nothing if not even a draft
    that is always right would pay.
    """
    if method == "autoregressive":
        return ROOT
    largest = max(costs.step)
    steps = costs.steps_of(range(1, largest + 1))
    level = costs.level / costs.step[1]
    most_levels = levels or DEPTH
    plan = _usual_plan(method, tuple(steps.values()), level, most_levels, usual)
    if batch > 1 and plan.speedup < SURE:
        return ROOT
    if len(plan.tree) > 1:
        return as_drafted(method, plan.tree, DEFAULT_CONFIDENCE)
    if _may_pay(steps, level, most_levels):
        logger.warning(
            "by the costs estimated for these models no tree is expected to pay: a level costs %.2f of a step; "
            "drafting one token a step; `heavypath calibrate` measures",
            level,
        )
        return METHODS[method].tree_of(2)
    logger.warning(
        "by the costs estimated for these models no tree can pay, even if the draft were always right: "
        "a level costs %.2f of a step; drafting nothing; `heavypath calibrate` measures",
        level,
    )
    return ROOT


def _may_pay(steps: Mapping[int, float], level: float, levels: int) -> bool:
    """Whether a chain of which every token is accepted is faster than plain decoding.

    steps, level: as in `_usual_plan`, steps by number of nodes; levels: most levels of the chain
    """
    depths = range(1, min(levels, len(steps) - 1) + 1)
    return any(1 + depth > steps[1 + depth] + depth * level for depth in depths)


@lru_cache(maxsize=256)  # many decoders of the same models are made in a program that compares methods
def _usual_plan(method: str, steps: tuple[float, ...], level: float, levels: int, usual: Usual) -> "Plan":
    """The fastest tree of a method by usual acceptance, which may be the root alone.

    steps, level: costs of a step with 1, 2, ... nodes, and of drafting a level, in steps of plain decoding
    levels: most levels that the draft can draft
    """
    most_levels = max(1, len(steps) - 1)  # of a tree of that many nodes
    depth = min(DEPTH, levels, most_levels)
    rates = torch.from_numpy(usual.rates(depth=depth))
    sequences = SEQUENCES if METHODS[method].independent_sequences else None
    costs = dict(enumerate(steps, 1))
    return best_plan(method, rates, costs, level, sequences)


def tree_of_options(method: str, given: Mapping[str, Any], size: int, levels: int | None = None) -> TokenTree | Growth:
    """The tree, or the growth, that a method makes of a decoder's options.

    given: the tree options that are not None
    size: number of nodes, if `tree_size` is not among them
    levels: most levels that the draft can draft; None for any. If no option sets the depth, the tree is limited to it

    Raises TypeError or ValueError for options that the method does not have, or that do not fit each other or the
    draft.
    """
    from heavypath.speculative.trees.checks import check_given

    tree = given.get("tree")
    if tree is None:
        tree = _shaped_tree(method, given, size, levels)
    else:
        others = [name for name in given if name != "tree"]
        check_given(method, METHODS[method].tree_of(8), tree, others)
    if levels is not None and tree.depth > levels:
        what = f"a tree of {tree.depth} levels"
        if "max_depth" in given:
            what = f"max_depth {given['max_depth']}"
        raise ValueError(
            f"the draft can draft {levels} levels of a tree, got {what}; give at most {levels} levels "
            f"(max_depth={levels}, tree.truncated({levels})[0])"
        )
    if len(tree) > MAX_NODES:
        raise ValueError(f"a tree may have at most {MAX_NODES} nodes, got {len(tree)}")
    return tree


def _shaped_tree(method: str, given: Mapping[str, Any], size: int, levels: int | None) -> TokenTree | Growth:
    """The tree of `tree_of_options` if none is given, only numbers for its shape."""
    from heavypath.speculative.trees.checks import check_numbers

    row = METHODS[method]
    options = dict(given)
    nodes = whole("tree_size", options.pop("tree_size", size))
    if not 2 <= nodes <= MAX_NODES:  # checked before planning, which takes a while for many nodes
        raise ValueError(f"tree_size counts the root and must be in 2 .. {MAX_NODES}, got {nodes}")
    for name in options:
        if name not in row.options:
            has = ", ".join(row.options) or "none but tree_size"
            raise ValueError(f"method {method!r} has no option {name!r}; it has {has}")
    check_numbers(options)
    if "branching" in options and len(given) > 1:
        others = ", ".join(name for name in given if name != "branching")
        raise ValueError(f"branching says all of the tree's shape; leave out {others}")
    tree = row.tree_of(nodes, **options)
    depth_is_given = "max_depth" in options or "branching" in options
    if levels is None or tree.depth <= levels or depth_is_given:
        return tree
    if "max_depth" in row.options:
        return row.tree_of(nodes, **options, max_depth=levels)
    return top(tree, levels)


def top(tree: TokenTree | Growth, levels: int | None) -> TokenTree | Growth:
    """A tree, or a growth, limited to its first `levels` levels; unchanged for None."""
    if levels is None or tree.depth <= levels:
        return tree
    if isinstance(tree, TokenTree):
        cut, _ = tree.truncated(levels)
        return cut
    most_nodes = 1 + levels * tree.width
    return replace(tree, depth=levels, size=min(tree.size, most_nodes))


def _best(trees: Iterator[TokenTree], rates: Tensor, costs: Mapping[int, float], level: float) -> "Plan":
    """The plan of the tree among these that is expected to decode fastest. The other arguments: as for `best_plan`."""
    from heavypath.speculative.trees.planning import Plan, expected_tokens

    plans = []
    for tree in trees:
        tokens = expected_tokens(tree, rates)
        cost = costs[len(tree)] + tree.depth * level
        plans.append(Plan(tree, tokens, tokens / cost))
    return max(plans, key=lambda plan: plan.speedup)


def _trees(method: str, size: int, rates: Tensor, sequence_count: int | None) -> Iterator[TokenTree] | None:
    """The trees of at most `size` nodes that a method can have, the root alone included; None if it can have any."""
    depth = len(rates)
    if sequence_count is not None:
        longest = min(depth, (size - 1) // sequence_count)
        return (TokenTree.independent(sequence_count, length) for length in range(longest + 1))
    if method == "chain":
        longest = min(depth, size - 1)
        return (TokenTree.chain(length) for length in range(longest + 1))
    return None
