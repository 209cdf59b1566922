"""The checks of losslessness can fail: each of these bugs, put into the program, is found by one of them.

The list is that of published code: stale noise, the factor 1 - D dropped, draft filters ignored, draft noise used again
for the recovered token, the recovered token drawn from the target instead of the residual, siblings tried out of draw
order, `<=` for `<`. `make mutants` puts in many more, which the tests of each kernel and of the step are to find.
"""

import ast
import inspect
from functools import lru_cache

import pytest
import torch
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import exact_law, tiny_llama
from toy_language import ToyLanguage, decode

from heavypath.kernels import verification
from heavypath.kernels.filtering import Filters
from heavypath.kernels.noise import Stream
from heavypath.kernels.verifying.residual import Chain
from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.decoding import drafting
from heavypath.speculative.models.caches import KeyValueCache

BINARY = TokenTree.k_ary(2, 2)
verify_tree, gumbels, coins = verification.verify_tree, verification.gumbels, verification.coins
accepted, pass_over = verification._accepted, Chain.pass_over


@pytest.fixture
def references(monkeypatch):
    """Decoding on this CPU runs the references, into which bugs are put, and no compiled code."""
    monkeypatch.setattr("heavypath.kernels.implementation.library", lambda: None)


def rewritten(function, change):
    """A function with `change` made to each node of its syntax tree."""

    class Change(ast.NodeTransformer):
        def visit(self, node):
            return change(self.generic_visit(node))

    tree, copy = Change().visit(ast.parse(inspect.getsource(function))), {}
    exec(compile(ast.fix_missing_locations(tree), "<rewritten>", "exec"), vars(inspect.getmodule(function)), copy)
    return copy[function.__name__]


def with_all_mass(chain, *given):
    """R, which is 1 - D, stays 1."""
    mass = chain.mass
    pass_over(chain, *given)
    chain.mass = mass


def from_the_target(*given):
    """Lets recovered tokens be drawn by the target."""
    return accepted(*given)[0], None


def no_draft_filters(*given, **named):
    return verify_tree(*given, **named | {"draft_temperature": 1.0, "draft_top_k": 0, "draft_top_p": 1.0})


def noise_of(stream):
    return lambda seed, _, *more: gumbels(seed, stream, *more)


def shared_draws(seed, stream, rows, vocab_size, draws):
    return gumbels(seed, stream, rows, vocab_size, draws=1).repeat(draws, 1)


BUGS = {  # what is put where, as arguments of `decode` or by name into modules; and settings that show it
    "the first step's noise in every step": ({"stale": True}, {}),
    "1 - D dropped": ({}, {"verifying.residual.Chain.pass_over": with_all_mass}),
    "draft filters ignored": ({"verify_tree": no_draft_filters, "draft_filters": Filters(0.5)}, {}),
    "the draft's noise for the recovered token": (
        {"tree": TokenTree.chain(1), "sequences": 7_000}, {"verifying.distributions.gumbels": noise_of(Stream.DRAFT)},
    ),
    "the recovered token from the target": ({}, {"verification._accepted": from_the_target}),
    "siblings out of draw order": (
        {"verify_tree": lambda *given, ranks, **named: verify_tree(*given, **named),
         "tree": TokenTree([-1, 0, 0, 2, 2], [0, 1, 0, 1, 0])}, {},
    ),
    "one coin for all children": ({}, {"verification.coins": lambda seed, rows, ranks: coins(seed, rows, 0 * ranks)}),
    "one noise for independent draws": (
        {"method": "with_replacement", "replacement": True}, {"sampling.gumbels": shared_draws},
    ),
}  # fmt: skip


