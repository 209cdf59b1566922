"""EAGLE heads as drafts: what they draft is what a pass over the whole text would, and the text stays the target's."""

from itertools import pairwise

import pytest
import torch
from block_checkpoints import LAWS, block_of
from drafted_cases import assert_drafts_as_said, assert_later_turns_agree, law_of, said_by, small_draft, steps_of
from families import tiny
from head_cases import VARIANTS, entries_over, head_of
from medusa_checkpoints import heads_of, oracle
from rounding import SMALL_MODEL
from tiny_models import transformers_greedy

from heavypath.kernels.commit import StateField
from heavypath.speculative import Pard, SpeculativeDecoder, load_demo_head
from heavypath.speculative.drafts.draft import Feed
from heavypath.speculative.drafts.heads import entries as head_module
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models import forward as forward_module
from heavypath.speculative.models.forward_of import forward_of

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize(("variant", "method"), [
    *((variant, "sequoia") for variant in VARIANTS),
    ("eagle-3", "chain"), ("eagle-3.1", "dyspec"), ("eagle-3, four tokens", "rsd-s"),
    ("p-eagle", "dyspec"),
])  # fmt: skip
def test_what_is_drafted_is_what_passes_over_the_whole_text_say(variant, method, target):
    head = head_of(target, **VARIANTS[variant])
    decoder = SpeculativeDecoder(target, head, method, tree_size=6)
    assert_drafts_as_said(decoder, head, 12, atol=SMALL_MODEL)


@pytest.mark.parametrize(("variant", "chunk"), [("eagle-1", 7), ("eagle-3", 512), ("eagle-3, four tokens", 7)])
def test_in_a_long_text_each_root_has_the_logits_of_a_pass_over_the_text(variant, chunk, target, monkeypatch):
    for module in (forward_module, head_module):
        monkeypatch.setattr(module, "PREFILL_CHUNK", chunk)
    head = head_of(target, **VARIANTS[variant])
    prompt = torch.randint(0, 7, (1, 30), generator=torch.Generator().manual_seed(1))
    decoder = SpeculativeDecoder(target, head, "sequoia", tree_size=8)
    out, steps = steps_of(decoder, prompt, max_new_tokens=100, temperature=1.0)
    assert_roots_are(entries_over(head, target, out.sequences[0]), steps)
    lengths = [int(before[StateField.LENGTHS, 0]) for before, _ in steps]
    assert lengths[0] == 29
    assert max(after - length for length, after in pairwise(lengths)) >= 3


def assert_roots_are(expected, steps):
    """Of one text: each step's logits after its root are the row of `expected` of the token before the root."""
    for before, drafted in steps:
        if drafted.logits is not None:
            root = expected[int(before[StateField.LENGTHS, 0]) - 1]
            torch.testing.assert_close(drafted.logits[0, 0], root.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["eagle-1", "eagle-3", "p-eagle"])
def test_a_later_turn_drafts_the_same_with_and_without_what_is_cached(variant, target):
    head = head_of(target, **VARIANTS[variant])
    assert_later_turns_agree(SpeculativeDecoder(target, head, "sequoia", tree_size=8))


@pytest.mark.parametrize("kind", ["eagle", "p-eagle", "medusa"])
def test_kept_rows_do_not_keep_the_memory_of_the_cache_that_they_were_in(kind, target, tmp_path):
    variant = VARIANTS.get(kind, {})
    head = heads_of(target, tmp_path)[0] if kind == "medusa" else head_of(target, **variant)
    cache = as_draft(head, forward_of(target, "target"), target).new_cache(2, 40)
    kept = cache.trimmed(slice(1), 5)
    tensors = [[each for each in vars(one).values() if isinstance(each, torch.Tensor)] for one in (kept, cache)]
    held, whole = ({tensor.untyped_storage().data_ptr() for tensor in of} - {0} for of in tensors)
    if kind != "medusa":
        assert held & whole <= {cache.rotary.untyped_storage().data_ptr()}  # a table that all caches share
        assert not kept._by_layer
        assert kept.nbytes < cache.nbytes / 4
    else:
        assert not held & whole
        assert kept.nbytes == 5 * 16 * 8


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_target_by_transformers_own_forward_pass(kind, tmp_path):
    model = tiny("gpt_neox", vocab_size=7, max_position_embeddings=128).double()
    head, tensors = (head_of(model), None) if kind == "eagle" else heads_of(model, tmp_path)
    out, steps = steps_of(SpeculativeDecoder(model, head, "sequoia", tree_size=8), PROMPT, max_new_tokens=40)
    text = out.sequences[0]
    assert_roots_are(entries_over(head, model, text) if tensors is None else oracle(tensors, model, text)[:, 0], steps)
    assert torch.equal(out.sequences, transformers_greedy(model, PROMPT, 40))


