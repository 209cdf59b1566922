"""Verifications to be checked: one of a chain in plain PyTorch, into which bugs are put, and an adapter of our own."""

import torch
from torch.nn.functional import pad

from heavypath.kernels.verification import verify_tree


def ratio(p, q, target):
    """The chance of acceptance of standard speculative sampling, where p and q are those of the drafted token."""
    return p / q


def residual(target, draft):
    left = (target - draft).clamp(min=0)
    return left.where(left.sum(-1, keepdim=True) > 0, target)


def chain(accept=ratio, left=residual):
    """A verification of a chain: accept(p, q, P) is a probability, left(P, Q) the weights of the recovered token."""

    def verify(tokens, parents, target, draft, seed):
        noise = torch.Generator().manual_seed(seed)
        outputs, going = torch.full_like(tokens, -1), torch.ones(len(tokens), dtype=torch.bool)
        last = tokens.shape[1] - 1
        for node in range(last):
            here, drafted = target[:, node], tokens[:, node + 1]
            p, q = (rows[:, node].gather(1, drafted[:, None])[:, 0] for rows in (target, draft))
            accepted = torch.rand(len(tokens), generator=noise) < accept(p, q, here)
            recovered = left(here, draft[:, node]).multinomial(1, generator=noise)[:, 0]
            outputs[:, node] = drafted.where(accepted, recovered).where(going, -1)
            going &= accepted
        bonus = target[:, last].multinomial(1, generator=noise)[:, 0]
        outputs[:, last] = bonus.where(going, -1)
        return outputs

    return verify


def not_normalised(target, draft):
    """What is left of P, as if it summed to 1: the last token gets the rest."""
    left = (target - draft).clamp(min=0)
    left[:, -1] += 1 - left.sum(-1)
    return left


def typical(p, q, target):
    """Typical acceptance of Medusa, by probability and entropy of the target alone."""
    entropy = torch.special.entr(target).sum(-1)
    return (p > (0.3 * (-entropy).exp()).clamp(max=0.09)).float()


def with_bias(verify, amount):
    """Moves this much probability of the first token to the token that is least likely there."""

    def wrong(tokens, parents, target, draft, seed):
        outputs, first = verify(tokens, parents, target, draft, seed), target[:, 0]
        noise = torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed + 2**31))
        moved = torch.full_like(outputs, -1)
        moved[:, 0] = first.argmin(-1)
        return moved.where((noise < amount / (1 - first.min(-1).values))[:, None], outputs)

    return wrong


BUGS = {
    "typical acceptance": chain(typical, lambda target, draft: target),
    "residual not normalised": chain(left=not_normalised),
    "p and q swapped": chain(lambda p, q, target: q / p),
    "recovered token from P": chain(left=lambda target, draft: target),
    "bias of 0.02": with_bias(chain(), 0.02),
}


def by_verify_tree(method, *, impl="auto", **options):
    """The package's own verification, as others call it."""

    def verify(tokens, parents, target, draft, seed):
        path, accepted, next_token = verify_tree(
            tokens, parents, target.log(), draft.log(), method=method, seed=seed, impl=impl, **options
        )
        outputs = tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
        outputs = pad(outputs[:, 1:], (0, 1), value=-1)
        return outputs.scatter(1, accepted[:, None], next_token[:, None])

    return verify
