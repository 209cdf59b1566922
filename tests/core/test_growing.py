"""Trees that grow: equal to the heap's, lossless by exact enumeration, and what they do with a threshold."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verification_oracle import Drawn, Language, rejection, target_law, top_down, whole

from heavypath.kernels.filtering import Filters
from heavypath.kernels.sampling import TopK
from heavypath.kernels.step_kernels import StepKernels
from heavypath.kernels.trees import growing as levels
from heavypath.speculative import METHODS
from heavypath.speculative.decoding import growing
from heavypath.speculative.decoding.drafted import Reach
from heavypath.speculative.decoding.growing import GrowingDrafter
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.trees.growth import DEFAULT_CONFIDENCE, Confidence, Growth

VOCAB = 3
BY_DEPTH = Confidence(
    (0.1,), (0.3,), (Confidence((0.5, 0.2), (0.5, 0.1)), Confidence((0.9, 0.1, 0.6), (0.0, 0.2, 0.4)))
)
CPU = torch.device("cpu")


class PathDraft:
    """A draft whose distribution depends on the whole path from the root; the path of each slot is remembered."""

    def __init__(self, law):
        self.law = law  # tuple of tokens -> list of V log-probabilities
        self.paths: dict[int, tuple[int, ...]] = {}

    def __call__(self, feed, cache):
        begin = int(feed.prefix_lengths[0])
        for token, row, parent in zip(feed.tokens[0], feed.cache_rows[0], feed.parent_rows[0], strict=True):
            if row == begin:
                self.paths[0] = ()
            elif row > begin:
                self.paths[int(row) - begin] = (*self.paths[int(parent) - begin], int(token))
        return torch.tensor([[self.law(self.paths.get(int(row) - begin, ())) for row in feed.cache_rows[0]]])


def heap_tree(
    below: Callable[[tuple[int, ...]], tuple[Sequence[float], Sequence[float]]],
    size: int,
    max_depth: int,
    threshold: float = 0.0,
) -> list[tuple[int, ...]]:
    """DySpec's algorithm 1 as published, with a draft call for each node: what a `GrowingDrafter` must find.

    Returns the drafted nodes as paths of ranks, in the order in which they are drawn, without the root.

    below(path): `kernels.growing.values` of the node at `path`, asked once for each node. O(size log size) beside that.
    threshold: slots of less value stay empty.
    """
    nodes: list[tuple[int, ...]] = [()]
    worths = [1.0]
    rows: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
    queue: list[tuple[float, int, int, int]] = []  # (-value, depth, rank, parent's number)

    def offer(parent: int, rank: int, most: float) -> None:
        depth = len(nodes[parent]) + 1
        if parent not in rows and depth <= max_depth:
            rows[parent] = below(nodes[parent])
        if depth <= max_depth and rank < len(rows[parent][0]):
            heapq.heappush(queue, (-min(most, worths[parent] * rows[parent][0][rank]), depth, rank, parent))

    offer(0, 0, 1.0)
    while queue and queue[0][0] < 0 and -queue[0][0] >= threshold and len(nodes) < size:
        negative, _, rank, parent = heapq.heappop(queue)
        nodes.append((*nodes[parent], rank))
        worths.append(worths[parent] * rows[parent][1][rank])
        offer(parent, rank + 1, -negative)
        offer(len(nodes) - 1, 0, -negative)
    return nodes[1:]


def grown(law, growth, filters=Filters(), seed=0, room=100):
    """The draft, and the tree that it grows after six tokens."""
    draft = PathDraft(law)
    state = Sequences.room_for(1, new_tokens=room + 1, stops=1, vocab_size=0, count_slots=1, device=CPU)
    prompt = torch.zeros(1, 6, dtype=torch.long)
    told = {"new_tokens": room + 1, "stops": torch.tensor([]), "sequence_ids": state.member, "seed": seed}
    state.begin(prompt, torch.tensor([6]), **told)
    rules = Rules("top_k" if growth.by == "node" else "without_replacement", "without_replacement", filters, filters)
    return draft, GrowingDrafter(growth, rules)(draft, object(), state, Reach(5, 1 + growth.depth), lambda phase: None)


def node_ranks(drafted):
    """Each present node's path from the root, of ranks."""
    paths = [()]
    for rank, parent in zip(drafted.ranks[0].tolist()[1:], drafted.parents[0].tolist()[1:], strict=True):
        paths.append((*paths[parent], rank))
    return [path for path, token in zip(paths, drafted.tokens[0].tolist(), strict=True) if token >= 0][1:]


