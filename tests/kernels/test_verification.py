"""verify_tree against exact enumeration, against the papers' recursion written out, and on bad input."""

from itertools import permutations, product
from math import log

import numpy as np
import pytest
import torch
from bisection import bisected
from torch import Tensor
from verification_laws import acceptance_and_weights

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.ordering import sibling_order
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.verification import VERIFICATION_METHODS, verify_tree
from heavypath.kernels.verifying.k_seq import k_seq
from heavypath.kernels.verifying.residual import residual_chain


def draws(draft: Tensor, k: int, replacement: bool, fill: bool = False) -> tuple[Tensor, Tensor]:
    """Every ordered draw of k tokens LongTensor[n, k] from draft probabilities [V], and its probability [n]."""
    tokens, probabilities = [], []
    vocab = range(len(draft))
    for draw in product(vocab, repeat=k) if replacement else permutations(vocab, k):
        probability, left = 1.0, draft.clone()
        for token in draw:
            if left.sum() == 0 and fill:
                left = torch.tensor([float(v not in draw[: draw.index(token)]) for v in vocab]).double()
            probability *= float(left[token] / left.sum()) if left.sum() > 0 else 0.0
            if not replacement:
                left[token] = 0
        if probability > 0:
            tokens.append(draw)
            probabilities.append(probability)
    return torch.tensor(tokens), torch.tensor(probabilities, dtype=torch.float64)


def emitted_law(target: Tensor, draft_logits: Tensor, k: int, replacement=False, filters=Filters(), fill=False):
    """Exact law [V] of the token emitted at one node, and the probability that it is an accepted child."""
    if filters.temperature == 0:
        tokens, weight = draft_logits.topk(k).indices[None], torch.ones(1).double()
    else:
        tokens, weight = draws(filtered_logprobs(draft_logits, filters).exp(), k, replacement, fill)
    acceptance, weights = acceptance_and_weights(target, draft_logits, filters, tokens, replacement)
    law, reach = torch.zeros_like(target), weight
    for place in range(k):
        law.index_add_(0, tokens[:, place], reach * acceptance[:, place])
        reach = reach * (1 - acceptance[:, place])
    return law + (reach[:, None] * weights / weights.sum(-1, keepdim=True)).sum(0), float(1 - reach.sum())


