"""The compiled kernels of what a step does between forward passes, against their references; and recorded steps."""

import logging
import random

import pytest
import torch
from native_cases import assert_fails_with
from tiny_models import tiny_llama

from heavypath.kernels.cache_compaction import _reference as compact_by_pytorch
from heavypath.kernels.commit import State, StateField, commit
from heavypath.kernels.native.library import library
from heavypath.kernels.native.recording import Recording, dense, do, recorded, refuse
from heavypath.kernels.native.steps import compact, copy_rows
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.noise import Stream, gumbels
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.trees.levels import Chosen, Drawn, Trees, alike, first_nodes, place
from heavypath.kernels.verification import verify_tree
from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.trees.tree import TokenTree

pytestmark = [
    pytest.mark.skipif(library() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="models of tests are on the GPU"),
]
FILTERS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 31, 33, 100, 1000, 5003])
def test_draws_are_those_of_the_reference(vocab, temperature, filters):
    torch.manual_seed(vocab)
    logits, rows = torch.randn(5, vocab) * 3, torch.arange(5) * 12345678901
    if vocab > 8:
        logits[0, 2], logits[1], logits[2, 3], logits[3, 4] = -torch.inf, -torch.inf, torch.nan, torch.inf
        logits[4, ::2] = 1.0  # equal logits
    for k in (1, 2, 5, 9, 40):
        for seed, options in ((7, {}), (-1, {"replacement": True}), (1 << 70, {"uniform_fill": True})):
            options = {"temperature": temperature, "seed": seed, "rows": rows} | filters | options
            found, expected = (gumbel_topk(logits, k, impl=impl, **options) for impl in ("native", "torch"))
            assert torch.equal(found.tokens, expected.tokens)
            for one, other in zip(found[1:], expected[1:], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_random_numbers_are_those_of_numpy_to_the_bit():
    """At equal scores the keys are the Gumbels, less the logarithm of how many tokens there are."""
    rows = torch.tensor([0, 5, 1 << 40])
    drawn = gumbel_topk(torch.zeros(3, 1 << 16), 1 << 16, seed=3, rows=rows, impl="native")
    expected = gumbels(3, Stream.DRAFT, rows.numpy(), 1 << 16)
    keys = torch.from_numpy(expected).gather(1, drawn.tokens)
    assert (keys[:, 1:] <= keys[:, :-1]).all()
    torch.testing.assert_close(drawn.keys, keys - 16 * torch.tensor(2.0).log(), rtol=1e-6, atol=2e-6)
    assert torch.equal(
        drawn.tokens, gumbel_topk(torch.zeros(3, 1 << 16), 1 << 16, seed=3, rows=rows, impl="torch").tokens
    )


def drawn_tree(trial, replacement, draft_temperature, filters):
    """A tree whose children were drawn from the draft's logits, some of them absent, and both sides' logits."""
    generator, numbers = random.Random(trial), torch.Generator().manual_seed(trial)
    vocab, batch, nodes = (generator.choice(sizes) for sizes in ((3, 7, 40, 200), (1, 1, 3), (1, 2, 5, 9, 20)))
    target = 2 * torch.randn(batch, nodes, vocab, generator=numbers)
    draft = target + generator.choice([0.1, 0.5, 2]) * torch.randn(batch, nodes, vocab, generator=numbers)
    parents = [-1, *(generator.randrange(max(0, node - 4), node) for node in range(1, nodes))]
    children = [[node for node in range(nodes) if parents[node] == parent] for parent in range(nodes)]
    ranks, tokens = torch.zeros(nodes, dtype=torch.long), torch.zeros(batch, nodes, dtype=torch.long)
    rows = torch.arange(batch * nodes).view(batch, nodes) + (trial << 36)
    for parent, own in enumerate(children):
        if own:
            ranks[own] = torch.arange(len(own))
            options = {"temperature": draft_temperature, **(filters if draft_temperature else {})}
            tokens[:, own] = gumbel_topk(
                draft[:, parent], len(own), seed=trial, rows=rows[:, parent], replacement=replacement,
                uniform_fill=not replacement, impl="torch", **options,
            ).tokens  # fmt: skip
    if generator.random() < 0.3:
        tokens[:, 1:][torch.rand(batch, nodes - 1, generator=numbers) < 0.2] = -1
    return tokens, torch.tensor(parents), ranks, rows, target, draft if nodes > 1 else None


@pytest.mark.parametrize("filters", FILTERS[:4], ids=str)
@pytest.mark.parametrize(("method", "replacement", "temperatures"), [
    ("greedy", False, (0.0, 0.0)), ("target_sample", False, (0.8, 0.8)), ("race", False, (1.3, 1.3)),
    *((method, replacement, temperatures)
      for method in ("traversal", "held_traversal")
      for replacement, temperatures in ((False, (1.0, 0.7)), (True, (0.6, 1.0)), (False, (0.9, 0.0)))),
])  # fmt: skip
def test_what_is_accepted_is_what_the_reference_accepts(method, replacement, temperatures, filters):
    temperature, draft_temperature = temperatures
    for trial in range(60):
        tokens, parents, ranks, rows, target, draft = drawn_tree(trial, replacement, draft_temperature, filters)
        options = {"temperature": temperature, "seed": trial, "rows": rows, "ranks": ranks, "method": method}
        options |= filters if temperature else {}
        if "traversal" in method:
            options |= {"draft_temperature": draft_temperature, "replacement": replacement}
        found, expected = (
            verify_tree(tokens, parents, target, draft, impl=impl, **options) for impl in ("native", "torch")
        )
        assert all(map(torch.equal, found, expected)), trial


def test_a_row_that_is_no_distribution_is_named():
    logits = torch.zeros(2, 1, 5)
    logits[1, 0, 3] = torch.nan
    tokens, parents = torch.zeros(2, 1, dtype=torch.long), torch.tensor([-1])
    for impl in ("native", "torch"):
        with pytest.raises(ValueError, match=r"target_logits must have .* but \[1, 0\] has nan"):
            verify_tree(tokens, parents, logits, None, method="target_sample", impl=impl)


def test_first_nodes_and_placed_nodes_are_those_of_the_references():
    torch.manual_seed(1)
    lengths = torch.tensor([0, 1, 7, 30])
    previous, root = torch.randint(50, (2, 4)).unbind()
    for nodes in (2, 6):
        for pair in zip(
            *(first_nodes(previous, root, lengths, nodes, impl=i) for i in ("native", "torch")), strict=True
        ):
            assert torch.equal(*pair)
    given = Chosen(torch.tensor([1, 3]), torch.tensor([0, 0]), torch.tensor([1, 1]))
    every = Chosen(torch.arange(6), torch.tensor([-1, 0, 1, 0, 3, 3]), torch.tensor([0, 1, 2, 1, 2, 2]))
    drawn = Drawn(torch.randint(50, (4, 4)), torch.tensor([1, 3]), torch.tensor([2, 0]))
    made = []
    for impl in ("native", "torch"):
        trees = Trees(
            torch.full((4, 6), 3), root, torch.arange(24).view(4, 6), lengths, torch.tensor([0, 1, 2, 9]), None
        )
        fed = [place(trees, drawn, given, impl=impl), place(trees, None, every, whole=True, impl=impl)]
        made.append([trees.tokens, *fed[0], *fed[1]])
    assert all(map(torch.equal, *made))


def test_nodes_of_equal_text_are_found():
    torch.manual_seed(2)
    for _ in range(20):
        tokens, found = torch.randint(2, (3, 7)), []
        levels = [([1, 2], [0, 0], [1, 1]), ([3, 4, 5, 6], [1, 1, 2, 2], [2] * 4)]
        for impl in ("native", "torch"):
            trees = Trees(tokens, tokens[:, 0], tokens, tokens[:, 0], tokens[:, 0], torch.zeros_like(tokens))
            found.append([alike(trees, Chosen(*map(torch.tensor, level)), impl=impl) for level in levels])
            found[-1].append(trees.texts)
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_moved_as_by_the_reference(dtype):
    torch.manual_seed(3)
    path = torch.tensor([[0, 2, 3, 7], [0, 1, 2, 3], [0, 5, -1, -1], [0, 1, 4, 6]])
    length, prefix = torch.tensor([3, 3, 1, 2]), torch.tensor([4, 0, 9, 2])
    made = []
    for move in (compact, compact_by_pytorch):
        torch.manual_seed(4)
        caches = [torch.randn(4, heads, 20, width).to(dtype) for heads, width in ((6, 8), (1, 5), (2, 0))]
        caches.append(torch.randn(4, 3, 40, 7).to(dtype)[:, :, ::2])
        move(caches, path, length, prefix)
        made.append(caches)
    assert all(map(torch.equal, *made))


def test_rows_are_copied_to_their_places():
    rows, to = torch.randn(2, 6, 5)[:, ::2], torch.zeros(2, 4, 5)
    copy_rows(rows, to, torch.tensor([3, 0, 2]))
    assert torch.equal(to[:, [3, 0, 2]], rows)
    assert not to[:, 1].any()


@pytest.mark.parametrize("to", [
    torch.zeros(2, 4, 5).bfloat16(), torch.zeros(2, 4, 3), torch.zeros(1, 4, 5), torch.zeros(2, 5, 4).mT,
], ids=["a type", "a width", "a batch", "a stride"])  # fmt: skip
def test_rows_are_not_copied_to_what_has_no_room_for_them(to):
    with pytest.raises(ValueError, match=r"copy_rows needs rows \[B, n, V\] and \[B, N, V\] of one type"):
        copy_rows(torch.ones(2, 3, 5), to, torch.tensor([3, 0, 2]))
    assert not to.any()


@pytest.mark.parametrize("seen", [0, 50])
def test_commits_are_those_of_the_reference(seen):
    tree, generator = TokenTree([-1, 0, 1, 1, 0, 4, 4, 5]), torch.Generator().manual_seed(5)
    for trial in range(30):
        tokens = torch.randint(50, (4, len(tree)), generator=generator)
        tokens[:, 1:][torch.rand(4, len(tree) - 1, generator=generator) < 0.2] = -1
        paths = [[0, 4, 5, 7], [0, 1, 3, -1], [0, 4, -1, -1], [0, -1, -1, -1]]
        length = torch.tensor([3, 2, 1, 0])
        after = torch.randint(-1 if trial % 5 == 0 else 0, 50, (4,), generator=generator)
        verified = Verified(torch.tensor(paths), length, after)
        per_sequence = [
            field.expand(4, -1) if trial % 2 else field for field in (tree.parents, tree.ranks, tree.depths)
        ]
        numbers = torch.zeros(len(StateField), 6, dtype=torch.long)
        numbers[StateField.LEFT] = torch.randint(-1, 6, (6,), generator=generator)
        numbers[StateField.PRODUCED] = torch.randint(5, (6,), generator=generator)
        numbers[StateField.MEMBER] = torch.tensor([3, 0, 5, 1, 2, 4])
        stops, made = torch.randint(-1, 50, (9,), generator=generator), []
        for impl in ("native", "torch"):
            state = State(
                numbers.clone()[:, :4], torch.zeros(6, 12, dtype=torch.long), stops,
                torch.zeros(4, seen, dtype=torch.bool), torch.zeros(2, 12, dtype=torch.long),
            )  # fmt: skip
            nodes = Nodes(tokens, *per_sequence[:2])
            commit(state, nodes, per_sequence[2], verified, 3, impl=impl)
            made.append(state)
        assert all(map(torch.equal, *made)), trial


@torch.inference_mode()
def test_a_recording_replays_calls_and_notices_what_is_none():
    values, out = torch.arange(6.0).view(2, 3), torch.empty(3)
    with recorded() as recording:
        do(lambda: torch.sum(values, 0, out=out))
        column = dense(values[:, 1:2])
    assert recording.obstacle is None
    values += 1
    recording.replay()
    assert out.tolist() == [5, 7, 9]
    assert column.tolist() == [[2], [5]]
    for computed in (lambda: values * 2, lambda: values.T.contiguous(), lambda: values.sum().item()):
        with recorded() as recording:
            computed()
        assert recording.obstacle is not None
    with recorded() as recording:
        refuse("a reference")
    assert recording.obstacle == "a reference"
    with recorded() as recording:
        gumbel_topk(values, 2, impl="auto")
    assert recording.obstacle is None


@pytest.mark.parametrize(
    "method", ["autoregressive", "chain", "specinfer", "sequoia", "rsd-c", "ersd", "top-k", "naive"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 4])
def test_recorded_steps_write_the_same_text(method, temperature, batch, monkeypatch):
    target, draft = tiny_llama(1), tiny_llama(2)
    prompts, texts = torch.tensor([[3, 1, 4], [0, 2, 6], [5, 5, 1], [2, 0, 0]])[:batch], []
    decoder = SpeculativeDecoder(target, None if method == "autoregressive" else draft, method)
    replays, replay, do_once = [], Recording.replay, Recording.do

    def noted_as_obstacle(self, call, kept):
        do_once(self, call, kept)
        self.obstacle = "a test"

    for record in (True, False):
        with monkeypatch.context() as context:
            if record:
                context.setattr(Recording, "replay", lambda self: (replays.append(1), replay(self)))
            else:
                context.setattr(Recording, "do", noted_as_obstacle)
            texts.append(decoder.generate(prompts, max_new_tokens=40, temperature=temperature, seed=5, eos_token_id=1))
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    assert texts[0].stats.accepted.tolist() == texts[1].stats.accepted.tolist()
    assert replays, "its steps are replayed"


def test_steps_that_cannot_be_recorded_run_as_before(caplog):
    """Growing trees are trimmed to as many nodes as they have."""
    target, draft = tiny_llama(1), tiny_llama(2)
    decoder = SpeculativeDecoder(target, draft, "dyspec")
    with caplog.at_level(logging.DEBUG, "heavypath.speculative.decoding.runner"):
        decoder.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=20, temperature=0.7, seed=1)
    [record] = caplog.records
    assert record.getMessage().startswith("a step is not recorded because of")


