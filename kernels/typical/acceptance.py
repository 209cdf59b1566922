"""Typical acceptance: keep drafted tokens that the target finds likely enough. This changes the law of the text.

With P the target's distribution after a node, after temperature and filters, a child with the token x is accepted iff
the node is and

    P(x) > min(epsilon, delta exp(-H(P)))        H(P) = -sum_v P(v) log P(v)

(Cai et al. 2024, "Medusa", arXiv 2401.10774, sec. 2.3.1). So less is asked of a token where the target itself is
unsure. Where several paths of accepted nodes are the longest, the likeliest of them is taken, as in Medusa's code. The
token after its end is a draw from P there; the paper takes the likeliest.

It looks at no draft: a likely token that is always drafted is always accepted, one that is never drafted comes only by
the last draw. `heavypath.kernels.verification` has the rules that keep the target's law.

On a GPU one launch weighs all nodes at once, one looks for the longest path, and one draws the token after it
(`kernel`).
"""

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from heavypath.kernels.filtering import Filters, check_kernel_takes
from heavypath.kernels.implementation import choose_impl, operator
from heavypath.kernels.native.verification import verify
from heavypath.kernels.nodes import (
    Nodes,
    Verified,
    VerifyInputs,
    check_trees,
    check_values,
    depth_of,
    nothing_verified,
    plain_trees,
)
from heavypath.kernels.noise import Noise, check_seed
from heavypath.kernels.typical.kernel import launch_typical
from heavypath.kernels.verifying.distributions import log_weights, used_row, verified_by_draws


class Typical(NamedTuple):
    """The least probability of an accepted token: epsilon, or less where the target is unsure, by delta.

    It is a function, too: `accept_typical` by these limits without its checks, called as `Verifier` describes it.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def check(self) -> "Typical":
        """Raise ValueError for a value outside its range; returns self."""
        for name, value in self._asdict().items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        return self

    @property
    def logs(self) -> tuple[float, float]:
        """log2 of both."""
        epsilon, delta = (math.log2(value) if value > 0 else -math.inf for value in self)
        return epsilon, delta

    @property
    def law_changed_by(self) -> str:
        """The change of the law of the text, in words."""
        return f"typical acceptance, epsilon {self.epsilon:g}, delta {self.delta:g}"

    def __call__(
        self, nodes: Nodes, target_logits: Tensor, draft_logits: Tensor | None, *, max_depth: int,
        target_filters: Filters, draft_filters: Filters, noise: Noise,
    ) -> Verified:  # fmt: skip
        """The accepted nodes. The draft is not asked, nor the ranks."""
        impl = choose_impl("typical", "auto", nodes.tokens, native=True)
        return _run(impl, nodes.per_sequence(), target_logits, self, max_depth, target_filters, noise)


@operator
def accept_typical(
    tokens: Tensor,
    parents: Tensor,
    target_logits: Tensor,
    *,
    epsilon: float = Typical().epsilon,
    delta: float = Typical().delta,
    max_depth: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Tensor = 0,
    rows: Tensor | None = None,
    impl: str = "auto",
) -> Verified:
    """The longest path of nodes that are likely enough in each sequence's tree, and a draw from P after it.

    tokens, parents, target_logits, max_depth, seed, rows, impl: as of `verify_tree`. The draw after node i is by noise
        row rows[b, i]. On a GPU it is three launches beside copies of a few rows, and two more for filters
    epsilon, delta: of the rule above, both in [0, 1]
    temperature, top_k, top_p, min_p: of P; temperature > 0, since greedy text has no law to change

    Raises ValueError for bad shapes, dtypes or options. On CPU also for values out of range, and for rows of
    logits that are read and no distribution. On a GPU next_token is -1 after such a row, whose children are not taken.
    """
    typical, filters = Typical(epsilon, delta).check(), Filters(temperature, top_k, top_p, min_p).check()
    if temperature == 0:
        raise ValueError("typical acceptance needs temperature > 0; greedy text is verify_tree(..., method='greedy')")
    impl = choose_impl("accept_typical", impl, tokens, native=True)
    parents = check_trees(tokens, parents, target_logits, rows)
    check_seed(seed, tokens.device)
    if impl == "triton":
        check_kernel_takes(target_logits=target_logits)
    if tokens.device.type == "cpu":
        check_values(tokens, parents, None, rows, target_logits.shape[-1])
    depth = depth_of(parents, max_depth)
    if len(tokens) == 0:
        return nothing_verified(tokens, depth)
    return _run(impl, Nodes(tokens, parents, None), target_logits, typical, depth, filters, Noise(seed, rows))


def _run(
    impl: str, nodes: Nodes, logits: Tensor, typical: Typical, max_depth: int, filters: Filters, noise: Noise
) -> Verified:
    given = VerifyInputs(nodes, logits, None, "typical", False, max_depth, filters, filters, noise)
    return {"triton": launch_typical, "native": verify, "torch": _reference}[impl](given, typical.logs)


@np.errstate(all="ignore")
def _reference(given: VerifyInputs, limits: tuple[float, float]) -> Verified:
    """Accept level by level in one tree after the other; logarithms are to base 2."""
    log_epsilon, log_delta = limits
    ends = []
    for number, tree in enumerate(plain_trees(given.nodes._replace(ranks=None))):
        likely, last = {0: np.float32(0)}, 0  # log P of the paths to the accepted nodes of a level
        for _ in range(given.max_depth):
            below = {}
            for node, path in likely.items():
                children = tree.below([node])
                if children:
                    log_p = log_weights(used_row(given.target_logits, "target", number, node), given.target_filters)
                    log_p -= np.log2(np.exp2(log_p).sum())
                    entropy = -(np.exp2(log_p) * np.where(log_p > -np.inf, log_p, 0)).sum()
                    least = min(log_epsilon, log_delta - entropy)
                    weights = ((child, log_p[tree.tokens[child]]) for child in children)
                    below |= {child: path + weight for child, weight in weights if weight > least}
            if not below:
                break
            likely, last = below, min(below, key=lambda node: (-below[node], node))
        weights = np.exp2(log_weights(used_row(given.target_logits, "target", number, last), given.target_filters))
        ends.append((tree.path(last), weights))
    return verified_by_draws(given, ends)
