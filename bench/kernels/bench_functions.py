"""How long the public functions take on a CPU, for comparing two versions.

python -m pytest bench/kernels/bench_functions.py --benchmark-only [--benchmark-json FILE]
"""

import pytest
import torch

from heavypath.kernels.cache_compaction import compact_cache
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.tree_attention import tree_attention
from heavypath.kernels.verification import verify_tree
from heavypath.speculative import SpeculativeDecoder, TokenTree, load_demo_pair, sequoia_tree
from heavypath.speculative.demo import demo_prompts

TREE = TokenTree.from_branching([4, 2, 2, 1]).reordered("heavy_path")[0]
NODES, VOCABULARY, PREFIX = len(TREE), 32_000, 512


def test_a_plan_of_64_nodes(benchmark):
    assert len(benchmark(sequoia_tree, (0.57, 0.12, 0.06, 0.04), 64, 6)) == 64


def test_attention_of_a_tree(benchmark):
    query, (key, value) = torch.randn(1, 8, NODES, 64), torch.randn(2, 1, 2, PREFIX + NODES, 64)
    benchmark(tree_attention, query, key, value, prefix_length=PREFIX, subtree_end=TREE.subtree_end)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=["no filters", "top-p"])
def test_four_children_of_each_of_eight_nodes(benchmark, filters):
    benchmark(gumbel_topk, torch.randn(8, VOCABULARY), 4, **filters)


@pytest.mark.parametrize("method", ["without_replacement", "race", "target_sample"])
def test_verifying_a_tree(benchmark, method):
    target, draft = torch.randn(2, 1, NODES, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (1, NODES))
    benchmark(verify_tree, tokens, TREE.parents, target, draft, method=method, ranks=TREE.ranks)


def test_compacting_the_caches_of_eight_layers(benchmark):
    keys, values = (list(torch.randn(8, 1, 4, PREFIX + NODES, 64)) for _ in range(2))
    places = {"path": torch.tensor([[0, 1, 3, 5]]), "length": torch.tensor([3])}
    benchmark(compact_cache, keys, values, **places, prefix_length=torch.tensor([PREFIX]))


@pytest.mark.parametrize("method", ["autoregressive", "sequoia"])
def test_decoding_32_tokens(benchmark, method):
    pair = load_demo_pair()
    prompt = pair.tokenizer(demo_prompts()[0], return_tensors="pt").input_ids
    benchmark(SpeculativeDecoder(*pair[:2], method).generate, prompt, max_new_tokens=32)