MUTANTS = [  # of the C++: a file, what is replaced, and a test that must fail
    ("noise.h", "stream + 256 * draw", "stream", lambda: draws(100, 1.0, {})),
    ("noise.h", "round < 10", "round < 9", lambda: draws(100, 1.0, {})),
    ("rows.h", "x[v] < threshold", "x[v] <= threshold", lambda: draws(31, 1.0, FILTERS[1])),
    ("rows.h", "mass >= limit", "mass > 2 * limit", lambda: draws(31, 1.0, FILTERS[2])),
    ("sampling.cpp", "words[a] < words[b]", "a < b", lambda: draws(31, 1.0, FILTERS[1])),
    ("verification.cpp", "tree.coin(node) < ending", "tree.coin(node) < 0.5", lambda: accepts("traversal", False)),
    ("verification.cpp", "chain.pass_over(tree.tokens[child], 1);", "", lambda: accepts("traversal", False)),
    ("verification.cpp", "1 - taken);", "1);", lambda: accepts("held_traversal", False)),
    ("verification.cpp", "equal = tree.alike(children, tree.tokens[child]);", ";", lambda: accepts("traversal", True)),
    ("verification.cpp", "call.method == RACE ? DRAFT : TARGET", "TARGET", lambda: accepts("race", False)),
    ("steps.cpp", "until = place + 1", "until = place + 2", lambda: test_commits_are_those_of_the_reference(0)),
    ("steps.cpp", "c.seen[b * c.seen_step + token] = 1", "", lambda: test_commits_are_those_of_the_reference(50)),
    ("steps.cpp", "(j - stays) * cache->row_bytes], rows +", "0], rows +",
     lambda: test_rows_are_moved_as_by_the_reference(torch.float32)),
]  # fmt: skip


def draws(vocab, temperature, filters):
    test_draws_are_those_of_the_reference(vocab, temperature, filters)


def accepts(method, replacement):
    test_what_is_accepted_is_what_the_reference_accepts(method, replacement, (1.0, 0.8), {})


@pytest.mark.slow
@pytest.mark.parametrize(("file", "original", "replacement", "test"), MUTANTS, ids=[f"{m[0]}, {m[1]}" for m in MUTANTS])
def test_a_bug_of_the_compiled_code_is_found(file, original, replacement, test, tmp_path, monkeypatch):
    assert_fails_with(test, file, original, replacement, tmp_path, monkeypatch)