def random_law(vocab_size: int, seed: int, spread: float = 1.0):
    """Log-probabilities after any path, of a language without structure."""

    def law(path):
        generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
        return (spread * torch.randn(vocab_size, generator=generator)).log_softmax(-1).tolist()

    return cache(law)


def check_the_heaps_tree(growth, law, vocab_size, filters, seed):
    """That a grown tree, which is returned, is that of a draft call for each node."""
    confidence, temperature = growth.confidence, filters.temperature
    draft, drafted = grown(law, growth, filters, seed)
    slot_of = {path: slot for slot, path in reversed(draft.paths.items())}  # empty slots come last, and have token 0

    def below(path):
        """By the same draws, found again by the path of tokens that `path`, of ranks, leads along."""
        tokens = ()
        for rank in path:
            tokens += (draws(tokens)[0][rank],)
        squares = np.array([sum(math.exp(2 * logprob) for logprob in law(tokens))])
        probs = draws(tokens)[1]
        own = None if confidence is None else [confidence, *confidence.deeper][: len(path) + 1][-1]
        child = np.arange(len(probs))
        lines = own and np.stack([np.array(each)[child.clip(max=len(each) - 1)] for each in (own.base, own.slope)])
        lines = lines if temperature > 0 else None
        return [field.tolist() for field in levels.values(probs, squares, lines)]

    @cache
    def draws(tokens):
        logits, row = torch.tensor([law(tokens)]), torch.tensor([(5 << 12) + slot_of[tokens]])
        drawn = growing.gumbel_topk(logits, min(growth.width, vocab_size), temperature=temperature, seed=seed, rows=row)
        logprobs = levels.logprobs_at(logits[None], drawn.tokens[None], 0.6)[0] if temperature == 0 else drawn.logprobs
        return drawn.tokens[0].tolist(), np.exp(logprobs[0].double().numpy())

    assert sorted(node_ranks(drafted)) == sorted(heap_tree(below, growth.size, growth.depth, growth.threshold))
    return drafted


@settings(max_examples=40, deadline=None)
@given(
    confidence=st.sampled_from([None, DEFAULT_CONFIDENCE]),
    seed=st.integers(0, 10_000), vocab_size=st.integers(1, 9), size=st.integers(2, 14), spread=st.floats(0.1, 4),
    temperature=st.sampled_from([0.0, 1.0]), threshold=st.sampled_from([0.0, 0.02, 0.3]),
)  # fmt: skip
def test_growing_by_levels_gives_the_heaps_tree(confidence, seed, vocab_size, size, spread, temperature, threshold):
    growth = Growth("slot", size, size - 1, size - 1, threshold, confidence)
    check_the_heaps_tree(growth, random_law(vocab_size, seed, spread), vocab_size, Filters(temperature), seed)


@pytest.mark.parametrize("seed", range(5))
def test_slots_below_a_depth_are_valued_by_the_lines_of_that_depth(seed):
    check_the_heaps_tree(Growth("slot", 9, 8, 8, 0.0, BY_DEPTH), random_law(4, seed, 1.5), 4, Filters(1.0), seed)


@pytest.mark.parametrize(("confidence", "threshold"), [("draft", 0.0), (DEFAULT_CONFIDENCE, 0.006)])
def test_trees_of_up_to_768_nodes_are_the_heaps(confidence, threshold):
    """The largest of DySpec's paper, with as many nodes on a level as the method gives them."""
    growth = METHODS["dyspec"].tree_of(768, max_depth=12, threshold=threshold, confidence=confidence)
    assert (growth.size, growth.width, growth.depth) == (768, 341, 12)
    drafted = check_the_heaps_tree(growth, random_law(24, 1, 2.0), 24, Filters(1.0), 1)
    assert 80 < drafted.tokens.shape[1] <= 768
    assert (drafted.tokens.shape[1] == 768) == (threshold == 0)


