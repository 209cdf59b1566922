"""Children of any laws: helpers of tests/kernels/test_laws.py and its neighbours."""

import random

import torch
from verification_cases import Compared, draft_options, random_filters, random_tree

from heavypath.kernels.sampling import gumbel_topk


class Problem(Compared):
    """Any small tree whose nodes were drawn from any laws: draw order, filters of both, dtype and absent nodes."""

    def __init__(self, seed: int, **fixed):
        chosen = random.Random(f"laws {seed}")
        tree = random_tree(chosen, 2, 8)
        parents, count = tree.parents.tolist(), len(tree)
        batch = fixed.get("batch", chosen.choice([1, 2]))
        vocab = fixed.get("vocab_size", chosen.choice([1, 2, 3, 5, 8, 40]))
        dtype = chosen.choice([torch.float32, torch.float16, torch.bfloat16])
        more = chosen.randint(0, 3)
        target_filters, draft_filters = fixed.get("filters", (random_filters(chosen), random_filters(chosen)))
        generator = torch.Generator().manual_seed(seed)
        contexts = min(vocab, 40)
        target = 1.5 * torch.randn(contexts, vocab, generator=generator)
        distance = chosen.choice([0.0, 1.0, 3.0, 5.0])
        drafts = (target + distance * torch.randn(3, contexts, vocab, generator=generator)).to(dtype)
        self.parents, self.tokens = tree.parents, torch.full((batch, count), -1)
        self.laws = torch.randint(0, count + more, (batch, count), generator=generator)
        if chosen.random() < 0.5:  # rows that a tree's own nodes have, as several drafts would have them
            several = count + max(0, more - 1)
            own = torch.tensor([several if parent == 0 and more > 0 else max(0, parent) for parent in parents])
            self.laws = torch.where(torch.rand(count, generator=generator) < 0.5, own, self.parents.clamp(min=0))
            self.laws = self.laws.expand(batch, -1)
        self.target = torch.zeros(batch, count, vocab, dtype=dtype)
        self.draft = torch.full((batch, count + more, vocab), torch.nan, dtype=dtype)  # others are never read
        self.tokens[:, 0] = 0
        every = torch.arange(batch)
        for node in range(count):
            context = self.tokens[:, node].clamp(min=0) % contexts
            self.target[:, node] = target[context].to(dtype)
            for child in (child for child in range(1, count) if parents[child] == node):
                law = self.laws[:, child]
                unset = self.draft[every, law, 0].isnan()
                self.draft[every[unset], law[unset]] = drafts[law[unset] % 3, context[unset]]
                drawn = gumbel_topk(
                    self.draft[every, law], 1, **draft_filters._asdict(), seed=seed, rows=1000 * child + every,
                    impl="torch",
                )  # fmt: skip
                self.tokens[:, child] = drawn.tokens[:, 0]
        absent = torch.rand(batch, count, generator=generator) < chosen.choice([0.0, 0.2])
        self.tokens[absent & (torch.arange(count) > 0)] = -1
        self.options = {
            "method": "with_replacement", "ranks": tree.ranks, "seed": seed, "laws": self.laws,
            **target_filters._asdict(), **draft_options(draft_filters),
        }  # fmt: skip
