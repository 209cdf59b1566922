"""Public functions as operators of PyTorch: what compilers are told of them is true, and they change no result."""

import inspect
import re
from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from devices import DEVICE
from tiny_models import tiny_llama
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from transformers import DynamicCache
from triton.runtime.interpreter import GridExecutor

from heavypath.kernels.attention.masks import Visible, pack_ancestors
from heavypath.kernels.cache_compaction import compact_cache
from heavypath.kernels.commit import State, commit
from heavypath.kernels.layers.few_logits import few_logits
from heavypath.kernels.layers.few_rows import few_rows_product
from heavypath.kernels.layers.gated import silu_product
from heavypath.kernels.layers.rms_norm import Norm, add_rms_norm
from heavypath.kernels.layers.rotary import HeadNorms, Projected, Turns, rotate_and_store
from heavypath.kernels.layers.spread import OwnTokens, spread_few, spread_logits
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.operators import OPERATORS
from heavypath.kernels.operators.definition import Operator
from heavypath.kernels.ordering import heavy_path_order
from heavypath.kernels.recurrent.acceptance import accept_state
from heavypath.kernels.recurrent.convolution import tree_conv
from heavypath.kernels.recurrent.delta import tree_delta
from heavypath.kernels.recurrent.kda import tree_kda
from heavypath.kernels.recurrent.paths import KeptNodes, Paths
from heavypath.kernels.retrieval.corpus import sort_corpus
from heavypath.kernels.retrieval.followers import follower_logprobs
from heavypath.kernels.retrieval.latest import latest_logprobs
from heavypath.kernels.retrieval.ranges import Appended, append_tokens
from heavypath.kernels.sampling import gumbel_topk, stochastic_beam
from heavypath.kernels.sequence_scores import sequence_scores
from heavypath.kernels.step_kernels import StepKernels
from heavypath.kernels.tree_attention import chain_attention, tree_attention, visible_attention
from heavypath.kernels.trees.levels import CommonNodes, Drawn, Trees, place
from heavypath.kernels.trees.slots import Level, Roots, Slots
from heavypath.kernels.verification import verify_tree
from heavypath.speculative import TokenTree


class Call(NamedTuple):
    function: Callable
    given: tuple
    named: dict


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


PARENTS, TOKENS = torch.tensor([-1, 0, 0, 1]), torch.tensor([[0, 3, 5, 1], [2, 4, 4, 0]])
ROOM = 8  # rows of a cache
ATTENDED = floats(2, 4, 4, 16), *floats(2, 2, 2, ROOM, 16)


def trees():
    noise = torch.arange(8).view(2, 4)
    return Trees(torch.full((2, 4), -1), torch.tensor([5, 6]), noise, torch.tensor([3, 4]), torch.tensor([9, 1]), None)


def state():
    numbers = torch.tensor([[5, 6], [4, 5], [3, 4], [1, 1], [4, 4], [0, 0], [0, 0], [0, 1], [0, 8]])
    return State(
        numbers, torch.zeros(2, 6).long(), torch.tensor([-1]), torch.zeros(2, 0).bool(), torch.zeros(2, 4).long()
    )


