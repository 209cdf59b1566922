"""commit against its definition, written out for one sequence at a time; NumPy and kernel."""

import importlib.util
import inspect
from contextlib import nullcontext

import pytest
import torch

import heavypath.kernels.commit as module
from heavypath.kernels.commit import State, StateField, commit
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.speculative import TokenTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["torch", "triton"] if DEVICE == "cpu" else ["triton"]


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
        self.after = self.random(vocab_size, batch)
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

    def committed(self, impl, function=commit):
        whole, output, seen, counts = (
            field.to(DEVICE, copy=True) for field in (self.whole, self.output, self.seen, self.counts)
        )
        tokens, parents, ranks, depths = (field.to(DEVICE) for field in (self.tokens, *self.shape))
        verified = Verified(*(field.to(DEVICE) for field in (self.path, self.length, self.after)))
        state = State(whole[:, : self.batch], output, self.stops.to(DEVICE), seen, counts)
        function(state, Nodes(tokens, parents, ranks), depths, verified, self.branching, impl=impl)
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

    def check(self, impl, function=commit):
        expected = self.expected()
        for name, found, right in zip(("numbers", "output", "seen", "counts"), self.committed(impl, function), expected,
                                      strict=True):  # fmt: skip
            assert torch.equal(found, right), name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_commit_is_what_it_says(seed, per_sequence, impl):
    Problem(seed, per_sequence=per_sequence).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_shapes_at_the_edge(impl):
    Problem(1, nodes=1).check(impl)  # a root alone
    Problem(2, stops=()).check(impl)
    Problem(3, batch=1, spare=0).check(impl)
    Problem(4, batch=2, nodes=700, new_tokens=40, vocab_size=1000).check(impl)  # nodes in several blocks
    unseen = Problem(5)
    unseen.seen = unseen.seen[:, :0]
    for found, right in zip(unseen.committed(impl)[:2], Problem(5).expected()[:2], strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_distribution_ends_a_sequence_with_minus_one(impl):
    problem = Problem(6)
    problem.after[:] = -1
    problem.whole[StateField.LEFT] = torch.tensor([10, 10, 0, 10, 10, 10, 10])
    problem.whole[StateField.PRODUCED] = 0
    problem.stops = torch.tensor([-1])  # none
    whole, _, seen, _ = problem.committed(impl)
    accepted = [set(problem.tokens[slot, problem.path[slot, 1 : 1 + length]].tolist())
                for slot, length in enumerate(problem.length.tolist())]  # fmt: skip
    assert [set(row.nonzero()[:, 0].tolist()) for row in seen] == [*accepted[:2], set(), *accepted[3:]]
    assert whole[StateField.LEFT, :5].tolist() == [-1, -1, 0, -1, -1]
    assert whole[StateField.ROOT, :5].tolist() == [0] * 5


@pytest.mark.parametrize(("original", "replacement"), [
    ("", ""),
    ("tl.minimum(length + 1, left)", "length + 1"),
    ("mask=place < count)", "mask=place < most)"),
    ("stop > 0) & (place <= length)", "stop > 0) & (place < length)"),
    ("tl.load(path_ptr + above, mask=there, other=-2) == parent", "parent >= 0"),
    ("accepted & (tl.load(path_ptr + above + 1, mask=accepted) == child)", "accepted"),
    ("there & (tl.load(tokens_ptr + child, mask=there, other=-1) >= 0)", "there"),
    ("until <= most", "until < most"),
    ("if active:", "if length >= 0:"),
    ("tl.load(path_ptr + length)", "length"),
])  # fmt: skip
@pytest.mark.usefixtures("interpreter")
def test_a_mutation_of_the_kernel_is_found(original, replacement, tmp_path):
    source = inspect.getsource(module)
    harmless = original == replacement
    assert harmless or original in source
    path = tmp_path / "mutated_commit.py"
    path.write_text(source.replace(original, replacement))
    spec = importlib.util.spec_from_file_location("mutated_commit", path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    with nullcontext() if harmless else pytest.raises(AssertionError):
        for seed in range(12):
            Problem(seed, per_sequence=seed % 2 == 1).check("triton", copy.commit)