def test_the_heaps_tree_by_hand():
    """Root: 0.6, 0.3, 0.1 in draw order; below every other node 0.5, 0.5."""

    def below(path):
        return ([1.0, 0.5], [0.5, 0.5]) if path else ([1.0, 0.4, 0.1], [0.6, 0.3, 0.1])

    # The root's first slot is worth 1, that below it 0.6, the root's second 0.4; then three are worth 0.3, of which the
    # shallower come first, and of those the one of lower rank.
    assert heap_tree(below, 7, 9) == [(0,), (0, 0), (1,), (1, 0), (0, 1), (0, 0, 0)]
    assert heap_tree(below, 6, 1) == [(0,), (1,), (2,)]


def test_values_by_hand():
    probs, squares = np.array([0.5, 0.3]), np.array([0.25 + 0.09 + 0.04])
    slot, worth = levels.values(probs, None, None)
    assert slot.tolist() == pytest.approx([1, 0.5])
    assert worth.tolist() == pytest.approx([0.5, 0.3])
    slot, worth = levels.values(probs, squares, np.array([[0.4, 0.2], [0.5, 0.6]]))
    accept = [0.4 + 0.5 * 0.5, 0.2 + 0.6 * 0.3 / 0.5]
    assert worth.tolist() == pytest.approx([accept[0], (1 - accept[0]) * accept[1]], abs=1e-7)
    expected = [0.4 + 0.5 * 0.38, 0.2 + 0.6 * (0.09 + 0.04) / 0.25]
    assert slot.tolist() == pytest.approx([expected[0], (1 - accept[0]) * expected[1]], abs=1e-7)
    sure, _ = levels.values(np.array([1.0, 0.0]), np.array([1.0]), np.array([[0.4, 0.2], [0.5, 0.6]]))
    assert sure.tolist() == [0.9, 0.0]
    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log()
    assert float(levels.sum_of_squares(logits, 1.0)) == pytest.approx(0.38)
    cool = (logits / 0.5).softmax(-1)
    assert float(levels.sum_of_squares(logits, 0.5)) == pytest.approx(float((cool**2).sum()))


def test_narrow_levels_and_a_shallow_tree_keep_their_bounds():
    law = random_law(6, 1, 0.3)
    _, drafted = grown(law, Growth("slot", 40, width=5, depth=3))
    assert torch.bincount(drafted.depths[0])[1:].tolist() == [5, 5, 5]
    _, drafted = grown(law, Growth("slot", 40, width=5, depth=3), room=2)
    assert torch.bincount(drafted.depths[0])[1:].tolist() == [5, 5]
    assert grown(law, Growth("beam", 13, width=4, depth=3))[1].tokens.shape == (1, 13)


class Enumeration:
    """Stands for the random draws: runs a function once for every outcome, with its probability."""

    def __iter__(self):
        self.choices = []  # what there was to choose from at each draw, and which one is taken
        while True:
            self.used, self.chance = 0, 1.0
            yield self
            del self.choices[self.used :]
            while self.choices and self.choices[-1][1] + 1 == len(self.choices[-1][0]):
                self.choices.pop()
            if not self.choices:
                return
            options, index = self.choices[-1]
            self.choices[-1] = options, index + 1

    def choose(self, outcomes):
        if self.used == len(self.choices):
            self.choices.append(([*outcomes], 0))
        options, index = self.choices[self.used]
        self.used += 1
        self.chance *= options[index][1]
        return options[index][0]


def orders(probs, count):
    """Draws without replacement: (tokens in draw order, probability)."""
    for drawn in itertools.permutations(range(len(probs)), count):
        chance, left = 1.0, 1.0
        for token in drawn:
            chance *= probs[token] / left
            left -= probs[token]
        yield drawn, chance


def enumerated(draws: Enumeration, uniform: list[float]):
    """What stands for `gumbel_topk`: keys at fixed quantiles of their law, which is independent of the tokens drawn."""

    def gumbel_topk(logits, k, *, temperature, seed, rows, **filters):
        tokens, keys = [], []
        for row, noise_row in zip(logits[0], rows[0], strict=True):
            probs = row.double().softmax(-1).tolist()
            likeliest = row.sort(descending=True, stable=True).indices[:k].tolist()
            drawn = likeliest if temperature == 0 else draws.choose(orders(probs, k))
            left, key, own = 1.0, math.inf, []
            for place, token in enumerate(drawn):  # the largest of Gumbels at log(left), below the one before
                chance = uniform[(5 * (int(noise_row) & 0xFFF) + place) % 64] * math.exp(-left * math.exp(-key))
                key = math.log(max(left, 1e-12)) - math.log(-math.log(chance))
                own.append(key)
                left -= probs[token]
            tokens.append(list(drawn))
            keys.append(own)
        tokens = torch.tensor([tokens])
        return TopK(tokens, torch.tensor([keys]), logits.log_softmax(-1).gather(-1, tokens))

    return gumbel_topk


