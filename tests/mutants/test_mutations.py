"""The checks of losslessness can fail: each of these bugs, put into the source, is found by one of them.

The list is that of published code: stale noise, the factor 1 - D dropped, draft filters ignored, draft noise used again
for the recovered token, the recovered token drawn from the target instead of the residual, siblings tried out of draw
order, `<=` for `<`.
"""

import numpy as np
import pytest
import torch
from mutations import mutated
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from toy_language import ToyLanguage, decode

from heavypath.kernels import commit, sampling, verification
from heavypath.kernels.filtering import Filters
from heavypath.kernels.verifying import k_seq, residual
from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.decoding import drafted, drafting, runner, step

MUTATIONS = {
    "the factor 1 - D is dropped": (
        residual, "np.exp2(log_mass - log_q)", "np.exp2(-log_q)", {}
    ),
    "lambda grows without 1 / (1 - D)": (
        residual, "np.log2(total) - log_mass", "np.log2(total)", {}
    ),
    "F is not divided by": (
        residual, "residual[sequence, child] / total *", "residual[sequence, child] *", {}
    ),
    "the recovered token is drawn from the target": (
        verification, "np.log(weights.astype(np.float64))", "np.log(np.exp2(log_target[stop]).astype(np.float64))", {}
    ),
    "the recovered token uses the draft's noise": (
        verification, "gumbels(seed, Stream.TARGET", "gumbels(seed, Stream.DRAFT",
        {"tree": TokenTree.chain(1)},
    ),
    "draft filters are ignored": (
        verification, "log_probs(draft_row, largest, draft_filters)", "log_probs(draft_row, largest, Filters())",
        {"draft_filters": Filters(0.5)},
    ),
    "target filters are ignored": (
        verification, "log_probs(target_row, largest, target_filters)",
        "log_probs(target_row, largest, Filters())",
        {"target_filters": Filters(0.5)},
    ),
    "siblings are tried in index order": (
        verification, "order = rank * count + index", "order = index + 0 * rank",
        {"tree": TokenTree([-1, 0, 0, 2, 2], [0, 1, 0, 1, 0])},
    ),
    "rejected children stay in the draft": (
        residual, "undrawn[sequence[rejected], child[rejected]] = False", "pass", {}
    ),
    "one coin for all children": (
        residual, "coins[:, place] <", "coins[:, 0] <", {}
    ),
    "K-SEQ takes a single child's threshold": (
        k_seq, "np.exp2(log_p - log_q) / high[:, None]", "np.exp2(log_p - log_q)",
        {"method": "kseq", "replacement": True},
    ),
    "K-SEQ recovers from the target": (
        k_seq, "share[:, None].astype(target.dtype) * share_of", "0 * share_of",
        {"method": "kseq", "replacement": True},
    ),
    "independent draws share their noise": (
        sampling, "gumbels(seed, stream, noise_rows, vocab_size, draws=k)",
        "gumbels(seed, stream, noise_rows, vocab_size, draws=1).repeat(k, 1)",
        {"method": "with_replacement", "replacement": True},
    ),
    "a race takes its own noise": (
        verification, 'Stream.DRAFT if method == "race" else Stream.TARGET', "Stream.TARGET", {"method": "race"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bug_is_found(name, monkeypatch):
    module, original, replacement, changes = MUTATIONS[name]
    monkeypatch.setattr("heavypath.kernels.implementation.library", lambda: None)  # references are changed
    settings = {"tree": TokenTree.k_ary(2, 2), "method": "without_replacement"} | changes

    def decoded(verify_tree=verification.verify_tree, gumbel_topk=sampling.gumbel_topk, **more):
        language = ToyLanguage(3, seed=5, spread=2.0)
        return language, decode(
            language, sequences=30_000, verify_tree=verify_tree, gumbel_topk=gumbel_topk, **settings, **more
        )

    language, right = decoded()
    copy = mutated(module, original, replacement)
    if module in (residual, k_seq):
        reference = "residual_chain" if module is residual else "k_seq"
        monkeypatch.setattr(verification, reference, getattr(copy, reference))
    names = [name for name in ("verify_tree", "gumbel_topk") if name in vars(module)]
    _, wrong = decoded(**{name: getattr(copy, name) for name in names})
    law = language.law(settings.get("target_filters", Filters()))
    assert chi_square_p_value(joint_counts(right, 3), law) > SIGNIFICANCE
    if settings["method"] == "race":  # still a sample of the target, but not the one that plain decoding takes
        assert torch.equal(right, decode(language, TokenTree([-1]), method="race", sequences=30_000))
        assert not torch.equal(wrong, right)
    else:
        assert chi_square_p_value(joint_counts(wrong, 3), law) < SIGNIFICANCE


def test_accepting_at_equality_is_found():
    copy = mutated(residual, "coins[:, place] <", "coins[:, place] <=")
    target, draft = np.array([[-np.inf, 0.0]]), np.array([[-1.0, -1.0]])
    impossible = target, draft, np.array([[0]]), np.zeros((1, 1)), False
    assert residual.residual_chain(*impossible)[0].tolist() == [-1]
    assert copy.residual_chain(*impossible)[0].tolist() == [0]


slow = pytest.mark.slow


@pytest.mark.parametrize(("module", "original", "replacement"), [
    pytest.param(step, "root_rows(state.noise, state.lengths)", "state.noise", marks=slow),  # alike in every step
    (step, "(roots, self.tree.whole_numbers)", "(roots, 0 * self.tree.whole_numbers)"),  # shared by all nodes
    (step, "target_cache.accept(", "(lambda *_: None)("),  # rows stay
    pytest.param(step, "settled(given.positions,", "settled(0 * given.positions + lengths[:, None],", marks=slow),
    (commit, "token[every, path[:, 1:]]", "token[every, path[:, :-1]]"),  # the bonus token in the last accepted's place
    pytest.param(
        commit, "numbers[StateField.ROOT] = np.maximum(after, 0)", "numbers[StateField.ROOT] = emitted[:, 0]",
        marks=slow,
    ),
])  # fmt: skip
def test_a_bug_of_the_decoder_is_found(module, original, replacement, monkeypatch):
    from tiny_models import exact_law, tiny_llama

    target, draft = tiny_llama(1), tiny_llama(2, layers=1)
    prompt, length = torch.tensor([3, 1, 4]), 5
    law = exact_law(target, prompt, Filters(), length)

    def p_value():
        decoding = SpeculativeDecoder(target, draft, "rsd-c", tree=TokenTree.k_ary(3, 2), verifier="rejection")
        out = decoding.generate(prompt.expand(20_000, -1), max_new_tokens=length, temperature=1.0, seed=3)
        return chi_square_p_value(joint_counts(out.sequences[:, 3:], 7), law)

    monkeypatch.setattr("heavypath.kernels.implementation.library", lambda: None)  # references are changed
    assert p_value() > SIGNIFICANCE
    copy = mutated(module, original, replacement)
    monkeypatch.setattr(runner, "new_step", getattr(copy, "new_step", runner.new_step))
    monkeypatch.setattr(step, "commit", getattr(copy, "commit", step.commit))
    assert p_value() < SIGNIFICANCE


def test_a_gap_in_the_drafts_cache_is_found(monkeypatch):
    """It leaves the text right and only makes fewer drafts fit: a draft equal to the target shows it."""
    from tiny_models import tiny_llama

    def acceptance():
        chain = SpeculativeDecoder(tiny_llama(1), tiny_llama(1), "chain", tree_size=5)
        return chain.generate(torch.tensor([[1, 2]]), max_new_tokens=40, temperature=1.0).stats.acceptance_by_rank

    assert acceptance() == [1.0]
    copy = mutated(drafted, "state.previous, state.root,", "state.root, state.root,")
    monkeypatch.setattr(drafting, "root_feed", copy.root_feed)
    assert acceptance() < [1.0]
