"""A verifier of one's own replaces a method's: the same text by the same rule, and its answers are checked."""

import pytest
import torch
from own_verifier import sample_the_target
from tiny_models import transformers_greedy

from heavypath.kernels.nodes import VerifyInputs
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative import METHODS, Method, Profile, SpeculativeDecoder, TokenTree, Verified, read_trace
from heavypath.speculative.output.page import trace_page
from heavypath.speculative.trees.growth import Growth

PROMPT = torch.tensor([3, 1, 4])


@pytest.mark.parametrize(("method", "temperature"), [("eagle-2", 0.8), ("naive-distinct", 0.0)])
def test_the_examples_verifier_gives_the_text_of_the_built_in_one(method, temperature, tiny_pair):
    options = {"max_new_tokens": 24, "temperature": temperature, "seed": 6}
    prompts = torch.tensor([[3, 1, 4], [2, 2, 5]])
    built_in, own = (
        SpeculativeDecoder(*tiny_pair, method, tree_size=7, verifier=verifier).generate(prompts, **options)
        for verifier in (None, sample_the_target)
    )
    assert torch.equal(own.sequences, built_in.sequences)
    assert torch.equal(own.stats.accepted, built_in.stats.accepted)
    assert own.stats.tokens_per_step > 1.1


@pytest.mark.parametrize("method", ["sequoia", "spectr", "dyspec"])
def test_a_verifier_gets_all_that_the_methods_own_one_needs(method, tiny_pair):
    """The built-in rule, handed in from outside: logits of both models, filters, noise and the depth.

    It is called in each step: a recorded one would not call it again.
    """
    row, calls = METHODS[method], []
    name = "rejection" if row.verifiers else None

    def built_in(nodes, target_logits, draft_logits, *, max_depth, target_filters, draft_filters, noise):
        calls.append(max_depth)
        how = row.verification, row.draw == "with_replacement"
        filters = target_filters, draft_filters
        given = VerifyInputs(nodes, target_logits, draft_logits, *how, max_depth, *filters, noise)
        return step_kernels(nodes.tokens.device).verify(given)

    options = {"max_new_tokens": 24, "temperature": 0.8, "top_k": 5, "seed": 6}
    shape = {"tree_size": 8, "draft_temperature": 1.3}
    own = SpeculativeDecoder(*tiny_pair, method, verifier=built_in, **shape).generate(PROMPT[None], **options)
    expected = SpeculativeDecoder(*tiny_pair, method, verifier=name, **shape).generate(PROMPT[None], **options)
    assert torch.equal(own.sequences, expected.sequences)
    assert len(calls) == own.stats.steps > 5


def test_children_for_an_own_verifier_are_all_drawn_from_the_draft(tiny_pair):
    """Sequoia's own rule gets further children once the draft has no token left, which other rules do not expect."""
    seen = []

    def note(nodes, target_logits, draft_logits, **options):
        seen.append((nodes.tokens >= 0).sum(-1).tolist())
        return sample_the_target(nodes, target_logits, draft_logits, **options)

    options = {"tree": TokenTree.from_branching([4]), "draft_top_k": 2}
    SpeculativeDecoder(*tiny_pair, "sequoia", verifier=note, **options).generate(PROMPT[None], 6, temperature=0.8)
    assert seen
    assert all(count in ([1], [3]) for count in seen), seen
    assert [3] in seen


def test_noise_rows_of_an_own_verifier_are_never_given_twice(tiny_pair):
    """ersd's own noise is keyed by position, and would come again in the next step: an own verifier gets fresh rows."""
    seen = []

    def note(nodes, target_logits, draft_logits, **options):
        seen.extend(options["noise"].rows[nodes.tokens >= 0].tolist())
        return sample_the_target(nodes, target_logits, draft_logits, **options)

    decoder = SpeculativeDecoder(*tiny_pair, "ersd", verifier=note)
    decoder.generate(torch.tensor([[3, 1], [2, 2]]), 20, temperature=1.0)
    assert len(seen) == len(set(seen)) > 40


@pytest.mark.parametrize(("verifier", "error", "message"), [
    ("speculation", ValueError, "verifier must be None, for the method's default, one of rejection, held, .*or a "
                                "callable as described by Verifier; got 'speculation'"),
    (3, TypeError, "or a callable as described by Verifier; got int"),
    (Verified, TypeError, "got the class Verified"),
    (lambda nodes, target_logits: None, TypeError, r"must be callable as <lambda>\(nodes, target_logits, draft_logits, "
                                                   r"\*, max_depth, target_filters, draft_filters, noise\): too many"),
])  # fmt: skip
def test_what_cannot_verify_is_refused_when_a_decoder_is_made(verifier, error, message, tiny_pair):
    with pytest.raises(error, match=message):
        SpeculativeDecoder(*tiny_pair, verifier=verifier)
    measured = r"a profile measures the method's own verification; .* give tree or tree_size"
    with pytest.raises(ValueError, match=measured):
        SpeculativeDecoder(*tiny_pair, profile=Profile.__new__(Profile), verifier=sample_the_target)


def changed(**fields):
    """The example's verifier, with some fields of its answer replaced: functions of what they were."""

    def mine(nodes, target_logits, draft_logits, **options):
        verified = sample_the_target(nodes, target_logits, draft_logits, **options)
        return verified._replace(**{name: change(getattr(verified, name)) for name, change in fields.items()})

    return mine