def as_drawn(drafted) -> Drawn:
    """A grown tree as the oracle has it, siblings in draw order."""
    drawn = [token for token in drafted.tokens[0].tolist()[1:] if token >= 0]
    tokens = dict(zip(node_ranks(drafted), drawn, strict=True))
    paths = [(), *sorted(tokens, key=lambda path: (len(path), path))]
    parents = (paths.index(path[:-1]) for path in paths[1:])
    return Drawn((-1, *parents), (-1, *(tokens[path] for path in paths[1:])), (0,) * len(paths))


def sampling(target, drafts, tokens, replacement):
    """The oracle's rule of a verifier that compares a sample of the target."""
    return [target[token] for token in tokens], whole([p * (v not in tokens) for v, p in enumerate(target)])


GROWTHS = {
    "dyspec": Growth("slot", 4, 2, 2),
    "dyspec by confidence, threshold": Growth("slot", 5, 2, 2, 0.2, Confidence((0.2, 0.1), (0.7, 0.4), (BY_DEPTH,))),
    "chain that ends early": Growth("slot", 3, 1, 2, 0.35),
    "eagle-2": Growth("node", 4, 3, 2),
    "rsd-s": Growth("beam", 5, 2, 2),
}


@pytest.fixture
def by_reference(monkeypatch):
    monkeypatch.setattr(growing, "step_kernels", lambda device: StepKernels("torch"))


@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.usefixtures("by_reference")
def test_every_way_to_grow_leaves_the_targets_law_exactly(name, monkeypatch):
    growth, language = GROWTHS[name], Language(VOCAB, seed=3)
    verifier = top_down(sampling) if growth.by == "node" else rejection
    draft_law = cache(lambda path: [math.log(q) for q in language.draft(path)])
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    law, total = dict.fromkeys(target_law(language, (), 2), 0.0), 0.0
    for draws in Enumeration():
        monkeypatch.setattr(growing, "gumbel_topk", enumerated(draws, uniform))
        tree = as_drawn(grown(draft_law, growth, Filters(1.0))[1])
        for (path, token), chance in verifier(language, tree).items():
            begin = (*(tree.tokens[node] for node in path), token)
            for end, rest in target_law(language, begin, max(0, 2 - len(begin))).items():
                law[(*begin, *end)[:2]] += draws.chance * float(chance * rest)
        total += draws.chance
    assert total == pytest.approx(1, abs=1e-9)
    assert law == pytest.approx({text: float(chance) for text, chance in target_law(language, (), 2).items()}, abs=1e-6)


def test_a_chain_ends_where_the_drafts_probability_falls_below_the_threshold():
    def law(path):
        likely = [0.9, 0.8, 0.5, 0.9][len(path)]
        return [math.log(likely), math.log(1 - likely), -math.inf]

    # Values at draft temperature 0.6: 1, then the product of p^(1/0.6) / (p^(1/0.6) + (1-p)^(1/0.6)).
    values = [1.0]
    for p in (0.9, 0.8, 0.5):
        a, b = p ** (1 / 0.6), (1 - p) ** (1 / 0.6)
        values.append(values[-1] * a / (a + b))
    for threshold in (0.0, 0.4, 0.75, 0.95):
        _, drafted = grown(law, Growth("slot", 5, 1, 4, threshold), Filters(0.0))
        assert drafted.tokens.shape[1] - 1 == sum(value >= threshold for value in values)


@pytest.mark.parametrize(("options", "message"), [
    ({"width": 0}, "width must be at least 1, got 0"),
    ({"depth": 0}, "depth must be at least 1, got 0"),
    ({"size": 1}, "size counts the root and must be at least 2, got 1"),
    ({"width": 1024, "depth": 4}, "may be at most 4096 with the root, got 4097"),
    ({"threshold": -0.1}, r"threshold must be in \[0, 1\], got -0.1"),
])  # fmt: skip
def test_growth_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Growth(**({"by": "slot", "size": 8, "width": 4, "depth": 3} | options))
