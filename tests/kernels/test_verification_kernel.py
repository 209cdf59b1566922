"""verify_tree's kernels against its PyTorch reference: the same noise, so the same nodes and tokens."""

import sys

import pytest
import torch
import triton.language as tl
from verification_cases import DEVICE, PLAIN, TREES, Problem, mutant, random_problem

from heavypath.kernels import verification
from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.noise import Noise
from heavypath.kernels.verification import VERIFICATION_METHODS, Rule, verify_tree
from heavypath.kernels.verifying import (
    decision,
    distributions,
    drafted_tree,
    held,
    k_seq,
    residual,
    traversal_chain,
    traversal_kernel,
    walk,
)
from heavypath.kernels.verifying.rule import WHOLE_TREE
from heavypath.speculative.trees.tree import TokenTree

SLOW = pytest.mark.slow


FILTERS = {
    "none": (PLAIN, PLAIN),
    "top-k": (Filters(0.7, 3), Filters(1.3, 2)),
    "top-p and min-p": (Filters(1.0, None, 0.8), Filters(1.0, None, 0.7, 0.05)),
    "a draft's top-k": (PLAIN, Filters(0.0)),
}


@pytest.mark.parametrize(("method", "filters"), [
    pytest.param(method, name, marks=pytest.mark.slow)
    if name == "top-k" or (name == "top-p and min-p" and method not in ("without_replacement", "greedy"))
    else (method, name)
    for method in VERIFICATION_METHODS for name in FILTERS
])  # fmt: skip
def test_the_kernels_accept_what_the_reference_accepts(method, filters):
    if method == "kseq" and filters == "a draft's top-k":
        pytest.skip("K-SEQ takes independent draws only")
    # Every filter costs a GPU a few passes, and the interpreter seconds.
    trees = TREES.values() if filters == "none" else (TREES["ranks"], TokenTree.independent(2, 2))
    for seed, tree in enumerate(trees):
        vocab_size, dtype = (3, 5, 11)[seed % 3], (torch.float32, torch.bfloat16, torch.float16)[seed // 2]
        shape = {"vocab_size": vocab_size, "dtype": dtype, "absent": 0.2 * (seed % 2), "seed": seed}
        assert Problem(tree, method, *FILTERS[filters], **shape).agrees(), (seed, tree)


@pytest.mark.slow
@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_the_kernels_accept_what_the_reference_accepts_in_random_trees(method):
    differ = [seed for seed in range(110) if not random_problem(method, seed).agrees()]
    assert not differ


@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_a_vocabulary_of_several_chunks_is_shared_by_programs(method):
    problem = Problem(
        TokenTree.k_ary(2, 1), method, vocab_size=20_001, batch=1, dtype=torch.bfloat16, noise=2.0, seed=2
    )
    assert problem.agrees()


@pytest.mark.parametrize(
    "method",
    [
        method if method in ("kseq", "held_traversal", "without_replacement") else pytest.param(method, marks=SLOW)
        for method in VERIFICATION_METHODS
    ],
)
def test_defaults_views_and_shallow_walks_agree(method):
    problem = Problem(TREES["ranks"], method, vocab_size=7, seed=4, noise=0.3)
    for depth in (0, 1):
        assert problem.agrees(max_depth=depth)
    in_order = Problem(TREES["3-ary"], method, vocab_size=7, batch=1, seed=0, noise=0.3)
    assert in_order.agrees(rows=None, ranks=None)
    problem.parents = problem.parents.expand(2, -1)
    wide = torch.zeros(2, len(TREES["ranks"]), 16)
    wide[..., :7] = problem.target
    problem.target = wide[..., :7]
    assert problem.agrees()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    "method", [name if name == "race" else pytest.param(name, marks=pytest.mark.slow) for name in VERIFICATION_METHODS]
)
def test_a_seed_in_memory_verifies_as_its_number(method, impl):
    problem = Problem(TREES["ranks"], method, vocab_size=7, noise=3.0)
    seen = set()
    for seed in (1, 2**32 + 1, -(2**40) - 3):
        verified = problem.verified(impl, seed=torch.tensor(seed))
        expected = problem.verified(impl, seed=seed)
        assert all(torch.equal(*fields) for fields in zip(verified, expected, strict=True))
        seen.add(str(verified))
    assert (len(seen) > 1) == (method != "greedy")


@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_rows_without_a_distribution_are_flagged_by_the_kernels(method):
    problem = Problem(TREES["chain"], method, seed=1)
    for bad in (torch.nan, torch.inf, -torch.inf):
        problem.target[1] = bad
        verified = verification._launch(
            Nodes(problem.tokens.to(DEVICE), problem.parents.expand(2, -1).to(DEVICE), None),
            problem.target.to(DEVICE),
            problem.draft.to(DEVICE),
            rule=Rule(method),
            max_depth=3,
            target_filters=Filters(0.0) if method == "greedy" else PLAIN,
            draft_filters=PLAIN,
            noise=Noise(0, problem.rows.to(DEVICE)),
        )
        assert int(verified.next_token[0]) >= 0
        assert int(verified.next_token[1]) == -1
        assert int(verified.length[1]) == 0


