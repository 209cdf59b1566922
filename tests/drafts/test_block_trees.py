"""Trees over block drafts that make errors bring more tokens a step than chains do: of each kind, by 1.2 at least."""

import pytest
from block_trees import KINDS, gain


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_of_64_brings_a_fifth_more_than_the_chain_of_the_same_draft(kind, tmp_path):
    """At temperature 1, where both bring less than the block is long; by more than the ratio's error."""
    chain, tree, ratio, error = gain(kind, tmp_path / "draft")
    assert 1.5 < chain < 6, "the draft is no longer one with some errors"
    assert ratio - 2 * error > 1.2, f"{tree:.2f} of {chain:.2f} tokens a step, {ratio:.2f} +- {error:.2f}"
