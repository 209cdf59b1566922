"""Helpers of tests/kernels/test_commit.py and its neighbours."""

import torch

from heavypath.kernels.commit import State, StateField, commit
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.speculative import TokenTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Problem:
    """b slots of a batch, of which some have ended, with trees of one shape or of their own."""

    def __init__(self, seed, batch=5, nodes=9, new_tokens=12, vocab_size=7, per_sequence=False, spare=2, stops=(3, 5)):
        self.generator = torch.Generator().manual_seed(seed)
        self.new_tokens, self.branching = new_tokens, nodes
        trees = [self.tree(nodes) for _ in range(batch)] if per_sequence else [self.tree(nodes)] * batch
        fields = ("parents", "ranks", "depths")
        self.shape = [torch.stack([getattr(tree, name) for tree in trees]) for name in fields]
        if not per_sequence:
            self.shape = [field[0] for field in self.shape]
        self.tokens = self.random(vocab_size, batch, nodes)
        depth = max(tree.depth for tree in trees)
        self.path, self.length = torch.full((batch, depth + 1), -1), torch.zeros(batch, dtype=torch.long)
        for slot, tree in enumerate(trees):
            node = int(self.random(nodes))
            while node >= 0:
                on_path = int(tree.depths[node])
                self.path[slot, on_path] = node
                self.length[slot] = max(int(self.length[slot]), on_path)
                node = int(tree.parents[node])
            absent = (self.random(4, nodes) == 0) & ~torch.isin(torch.arange(nodes), self.path[slot])
            self.tokens[slot, absent] = -1
        self.after = self.random(vocab_size + 1, batch) - 1  # of -1, there was no distribution
        whole = torch.zeros(len(StateField), batch + spare, dtype=torch.long)
        whole[StateField.LENGTHS] = self.random(50, batch + spare)
        whole[StateField.PRODUCED] = self.random(new_tokens - 2, batch + spare)
        whole[StateField.LEFT] = new_tokens - whole[StateField.PRODUCED]
        whole[StateField.LEFT, self.random(4, batch + spare) == 0] = 0
        whole[StateField.MEMBER] = torch.randperm(batch + spare, generator=self.generator)
        whole[StateField.NOISE] = 77
        self.whole, self.batch = whole, batch
        self.output = torch.full((batch + spare, new_tokens), -7)
        self.stops = torch.tensor(stops)
        self.seen = torch.zeros(batch, vocab_size, dtype=torch.bool)
        self.counts = self.random(9, 2, depth * nodes + 3)

    def random(self, high, *shape):
        return torch.randint(0, high, shape, generator=self.generator)

    def tree(self, nodes):
        return TokenTree([-1, *(int(self.random(node)) for node in range(1, nodes))])

    def committed(self, impl):
        state = self.whole, self.output, self.seen, self.counts
        whole, output, seen, counts = (field.to(DEVICE, copy=True) for field in state)
        counts = torch.cat([counts, counts], 1)[:, : counts.shape[1]]  # rows need not be adjacent
        tokens, parents, ranks, depths = (field.to(DEVICE) for field in (self.tokens, *self.shape))
        verified = Verified(*(field.to(DEVICE) for field in (self.path, self.length, self.after)))
        state = State(whole[:, : self.batch], output, self.stops.to(DEVICE), seen, counts)
        commit(state, Nodes(tokens, parents, ranks), depths, verified, self.branching, impl=impl)
        return [field.cpu() for field in (whole, output, seen, counts)]

    def expected(self):
        whole, output, seen, counts = (field.clone() for field in (self.whole, self.output, self.seen, self.counts))
        parents, ranks, depths = (field.expand(self.batch, self.tokens.shape[1]).tolist() for field in self.shape)
        for slot in range(self.batch):
            state = dict(zip(StateField, whole[:, slot].tolist(), strict=True))
            tokens, path = self.tokens[slot].tolist(), self.path[slot, : int(self.length[slot]) + 1].tolist()
            new = [tokens[node] for node in path[1:]] + [int(self.after[slot])]
            state[StateField.PREVIOUS], state[StateField.ROOT] = tokens[path[-1]], max(new[-1], 0)
            if state[StateField.LEFT] > 0:
                for node in range(1, len(tokens)):
                    if tokens[node] >= 0 and parents[slot][node] in path:
                        place = (depths[slot][node] - 1) * self.branching + ranks[slot][node]
                        counts[0, place] += 1
                        counts[1, place] += node in path
                state[StateField.LENGTHS] += len(new)
                state[StateField.STEPS] += 1
                state[StateField.NODES] += len(tokens)
                ended = False
                for token in new[: state[StateField.LEFT]]:
                    output[state[StateField.MEMBER], state[StateField.PRODUCED]] = token
                    if token >= 0:
                        seen[slot, token] = True
                    state[StateField.PRODUCED] += 1
                    state[StateField.LEFT] -= 1
                    if token in self.stops.tolist():
                        ended = True
                        break
                if ended:
                    state[StateField.LEFT] = 0
                if self.after[slot] < 0:
                    state[StateField.LEFT] = -1
            whole[:, slot] = torch.tensor([*state.values()])
        return [whole, output, seen, counts]

    def check(self, impl):
        names = "numbers", "output", "seen", "counts"
        for name, found, right in zip(names, self.committed(impl), self.expected(), strict=True):
            assert torch.equal(found, right), name