def cases() -> dict[str, Call]:
    """Calls of all public functions that are operators, and of two around them; with options that change results."""
    logits, draft = floats(2, 2, 4, 7)
    query, cache = ATTENDED[0], floats(2, 2, 2, ROOM, 16)
    attend = {"prefix_length": torch.tensor([3, 2]), "subtree_end": torch.tensor([4, 4, 3, 4]), "window": 3}
    path, length = torch.tensor([[0, 2, 3], [0, 3, -1]]), torch.tensor([2, 1])
    nodes = Nodes(TOKENS, PARENTS, torch.tensor([0, 0, 1, 0]))
    common = CommonNodes(torch.arange(1, 3), torch.zeros(2).long(), torch.ones(2).long())
    every = CommonNodes(torch.arange(4), PARENTS, torch.tensor([0, 1, 1, 2]))
    drawn = Drawn(torch.tensor([[3, 5], [4, 4]]), torch.tensor([1, 2]), torch.tensor([0, 1]))
    projected = Projected(floats(2, 4, 4, 16), *floats(2, 2, 4, 2, 16))
    turns, rows = Turns(*floats(2, 2, 4, 1, 16)), torch.arange(4).expand(2, 4)
    norms = HeadNorms(Norm(floats(16), 1e-6), Norm(floats(16), 1e-5))
    corpus = sort_corpus([np.array([3, 1, 3, 2, 3, 1])], 2)
    texts = torch.zeros(2, 2, 2, ROOM, 2).long()
    appended = Appended(
        torch.tensor([[3, 1], [3, 2]]), torch.tensor([[0, 1], [0, 1]]), torch.tensor([[-1, 0], [-1, 0]])
    )
    x, y = floats(2, 3, 32)
    seeded = {"seed": torch.tensor(4), "top_k": 5}
    kept = KeptNodes(floats(2, 3, 1, 16), floats(2, 3, 2, 16), -floats(2, 3, 2).abs().double())
    window = torch.tensor([[0, 1, 2], [1, 2, 3], [1, 2, 4]]).expand(2, 3, 3)
    return {
        "tree_attention": Call(tree_attention, (query, *cache), attend),
        "tree_attention of a bool mask": Call(
            tree_attention, (query, *cache), {"prefix_length": 2, "ancestor_mask": torch.eye(4).bool(), "softcap": 2.0}
        ),
        "tree_attention of a chain": Call(chain_attention, (query, *cache, 3), {}),
        "gumbel_topk": Call(gumbel_topk, (logits, 3), seeded | {"rows": torch.arange(8).view(2, 4)}),
        "gumbel_topk in a beam": Call(stochastic_beam, (logits, *floats(2, 2, 4), 3), {"seed": 4}),
        "verify_tree": Call(
            verify_tree, (TOKENS, PARENTS, logits, draft), seeded | {"method": "without_replacement", "max_depth": 2}
        ),
        "verify_tree of any depth": Call(
            verify_tree, (TOKENS, PARENTS, logits, None), {"method": "greedy", "temperature": 0.0}
        ),
        "sequence_scores": Call(sequence_scores, (logits, torch.tensor([[0.8, 3, 1, 0], [0, 0, 1, 0]]).double()), {}),
        "heavy_path_order": Call(heavy_path_order, (torch.tensor([-1, 0, 0, 2]),), {}),
        "place": Call(place, (trees(), drawn, common), {}),
        "place of all": Call(place, (trees(), drawn, every), {"whole": True}),
        "place of roots": Call(place, (trees(), None, CommonNodes(*torch.zeros(3, 1).long())), {}),
        "commit": Call(commit, (state(), nodes, every.depths, Verified(path, length, torch.tensor([2, 3])), 2), {}),
        "compact_cache": Call(compact_cache, ([cache[0]], [cache[1]], path, length, torch.tensor([1, 2])), {}),
        "add_rms_norm": Call(add_rms_norm, (x, y, Norm(floats(32), 1e-6)), {}),
        "add_rms_norm of one": Call(add_rms_norm, (x, None, Norm(floats(32), 1e-6)), {}),
        "rotate_and_store": Call(rotate_and_store, (projected, turns, *cache, rows), {}),
        "rotate_and_store with norms": Call(rotate_and_store, (projected, turns, *cache, rows, norms), {}),
        "silu_product": Call(silu_product, (x, y), {}),
        "tree_conv": Call(tree_conv, (floats(2, 3, 8), floats(2, 2, 8), floats(8, 3), floats(8), window), {}),
        "accept_state": Call(
            accept_state, (floats(2, 2, 16, 16), kept, torch.tensor([[0, 2], [0, 0]]), length), {"normalised": True}
        ),
        "few_rows_product": Call(few_rows_product, (x.bfloat16(), floats(6, 32).bfloat16()), {"gated": True}),
        "append_tokens": Call(append_tokens, (corpus, appended, *texts), {}),
        "follower_logprobs": Call(
            follower_logprobs, (corpus, appended.cache_rows, torch.tensor([0, 0]), *texts), {"vocab_size": 5}
        ),
        "latest_logprobs": Call(
            latest_logprobs, (appended, torch.tensor([0, 0]), *(each[:, :1].contiguous() for each in texts)),
            {"shortest": 1, "is_chain": False, "vocab_size": 5},
        ),
    }  # fmt: skip


CASES = cases()