@lru_cache
def p_value(sequences, **options):
    language = ToyLanguage(3, seed=7, spread=1.4)
    text = decode(language, sequences=sequences, length=2, **options)
    return chi_square_p_value(joint_counts(text, 3), language.law(Filters(), 2))


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug, monkeypatch, request):
    arguments, patches = BUGS[bug]
    settings = {"tree": BINARY, "method": "without_replacement", "sequences": 2_500 if patches else 12_000} | arguments
    if patches:
        request.getfixturevalue("references")
    code = {name: settings.pop(name) for name in ("stale", "verify_tree") if name in settings}
    assert p_value(**settings) > SIGNIFICANCE
    for name, value in patches.items():
        monkeypatch.setattr(f"heavypath.kernels.{name}", value)
    assert p_value.__wrapped__(**settings, **code) < SIGNIFICANCE


def test_a_race_with_noise_of_its_own_is_found(monkeypatch, references):
    """It is still a sample of the target, but not the one that plain decoding takes."""
    language, settings = ToyLanguage(3, seed=5, spread=2.0), {"method": "race", "sequences": 500}
    plain = decode(language, TokenTree([-1]), **settings)
    assert torch.equal(decode(language, BINARY, **settings), plain)
    monkeypatch.setattr(verification, "gumbels", noise_of(Stream.TARGET))
    assert not torch.equal(decode(language, BINARY, **settings), plain)


def test_accepting_at_equality_is_found(monkeypatch):
    """A token that the target cannot draw is accepted by no coin, not even by 0."""
    monkeypatch.setattr(verification, "coins", lambda seed, row, rank: 0.0 * row)
    target, given = torch.tensor([-torch.inf, 0.0]).expand(1, 2, 2), (torch.tensor([[0, 0]]), torch.tensor([-1, 0]))
    options = {"method": "without_replacement", "impl": "torch"}
    assert verify_tree(*given, target, torch.zeros(1, 2, 2), **options).length.tolist() == [0]
    wrong = rewritten(accepted, lambda node: ast.LtE() if isinstance(node, ast.Lt) else node)
    monkeypatch.setattr(verification, "_accepted", wrong)
    assert verify_tree(*given, target, torch.zeros(1, 2, 2), **options).length.tolist() == [1]


@pytest.mark.parametrize(("owner", "name", "wrong"), [
    (None, "", None),
    (drafting, "root_rows", lambda rows, positions: rows),  # alike in every step
    (drafting, "node_rows", lambda roots, nodes: roots[:, None] + 0 * nodes),  # shared by all nodes
    (KeyValueCache, "accept", lambda *_: None),  # rows of the cache stay where they were
], ids=["right", "stale noise", "shared noise", "rows that stay"])  # fmt: skip
def test_a_bug_of_the_decoder_is_found(owner, name, wrong, monkeypatch):
    target, draft, prompt = tiny_llama(1, layers=1), tiny_llama(2, layers=1), torch.tensor([3, 1, 4])
    if owner is not None:
        monkeypatch.setattr(owner, name, wrong)
    decoding = SpeculativeDecoder(target, draft, "rsd-c", tree=TokenTree.k_ary(3, 2), verifier="rejection")
    out = decoding.generate(prompt.expand(5_000, -1), max_new_tokens=4, temperature=1.0, seed=3)
    p_value = chi_square_p_value(joint_counts(out.sequences[:, 3:], 7), exact_law(target, prompt, Filters(), 4))
    assert (p_value > SIGNIFICANCE) == (owner is None)


def test_a_gap_in_the_drafts_cache_is_found(monkeypatch):
    """It leaves the text right and only makes fewer drafts fit: a draft equal to the target shows it."""

    def acceptance():
        chain = SpeculativeDecoder(tiny_llama(1), tiny_llama(1), "chain", tree_size=5)
        return chain.generate(torch.tensor([[1, 2]]), max_new_tokens=40, temperature=1.0).stats.acceptance_by_rank

    def wrong(*given):
        feed = right(*given)
        feed.tokens[:, 0] = feed.tokens[:, 1]  # the root in the place of the token before it
        return feed

    right = drafting.root_feed
    assert acceptance() == [1.0]
    monkeypatch.setattr(drafting, "root_feed", wrong)
    assert acceptance() < [1.0]
