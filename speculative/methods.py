"""The table of methods: which tree each drafts, how its nodes are sampled, and how they are verified.

The table METHODS is at the end of this file. Each method has its paper, and where it differs from the paper.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import DRAWS, EITHER_DRAW, VERIFICATION_RULES
from heavypath.speculative.decoding.rules import OWN, VALUE_TEMPERATURE, Rules, Verifier
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.names import load
from heavypath.speculative.trees.growth import DEFAULT_ACCEPTANCE, DEFAULT_CONFIDENCE, MAX_SLOTS, Confidence, Growth
from heavypath.speculative.trees.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from heavypath.speculative.decoding.request import Request
    from heavypath.speculative.profile import Profile
    from heavypath.speculative.trees.rates import Acceptance

# The draws for which each verification is lossless.
LOSSLESS_FOR = {name: rule.draws for name, rule in VERIFICATION_RULES.items() if rule.draws}
REJECTION = DRAWS[:2]  # the verifications that are recursive rejection; each has the name of its draw
# Values of the option `verifier` of SpeculativeDecoder, for methods whose papers have recursive rejection. "rejection"
# means that; the others are values of `Method.verification`.
VERIFIERS = ("rejection", *EITHER_DRAW)
# The default of that option, by device type. An entry means that bench/decoding.py has shown on such a device that it
# accepts more tokens and is not slower. Without an entry the default is the verification of the method's paper.
DEFAULT_VERIFIERS: dict[str, dict[str, str]] = {
    "cpu": {
        "chain": "traversal",
        "specinfer": "held_traversal",
        "sequoia": "held_traversal",
        "dyspec": "traversal",
        "rsd-c": "held_traversal",
        "rsd-s": "traversal",
    },
}
_SIBLINGS_FIRST = {name for name, rule in VERIFICATION_RULES.items() if rule.siblings_first}
LARGE = 64  # nodes of a tree
# Typical acceptance changes the output distribution. Whether a user's own verifier (OWN) keeps it is unknown.
VERIFICATIONS = (*LOSSLESS_FOR, "typical", OWN)
# Options of SpeculativeDecoder that only some methods have.
OPTIONS = ("acceptance", "max_depth", "width", "branching", "threshold", "confidence")


@dataclass(frozen=True)
class Method:
    """A method: one row of the table METHODS.

    draw: how children are sampled from the draft: "without_replacement", "with_replacement" (independently), or "top_k"
        (the draft's likeliest tokens)
    verification: `method` of heavypath.kernels.verification.verify_tree, where recursive rejection has the name of its
        draw, "without_replacement" or "with_replacement"; or "typical", typical acceptance, which
        changes the output distribution; or "own", which calls `verifier`
    tree_of: a function of a size that returns a tree of at most that many nodes, or a `Growth` of at most that size.
        Its other parameters are options of SpeculativeDecoder
    fill: whether further children are sampled uniformly once all tokens with positive draft probability are drawn
    verifier: what is called instead of `verify_tree`: a user's own verifier, or the thresholds of typical acceptance,
        which the decoder sets

    To add a method, add an entry: METHODS["mine"] = Method("without_replacement", "target_sample", tree_of). Raises
    ValueError for an unknown draw or verification, for a verification that is not lossless for this draw, for a
    parameter of tree_of that is not in OPTIONS, and for "own" without a verifier.
    """

    draw: Literal["without_replacement", "with_replacement", "top_k"]
    verification: str
    tree_of: Callable[..., TokenTree | Growth]
    fill: bool = False
    verifier: Verifier | None = None

    def __post_init__(self) -> None:
        _check_word("draw", self.draw, DRAWS)
        _check_word("verification", self.verification, VERIFICATIONS)
        draws = LOSSLESS_FOR.get(self.verification, DRAWS)
        if self.draw not in draws:
            lossless = " or ".join(draws)
            raise ValueError(
                f"verification {self.verification!r} is lossless for children drawn {lossless}, got draw {self.draw!r}"
            )
        if self.fill and self.draw != "without_replacement":
            raise ValueError(f"fill needs draw 'without_replacement', got {self.draw!r}")
        if self.verification == OWN and self.verifier is None:
            raise ValueError(f"verification {OWN!r} needs a verifier, got None")
        if not callable(self.tree_of):
            raise TypeError(f"tree_of must be a function of a size, got {type(self.tree_of).__name__}")
        for option in self.options:
            _check_word("a parameter of tree_of after the size", option, OPTIONS)

    def at(self, temperature: float, draft_temperature: float | None = None) -> tuple[str, str]:
        """The names of the draw and the verification at these temperatures, as `Rules` has them.

        At temperature 0 every method drafts the draft's likeliest tokens and follows the target's argmax; only a user's
        own verifier still decides alone. With draft_temperature 0 the draft's likeliest tokens are drafted, even if
        the target samples.

        draft_temperature: default: the target's
        """
        draw = self.draw
        verification = self.verification
        if temperature == 0 or draft_temperature == 0:
            draw = "top_k"
        if temperature == 0 and verification != OWN:
            verification = "greedy"
        return draw, verification

    def texts_ignore_trees(self, filters: Filters) -> bool:
        """Whether the output is the same for all trees: at temperature 0, and for verification "race"."""
        _, verification = self.at(filters.temperature)
        return verification in ("greedy", "race")

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The values of VERIFIERS that can verify the method's trees; none if its verification is not among them.

        Held traversal requires that all children of a node are drawn before any node below them, and that none is
        removed later. A tree that grows by `Growth` is cut at the end, and what is cut can depend on tokens below.
        """
        if self.verification not in (*REJECTION, *VERIFIERS):
            return ()
        if self.tree_of in _GROWING:
            return tuple(word for word in VERIFIERS if word not in _SIBLINGS_FIRST)
        return VERIFIERS

    def verified_by(self, verifier: str | None) -> "Method":
        """The same method with another verification, if `verifier` is one of `verifiers`; else unchanged."""
        if verifier not in self.verifiers:
            return self
        if verifier == "rejection":
            return replace(self, verification=self.draw)
        return replace(self, verification=verifier)

    @property
    def is_lossless(self) -> bool:
        """Whether the output has the target's distribution, at any temperature."""
        return self.verification in LOSSLESS_FOR

    @property
    def independent_sequences(self) -> bool:
        """Whether the tree is a few sequences that are drafted independently of each other, starting at the root."""
        return self.tree_of is _sequences

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the parameters of `tree_of` after the size."""
        return tuple(inspect.signature(self.tree_of).parameters)[1:]


def _check_word(name: str, given: str, expected: Iterable[str]) -> None:
    if not isinstance(given, str) or given not in expected:
        raise ValueError(f"{name} must be one of {', '.join(expected)}, got {given!r}")


def _root(size: int) -> TokenTree:
    return ROOT


def _chain(size: int, threshold: float = 0.0) -> TokenTree | Growth:
    """A chain. With a threshold it may end early, so it is a `Growth` with one node a level."""
    if threshold == 0:
        return TokenTree.chain(size - 1)
    return Growth("slot", size, 1, size - 1, threshold)


def _sequences(size: int, width: int = 3) -> TokenTree:
    """`width` sequences of equal length below the root."""
    below_root = size - 1
    width = min(width, below_root)
    length = max(1, below_root // width)
    return TokenTree.independent(width, length)


def _default_depth(size: int) -> int:
    """The depth if none is requested.

    Up to LARGE nodes, twice the nodes add one level; above, they add three.
    """
    up_to_large = min(size, LARGE)
    doublings = up_to_large.bit_length() - 1
    beyond = math.log2(max(size, LARGE) / LARGE)
    depth = doublings + round(3 * beyond)
    return min(size - 1, max(2, depth))


def _planned(size: int, acceptance: "Acceptance | None" = None, max_depth: int | None = None) -> TokenTree:
    """The best tree for an acceptance, by `sequoia_tree`.

    It has fewer nodes than `size` if the acceptance has too few children and levels for that many.
    """
    from heavypath.speculative.trees.planning import greedy_tree, sequoia_tree
    from heavypath.speculative.trees.rates import Rates

    levels = size - 1
    if max_depth is not None:
        levels = min(levels, max_depth)
    elif acceptance is None:
        levels = _default_depth(size)
    given = DEFAULT_ACCEPTANCE if acceptance is None else acceptance
    Rates.of(given)  # checks the values
    plan = sequoia_tree
    rates = torch.as_tensor(given, device="cpu")
    if acceptance is None and size > LARGE:
        from heavypath.speculative.trees.tails import of_any_pair

        plan = greedy_tree
        rates = torch.from_numpy(of_any_pair(size // 8))
    most_levels = levels
    if rates.dim() == 2:
        most_levels = min(levels, len(rates))
    children = rates.shape[-1]
    possible = 1
    for depth in range(1, most_levels + 1):
        possible = min(size, possible + children**depth)
    return plan(rates, possible, levels)


def _by_levels(
    size: int,
    branching: Sequence[int] | None = None,
    width: int | None = None,
    acceptance: "Acceptance | None" = None,
    max_depth: int | None = None,
) -> TokenTree:
    """A tree in which all nodes of a level have the same number of children.

    The numbers are `branching`, or `width` at every level, or by default the best ones for the acceptance.
    """
    if branching is not None:
        return TokenTree.from_branching(branching)
    if width is None:
        from heavypath.speculative.trees.branching import branching_tree

        levels = _default_depth(size) if max_depth is None else max_depth
        rates = DEFAULT_ACCEPTANCE if acceptance is None else acceptance
        return branching_tree(rates, size, levels)
    if acceptance is not None:
        raise ValueError("with acceptance the number of children is planned; leave out width")
    tree = _k_ary(size, width)
    if max_depth is not None:
        tree, _ = tree.truncated(max_depth)
    return tree


def _k_ary(size: int, width: int) -> TokenTree:
    """The deepest tree of at most `size` nodes in which every node above the leaves has `width` children."""
    nodes = 1
    level = width
    depth = 0
    while nodes + level <= size:
        nodes += level
        level *= width
        depth += 1
    if depth == 0:
        return TokenTree.k_ary(size - 1, 1)
    return TokenTree.k_ary(width, depth)


def _beam(size: int, width: int | None = None, max_depth: int | None = None) -> Growth:
    """Stochastic beam search with equally wide levels."""
    below_root = size - 1
    depth = _default_depth(size) if max_depth is None else max_depth
    if width is None:
        width = max(1, below_root // max(1, depth))
    deepest = max(1, below_root // max(1, width))
    depth = min(depth, deepest)
    most_nodes = 1 + width * depth
    return Growth("beam", min(size, most_nodes), width, depth)


def _by_slots(
    size: int,
    width: int | None = None,
    max_depth: int | None = None,
    threshold: float = 0.0,
    confidence: Confidence | Literal["draft"] = DEFAULT_CONFIDENCE,
) -> Growth:
    """A tree that grows at the slot whose next child has the highest value, before the child's token is known."""
    if confidence != "draft" and not isinstance(confidence, Confidence):
        raise ValueError(f"confidence must be a Confidence or 'draft', got {confidence!r}")
    known = confidence if isinstance(confidence, Confidence) else None
    return _grown("slot", size, width, max_depth, threshold, known)


def _by_nodes(size: int, width: int | None = None, max_depth: int | None = None, threshold: float = 0.0) -> Growth:
    """A tree of the nodes whose paths have the highest probability under the draft."""
    return _grown("node", size, width, max_depth, threshold, None)


def _grown(
    by: Literal["slot", "node"],
    size: int,
    width: int | None,
    max_depth: int | None,
    threshold: float,
    confidence: Confidence | None,
) -> Growth:
    """A `Growth`. By default a level may have half of the nodes: wider levels are rare and cost draft time."""
    depth = _default_depth(size) if max_depth is None else min(max_depth, size - 1)
    levels = max(1, depth)
    if width is None:
        half = math.ceil(size / 2)
        needed = math.ceil((size - 1) / levels)
        fits = (MAX_SLOTS - 1) // levels
        width = min(max(half, needed), fits)
    most_nodes = 1 + width * depth
    return Growth(by, min(size, most_nodes), width, depth, threshold, confidence)


_GROWING = (_beam, _by_slots, _by_nodes)

METHODS = {
    # Plain decoding: the tree is the root alone. Its tokens are the outcomes of an exponential race without drafts.
    "autoregressive": Method("without_replacement", "race", _root),
    # Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192);
    # Chen, Borgeaud, Irving, Lespiau, Sifre and Jumper 2023, "Accelerating Large Language Model Decoding with
    # Speculative Sampling" (arXiv 2302.01318). The option `threshold` is in neither.
    "chain": Method("without_replacement", "without_replacement", _chain),
    # Miao et al. 2023, "SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative
    # Inference and Verification" (arXiv 2305.09781): multi-step speculative sampling. The paper's trees branch at some
    # levels, and have one draft model or several (here: `Merge`). Three sequences from the root are our default; the
    # option `tree` takes any other tree.
    "specinfer": Method("with_replacement", "with_replacement", _sequences),
    # Sun, Suresh, Ro, Beirami, Jain and Yu 2023, "SpecTr: Fast Speculative Decoding via Optimal Transport"
    # (arXiv 2310.15141): independent sequences, K-SEQ. Three sequences are our default.
    "spectr": Method("with_replacement", "kseq", _sequences),
    # Chen, May, Svirschevski, Huang, Ryabinin, Jia and Chen 2024, "Sequoia: Scalable, Robust, and Hardware-aware
    # Speculative Decoding" (arXiv 2402.12374).
    "sequoia": Method("without_replacement", "without_replacement", _planned, fill=True),
    # Xiong et al. 2024, "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure" (arXiv 2410.11744). The
    # paper takes a token's draft probability for its probability of acceptance, which is confidence="draft" here. Our
    # default is what a profile measured, else DEFAULT_CONFIDENCE. Levels are at most `width` wide, see `growing`.
    "dyspec": Method("without_replacement", "without_replacement", _by_slots),
    # Jeon, Gagrani, Goel, Park, Lee and Lott 2024, "Recursive Speculative Decoding: Accelerating LLM Inference via
    # Sampling Without Replacement" (arXiv 2402.14160). RSD-C takes any number of children for each level, which is
    # branching=[...] here. The paper leaves the numbers open; our default are the best ones for the acceptance.
    "rsd-c": Method("without_replacement", "without_replacement", _by_levels),
    # RSD-S of the same paper: stochastic beam search.
    "rsd-s": Method("without_replacement", "without_replacement", _beam),
    # Kobus and Gündüz 2025, "Speculative Sampling via Exponential Races" (Findings of ACL 2025). Noise is keyed by
    # position, so the output is that of "autoregressive" with the same seed.
    "ersd": Method("without_replacement", "race", _planned),
    # Li, Wei, Zhang and Zhang 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (arXiv
    # 2406.16858). Only its tree policy: expand the likeliest nodes, then keep the likeliest of all. Any draft will do,
    # not only an EAGLE head. The nodes to keep are chosen among the `width` best of each level; the paper
    # chooses among all children of the expanded nodes. The tree is verified with a sample of the target.
    "eagle-2": Method("top_k", "target_sample", _by_nodes),
    # The draft's likeliest tokens, verified with a sample of the target: the top-k baseline of Sequoia's paper.
    "top-k": Method("top_k", "target_sample", _planned),
    # Naive sampling (Miao et al. 2023, see "specinfer"): independent draws, verified with a sample of the target. The
    # planned tree is ours. Siblings may have the same token; then the children of all of them are candidates.
    "naive": Method("with_replacement", "target_sample", _planned),
    # Naive sampling with distinct siblings, drawn without replacement: ours, from no paper.
    "naive-distinct": Method("without_replacement", "target_sample", _planned),
    # Cai, Li, Geng, Peng, Lee, Chen and Dao 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple
    # Decoding Heads" (arXiv 2401.10774), section 2.3.1: typical acceptance. It changes the output distribution: drafted
    # tokens that are likely enough under the target are always accepted. After the accepted tokens the paper takes the
    # target's likeliest token; here it is sampled. The paper's trees are tree=TokenTree.from_paths(...), its draft is
    # Medusa heads. At temperature 0 it is greedy decoding, like every method.
    "typical-lossy": Method("top_k", "typical", _planned),
}
LOSSLESS_METHODS = tuple(name for name, method in METHODS.items() if method.is_lossless)


def check_draft_may_be_greedy(method: str, verification: str) -> None:
    """Raise ValueError if the verification needs a draft that samples; called where draft_temperature is 0."""
    rule = VERIFICATION_RULES.get(verification)  # none for typical acceptance and a user's verifier
    if rule is not None and not rule.point_masses:
        raise ValueError(f"method {method!r} needs draft_temperature > 0 where it samples, got 0")


def default_verifier(method: str, device_type: str) -> str | None:
    """The value of VERIFIERS that a method has by default, or None for the verification of its row.

    device_type: of the models, as torch names it
    """
    return DEFAULT_VERIFIERS.get(device_type, {}).get(method)


def measured_row(method: str, verifier: str | None, device_type: str) -> Method:
    """The row of a method with the verification whose acceptance `calibrate` measures.

    That is `verifier` if the method can be verified by it, else the method's default.
    """
    row = row_of(method)
    if verifier not in row.verifiers:
        verifier = default_verifier(method, device_type)
    return row.verified_by(verifier)


def row_of(method: str, verifier: str | None = None) -> Method:
    """The row of a method, with the verification `verifier` (one of VERIFIERS) if it is given.

    Raises ValueError for an unknown method, for an unknown verifier, and for a verifier that does not fit the method.
    """
    _check_word("method", method, METHODS)
    row = METHODS[method]
    if verifier is None:
        return row
    if verifier not in VERIFIERS:
        raise ValueError(
            f"verifier must be None, for the method's default, one of {', '.join(VERIFIERS)}, or a callable as "
            f"described by Verifier; got {verifier!r}"
        )
    if verifier not in row.verifiers:
        if row.verifiers:
            raise ValueError(
                f"verifier {verifier!r} needs siblings that are all drawn before any node below them, which is not so "
                f"where trees grow, as those of method {method!r} do; it takes {', '.join(row.verifiers)}"
            )
        fitting = ", ".join(name for name, other in METHODS.items() if verifier in other.verifiers)
        raise ValueError(
            f"verifier {verifier!r} replaces recursive rejection, by which only {fitting} are verified; method "
            f"{method!r} is verified by {row.verification!r}: leave the verifier out"
        )
    return row.verified_by(verifier)


def asked_row(method: str, options: Mapping[str, Any]) -> Method:
    """The row of a method with the verification that the options request.

    options: those of `RuleOptions`; others are ignored

    Raises TypeError or ValueError for options that the method does not have, or that do not fit each other.
    """
    own = options.get("verifier")
    if own is None or isinstance(own, str):
        row = row_of(method, own)
        own = row.verifier
    else:
        row = row_of(method)
    limits = {name: options[name] for name in ("epsilon", "delta") if options.get(name) is not None}
    if limits and row.verification != "typical":
        raise ValueError(f"only typical acceptance, method 'typical-lossy', takes {' and '.join(limits)}")
    draft_filters_of(options, Filters()).check("draft_")
    if own is None and row.verification == "typical":
        typical = load("Typical")(**limits)
        return replace(row, verifier=typical.check())
    if own is None:
        return row
    own = load("checked_verifier")(own)
    if row.verification == "typical":
        raise ValueError(
            f"{method!r} is its verification; with a verifier of your own give another method, as 'rsd-c', whose "
            "children are drawn from the draft without replacement"
        )
    return replace(row, verification=OWN, verifier=own)


def draft_filters_of(options: Mapping[str, Any], target: Filters) -> Filters:
    """The draft's filters: the target's, with those that the options set. If the target is greedy, so is the draft."""
    of_draft = {name: options.get(f"draft_{name}") for name in Filters._fields}
    filters = target.override(**of_draft)
    if target.temperature > 0:
        return filters
    return filters._replace(temperature=0.0)


def rules_of(
    method: str,
    row: Method,
    options: Mapping[str, Any],
    request: "Request",
    draft: Draft,
    profile: "Profile | None",
) -> Rules:
    """The sampling and verification rules of a request. Raises ValueError if the method cannot sample that way."""
    filters = request.filters
    draft_filters = draft_filters_of(options, filters)
    draw, verification = row.at(filters.temperature, draft_filters.temperature)
    if draft_filters.temperature == 0:
        check_draft_may_be_greedy(method, verification)
    fill = row.fill and draft.proposes_all(request.most_tokens)
    # Do not fill where uniformly sampled tokens would be rejected: for drafts without a model, which propose few
    # tokens on purpose; after the last position of a draft model; and where logits processors exclude tokens.
    # Nor for a user's verifier, which expects that all children were drawn from Q.
    if request.processors is not None or verification == OWN:
        fill = False
    changes = ()
    if profile is not None and draft is not NO_DRAFT:
        changes = profile.changes(method, filters)
    if request.processing is not None:
        changes = (*changes, request.processing)
    rules = Rules(
        draw,
        verification,
        filters,
        draft_filters,
        fill=fill,
        value_temperature=options.get("draft_temperature") or VALUE_TEMPERATURE,
        changes=changes,
        verifier=None if verification == "greedy" else row.verifier,
    )
    return draft.rules(rules)