def test_a_draft_equal_to_the_target_is_accepted_whole():
    for seed in range(4):
        problem = Problem(TREES["chain"], "without_replacement", vocab_size=50, batch=3, seed=seed)
        problem.draft = problem.target  # what the children were drawn from matters not: coins are below 1
        assert (problem.verified("triton").length == 3).all()


def test_remaining_draft_mass_does_not_cancel_in_the_kernel():
    """Q(first) rounds to 1 in fp32, yet the second child's conditional probability is 1/4 or 3/4."""
    draft = torch.tensor([0.0, -1000.0, -1000.0 + torch.log(torch.tensor(3.0))])
    target = torch.tensor([-torch.inf, 0.0, 0.0])
    batch = 2000
    tokens = torch.tensor([0, 0, 1]).repeat(batch, 1)
    tokens[::2, 2] = 2
    arguments = tokens, torch.tensor([-1, 0, 0]), target.expand(batch, 3, 3), draft.expand(batch, 3, 3)
    options = {"method": "without_replacement", "rows": torch.arange(3 * batch).view(batch, 3)}
    reference = verify_tree(*arguments, impl="torch", **options)
    accepted = (reference.length[1::2].double().mean(), reference.length[::2].double().mean())
    assert accepted[0] == 1
    assert abs(accepted[1] - 2 / 3) < 0.06
    few = slice(0, 10)
    arguments = tokens[few], torch.tensor([-1, 0, 0]), *(logits[few] for logits in arguments[2:])
    kernel = verify_tree(*(tensor.to(DEVICE) for tensor in arguments), impl="triton", method="without_replacement",
                         rows=options["rows"][few].to(DEVICE))  # fmt: skip
    assert torch.equal(kernel.path.cpu(), reference.path[few])


MUTATIONS = {
    "the remaining mass is dropped": (residual, "this_q + log_mass) - tl.exp2(log_multiple + log_mass)",
                                      "this_q) - tl.exp2(log_multiple)"),
    "F is dropped": (residual, "tl.maximum(ratio, 0.0) / over", "tl.maximum(ratio, 0.0)"),
    "lambda stays": (residual, "log_multiple = add_logs(log_multiple, tl.log2(over) - log_mass)", "pass"),
    "children are not left out": (residual, "open = (order < NONE) & (passed == 0)", "open = order < NONE"),
    "equal siblings are separate": (drafted_tree, "equal = same | (there &", "equal = same & (there &"),
    "all children share a coin": (drafted_tree, "word = rank % 4\n", "word = rank * 0\n"),
    "the draft's filters are the target's": (
        decision, "filter_cuts(source, draft_filters)", "filter_cuts(source, target_filters)"
    ),
    "the recovered token uses the draft's noise": (walk, "int(Stream.TARGET))", "int(Stream.DRAFT))"),
    "the recovered token comes from the target": (walk, "weight = p - share * cover", "weight = p"),
    "K-SEQ searches no further than K": (k_seq, "g = high.to(tl.float32)", "g = children.to(tl.float32)"),
    "the path names another sibling": (drafted_tree, "node = tl.load(parents_ptr + node).to(tl.int32)\n        pos",
                                       "node = 1\n        pos"),
    "held: the elder do not lose": (held, "weight * scale), chance", "weight), chance"),
    "held: c stays": (residual, "over /= scale", "pass"),
    "held: the last child takes no pass": (residual, "needed |= elder > 0", "pass"),
    "held: the chain restarts with all mass": (residual, "over = 1 / mass_left if HELD", "over = 1 / elder if HELD"),
    "held: another coin": (held, "order == next_order, coin, 0.0", "order == tl.max(order), coin, 0.0"),
    "traversal: r without 1 - w": (traversal_chain, "total = leaving + held + emitted", "total = held + emitted"),
    "traversal: the coin is held against w": (traversal_kernel, "STATES + 1, mask=drafted", "STATES, mask=drafted"),
    "traversal: youngest first": (traversal_kernel, "order = rank * N + index\n", "order = (N - rank) * N + index\n"),
    "traversal: R is forgotten": (traversal_chain, "-tl.log2(factor) - log_mass)", "-tl.log2(factor))"),
    "traversal: every chain begins at w = 1": (
        traversal_chain, "leaving = weight, weight, 1 - weight", "leaving = 1.0, weight, 1 - weight"
    ),
    "traversal: children of later siblings are lost": (
        traversal_kernel, "tl.load(traits_ptr + (root + parent) * TRAITS + 1, mask=child, other=-1) == context",
        "parent == node",
    ),
    "traversal: the held keep their weights": (traversal_chain, "rest += this_weight", "rest = 1 + 0 * rest"),
    "rank is ignored": (decision, "tl.where(child, rank * N + index, NONE)", "tl.where(child, index, NONE)"),
}  # fmt: skip


