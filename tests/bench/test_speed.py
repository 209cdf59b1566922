"""How long the public functions take on a CPU, for comparing two versions: skipped unless asked for.

    .venv/bin/python -m pytest tests/bench/test_speed.py --benchmark-only            # a table
    .venv/bin/python -m pytest tests/bench/test_speed.py --benchmark-only --benchmark-json FILE

What a GPU does, and comparisons with other programs, are commands of bench/.
"""

import pytest
import torch

from heavypath.kernels.cache_compaction import compact_cache
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.tree_attention import tree_attention
from heavypath.kernels.verification import verify_tree
from heavypath.speculative import SpeculativeDecoder, TokenTree, sequoia_tree
from heavypath.speculative.demo import demo_prompts

ACCEPTANCE = (0.57, 0.12, 0.06, 0.04)
TREE = TokenTree.from_branching([4, 2, 2, 1]).reordered("heavy_path")[0]
VOCABULARY, PREFIX = 32_000, 512


def test_a_plan_of_64_nodes(benchmark):
    assert len(benchmark(sequoia_tree, ACCEPTANCE, 64, 6)) == 64


def test_a_tree_renumbered(benchmark):
    parents = TokenTree.k_ary(2, 9).parents
    benchmark(lambda: TokenTree(parents).reordered("heavy_path"))


def test_attention_of_a_tree(benchmark):
    query = torch.randn(1, 8, len(TREE), 64)
    key, value = torch.randn(2, 1, 2, PREFIX + len(TREE), 64)
    benchmark(tree_attention, query, key, value, prefix_length=PREFIX, subtree_end=TREE.subtree_end)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=["no filters", "top-p"])
def test_four_children_of_each_of_eight_nodes(benchmark, filters):
    benchmark(gumbel_topk, torch.randn(8, VOCABULARY), 4, **filters)


@pytest.mark.parametrize("method", ["without_replacement", "race", "target_sample"])
def test_verifying_a_tree(benchmark, method):
    target, draft = torch.randn(2, 1, len(TREE), VOCABULARY)
    tokens = torch.randint(VOCABULARY, (1, len(TREE)))
    benchmark(verify_tree, tokens, TREE.parents, target, draft, method=method, ranks=TREE.ranks)


def test_compacting_the_caches_of_eight_layers(benchmark):
    caches = list(torch.randn(8, 1, 4, PREFIX + len(TREE), 64))
    path, length, prefix = torch.tensor([[0, 1, 3, 5]]), torch.tensor([3]), torch.tensor([PREFIX])
    benchmark(compact_cache, caches, [cache.clone() for cache in caches], path, length, prefix)


@pytest.mark.parametrize("method", ["autoregressive", "sequoia"])
def test_decoding_32_tokens(benchmark, method, demo_pair):
    prompt = demo_pair.tokenizer(demo_prompts()[0], return_tensors="pt").input_ids
    decoder = SpeculativeDecoder(*demo_pair[:2], method)
    benchmark(decoder.generate, prompt, max_new_tokens=32)