def there(call: Call) -> Call:
    """A copy of the call, so that what it changes is its own, on this machine's device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), deepcopy(call))


def did(run: Callable, call: Call):
    """The results, and the arguments afterwards."""
    return run(*call.given, **call.named), call.given


def assert_same(one, other):
    torch.testing.assert_close(one, other, equal_nan=True)


def test_every_operator_has_a_case():
    assert {name.split()[0] for name in CASES} == {*OPERATORS}


def attended(impl="torch", **tree) -> Call:
    """What `tree_attention` hands to its operator."""
    seen = {"lengths": None, "subtree_end": None, "ancestors": None, "first_row": None, "window": None} | tree
    return Call(visible_attention, (*ATTENDED, Visible(2, nodes=4, **seen), None, 0.2, impl), {})


LENGTHS, PACKED = torch.tensor([3, 2]), pack_ancestors(torch.ones(4, 4).bool().tril(), 3)


TOLD = {
    name: call for name, call in CASES.items() if call.function.__name__ in OPERATORS and "attention" not in name
} | {
    "tree_attention of a chain": attended(),
    "tree_attention of a tree": attended(lengths=LENGTHS, subtree_end=torch.tensor([4, 4, 3, 4])),
    "tree_attention of a mask": attended(ancestors=torch.eye(4).bool(), window=3),
    "tree_attention in Triton": attended(
        "triton", lengths=LENGTHS, ancestors=PACKED.words, counts=PACKED.counts, first_row=LENGTHS - 2, window=3
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_pytorch_is_told_the_truth_about_operators(name):
    call, operator = there(TOLD[name]), OPERATORS[name.split()[0]]
    torch.library.opcheck(operator.overload, tuple(operator.leaves(call.given, call.named)))


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_whole_graph_does_the_same(name):
    torch.compiler.reset()
    call = CASES[name]
    nodes = []

    def backend(graph, _):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(call.function, backend=backend, fullgraph=True)
    assert_same(did(compiled, there(call)), did(call.function, there(call)))
    assert nodes.count(f"heavypath.{name.split()[0]}.default") == 1


@pytest.mark.parametrize("name", ["gumbel_topk", "verify_tree", "verify_tree of any depth", "rotate_and_store"])
def test_functions_are_exported(name):
    class Module(torch.nn.Module):
        def forward(self, *given):
            return call.function(*given, **call.named)

    call = CASES[name]
    exported = torch.export.export(Module(), there(call).given)
    assert_same(did(exported.module(), there(call)._replace(named={})), did(call.function, there(call)))


class AfterPrompt(torch.nn.Module):
    """A Llama's logits for the nodes of a tree after a prompt whose keys and values are given."""

    def __init__(self):
        super().__init__()
        shape = {"hidden_size": 32, "num_key_value_heads": 2, "attn_implementation": "heavypath"}
        self.model = tiny_llama(1, 61, layers=1, **shape).to(DEVICE)

    def forward(self, nodes, positions, end, key, value):
        cache = DynamicCache(config=self.model.config)
        cache.update(key, value, 0)
        return self.model(nodes, None, positions, cache, tree_subtree_end=end).logits


@pytest.mark.slow
@torch.no_grad()
def test_a_llama_with_trees_is_one_graph_and_is_exported():
    model, tree = AfterPrompt(), TokenTree.from_branching([2, 1])
    cache = floats(2, 1, 2, 3, 16).to(DEVICE)
    given = (torch.arange(len(tree))[None], 3 + tree.depths[None], tree.subtree_end)
    given = *(tensor.to(DEVICE) for tensor in given), *cache
    expected = model(*given)
    torch.compiler.reset()
    assert_same(torch.compile(model, backend="aot_eager", fullgraph=True)(*given), expected)
    exported = torch.export.export(model, given)
    assert_same(exported.module()(*given), expected)
    assert [str(node.target) for node in exported.graph.nodes].count("heavypath.tree_attention.default") == 1


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default(request):
    """A type that torch gives to floating-point tensors of which nobody says one."""
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_the_default_type_of_torch_changes_no_bit(name, impl, default):
    call = CASES[name]
    if "impl" in inspect.signature(call.function).parameters:
        call = call._replace(named={**call.named, "impl": impl})
    expected = did(call.function, there(call))
    torch.set_default_dtype(default)
    torch.testing.assert_close(did(call.function, there(call)), expected, rtol=0, atol=0, equal_nan=True)


