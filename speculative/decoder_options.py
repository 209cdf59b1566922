"""The options of a `SpeculativeDecoder`, declared once."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from heavypath.speculative.decoding.rules import Verifier
from heavypath.speculative.trees.growth import Confidence
from heavypath.speculative.trees.tree import TokenTree

if TYPE_CHECKING:
    from heavypath.speculative.profile import Profile
    from heavypath.speculative.trees.planning import Acceptance


class TreeOptions(TypedDict, total=False):
    """Options for the trees of a decoder. All but tree_size are options of some methods, which the others refuse.

    tree_size: nodes of the drafted tree, root included; a method whose trees cannot have that size takes the next
        smaller one. Default: 5 on a CPU; where weights are streamed by what a pass reads and computes, see
        `costs.streamed`. On a GPU it is the size and the levels that pay for one sequence, by costs which
        `costs.roofline` estimates from the device and the models. At temperature 0, and for ersd, the default follows
        the batch, because texts do not depend on trees. By estimated costs, several sequences have smaller trees, down
        to plain decoding, and larger ones while the batch shrinks
    tree: a TokenTree to use instead, for methods whose trees do not grow
    acceptance: [child] or [depth, child], the chance that child j of an accepted node is accepted, for planned trees
    max_depth:  at most so many levels of planned and grown trees (default: any by an `acceptance`, else by the nodes)
    width:      sequences of specinfer and spectr, children of a node in rsd-c, nodes on a level of grown trees
    branching:  for rsd-c: children of a node at each level (default: those that promise most by `acceptance`)
    threshold:  for chain, dyspec, eagle-2: slots of less value stay empty; see `decoding.growing`
    confidence: for dyspec: how the draft's probabilities tell acceptance, as a `Confidence` (default:
        growth.DEFAULT_CONFIDENCE), or "draft" for the paper's, where they are the acceptance
    profile: the measurements of `heavypath calibrate`, as a file or a `Profile`, instead of all these. Each step takes
        the tree with which decoding is expected to be fastest, for as many sequences as are running. So a sampled text
        is another sample of the same law in another batch, for the same seed and id, except with ersd. Where that must
        not be, calibrate with batch_sizes=[1]
    replan: with a profile, change the tree every few steps by the acceptance in this text so far, see `replanning`
    """

    tree: TokenTree | None
    tree_size: int | None
    acceptance: "Acceptance | None"
    max_depth: int | None
    width: int | None
    branching: Sequence[int] | None
    threshold: float | None
    confidence: Confidence | Literal["draft"] | None
    profile: "Profile | str | Path | None"
    replan: bool


class RuleOptions(TypedDict, total=False):
    """Rules by which a draft is sampled and its nodes are verified, and by which a lossy method accepts.

    verifier: the rule that decides about drafted nodes. Methods whose papers have recursive rejection are chain,
        specinfer, sequoia, dyspec, rsd-c and rsd-s. They take "rejection", or a rule that accepts more of the same
        trees. "held" holds siblings back (`heavypath.kernels.verifying.held`), "traversal" tries leaves before the
        nodes above them (`.traversal`), "held_traversal" does both, for trees that do not grow; default:
        `methods.DEFAULT_VERIFIERS`. Or, for any method and also at temperature 0, a callable as `Verifier` describes
        it, such as `top_down(rule)`. You must then keep the target's law yourself, and there is no profile, since one
        measures the built-in rules
    draft_temperature, draft_top_k, draft_top_p, draft_min_p: how the draft is sampled; None takes the target's setting.
        Where the draft takes its likeliest tokens, draft_temperature is that of the probabilities by which trees grow
        (default: 0.6)
    epsilon, delta: for typical-lossy: a drafted token is accepted iff P > min(epsilon, delta exp(-H(P))), where the
        target samples (default: 0.09 and 0.3)
    """

    verifier: Verifier | str | None
    epsilon: float | None
    delta: float | None
    draft_temperature: float | None
    draft_top_k: int | None
    draft_top_p: float | None
    draft_min_p: float | None


class DecoderOptions(TreeOptions, RuleOptions, total=False):
    """Options for the drafted trees, the rules that draw and verify them, and how steps run.

    cuda_graphs: replay each step as one CUDA graph (default: on a GPU); False runs the same step eagerly, for a
        debugger or a profiler. With graphs the decoder keeps their memory, caches included, for the next call
    """

    cuda_graphs: bool | None
