"""Expected tokens of drafted trees: against the oracle in fractions, by hand, and along a recorded text."""

import numpy as np
import pytest
import torch
import verification_oracle as oracle
from bench_scripts import script
from tiny_models import tiny_llama
from verification_oracle import GROWTHS, Language, drawn

from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.demo import DemoPair

exact = script("exact")
RULES = {  # the oracle's verifier, whether children are independent, and how near it must be
    "without_replacement": (oracle.rejection, False, 1e-9),
    "with_replacement": (oracle.rejection, True, 1e-9),
    "k_seq": (oracle.k_seq, True, 1e-3),  # whose g the oracle rounds up
}


def rows(language, tree, law):
    """The probabilities after each node of a drawn tree: [N, V]."""
    return np.array([[float(part) for part in law(tree.context(node))] for node in range(len(tree.tokens))])


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("rule", RULES)
def test_expected_tokens_are_those_of_the_oracle_for_each_tree_that_can_be_drawn(rule, growth):
    verifier, replacement, near = RULES[rule]
    language = Language(3, seed=5)
    for tree, _ in [*drawn(language, GROWTHS[growth], replacement=replacement)][:40]:
        paths = (
            (float(chance), path) for (path, _), chance in verifier(language, tree, replacement=replacement).items()
        )
        expected = 1 + sum(chance * len(path) for chance, path in paths)
        own = exact.Tree([*tree.tokens], [*tree.parents], None)
        found = own.expected_tokens(
            getattr(exact, rule), rows(language, tree, language.target), rows(language, tree, language.draft)
        )
        assert found == pytest.approx(expected, abs=near)


def test_by_hand():
    """P = (1/2, 1/2), Q = (1, 0): the only child is accepted in half of the cases; a sample of P is it as often."""
    target, draft = np.array([0.5, 0.5]), np.array([1.0, 0.0])
    assert exact.without_replacement(target, draft, [0]) == [0.5]
    assert exact.without_replacement(target, draft, [0, 1]) == [0.5, 0.5], "once Q is used up, it is uniform"
    assert exact.target_sample(target, draft, [0, 0]) == [0.5, 0.0], "an equal sibling adds nothing"
    tree = exact.Tree([-1, 0, 0, 1], [-1, 0, 0, 2], None)  # the child of the second of two equal siblings
    assert (tree.size, tree.depth) == (4, 2)
    both = np.array([target] * 4)
    assert tree.expected_tokens(exact.target_sample, both, both) == 1 + 0.5 * (1 + 0.5)


def test_a_race_accepts_the_targets_first_token_as_often_as_simulated_races_do():
    """Races of four tokens: those whose first two arrivals in the draft's race are 2, 1."""
    target, draft = np.array([0.1, 0.5, 0.15, 0.25]), np.array([0.3, 0.2, 0.4, 0.1])
    clocks = np.random.default_rng(1).exponential(size=(400_000, 4))
    order = (clocks / draft).argsort(1)[:, :2]
    winner = (clocks / target).argmin(1)[(order == [2, 1]).all(1)]
    often = [float((winner == token).mean()) for token in (2, 1)]
    assert exact.race(target, draft, [2, 1], 20_000) == pytest.approx(often, abs=0.01)
    assert exact.race(draft, draft, [2, 1]) == pytest.approx([1, 0]), "P = Q: the first arrival is the target's, too"
    assert exact.race(target, np.array([1.0, 0, 0, 0]), [0, 3])[1] == 0, "what the draft cannot draw never arrives"


def accepted(rule, target, draft, children, replacement):
    """How often one of the children is accepted, over all draws of them."""
    total = 0.0

    def draw(tokens, left, chance):
        nonlocal total
        if len(tokens) == children or left.sum() == 0:
            total += chance * sum(rule(np.array(target), np.array(draft), tokens))
            return
        for token in np.flatnonzero(left):
            rest = left.copy()
            rest[token] *= replacement
            draw([*tokens, int(token)], rest, chance * left[token] / left.sum())

    draw([], np.array(draft), 1.0)
    return total


@pytest.mark.parametrize("support", [1, 2, 3])
def test_theorem_3_7_as_many_children_as_the_draft_has_tokens_cover_the_target(support):
    """Fewer than the vocabulary: where P is within Q's support of k tokens, k children are always accepted."""
    draft = np.array([0.7, 0.2, 0.1, 0, 0][:support] + [0.0] * (5 - support))
    target = np.array([0.1, 0.3, 0.6, 0, 0][:support] + [0.0] * (5 - support))
    draft, target = draft / draft.sum(), target / target.sum()
    assert accepted(exact.without_replacement, target, draft, support, False) == pytest.approx(1)


def test_appendix_f_6_the_others_lack_one_of_the_two_properties():
    """Cover: SpecInfer rejects 25%, SpecTr accepts 0.75. Transport, P = Q: top-k accepts 0.6, naive sampling 0.5."""
    sure, even, uneven = [1.0, 0.0], [0.5, 0.5], [0.6, 0.4]
    assert accepted(exact.with_replacement, sure, even, 2, True) == pytest.approx(0.75)
    assert accepted(exact.k_seq, sure, even, 2, True) == pytest.approx(0.75)
    assert accepted(exact.without_replacement, sure, even, 2, False) == pytest.approx(1)
    assert sum(exact.target_sample(np.array(uneven), np.array(uneven), [0])) == 0.6
    assert accepted(exact.target_sample, even, even, 1, True) == pytest.approx(0.5)
    for law in (even, uneven):
        assert accepted(exact.without_replacement, law, law, 1, False) == pytest.approx(1)


def test_steps_follow_a_recorded_text_and_a_target_that_drafts_for_itself_accepts_all():
    target = tiny_llama(1, max_position_embeddings=256)
    setting = script("papers_setting").Setting(DemoPair(target, target, None), ["", ""], small=False)
    setting.texts = script("batches").batch_of([target.dummy_inputs["input_ids"][:1] % 7] * 2)
    found = setting.evaluate("chain", temperature=0.0, contexts=3, tree=TokenTree.chain(2))
    assert found.tokens.tolist() == [3, 3]
    assert (found.row["nodes"], found.row["contexts"]) == (3, 6)
    assert found.over(found) == [0, 0]
    text = torch.tensor([[4, 5], [6, 5]])
    steps = exact.ExactSteps(exact.without_replacement, text, 3)
    decoder = SpeculativeDecoder(target, target, "sequoia", verifier=steps, tree=TokenTree.k_ary(2, 1))
    out = decoder.generate(setting.texts.tokens, 60, temperature=1.0, eos_token_id=3, attention_mask=setting.texts.mask)
    new = out.sequences[:, setting.texts.tokens.shape[1] :]
    assert new[:, :3].tolist() == [[4, 5, 3], [6, 5, 3]]
    assert [step.expected for step in steps.steps] == pytest.approx([2.0] * 6), "P = Q: the first child is accepted"