def spaced(tensor):
    """The same numbers with another one after each."""
    return torch.stack([tensor, torch.ones_like(tensor)], -1)[..., 0]


def turned(tensor):
    """The same numbers with their axes in reverse order in memory."""
    axes = range(tensor.dim())[::-1]
    return tensor.permute(*axes).contiguous().permute(*axes)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_tensors_of_other_strides_give_the_same_or_are_refused(name, impl):
    """Each tensor alone, so that a refusal of one hides no fault of another."""
    call = CASES[name]._replace(named=CASES[name].named | {"impl": impl})
    expected = did(call.function, there(call))
    leaves, tree = tree_flatten(there(call))
    for number, leaf in enumerate(leaves):
        for lay in (spaced, turned) if isinstance(leaf, torch.Tensor) and leaf.dim() else ():
            own = tree_map_only(torch.Tensor, torch.clone, leaves)
            own[number] = lay(own[number])
            try:
                assert_same(did(call.function, tree_unflatten(own, tree)), expected)
            except ValueError as refusal:
                if not re.search("stride|contiguous|side by side", str(refusal)):
                    raise


MANY = 70_000  # sequences; in its second and third dimension a grid of CUDA has at most 65,535 programs


def of_many(value):
    """Tensors of many sequences in place of two, without numbers."""
    return tree_map_only(
        torch.Tensor,
        lambda each: torch.empty(
            [MANY, *each.shape[1:]] if each.shape[:1] == (2,) else each.shape, dtype=each.dtype, device="meta"
        ),
        value,
    )


def beside_operators() -> dict[str, Call]:
    """Calls of functions that are no operators, by those of their kernels that look at several sequences."""
    table, few = OwnTokens.by_offsets(torch.zeros(3).long(), 9), torch.zeros(2, 3).long()
    logits, hidden, state = floats(2, 3, 3), floats(2, 1, 16), floats(2, 1, 16, 16)
    row, gate, paths = floats(2, 3, 1, 16), floats(2, 3, 1), torch.ones(2, 3, 3).bool()
    slots, roots = Slots.room_for(2, 4, torch.device("cpu")), Roots(*torch.zeros(4, 2).long())

    def rule(function):
        return lambda *given, impl: function(*given[:-1], Paths(given[-1]), impl=impl)

    def by_step(name):
        return lambda *given, impl: getattr(StepKernels(impl), name)(*given)

    return {
        "spread_logits": Call(spread_logits, (logits, table), {}),
        "spread_few": Call(spread_few, (logits, few, 9), {}),
        "few_logits": Call(
            few_logits, (hidden[:, 0], floats(2, 3, 16), Norm(floats(16), 1e-6), floats(9, 16), few), {}
        ),
        "tree_delta": Call(rule(tree_delta), (row, row, row, gate, gate, state, paths), {}),
        "tree_kda": Call(rule(tree_kda), (row, row, row, row, gate, state, paths), {}),
        "alike": Call(
            by_step("alike"),
            (trees()._replace(texts=torch.zeros(2, 4).long()), CommonNodes(*torch.zeros(3, 1).long())),
            {},
        ),
        "assemble": Call(by_step("assemble"), (slots, roots, Level(1, 3, 1, paths), 3, False), {}),
    }


LAUNCHING = {name: call for name, call in CASES.items() if not re.search("attention|few_rows|any depth", name)}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", [*LAUNCHING, *beside_operators()])
def test_of_many_sequences_all_programs_fit_into_a_grid(name, monkeypatch):
    """`tree_attention` refuses more key heads than that, and `few_rows_product` more rows than 128."""
    call = (LAUNCHING | beside_operators())[name]
    grids = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda executor, *_, **__: grids.append(executor.grid))
    call.function(*of_many(call.given), **of_many(call.named), impl="triton")
    assert grids
    for grid in grids:
        assert max(grid[1:], default=1) <= 65_535, grid


def test_what_an_operator_does_not_have_is_named():
    with pytest.raises(ValueError, match="silu_product has no left, which it mutates"):
        Operator(silu_product, mutates=["left"])
