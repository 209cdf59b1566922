"""Helpers of tests/kernels/test_laws.py and its neighbours."""

import random
from fractions import Fraction

import torch
from verification_cases import DEVICE

from heavypath.kernels.filtering import Filters
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import verify_tree


def law(weights):
    return [Fraction(weight, sum(weights)) for weight in weights]


class Problem:
    """Any small tree whose nodes were drawn from any laws: draw order, filters of both, dtype and absent nodes."""

    def __init__(self, seed: int, **fixed):
        chosen = random.Random(f"laws {seed}")
        parents = [-1, *(chosen.randrange(node) for node in range(1, chosen.randint(2, 8)))]
        ranks, order = [0] * len(parents), chosen.sample(range(1, len(parents)), len(parents) - 1)
        for place, node in enumerate(order):
            ranks[node] = sum(parents[other] == parents[node] for other in order[:place])
        count, batch = len(parents), fixed.get("batch", chosen.choice([1, 2]))
        vocab = fixed.get("vocab_size", chosen.choice([1, 2, 3, 5, 8, 40]))
        dtype = fixed.get("dtype", chosen.choice([torch.float32, torch.float16, torch.bfloat16]))
        more = chosen.randint(0, 3)
        self.target_filters, self.draft_filters = fixed.get("filters", (self.filters(chosen), self.filters(chosen)))
        generator = torch.Generator().manual_seed(seed)
        contexts = min(vocab, 40)
        target = 1.5 * torch.randn(contexts, vocab, generator=generator)
        distance = chosen.choice([0.0, 1.0, 3.0, 5.0])
        drafts = (target + distance * torch.randn(3, contexts, vocab, generator=generator)).to(dtype)
        self.parents, self.tokens = torch.tensor(parents), torch.full((batch, count), -1)
        self.laws = torch.randint(0, count + more, (batch, count), generator=generator)
        if chosen.random() < 0.5:  # rows that a tree's own nodes have, as several drafts would have them
            own = torch.tensor(
                [[max(0, parent), count + max(0, more - 1)][parent == 0 and more > 0] for parent in parents]
            )
            self.laws = torch.where(torch.rand(count, generator=generator) < 0.5, own, self.parents.clamp(min=0))
            self.laws = self.laws.expand(batch, -1)
        self.target = torch.zeros(batch, count, vocab, dtype=dtype)
        self.draft = torch.full((batch, count + more, vocab), torch.nan, dtype=dtype)  # others are never read
        self.tokens[:, 0] = 0
        every = torch.arange(batch)
        for node in range(count):
            self.target[:, node] = target[self.tokens[:, node].clamp(min=0) % contexts].to(dtype)
            for child in range(1, count):
                if parents[child] == node:
                    law, context = self.laws[:, child], self.tokens[:, node].clamp(min=0) % contexts
                    unset = self.draft[every, law, 0].isnan()
                    self.draft[every[unset], law[unset]] = drafts[law[unset] % 3, context[unset]]
                    drawn = gumbel_topk(
                        self.draft[every, law], 1, **self.draft_filters._asdict(), seed=seed,
                        rows=1000 * child + every, impl="torch",
                    )  # fmt: skip
                    self.tokens[:, child] = drawn.tokens[:, 0]
        absent = torch.rand(batch, count, generator=generator) < chosen.choice([0.0, 0.2])
        self.tokens[absent & (torch.arange(count) > 0)] = -1
        temperature, top_k, top_p, min_p = self.draft_filters
        off = Filters(temperature, top_k or 0, top_p or 1.0, min_p or 0.0)  # None would mean the target's
        self.options = {
            "method": "with_replacement", "ranks": torch.tensor(ranks), "seed": seed, **self.target_filters._asdict(),
            **{f"draft_{name}": value for name, value in off._asdict().items()},
        }  # fmt: skip

    @staticmethod
    def filters(chosen) -> Filters:
        drops = [chosen.random() < 0.2 for _ in range(3)]
        return Filters(
            chosen.choice([0.3, 1.0, 1.7]),
            chosen.randint(1, 5) if drops[0] else None,
            chosen.uniform(0.2, 0.99) if drops[1] else None,
            chosen.uniform(0, 0.3) if drops[2] else None,
        )

    def verified(self, impl: str, **changes):
        tensors = (self.tokens, self.parents, self.target, self.draft)
        given = self.options | {"laws": self.laws} | changes
        if impl == "triton":
            tensors = tuple(tensor.to(DEVICE) for tensor in tensors)
            given = {k: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for k, value in given.items()}
        return [field.cpu() for field in verify_tree(*tensors, impl=impl, **given)]

    def agrees(self, **changes) -> bool:
        both = zip(self.verified("triton", **changes), self.verified("torch", **changes), strict=True)
        return all(torch.equal(kernel, reference) for kernel, reference in both)