@pytest.mark.parametrize(("verifier", "error", "message"), [
    (lambda *_, **__: None, TypeError, r"must return Verified\(path, length, next_token\), got NoneType"),
    (changed(path=lambda path: path[:, :1]), ValueError,
     r"'mine' must return path as a LongTensor \[1, 3\] on cpu, got torch.int64 \[1, 1\]"),
    (changed(length=lambda length: length.int()), ValueError, r"length as a LongTensor \[1\] on cpu, got torch.int32"),
    (changed(next_token=lambda token: int(token)), TypeError, "must return tensors, got next_token int"),
    (changed(next_token=lambda token: token - 7), ValueError, r"next_token in 0 .. 6, got \[-"),
    (changed(length=lambda length: length + 1), ValueError, r"then -1; got path \[0, .* in a tree with parents \[-1, "),
    (changed(path=lambda path: torch.tensor([[0, 2, 1]]), length=lambda length: length * 0 + 2), ValueError,
     r"must return paths of 0, then `length` drafted nodes from parent to child, then -1; got path \[0, 2, 1\]"),
    (changed(path=lambda path: torch.tensor([[0, 9, -1]]), length=lambda length: length * 0 + 1), ValueError,
     r"got path \[0, 9, -1\] of length 1"),
])  # fmt: skip
def test_what_a_verifier_returns_is_checked(verifier, error, message, tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair, tree=TokenTree.k_ary(1, 2), verifier=verifier)
    with pytest.raises(error, match=message):
        decoder.generate(PROMPT[None], 8)


def test_a_trace_says_that_an_own_verifier_gives_no_reasons(tiny_pair, tmp_path):
    decoder = SpeculativeDecoder(*tiny_pair, "naive", tree_size=8, verifier=sample_the_target)
    decoder.generate(PROMPT[None], 30, temperature=0.8, trace=tmp_path / "trace")
    header, steps = read_trace(tmp_path / "trace")
    assert header["verify"] == "own"
    fates, usual = {fate for step in steps for fate in step["fates"]}, {"root", "accepted", "refused", "parent"}
    assert usual <= fates <= usual | {"absent", "equal"}
    assert all(step["chosen"] == step["path"] for step in steps)
    assert not any(coin is not None for step in steps for coin in step["coins"])
    page = trace_page(header, steps)
    assert "A verifier that gives no reasons drew this token." in page
    assert '"not accepted"' in page
    assert "not the target's token" not in page


def misspelt(size, acceptence=None):
    return TokenTree.chain(size - 1)


@pytest.mark.parametrize(("row", "message"), [
    (("without-replacement", "target_sample", TokenTree.chain),
     "draw must be one of without_replacement, with_replacement, top_k, got 'without-replacement'"),
    (("without_replacement", "target_samples", TokenTree.chain),
     "verification must be one of without_replacement, with_replacement, kseq, held, .*race, .*, got 'ta"),
    (("without_replacement", "greedy", TokenTree.chain), "verification must be one of .*, got 'greedy'"),
    (("with_replacement", "without_replacement", TokenTree.chain),
     "verification 'without_replacement' is lossless for children drawn without_replacement, got draw 'with_replace"),
    (("top_k", "kseq", TokenTree.chain), "'kseq' is lossless for children drawn with_replacement, got draw 'top_k'"),
    (("top_k", "target_sample", misspelt), "a parameter of tree_of .* must be one of acceptance, .*, got 'acceptence'"),
    (("top_k", "held", TokenTree.chain), "'held' is lossless for children drawn without_replacement or with_replace"),
    (("top_k", "target_sample", misspelt, True), "fill needs draw 'without_replacement', got 'top_k'"),
    (("top_k", "own", TokenTree.chain), "verification 'own' needs a verifier, got None"),
])  # fmt: skip
def test_a_row_that_is_misspelt_or_not_lossless_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        Method(*row)


def test_rows_of_ones_own_decode(monkeypatch, tiny_pair):
    def two_chains(size, max_depth=3):
        return TokenTree.independent(2, min(max_depth, (size - 1) // 2))

    for verification, verifier in (("target_sample", None), ("held", None), ("own", sample_the_target)):
        monkeypatch.setitem(METHODS, "mine", Method("without_replacement", verification, two_chains, verifier=verifier))
        decoder = SpeculativeDecoder(*tiny_pair, "mine", tree_size=7, max_depth=2)
        assert len(decoder.tree) == 5
        greedy = transformers_greedy(tiny_pair[0], PROMPT[None], 20)
        assert torch.equal(decoder.generate(PROMPT[None], 20).sequences, greedy)
        assert decoder.generate(PROMPT[None], 8, temperature=1.0).stats.verification == verification
    with pytest.raises(ValueError, match="method 'mine' has no option 'width'; it has max_depth"):
        SpeculativeDecoder(*tiny_pair, "mine", width=3)
    grown = Method("without_replacement", "held_traversal", lambda size: Growth("slot", 6, 3, 2))
    monkeypatch.setitem(METHODS, "mine", grown)
    with pytest.raises(ValueError, match="held traversal needs a static tree, got Growth"):
        SpeculativeDecoder(*tiny_pair, "mine").generate(PROMPT[None], 8, temperature=1.0)
