"""Trained heads by compiled code: each call does what PyTorch's operations do, on caches that are the same."""

from copy import copy, deepcopy

import pytest
import torch
from drafted_cases import (
    PROMPTS,
    assert_equal,
    assert_later_turns_agree,
    assert_replays_as_run,
    drafted,
    drafted_nodes,
)
from head_cases import VARIANTS, head_of
from kernel_cases import needs_compiler
from medusa_checkpoints import heads_of
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters
from heavypath.kernels.native import library as native_library
from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.calibration import ways_to_draft
from heavypath.speculative.drafts.heads.draft import HeadDraft
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.drafts.medusa.draft import MedusaDraft
from heavypath.speculative.models.forward import Taps
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.walking import Extent, walk

pytestmark = needs_compiler
ODD = {"hidden_size": 78, "intermediate_size": 70, "owns_embedding": True, "owns_lm_head": True, "head_dim": 20}
HEADS = {name: given for name, given in VARIANTS.items() if "p-eagle" not in name} | {  # whose calls are PyTorch's
    "eagle-3, odd sizes": ODD | {"num_attention_heads": 3, "num_key_value_heads": 1},
    "eagle-3 of two layers": {"layers": 2, "norm_before_residual": True},
    "eagle-1, other biases": {"generation": 1, "taps": (1,), "biases": frozenset({"v_proj", "o_proj", "down_proj"})},
}
KINDS = [*HEADS, "medusa", "medusa of two layers, the target's lm_head"]
MORE_PROMPTS = [*PROMPTS, torch.tensor([4])]  # before the root of the last one there is no token


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, max_position_embeddings=256)


def draft_of(kind, target, folder):
    if kind.startswith("medusa"):
        return heads_of(target, folder, layers=1 + ("two" in kind), owns="target's" not in kind)[0]
    return head_of(target, **HEADS[kind])


def copied(cache, dtype=None):
    """A cache with the same numbers, in memory of its own, and perhaps of another type."""
    other = copy(cache)
    for name, each in vars(cache).items():
        if isinstance(each, torch.Tensor):
            setattr(other, name, each.to(dtype if each.is_floating_point() else None, copy=True))
    if hasattr(other, "_by_layer"):
        other._by_layer = other._split()
    return other


def numbers_of(cache):
    return [each for each in vars(cache).values() if isinstance(each, torch.Tensor)]


def compare_calls(monkeypatch, compare, exact=None):
    """Do all that drafts do by PyTorch's operations, too, and compare what is returned and what is cached.

    exact: the same draft in fp64, which then does it as well. Returns the list of what was compared
    """
    seen = []

    def beside(name, original):
        def call(draft, given, cache, *more):
            native, caches = draft.native, [copied(cache)]
            if native is None:
                return original(draft, given, cache, *more)
            if exact is not None:
                caches.append(copied(cache, torch.float64))
            found = [original(draft, given, cache, *more)]
            draft.native = None
            try:
                found.append(original(draft, given, caches[0], *more))
            finally:
                draft.native = native
            if exact is not None:
                found.append(original(exact, given, caches[1], *more))
            results = zip(found, [cache, *caches], strict=True)
            compare(*([*([] if one is None else [one]), *numbers_of(each)] for one, each in results))
            seen.append(name)
            return found[0]

        return call

    for kind in (HeadDraft, MedusaDraft):

        def read_alone(draft, states, cache, tokens, positions, rows, taps=kind.taps):
            taps(draft, cache).read([each.to(draft.dtype) for each in states], tokens, positions, rows)

        def taps(draft, cache, taps=kind.taps, read_alone=read_alone):
            def both(states, tokens, positions, rows):
                beside("taps", read_alone)(draft, states, cache, tokens, positions, rows)

            return Taps(taps(draft, cache).numbers, both)

        monkeypatch.setattr(kind, "taps", taps)
        for name in ("__call__", "prefill"):
            monkeypatch.setattr(kind, name, beside(name, getattr(kind, name)))
    return seen


def near(found, usual):
    for one, other in zip(found, usual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "size"), [("sequoia", 9), ("dyspec", 6)])
