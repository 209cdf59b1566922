"""A tree policy of one's own is asked before the first step and between steps; texts of ersd are the same with any."""

import pickle
from copy import copy

import pytest
import torch
from conformance_parts import medusa_of
from head_cases import head_of
from played_steps import PADDING, PROMPTS
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters
from heavypath.speculative import SpeculativeDecoder, TokenTree, TreePolicy, goodness_of_fit, joint_law
from heavypath.speculative.tree_policy import FixedTree, TreeByCosts
from heavypath.speculative.trees.growth import Growth


class SmallInBatches(TreePolicy):
    alone, together = TokenTree.chain(6), TokenTree.chain(2)

    def tree(self, filters, running):
        return self.alone if running == 1 else self.together


def ends_late(ids, scores):
    """The second prompt goes on longest, alone."""
    return ids.shape[1] >= PROMPTS.shape[1] + (20 if int(ids[0, 1]) == 6 else 6)


def test_a_policy_of_ones_own_chooses_the_tree_of_each_step():
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    options = {"attention_mask": PADDING, "max_new_tokens": 24, "pad_token_id": 0, "stopping_criteria": [ends_late]}
    decoder = SpeculativeDecoder(target, draft, "ersd", trees=SmallInBatches())
    out = decoder.generate(PROMPTS, temperature=0.9, **options)
    assert out.stats.tree == "3 nodes, 2 levels, by a policy of your own"
    assert [tree for _, tree in out.stats.replans] == ["7 nodes, 6 levels"]
    plain = SpeculativeDecoder(target, None, "autoregressive").generate(PROMPTS, temperature=0.9, **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert decoder.generate(PROMPTS[:1], 4).stats.tree == "7 nodes, 6 levels, by a policy of your own"


def test_a_policy_of_ones_own_serves_and_warms_up():
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    decoder = SpeculativeDecoder(target, draft, "ersd")
    decoder.trees = SmallInBatches()
    assert decoder.warm_up(batch_size=3, prompt_tokens=4, max_new_tokens=8) > 0
    prompts = [prompt[mask.bool()] for prompt, mask in zip(PROMPTS, PADDING, strict=True)]
    with decoder.serve(slots=2) as service:
        found = [service.submit(prompt, 9, temperature=0.9, seed=7, eos_token_id=None) for prompt in prompts]
        for prompt, completion in zip(prompts, found, strict=True):
            out = decoder.generate(prompt[None], 9, temperature=0.9, sequence_ids=torch.tensor([7]), eos_token_id=None)
            assert completion.result(60).tokens == out.sequences[0, len(prompt) :].tolist()


def test_a_policy_that_lets_a_draft_rest_that_cannot_is_refused():
    class RootInBatches(SmallInBatches):
        together = TokenTree([-1])

    target = tiny_llama(1, layers=3)
    decoder = SpeculativeDecoder(target, head_of(target, taps=(0, 1)), "ersd", trees=RootInBatches())
    assert decoder.generate(PROMPTS[:1], 4).stats.steps > 0
    with pytest.raises(ValueError, match="the tree policy must give trees of two nodes and more"):
        decoder.generate(PROMPTS, 4, attention_mask=PADDING, pad_token_id=0)


def test_a_copy_of_a_decoder_has_the_policy_that_was_set():
    decoder = SpeculativeDecoder(tiny_llama(1), tiny_llama(2, layers=1))
    assert type(copy(decoder).trees) is TreeByCosts
    decoder.trees = SmallInBatches()
    assert type(copy(decoder).trees) is type(pickle.loads(pickle.dumps(decoder)).trees) is SmallInBatches
    decoder.tree = TokenTree.chain(3)
    assert copy(decoder).tree == TokenTree.chain(3)
    given = SpeculativeDecoder(decoder.target, tiny_llama(2, layers=1), trees=SmallInBatches())
    assert type(copy(given).trees) is SmallInBatches


def policy(tree):
    return type("Mine", (TreePolicy,), {"tree": lambda self, filters, running: tree})()


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"trees": SmallInBatches}, TypeError, "trees must be an object of a class that inherits TreePolicy, got <class"),
    ({"trees": SmallInBatches}, TypeError, r"give SmallInBatches\(...\)"),
    ({"trees": type("Mine", (TreePolicy,), {"tree": lambda self, filters, running, tokens: None})()}, TypeError,
     r"Mine must be callable as tree\(filters, running\): missing a required argument: 'tokens'"),
    ({"trees": TokenTree.chain(2)}, TypeError, "trees must be an object of a class that inherits TreePolicy"),
    ({"trees": SmallInBatches(), "tree_size": 4, "max_depth": 2}, ValueError,
     "trees chooses all trees; leave out tree_size, max_depth"),
    ({"trees": SmallInBatches(), "profile": "profile.json"}, ValueError, "leave out trees"),
])  # fmt: skip
def test_what_is_no_policy_or_has_other_options_beside_it_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        SpeculativeDecoder(tiny_llama(1), tiny_llama(2), **options)


