"""Further kinds of block drafts: their laws are those of the formulas in every layout, and trees over them are exact.

Each kind is a module of tests/support with its checkpoints, an oracle, and what is refused.
"""

import re

import block_dfly
import block_dspine
import block_lilicorr
import block_treeflash
import pytest
import torch
from block_checkpoints import TEXT, driven, said_of, tensors_of, variant
from block_kinds import drafted, target_of
from drafted_cases import PROMPTS, assert_drafts_as_said
from rounding import SMALL_MODEL

from heavypath.speculative import SpeculativeDecoder, goodness_of_fit, joint_law

KINDS = {"DFly": block_dfly, "DSpine": block_dspine, "LiLiCorr": block_lilicorr, "TreeFlash": block_treeflash}
LAYOUTS = [(kind, layout) for kind in KINDS for layout in KINDS[kind].LAYOUTS]
REFUSED = [(kind, message) for kind in KINDS for message in KINDS[kind].REFUSED]
WAYS = [("sequoia", "rejection"), ("sequoia", "traversal"), ("sequoia", "held"), ("dyspec", "rejection"),
        ("ersd", None), ("eagle-2", None)]  # fmt: skip
EXACT = [
    *((*way, 2_000) for way in WAYS[:2]),
    *(pytest.param(*way, 20_000, marks=pytest.mark.slow) for way in WAYS),
]
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def least_likely(oracle, depth):
    """A path of tokens that can be drafted, each the least likely of them."""
    path = ()
    while len(path) < depth:
        logits = oracle.after(path)
        path += (int(logits.masked_fill(logits.isinf(), torch.inf).argmin()),)
    return path


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_every_layout_has_the_laws_of_the_formulas(kind, layout, tmp_path):
    """Below paths of all depths, after texts of several lengths, one token's among them: probabilities to 1e-5."""
    form, options = KINDS[kind].LAYOUTS[layout]
    target = target_of()
    head = drafted(form, tmp_path, target, **options)
    for text in (TEXT, TEXT[:3], TEXT[:1]):
        oracle, depth = said_of(head, target, text), head.config.depths - 1
        for path in ((8, 9, 2, 7)[:depth], least_likely(oracle, depth)):
            expected = torch.stack([oracle.after(path[:end]) for end in range(depth + 1)])
            found = driven(head, target, text, path)
            torch.testing.assert_close(found, expected.float(), rtol=0, atol=SMALL_MODEL)
            torch.testing.assert_close(found.double().softmax(-1), expected.softmax(-1), rtol=0, atol=1e-5)
        assert len(oracle.base) == head.config.depths


@pytest.mark.parametrize("method", ["sequoia", "dyspec"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_of_a_tree_has_its_law(kind, method, tmp_path):
    """In a batch, over steps that accept some nodes; none is deeper than the block."""
    target = target_of(7)
    head = drafted(KINDS[kind].KIND, tmp_path, target, scale=2.0, block=4)
    decoder = SpeculativeDecoder(target, head, method, tree_size=8, max_depth=3)
    nodes = assert_drafts_as_said(decoder, head, 12, [*PROMPTS, torch.tensor([4])], atol=SMALL_MODEL)
    assert max(len(node.path) for node in nodes) > 1, "no node was deep"


@pytest.mark.parametrize(("method", "verifier", "sequences"), EXACT)
@pytest.mark.parametrize("kind", KINDS)
def test_the_joint_law_of_four_tokens_is_the_targets(kind, method, verifier, sequences, tmp_path):
    """By enumeration. Of each kind but one the draft has few of the tokens, so that Q lacks what P has."""
    target = target_of(7)
    few = {"drafted": 4, "own_lm_head": True} if kind == "DFly" else {}
    head = drafted(KINDS[kind].KIND, tmp_path, target, scale=0.6, **few)
    given = {} if verifier is None else {"verifier": verifier}
    decoder = SpeculativeDecoder(target, head, method, tree_size=6, **given)
    out = decoder.generate(PROMPT.expand(sequences, -1), max_new_tokens=4, temperature=1.5, seed=5)
    assert out.stats.tokens_per_step > 1.2
    fit = goodness_of_fit(out.sequences[:, PROMPT.shape[1] :], joint_law(target, PROMPT[0], 4, temperature=1.5))
    assert fit.is_lossless(), str(fit)


def refused(kind, folder, message, write):
    with pytest.raises(ValueError, match=message):
        drafted(kind._replace(write=write), folder, target_of())


@pytest.mark.parametrize(("kind", "message"), REFUSED)
def test_what_is_not_understood_is_refused_by_its_name(kind, message, tmp_path):
    form, changes = KINDS[kind].KIND, KINDS[kind].REFUSED[message]
    refused(form, tmp_path, message, lambda *given: form.write(*given, **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_that_is_missing_is_named(kind, tmp_path):
    """Of those that the kind has besides a backbone; or what config.json has and the tensors then lack."""
    form = KINDS[kind].KIND
    shape = variant(**form.options)
    for name in form.tensors(shape).keys() - tensors_of(shape).keys():

        def without(shape, tensors, name=name):
            return form.write(shape, {other: each for other, each in tensors.items() if other != name})

        refused(form, tmp_path, f"{re.escape(name.split('.', 1)[-1])}|enable_hidden_correction True, and", without)


def test_a_dspine_that_was_saved_before_its_codes_were_made_is_refused(tmp_path):
    form = block_dspine.KIND

    def unready(shape, tensors):
        config, whole = form.write(shape, tensors)
        return config, whole | {"transfer_ready": torch.tensor(False)}

    refused(form, tmp_path, "'transfer_ready' in .* is false: it was saved before", unready)