def pair(vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Target probabilities [V] fp64 and draft logits [V] fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, generator=generator).double().softmax(-1), 2 * torch.randn(
        vocab_size, generator=generator
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize(("vocab_size", "k"), [(2, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 2)])
def test_the_emitted_token_has_exactly_the_targets_law(vocab_size, k, replacement, seed):
    target, draft_logits = pair(vocab_size, seed)
    law, _ = emitted_law(target, draft_logits, k, replacement)
    torch.testing.assert_close(law, target, atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocab_size", "k"), [(2, 1), (2, 3), (3, 2), (4, 3), (5, 2), (6, 3)])
def test_k_seq_emits_exactly_the_targets_law(vocab_size, k, seed):
    """A coin of 1 - 2^-53 accepts only what is always accepted; thresholds are found by bisection."""
    target, draft_logits = pair(vocab_size, seed)
    tokens, weight = draws(draft_logits.double().softmax(-1), k, replacement=True)
    arguments = [
        rows.expand(len(tokens), -1).numpy() for rows in (target.log2(), draft_logits.double().log_softmax(-1) / log(2))
    ]
    law, reach = torch.zeros_like(target), weight.clone()
    for place in range(k):

        def accepts(coins: np.ndarray, place: int = place) -> np.ndarray:
            first, _ = k_seq(*arguments, tokens.numpy(), coins)
            return (first >= 0) & (first <= place)

        accepted = torch.from_numpy(bisected(accepts, *tokens.shape, place))
        law.index_add_(0, tokens[:, place], reach * accepted)
        reach = reach * (1 - accepted)
    choice, stopped = k_seq(*arguments, tokens.numpy(), np.ones(tokens.shape))
    left, stopped = reach[torch.from_numpy(choice < 0)], torch.from_numpy(stopped)
    law += (left[:, None] * stopped / stopped.sum(-1, keepdim=True)).sum(0)
    torch.testing.assert_close(law, target, atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("filters", "k", "fill"), [
    (Filters(top_k=2), 2, False), (Filters(top_k=2), 4, True), (Filters(top_k=1), 3, True),
    (Filters(top_p=0.6), 1, False), (Filters(temperature=0.3), 3, False), (Filters(temperature=0.0), 3, False),
    (Filters(temperature=0.0), 1, False),
])  # fmt: skip
def test_filtered_filled_and_deterministic_drafts_keep_the_law_exactly(filters, k, fill, seed):
    target, draft_logits = pair(5, seed)
    law, _ = emitted_law(target, draft_logits, k, filters=filters, fill=fill)
    torch.testing.assert_close(law, target, atol=1e-12, rtol=0)


def test_a_target_without_support_on_the_draft_keeps_the_law_exactly():
    target = torch.tensor([0.0, 0.0, 0.25, 0.75, 0.0]).double()
    draft_logits = torch.tensor([3.0, 2.0, -1.0, -float("inf"), 0.0])
    for k in (1, 2, 3):
        law, _ = emitted_law(target, draft_logits, k)
        torch.testing.assert_close(law, target, atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_one_child_is_accepted_with_the_overlap_of_both_distributions(seed):
    target, draft_logits = pair(6, seed)
    _, accepted = emitted_law(target, draft_logits, 1)
    overlap = torch.minimum(target, draft_logits.double().softmax(-1)).sum()
    assert accepted == pytest.approx(float(overlap), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_as_many_children_as_tokens_cover_the_target(seed):
    target, draft_logits = pair(5, seed)
    assert emitted_law(target, draft_logits, 5)[1] == pytest.approx(1, abs=1e-9)


def test_rsds_bernoulli_example_accepts_always_with_two_children():
    for target_one in (0.1, 0.5, 0.9):
        for draft_one in (0.05, 0.5, 0.95):
            target = torch.tensor([1 - target_one, target_one]).double()
            draft_logits = torch.tensor([1 - draft_one, draft_one]).log()
            assert emitted_law(target, draft_logits, 2)[1] == pytest.approx(1, abs=1e-6)


def sequoia_acceptance(target: Tensor, draft: Tensor, drawn: Tensor, replacement: bool) -> tuple[Tensor, Tensor]:
    """Sequoia's algorithm 2 with residual and draft rows written out, for one node: [k] and the last residual [V]."""
    residual, draft, ratios = target.clone(), draft.clone(), []
    for token in drawn:
        ratios.append((residual[token] / draft[token]).clamp(max=1))
        residual = (residual - draft).clamp(min=0)
        residual = residual / residual.sum() if residual.sum() > 0 else residual
        if not replacement:
            draft[token] = 0
            draft = draft / draft.sum()
    return torch.stack(ratios), residual


@pytest.mark.parametrize("replacement", [False, True])
def test_the_closed_form_is_sequoias_recursion(replacement):
    for seed in range(40):
        target, draft_logits = pair(12, seed)
        drawn = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:4]
        expected, residual = sequoia_acceptance(target, draft_logits.double().softmax(-1), drawn, replacement)
        acceptance, weights = acceptance_and_weights(target, draft_logits, Filters(), drawn[None], replacement)
        reachable = torch.cat([torch.ones(1), (1 - expected[:-1]).cumprod(0)]) > 1e-9
        torch.testing.assert_close(acceptance[0, reachable], expected[reachable], atol=1e-9, rtol=0)
        if (expected < 1).all():
            torch.testing.assert_close(weights[0] / weights.sum(), residual, atol=1e-9, rtol=0)


def test_remaining_draft_mass_does_not_cancel():
    """Q(first) rounds to 1 in fp32 and fp64, yet the second child's conditional probabilities are 1/4 and 3/4."""
    draft_logits = torch.tensor([0.0, -1000.0, -1000.0 + torch.log(torch.tensor(3.0))])
    target = torch.tensor([0.0, 0.5, 0.5]).double()
    acceptance, weights = acceptance_and_weights(target, draft_logits, Filters(), torch.tensor([[0, 1], [0, 2]]), False)
    torch.testing.assert_close(acceptance, torch.tensor([[0, 1], [0, 2 / 3]]).double(), atol=1e-5, rtol=0)
    assert (weights[1] > 0).tolist() == [False, True, False]


def test_a_coin_of_zero_does_not_accept_an_impossible_child():
    target, draft = np.array([[-np.inf, 0.0]]), np.array([[-1.0, -1.0]])
    choice, _ = residual_chain(target, draft, np.array([[0]]), np.zeros((1, 1)), False)
    assert choice.tolist() == [-1]


def test_greedy_follows_the_argmax_through_the_tree():
    #        0 (root)
    #       / \
    #      1   4       tokens 5, 6; below 1: tokens 7, 8
    #     / \
    #    2   3
    tokens = torch.tensor([[9, 5, 7, 8, 6]])
    parents = torch.tensor([-1, 0, 1, 1, 0])
    logits = torch.zeros(1, 5, 10)
    logits[0, 0, 5] = logits[0, 1, 8] = logits[0, 3, 2] = logits[0, 4, 1] = 1
    verified = verify_tree(tokens, parents, logits, None, method="greedy", temperature=0)
    assert verified.path.tolist() == [[0, 1, 3]]
    assert (verified.length.tolist(), verified.next_token.tolist()) == ([2], [2])

    logits[0, 0, 6] = 2
    verified = verify_tree(tokens, parents, logits, None, method="greedy", temperature=0)
    assert verified.path.tolist() == [[0, 4, -1]]
    assert (verified.length.tolist(), verified.next_token.tolist()) == ([1], [1])


def test_children_of_all_equal_siblings_are_candidates():
    """Siblings 1 and 3 both carry token 1; the next token, 2, hangs below the second of them only."""
    tokens = torch.tensor([[0, 1, 0, 1, 2]])
    parents = torch.tensor([-1, 0, 1, 0, 3])
    target = torch.full((1, 5, 3), -50.0)
    target[0, 0, 1] = target[0, 1, 2] = target[0, 3, 2] = target[0, 4, 0] = 50
    verified = verify_tree(tokens, parents, target, None, method="target_sample")
    assert verified.path.tolist() == [[0, 3, 4]]
    assert verified.next_token.tolist() == [0]


def test_absent_nodes_and_leaves_draft_rows_are_never_used():
    tokens = torch.tensor([[0, 1, -1, -1]])
    parents = torch.tensor([-1, 0, 0, 2])
    logits = torch.randn(1, 4, 3)
    draft_logits = torch.full((1, 4, 3), float("nan"))
    draft_logits[0, 0] = torch.tensor([-float("inf"), 0, -float("inf")])
    for seed in range(20):
        verified = verify_tree(tokens, parents, logits, draft_logits, method="without_replacement", seed=seed)
        assert verified.length[0] in (0, 1)
        assert (verified.path[0, 1:] <= 1).all()


def test_results_do_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(0)
    batch, nodes, vocab = 16, 7, 5
    parents = torch.tensor([-1, 0, 1, 1, 0, 4, 4])
    tokens = torch.randint(0, vocab, (batch, nodes), generator=generator)
    tokens[:, 4] = (tokens[:, 1] + 1) % vocab
    target, draft = torch.randn(2, batch, nodes, vocab, generator=generator)
    rows = torch.arange(batch * nodes).view(batch, nodes)
    for method in ("without_replacement", "with_replacement", "race", "target_sample", "greedy"):
        whole = verify_tree(tokens, parents, target, draft, method=method, rows=rows)
        for b in (0, 5, 15):
            one = slice(b, b + 1)
            alone = verify_tree(tokens[one], parents, target[one], draft[one], method=method, rows=rows[one])
            assert all(torch.equal(field[0], whole_field[b]) for field, whole_field in zip(alone, whole, strict=True))


def test_equal_ranks_of_siblings_are_refused():
    logits, ranks = torch.zeros(1, 3, 4), torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="ranks must differ among siblings"):
        verify_tree(
            torch.tensor([[0, 1, 2]]),
            torch.tensor([-1, 0, 0]),
            logits,
            logits,
            method="race",
            ranks=ranks,
        )


def test_siblings_are_ordered_by_index_where_no_ranks_are_given():
    parents = torch.tensor([[-1, 0, 1, 0, 1, 3, 0], [-1, 0, 0, 0, 1, 1, 1]])
    assert sibling_order(parents).tolist() == [[0, 0, 0, 1, 1, 0, 2], [0, 0, 1, 2, 0, 1, 2]]


def test_an_empty_batch_gives_an_empty_answer():
    empty = torch.zeros(0, 2, dtype=torch.long)
    verified = verify_tree(empty, torch.tensor([-1, 0]), torch.zeros(0, 2, 3), None, method="race", max_depth=1)
    assert [field.shape for field in verified] == [(0, 2), (0,), (0,)]


@pytest.mark.parametrize("temperature", [1e-8, 1e-37, 1e-42, 5e-324])
@pytest.mark.parametrize("method", ["without_replacement", "with_replacement", "kseq", "race", "target_sample"])
def test_a_tiny_temperature_is_the_argmax(method, temperature):
    """The child is the draft's argmax, which the target accepts after node 0 only."""
    draft_logits = torch.tensor([50.0, 3.0, 60.0]).expand(1, 3, 3)
    target_logits = torch.stack([draft_logits[0, 0], torch.tensor([-1e38, 3e38, 0.0]), torch.zeros(3)])[None]
    tokens, parents = torch.tensor([[0, 2, 2]]), torch.tensor([-1, 0, 1])
    verified = verify_tree(tokens, parents, target_logits, draft_logits, method=method, temperature=temperature)
    assert verified.path.tolist() == [[0, 1, -1]]
    assert verified.next_token.tolist() == [1]


GOOD = {
    "tokens": torch.tensor([[0, 1]]),
    "parents": torch.tensor([-1, 0]),
    "target_logits": torch.zeros(1, 2, 3),
    "draft_logits": torch.zeros(1, 2, 3),
    "method": "without_replacement",
}


@pytest.mark.parametrize(("change", "message"), [
    ({"method": "typical"}, "method must be one of without_replacement, .* got 'typical'"),
    ({"temperature": -1.0}, "temperature must be .* got -1.0"),
    ({"temperature": 0.0}, "temperature 0 needs method 'greedy'"),
    ({"top_p": 0.0}, r"top_p must be .*\(0, 1\], got 0.0"),
    ({"draft_top_p": 1.5}, "draft_top_p must be .* got 1.5"),
    ({"top_k": -2}, "top_k must be .* got -2"),
    ({"impl": "cuda"}, "impl .* got 'cuda'"),
    ({"draft_logits": None}, "needs draft_logits"),
    ({"draft_logits": torch.zeros(1, 2, 4)}, r"target_logits' shape \[1, 2, 3\], got \[1, 2, 4\]"),
    ({"tokens": torch.tensor([[0, 3]])}, r"tokens must be in \[-1, 3\)"),
    ({"tokens": torch.tensor([0, 1])}, r"LongTensor \[B, N\]"),
    ({"parents": torch.tensor([0, 0])}, "parents must hold -1 at node 0"),
    ({"parents": torch.tensor([-1, 1])}, "parents must hold"),
    ({"parents": torch.tensor([-1, 0, 0])}, r"parents must be a LongTensor \[2\] or \[1, 2\]"),
    ({"target_logits": torch.full((1, 2, 3), float("nan"))}, r"target_logits .* \[0, 0\] has nan"),
    ({"draft_logits": torch.full((1, 2, 3), float("nan"))}, r"draft_logits .* \[0, 0\] has nan"),
    ({"target_logits": torch.full((1, 2, 3), -float("inf"))}, r"target_logits .* \[0, 0\] has -inf"),
    ({"ranks": torch.tensor([0, 2])}, r"ranks must differ among siblings and be in \[0, 2\)"),
    ({"ranks": torch.tensor([0, -1])}, "ranks must differ"),
    ({"rows": torch.tensor([[0, -1]])}, "rows must be at least 0, got -1"),
    ({"replacement": True}, "is for method 'held' or .*'without_replacement' says .* got replacement=True"),
    ({"method": "held", "draft_logits": None}, "'held' needs draft_logits"),
    ({"max_depth": -1}, "max_depth must be at least 0, got -1"),
    ({"rows": torch.zeros(2, dtype=torch.long)}, r"rows must be a LongTensor \[1, 2\]"),
])  # fmt: skip
def test_bad_input_is_refused_with_what_was_given_and_expected(change, message):
    arguments = GOOD | change
    with pytest.raises(ValueError, match=message):
        verify_tree(**arguments)


TREE = torch.tensor([[0, 3, 5, 1], [2, 4, 4, 0]]), torch.tensor([-1, 0, 0, 1])


def doubled(name, impl, target, draft):
    """A function of a user's around one of ours."""
    if name == "gumbel_topk":
        return gumbel_topk(target * 2, 3, seed=4, impl=impl).tokens + 1
    draft = None if name in ("greedy", "target_sample") else draft * 2
    options = {"method": name, "temperature": float(name != "greedy"), "seed": 3, "impl": impl}
    return verify_tree(*TREE, target * 2, draft, **options).next_token + 1


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("name", ["gumbel_topk", *VERIFICATION_METHODS])
def test_the_compiler_looks_around_what_it_cannot_compile(name, impl):
    graphs = []

    def backend(graph, _):
        graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch.compiler.reset()
    logits = torch.randn(2, 2, 4, 7, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(doubled, backend=backend)(name, impl, *logits)
    assert torch.equal(compiled, doubled(name, impl, *logits))
    assert [node for graph in graphs for node in graph if node != "mul"] == ["add"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gumbel_topk", "without_replacement", "traversal"])
def test_inductor_compiles_what_is_around(name):
    torch.compiler.reset()
    logits = torch.randn(2, 2, 4, 7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.compile(doubled)(name, "torch", *logits), doubled(name, "torch", *logits))


def test_a_whole_graph_says_what_breaks_it():
    torch.compiler.reset()
    whole = torch.compile(doubled, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="verify_tree computes outside of PyTorch"):
        whole("greedy", "auto", torch.zeros(2, 4, 7), None)


@pytest.mark.parametrize("name", ["gumbel_topk", "greedy"])
def test_torch_func_is_refused_by_name(name):
    with pytest.raises(TypeError, match=r"cannot be transformed by torch.func .* it takes a batch"):
        torch.vmap(lambda logits: doubled(name, "auto", logits, None))(torch.zeros(3, 2, 4, 7))