@pytest.mark.parametrize(("method", "trees", "error", "message"), [
    ("sequoia", TreePolicy(), NotImplementedError, r"TreePolicy must define tree\(filters, running\)"),
    ("sequoia", policy(None), TypeError, "a tree policy must return a TokenTree, as .*, got None"),
    ("sequoia", policy(TokenTree([-1, 0, 0, 1])), ValueError, r"take tree.reordered\('heavy_path'\)\[0\]"),
    ("autoregressive", policy(TokenTree.chain(3)), ValueError, "must be the root alone, got one of 4 nodes"),
    ("specinfer", policy(Growth("slot", 5, 2, 3)), ValueError, "by 'slot' does not fit children drawn 'with_replacem"),
    ("sequoia", policy(Growth("node", 5, 2, 3)), ValueError, "by 'node' does not fit children drawn 'without_replac"),
])  # fmt: skip
def test_a_tree_that_does_not_fit_is_refused_before_it_is_drafted(method, trees, error, message):
    draft = None if method == "autoregressive" else tiny_llama(2, layers=1)
    by_rejection = {} if draft is None else {"verifier": "rejection"}
    decoder = SpeculativeDecoder(tiny_llama(1), draft, method, trees=trees, **by_rejection)
    with pytest.raises(error, match=message):
        decoder.generate(PROMPTS[:1], 6, temperature=0.9)


def test_a_tree_deeper_than_the_draft_drafts_is_refused():
    target = tiny_llama(1)
    decoder = SpeculativeDecoder(target, medusa_of(target), trees=policy(TokenTree.chain(9)))
    with pytest.raises(ValueError, match="the draft can draft 8 levels of a tree, got one of 9 levels"):
        decoder.generate(PROMPTS[:1], 6)


def test_a_policy_may_let_trees_grow_where_children_are_drawn_so():
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    decoder = SpeculativeDecoder(target, draft, "rsd-c", verifier="rejection", trees=policy(Growth("slot", 5, 2, 3)))
    prompt = PROMPTS[:1]
    out = decoder.generate(prompt.expand(8000, -1), 2, temperature=0.9, seed=3)
    law = joint_law(target, prompt[0], 2, temperature=0.9)
    assert goodness_of_fit(out.sequences[:, prompt.shape[1] :], law).is_lossless()


def test_a_decoder_chooses_its_policy_once_by_its_options():
    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    by_default, given = SpeculativeDecoder(target, draft), SpeculativeDecoder(target, draft, tree_size=4)
    assert type(by_default.trees) is TreeByCosts
    assert type(given.trees) is FixedTree
    assert given.trees.tree(Filters(0.6), 1) == given.trees.tree(Filters(0.6), 64) == given.tree
    by_default.tree = TokenTree.chain(3)
    assert type(by_default.trees) is FixedTree
    assert by_default.trees.candidates(Filters(), 8) == (TokenTree.chain(3),)
