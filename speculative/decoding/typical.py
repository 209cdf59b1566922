"""Typical acceptance: keep drafted tokens that the target finds likely enough. This changes the distribution.

With P the target's distribution after a node, after temperature and filters, a child with the token x is accepted iff
the node is and

    P(x) > min(epsilon, delta exp(-H(P)))        H(P) = -sum_v P(v) log P(v)

(Cai et al. 2024, "Medusa", arXiv 2401.10774, sec. 2.3.1). So less is asked of a token where the target itself is
unsure. Where several paths of accepted nodes are the longest, the likeliest of them is taken, as in Medusa's code. The
token after its end is a draw from P there; the paper takes the likeliest.

It looks at no draft: a likely token that is always drafted is always accepted, one that is never drafted comes only by
the last draw. `heavypath.kernels.verification` has the rules that keep the target's distribution.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes, Verified, VerifyInputs
from heavypath.kernels.noise import Noise
from heavypath.kernels.sequence_scores import filtered_scores
from heavypath.kernels.step_kernels import step_kernels


class Typical(NamedTuple):
    """Typical acceptance, as a `Verifier`: a token is accepted if the target finds it likely enough.

    epsilon: the probability that is always enough; delta: scales what is enough where the target is unsure

    It is plain PyTorch, besides the filters and the last draw, and never asks the host.
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
    def law_changed_by(self) -> str:
        """The change of the output's distribution, in words."""
        return f"typical acceptance, epsilon {self.epsilon:g}, delta {self.delta:g}"

    def least(self, log_p: Tensor) -> Tensor:
        """The threshold of a token's probability, [...], for distributions with logarithms log P [..., V]."""
        entropy = torch.special.entr(log_p.exp()).sum(-1)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)

    def __call__(
        self,
        nodes: Nodes,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        *,
        max_depth: int,
        target_filters: Filters,
        draft_filters: Filters,
        noise: Noise,
    ) -> Verified:
        """The accepted nodes and the next token; arguments and result as in `Verifier`.

        Draft logits and ranks are not read. A row of target logits without a distribution accepts no child.
        """
        tokens, parents, _ = nodes.per_sequence()
        slot = torch.arange(len(tokens), device=tokens.device)[:, None]
        above = parents.clamp(min=0)
        log_p = filtered_scores(target_logits, target_filters).log_softmax(-1)  # [B, N, V]
        log_drawn = log_p[slot, above, tokens.clamp(min=0)]  # [B, N]
        likely = (log_drawn.exp() > self.least(log_p).gather(1, above)) & (parents >= 0) & (tokens >= 0)
        weight = log_drawn.where(likely, -torch.inf)

        path = torch.full_like(log_drawn, -torch.inf)  # log P of the paths to the accepted nodes of a level
        path[:, 0] = 0
        last = torch.zeros_like(tokens[:, :1])  # the end of the likeliest of the longest paths
        length = torch.zeros_like(last)
        for _ in range(max_depth):
            path = path.gather(1, above) + weight
            best, node = path.max(1, keepdim=True)
            deeper = best > -torch.inf
            last = node.where(deeper, last)
            length += deeper

        ends = target_logits[slot, last]  # [B, 1, V]
        assert noise.rows is not None
        drawn = step_kernels(tokens.device).verify(
            VerifyInputs(
                nodes=Nodes(tokens.gather(1, last), parents[:, :1], None),
                target_logits=ends,
                draft_logits=None,
                method="target_sample",
                replacement=False,
                max_depth=0,
                target_filters=target_filters,
                draft_filters=target_filters,
                noise=Noise(noise.seed, noise.rows.gather(1, last)),
            )
        )
        return Verified(_up_from(last, length, above, max_depth), length[:, 0], drawn.next_token)


def _up_from(last: Tensor, length: Tensor, above: Tensor, max_depth: int) -> Tensor:
    """The paths from the root that end at the nodes `last` LongTensor[B, 1]: LongTensor[B, max_depth + 1], then -1."""
    path = []
    node = last
    for place in range(max_depth, -1, -1):
        there = length >= place
        path.insert(0, node.where(there, -1))
        node = above.gather(1, node).where(there, node)
    return torch.cat(path, 1)