# Of others that are like them; all are tried by `make test-all`.
RESEMBLING = ("the last child", "traversal", "names another sibling", "restarts with all mass", "lambda stays")


@pytest.mark.usefixtures("interpreter")  # which needs no compiler for each bug, and ends
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW) if any(some in name for some in RESEMBLING) else name for name in MUTATIONS],
)
def test_a_bug_of_the_kernels_is_found(name, tmp_path, monkeypatch):
    module, original, replacement = MUTATIONS[name]
    copy = mutant(tmp_path, module, original, replacement, "mutant")
    if module is held:  # what the chain calls
        monkeypatch.setitem(sys.modules, "held_mutant", mutant(tmp_path, held, original, replacement, "held_mutant"))
        module = residual
        copy = mutant(tmp_path, residual, f"from {held.__name__} import", "from held_mutant import", "mutant")
    callers = {residual: decision, k_seq: decision, traversal_chain: traversal_kernel}
    callers[drafted_tree] = walk if "path" in name else decision
    if module in callers:
        monkeypatch.setitem(sys.modules, "mutant", copy)
        called, module = module.__name__, callers[module]
        copy = mutant(tmp_path, module, f"from {called} import", "from mutant import", "calls_mutant")
    launcher = {walk: "launch_walk", traversal_kernel: "launch_traversal"}.get(module, "decide")
    monkeypatch.setattr(verification, launcher, getattr(copy, launcher))

    def differs(problem: Problem) -> bool:
        pairs = zip(problem.verified("triton"), problem.verified("torch"), strict=True)
        return not all(torch.equal(kernel, reference) for kernel, reference in pairs)

    shape, method = TREES["ranks"], "without_replacement"
    if "equal" in name or "sibling" in name or "K-SEQ" in name:
        shape, method = TokenTree.independent(3, 2), "kseq"
    if name.startswith("held"):
        shape, method = TokenTree.k_ary(3, 1), "held"
    if name.startswith("traversal"):
        shape, method = TokenTree.k_ary(2, 2), "held_traversal" if "held keep" in name else "traversal"
    filters = FILTERS["top-k"] if "filters" in name else FILTERS["none"]
    if "restarts" in name:
        filters = PLAIN, Filters(1.0, 2)
    problems = (Problem(shape, method, *filters, batch=2, vocab_size=4, seed=seed) for seed in range(40))
    assert any(differs(problem) for problem in problems)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_a_captured_graph_verifies_what_its_tensors_hold_when_it_is_replayed(method):
    problems = [Problem(TREES["4, 2"], method, vocab_size=32_000, batch=4, seed=2 * seed) for seed in range(3)]
    expected = [problem.verified("triton", max_depth=2) for problem in problems]
    fields = ("tokens", "target", "draft", "rows")
    held = {name: getattr(problems[0], name).to(DEVICE) for name in fields}
    ranks, parents = problems[0].options["ranks"].to(DEVICE), problems[0].parents.to(DEVICE)
    seed = torch.tensor(problems[0].options["seed"], device=DEVICE)
    options = problems[0].options | {"ranks": ranks, "rows": held["rows"], "max_depth": 2, "seed": seed}

    def run() -> Verified:
        return verify_tree(held["tokens"], parents, held["target"], held["draft"], **options)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for problem, right in zip(problems, expected, strict=True):
        for name in fields:
            held[name].copy_(getattr(problem, name))
        seed.fill_(problem.options["seed"])
        graph.replay()
        assert all(torch.equal(field.cpu(), wanted) for field, wanted in zip(out, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("without_replacement", "4, 2"),
        ("with_replacement", "sequences"),
        ("kseq", "sequences"),
        ("kseq", "4, 2"),
        ("held", "4, 2"),
        ("traversal", "4, 2"),
        ("held_traversal", "sequences"),
    ],
)
def test_passes_that_programs_share_are_right_in_any_schedule(method, tree, adversary, monkeypatch):
    """Short pieces, so that a few tokens are several; with uniform_fill (even seeds) the chain restarts."""
    for module in (decision, distributions, traversal_kernel):
        monkeypatch.setattr(module, "PIECE", tl.constexpr(2))
    for seed in (1, 2):
        filters = Filters(1.0, 2) if method not in ("with_replacement", "kseq") and seed == 2 else PLAIN
        problem = Problem(TREES[tree], method, PLAIN, filters, vocab_size=8, batch=1, noise=3.0, seed=seed)
        assert problem.agrees()
    kernel = "_normalize_kernel" if method in WHOLE_TREE else "_decide_kernel"
    assert adversary.launched[kernel] == 2
