"""The limits of trees that docs/methods.md prints are those of the methods, and DySpec's trees can be deeper."""

import re
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_llama

from heavypath.speculative import METHODS, SpeculativeDecoder

PAGE = (Path(__file__).parents[2] / "docs/methods.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| (\d+), (\d+) \| (\d+), (\d+) \| (\d+), (\d+) \| (\d+), (\d+) \|$", PAGE, re.M)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_page_has_the_limits_of_trees_of_a_size(row):
    size, *printed = map(int, row)
    planned, levels = METHODS["sequoia"].tree_of(size), METHODS["rsd-c"].tree_of(size)
    most = int(torch.bincount(planned.parents[1:]).max())
    found = [planned.depth, most]
    for method in ("dyspec", "rsd-s"):
        growth = METHODS[method].tree_of(size)
        found += [growth.depth, growth.width]
    assert printed == [*found, levels.depth, int((levels.parents == 0).sum())]


def test_the_page_has_rows():
    assert [int(row[0]) for row in ROWS] == [8, 16, 32, 64, 128, 256, 768]


def test_a_dyspec_tree_of_64_nodes_can_be_a_chain():
    """Where the draft is sure, all 63 tokens below the root are one path, which can give the paper's 9.1 tokens."""
    target = tiny_llama(1, max_position_embeddings=256)
    target.lm_head.weight.data *= 1000  # every distribution is one token
    options = {"tree_size": 64, "max_depth": 63, "width": 63, "confidence": "draft"}
    decoder = SpeculativeDecoder(target, target, "dyspec", verifier="rejection", **options)
    out = decoder.generate(target.dummy_inputs["input_ids"][:1] % 7, 64, temperature=1.0, eos_token_id=None)
    assert out.stats.tokens_per_step > 20