def test_a_call_is_that_of_pytorch(kind, method, size, target, monkeypatch, tmp_path):
    """In a batch of texts of different lengths, over steps that accept some, at the end of which trees are cut."""
    decoder = SpeculativeDecoder(target, draft_of(kind, target, tmp_path), method, tree_size=size)
    assert decoder._draft.native is not None
    seen = compare_calls(monkeypatch, near)
    out, _ = drafted_nodes(decoder, 14, MORE_PROMPTS)
    assert {*seen} >= {"__call__", "taps"}
    assert out.stats.tokens_per_step > 1.05


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3.1", "eagle-3, four tokens", "medusa"])
def test_a_later_turn_is_that_of_pytorch(kind, target, monkeypatch, tmp_path):
    decoder = SpeculativeDecoder(target, draft_of(kind, target, tmp_path), "sequoia", tree_size=8)
    compare_calls(monkeypatch, near)
    assert_later_turns_agree(decoder, unread=0 if kind == "medusa" else 12)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", "eagle-3, four tokens", "medusa"])
@torch.inference_mode()
def test_what_calibration_asks_for_is_what_pytorch_says(kind, target, monkeypatch, tmp_path):
    """Texts that count as drafted at depths of their own."""
    forward = forward_of(target, "target")
    draft = as_draft(draft_of(kind, target, tmp_path), forward, target)
    seen = compare_calls(monkeypatch, near)
    prompts = [torch.tensor([3, 1, 4]), torch.tensor([1, 5])]
    walk(forward, draft, prompts, ways_to_draft(1.0, "cpu")[0], Filters(1.0), Extent(tokens=9, sequences=2, depth=3), 1)
    assert seen.count("__call__") > 5


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3.1", "eagle-3, residual normed, biases", "medusa"])
def test_a_call_in_16_bits_is_as_near_as_that_of_pytorch(kind, target, monkeypatch, tmp_path):
    """PyTorch's operations round less often, some of them."""
    narrow = deepcopy(target).bfloat16()
    given, wide = draft_of(kind, narrow, tmp_path), deepcopy(narrow).double()
    exact = as_draft(deepcopy(given).double(), forward_of(wide, "target"), wide)
    decoder, errors = SpeculativeDecoder(narrow, given, "chain", tree_size=4), [0.0, 0.0]

    def compare(found, usual, right):
        for which, numbers in enumerate((found, usual)):
            for one, other in zip(numbers, right, strict=True):
                errors[which] += float((one.double() - other).masked_fill(other.isinf(), 0).square().sum())

    seen = compare_calls(monkeypatch, compare, exact)
    decoder.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=24, temperature=1.0)
    assert {*seen} >= {"__call__", "taps"}
    assert 0 < errors[0] <= 1.6**2 * errors[1]


@pytest.mark.parametrize("method", ["sequoia", "specinfer", "dyspec", "rsd-s", "eagle-2"])
@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3.1", "eagle-3, four tokens", "medusa"])
def test_a_recorded_step_does_what_one_does_that_is_not(kind, method, target, monkeypatch, tmp_path):
    decoder = SpeculativeDecoder(target, draft_of(kind, target, tmp_path), method, tree_size=8)
    replays = assert_replays_as_run(decoder, MORE_PROMPTS, monkeypatch, max_new_tokens=40, temperature=0.8, seed=3)
    assert sum(replays) > 10


@pytest.mark.parametrize("kind", ["eagle-3", "medusa"])
def test_threads_change_nothing(kind, target, monkeypatch, tmp_path):
    decoder = SpeculativeDecoder(target, draft_of(kind, target, tmp_path), "sequoia", tree_size=8)
    alone = drafted(decoder, MORE_PROMPTS, max_new_tokens=12, temperature=1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(native_library, "SHARE", 1)
    assert_equal(alone, drafted(decoder, MORE_PROMPTS, max_new_tokens=12, temperature=1.0))


def test_what_is_not_compiled_is_left_to_pytorch(target):
    forward = forward_of(target, "target")
    assert as_draft(head_of(target), forward, target).native is not None
    for head in (head_of(target, hidden_act="gelu"), hooked := head_of(target)):
        if head is hooked:
            head.fc.register_forward_hook(lambda *given: None)
        assert as_draft(head, forward, target).native is None
    wide = deepcopy(target).double()
    assert as_draft(head_of(wide), forward_of(wide, "target"), wide).native is None