@pytest.mark.parametrize("method", ["sequoia", "chain", "rsd-s", "dyspec"])
def test_planned_trees_are_no_shallower_by_default_than_those_of_a_model(method, demo_pair):
    """More of a head's tokens are accepted than of a small model's."""
    target, draft, _ = demo_pair
    by_head, by_model = (SpeculativeDecoder(target, each, method).tree for each in (load_demo_head(target), draft))
    assert by_head.depth >= by_model.depth >= 3


def with_nan(head):
    head.fc.weight.data[0, 0] = torch.nan
    return head


UNFIT = {
    r"reads the hidden states \[0, 1, 3\], the target has 0 .. 2": {"taps": (0, 1, 3)},
    "for a target of width 32 with 7 tokens, got one of width 16 with 7": {"target_hidden_size": 32},
    "with 9 tokens, got one of width 16 with 7": {"vocab_size": 9, "draft_vocab_size": 9},
    "a head of width 24 needs an embedding of its own": {"hidden_size": 24},
    "rope type 'dynamic'": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "training mode": lambda head: head.train(),
    r"one dtype, got torch\.float64 and torch\.float32": lambda head: head.float(),
    r"draft has NaN or infinite weights in fc\.weight": with_nan,
}


@pytest.mark.parametrize("message", UNFIT)
def test_a_head_that_does_not_fit_is_refused(message, target):
    change = UNFIT[message]
    head = change(head_of(target)) if callable(change) else head_of(target, **change)
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(target, head)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", "p-eagle", "medusa", "pard", *LAWS])
@torch.inference_mode()
def test_acceptance_at_a_depth_is_that_of_a_draft_which_reads_itself(kind, target, tmp_path):
    """Calibration walks along texts token by token, and counts a token as drafted at the depth it would have.

    Beside one text is another as long at another depth: the last rows of a cache are then one text's only entry, and
    another's last of several. Medusa heads and the like propose nothing below their last level, here the third.
    """
    if kind == "pard":
        given = Pard(small_draft(), mask_token_id=6, depths=3)
    elif kind == "medusa":
        given = heads_of(target, tmp_path, heads=3)[0]
    else:
        given = block_of(target, tmp_path, block=4, **LAWS[kind]) if kind in LAWS else head_of(target, **VARIANTS[kind])
    forward, text = forward_of(target, "target"), torch.tensor([3, 1, 4, 1, 5, 2, 6])
    draft = as_draft(given, forward, target)
    cache, texts = draft.new_cache(2, 7), text.expand(2, -1)
    forward.prefill(texts, forward.new_cache(2, 7), taps=draft.taps(cache))
    cache.begin(torch.tensor([3, 3]))
    draft.prefill(texts[:, :3], cache)
    before = cache.keys.clone(), cache.values.clone()
    for length, depths in ((3, (0, 0)), (4, (1, 1)), (5, (2, 2)), (6, (0, 3))):
        at = torch.full((2,), length)
        feed = Feed(
            tokens=texts[:, length - 1 : length + 1], positions=at[:, None], cache_rows=at[:, None],
            parent_rows=at[:, None] - 1, prefix_lengths=at, visible_rows=length + 1,
            ancestor_mask=torch.ones(1, 1, 1).bool(), news=5, levels=9, drafted=torch.tensor(depths),
        )  # fmt: skip
        for logits, depth in zip(draft(feed, cache)[:, -1], depths, strict=True):
            known, path = text[: length - depth + 1], text[length - depth + 1 : length + 1]
            said = said_by(given, target, known, path.tolist())
            torch.testing.assert_close(law_of(logits.float()), said, atol=1e-4, rtol=1e-4)
        if kind in LAWS:  # the others keep their own entries there
            for now, then in zip((cache.keys, cache.values), before, strict=True):
                assert torch.equal(now[:, :, :7], then[:, :, :7])
