"""The checks of losslessness can fail: each of these bugs, put into the program, is found by one of them.

The list is that of published code: stale noise, the factor 1 - D dropped, draft filters ignored, draft noise used again
for the recovered token, the recovered token drawn from the target instead of the residual, siblings tried out of draw
order. `make mutants` puts in many more, which the tests of each kernel and of the step are to find.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import exact_law, tiny_llama

from heavypath.kernels import step_kernels, verification
from heavypath.kernels.filtering import Filters
from heavypath.kernels.noise import Stream
from heavypath.kernels.verifying.residual import Offers
from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.decoding import drafting

PROMPT, BINARY = torch.tensor([1, 2, 0]), TokenTree.k_ary(2, 2)
PAIR = [tiny_llama(seed, vocab_size=3, layers=1) for seed in (5, 6)]
OTHER = [tiny_llama(seed, vocab_size=4, layers=1, initializer_range=0.5) for seed in (1, 2)]
gumbels, coins = verification.gumbels, verification.coins
accepted, pass_over = verification._accepted, Offers.pass_over


def without_compiled_code(monkeypatch):
    """Decoding on this CPU runs the references, into which bugs are put."""
    monkeypatch.setattr("heavypath.kernels.implementation.library", lambda: None)
    monkeypatch.setitem(step_kernels._CHOSEN, "cpu", step_kernels.StepKernels("torch"))


def with_all_mass(chain, *given):
    """R, which is 1 - D, stays 1."""
    mass = chain.mass
    pass_over(chain, *given)
    chain.mass = mass


def from_the_target(*given):
    """Lets recovered tokens be drawn by the target."""
    return accepted(*given)[0], None


def verifying_otherwise(change):
    """The kernels of a step, whose verification is given something else."""
    verify = step_kernels.StepKernels("native").verify
    return lambda device: SimpleNamespace(verify=lambda given: verify(change(given)))


def no_draft_filters(given):
    return given._replace(draft_filters=Filters())


def younger_first(given):
    return given._replace(nodes=given.nodes._replace(ranks=1 - given.nodes.ranks))


def noise_of(stream):
    return lambda seed, _, *more: gumbels(seed, stream, *more)


def shared_draws(seed, stream, rows, vocab_size, draws):
    return gumbels(seed, stream, rows, vocab_size, draws=1).repeat(draws, 1)


VERIFY = "speculative.decoding.rules.step_kernels"
BUGS = {  # what is put where; and another pair, number of tokens, or options of the decoder that show it
    "the first step's noise in every step": (
        "speculative.decoding.drafting.root_rows", lambda rows, positions: rows, {},
    ),
    "the same noise at all nodes": (
        "speculative.decoding.drafting.node_rows", lambda roots, nodes: roots[:, None] + 0 * nodes, {},
    ),
    "rows of the cache that stay": (
        "speculative.models.caches.KeyValueCache.accept", lambda *_: None, {"pair": OTHER, "length": 4},
    ),
    "1 - D dropped": ("kernels.verifying.residual.Offers.pass_over", with_all_mass, {}),
    "draft filters ignored": (VERIFY, verifying_otherwise(no_draft_filters), {"draft_temperature": 0.5}),
    "the draft's noise for the recovered token": (
        "kernels.verifying.distributions.gumbels", noise_of(Stream.DRAFT), {"pair": OTHER, "tree": TokenTree.chain(1)},
    ),
    "the recovered token from the target": ("kernels.verification._accepted", from_the_target, {}),
    "siblings out of draw order": (VERIFY, verifying_otherwise(younger_first), {}),
    "one coin for all children": (
        "kernels.verification.coins", lambda seed, rows, ranks: coins(seed, rows, 0 * ranks), {},
    ),
    "one noise for independent draws": ("kernels.sampling.gumbels", shared_draws, {"method": "specinfer"}),
}  # fmt: skip


@pytest.mark.budget(math.inf)
@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_bug_is_found(bug, monkeypatch):
    place, wrong, options = BUGS.get(bug, ("", None, {}))
    options = {"pair": PAIR, "length": 3, "method": "rsd-c", "tree": BINARY, "verifier": "rejection"} | options
    pair, length, sequences = options.pop("pair"), options.pop("length"), 5_000
    if place.startswith("kernels"):
        without_compiled_code(monkeypatch)
        sequences = 2_000
    if bug is not None:
        monkeypatch.setattr(f"heavypath.{place}", wrong)
    out = SpeculativeDecoder(*pair, **options).generate(PROMPT.expand(sequences, -1), length, temperature=1.0, seed=3)
    counts = joint_counts(out.sequences[:, 3:], pair[0].config.vocab_size)
    p_value = chi_square_p_value(counts, exact_law(pair[0], PROMPT, Filters(), length))
    assert (p_value > SIGNIFICANCE) == (bug is None)


def test_a_race_with_noise_of_its_own_is_found(monkeypatch):
    """It is still a sample of the target, but not the one that plain decoding takes."""
    without_compiled_code(monkeypatch)
    options = {"input_ids": PROMPT.expand(100, -1), "max_new_tokens": 4, "temperature": 1.0}
    plain = SpeculativeDecoder(PAIR[0], None, "autoregressive").generate(**options).sequences
    decoder = SpeculativeDecoder(*PAIR, "ersd", tree=BINARY)
    assert torch.equal(decoder.generate(**options).sequences, plain)
    monkeypatch.setattr(verification, "gumbels", noise_of(Stream.TARGET))
    assert not torch.equal(decoder.generate(**options).sequences, plain)


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
