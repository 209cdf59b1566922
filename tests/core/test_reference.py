"""Both files of speculative/reference give the decoder's tokens under a seed, and transformers' greedy ones."""

import pytest
import torch
from tiny_models import tiny_llama

from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.reference import chain
from heavypath.speculative.reference.chain import chain_decode
from heavypath.speculative.reference.tree import tree_decode

PROMPT = torch.tensor([[3, 1, 4]])
NEW_TOKENS = 12
TREES = {
    "root alone": TokenTree([-1]),
    "chain": TokenTree.chain(3),
    "planned": TokenTree([-1, 0, 1, 2, 1, 0, 5, 0]),
    "all tokens": TokenTree.from_branching([7, 2]),  # of a vocabulary of seven
}


@pytest.fixture(scope="module")
def similar_pair():
    """A target, and a draft that is often right and often wrong."""
    target, draft = tiny_llama(1), tiny_llama(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    return target, draft


def count_forwards(model):
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    return forwards


@pytest.mark.parametrize("temperature", [0, 0.6, 1.5])
@pytest.mark.parametrize("draft_length", [1, 4])
def test_the_chain_gives_the_decoders_tokens(draft_length, temperature, similar_pair):
    decoder = SpeculativeDecoder(*similar_pair, "chain", tree=TokenTree.chain(draft_length), verifier="rejection")
    for seed in range(3):
        expected = decoder.generate(PROMPT, NEW_TOKENS, temperature, seed=seed)
        assert expected.stats.accepted.any()
        tokens = chain_decode(*similar_pair, PROMPT, NEW_TOKENS, draft_length, temperature, seed)
        assert torch.equal(tokens, expected.sequences), seed


@pytest.mark.parametrize("temperature", [0, 0.6, 1.5])
@pytest.mark.parametrize("shape", TREES)
def test_the_tree_gives_the_decoders_tokens(shape, temperature, similar_pair):
    decoder = SpeculativeDecoder(*similar_pair, "sequoia", tree=TREES[shape], verifier="rejection")
    parents = decoder.tree.parents.tolist()
    assert decoder.tree == TokenTree(parents), "siblings are drafted in the order of their numbers"
    accepted = []
    for seed, prompt in enumerate((PROMPT, PROMPT, PROMPT[:, 2:])):  # one of them without a token before the root
        expected = decoder.generate(prompt, NEW_TOKENS, temperature, seed=seed)
        accepted.append(bool(expected.stats.accepted.any()))
        tokens = tree_decode(*similar_pair, prompt, NEW_TOKENS, parents, temperature, seed)
        assert torch.equal(tokens, expected.sequences), seed
    assert any(accepted) == (shape != "root alone")


def test_there_are_as_many_new_tokens_as_asked_for(similar_pair):
    for max_new_tokens in range(7):
        for tokens in (
            chain_decode(*similar_pair, PROMPT, max_new_tokens),
            tree_decode(*similar_pair, PROMPT, max_new_tokens, [-1, 0, 1, 2]),
        ):
            assert tokens.shape == (1, PROMPT.shape[1] + max_new_tokens)
            assert torch.equal(tokens[:, : PROMPT.shape[1]], PROMPT)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_draft_that_is_the_target_is_always_accepted(temperature):
    """5 steps write 5 tokens each, and a 6th the last 2."""
    for decode, drafts in (
        (lambda *models: chain_decode(*models, PROMPT, 27, 4, temperature), 5 * 4 + 1),
        (lambda *models: tree_decode(*models, PROMPT, 27, [-1, 0, 1, 2, 3], temperature), 6 * 4),
    ):
        target, draft = tiny_llama(1), tiny_llama(1)
        target_forwards, draft_forwards = count_forwards(target), count_forwards(draft)
        decode(target, draft)
        assert (len(target_forwards), len(draft_forwards)) == (6, drafts)


def test_where_rounding_leaves_no_residual_the_target_is_sampled():
    """P(0) is half of Q(0), but Q(1) and P(1) are both 1 after rounding."""
    draft_probs = torch.tensor([1e-20, 1.0], dtype=torch.float64)
    target_probs = torch.tensor([5e-21, 1.0], dtype=torch.float64)
    assert torch.equal(chain.residual(target_probs, draft_probs), target_probs)
