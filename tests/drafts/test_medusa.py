"""Medusa heads as drafts: each depth has its head's logits of the root's feature, and the text stays the target's."""

import pytest
import torch
from draft_checks import (
    assert_a_batch_is_each_alone,
    assert_greedy_text_is_that_of_transformers,
    assert_races_are_plain_sampling,
)
from head_cases import drafted_any, head_of, inner_nodes, steps_of
from medusa_cases import heads_of
from medusa_checkpoints import of_states, oracle
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import exact_law, tiny_llama, transformers_greedy
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from heavypath.kernels.commit import StateField
from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    LOSSLESS_METHODS,
    METHODS,
    Cascade,
    MedusaHeads,
    Mixture,
    PromptLookup,
    SpeculativeDecoder,
    TokenTree,
    calibrate,
    read_trace,
)
from heavypath.speculative.costs.roofline import Device, Work, estimated_costs
from heavypath.speculative.decoding.growth import Growth
from heavypath.speculative.drafts import Feed, as_draft, most_levels
from heavypath.speculative.drafts.medusa.heads import MedusaConfig
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.profile import describe, draft_parameter_count
from heavypath.speculative.tree_choice import default_tree

DRAFTED = [method for method in METHODS if method != "autoregressive"]
LOSSLESS = [method for method in DRAFTED if method in LOSSLESS_METHODS]
QUICK = ("sequoia", "dyspec")  # methods that stand for others where a test takes seconds
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def target():
    """In fp64: random weights with opinions make much of rounding."""
    return tiny_llama(0, max_position_embeddings=256).double()


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    return heads_of(target, tmp_path_factory.mktemp("medusa"))[0]


def expected_after(tensors, target, text, depth):
    """What head `depth` says of a text whose last token is the root, [V]: of the state before it, or of zeros."""
    if len(text) > 1:
        return oracle(tensors, target, text)[len(text) - 2, depth].float()
    return of_states(tensors, target, torch.zeros(1, target.config.hidden_size).double())[0, depth].float()


@pytest.mark.parametrize("owns", [True, False], ids=["own", "the target's"])
@pytest.mark.parametrize("method", ["chain", "sequoia", "dyspec", "rsd-s"])
def test_every_node_has_its_depths_head_of_the_feature_before_the_root(method, owns, target, tmp_path):
    heads, tensors = heads_of(target, tmp_path, owns=owns, layers=2)
    prompts, new = [torch.tensor([3, 1, 4, 1, 5, 2]), torch.tensor([2, 6, 5]), torch.tensor([4])], 14
    padded = torch.stack([torch.cat([torch.zeros(6 - len(each), dtype=torch.long), each]) for each in prompts])
    mask = torch.stack([torch.arange(6) >= 6 - len(each) for each in prompts]).long()
    decoder = SpeculativeDecoder(target, heads, method, tree_size=8)
    out, steps = steps_of(decoder, padded, attention_mask=mask, max_new_tokens=new, temperature=1.0)
    depths = []
    for before, drafted in drafted_any(steps):
        for slot in range(before.shape[1]):
            member, length = (int(before[field, slot]) for field in (StateField.MEMBER, StateField.LENGTHS))
            text = torch.cat([prompts[member], out.sequences[member, 6:]])[: length + 1]
            for node, path in inner_nodes(before, drafted, slot):
                expected = expected_after(tensors, target, text, len(path))
                torch.testing.assert_close(drafted.logits[slot, node], expected, atol=1e-4, rtol=1e-4)
                depths.append(len(path))
    assert max(depths) > 1, "no node was deep"
    assert out.stats.tokens_per_step > 1.1, "nothing is shown of features behind accepted nodes"


@pytest.mark.parametrize("method", DRAFTED)
def test_greedy_text_is_the_targets_own(method, heads, target):
    expected = transformers_greedy(target, PROMPT, 60)
    out = SpeculativeDecoder(target, heads, method, tree_size=8).generate(PROMPT, max_new_tokens=60)
    assert torch.equal(out.sequences, expected)


@pytest.mark.slow
def test_greedy_text_with_medusa_heads_is_that_of_transformers(demo_pair, tmp_path):
    target, _, tokenizer = demo_pair
    heads, _ = heads_of(target, tmp_path, owns=False, scale=0.1)
    decoders = {
        method: SpeculativeDecoder(target, heads, method, tree_size=16) for method in ("sequoia", "dyspec", "top-k")
    }
    assert_greedy_text_is_that_of_transformers([*decoders.values()], tokenizer)


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}])
def test_ersd_writes_what_plain_sampling_writes(sampling, heads, target):
    assert_races_are_plain_sampling(target, heads, PROMPT, **sampling)


@pytest.mark.parametrize(
    "method", [method if method in QUICK else pytest.param(method, marks=pytest.mark.slow) for method in LOSSLESS]
)
def test_the_joint_law_of_four_tokens_is_exact(method, tmp_path):
    target = tiny_llama(1)
    heads, _ = heads_of(target, tmp_path, heads=3, scale=0.5)
    prompt = torch.tensor([3, 1, 4])
    law = exact_law(target, prompt, Filters(1.0), 4)
    decoder = SpeculativeDecoder(target, heads, method, tree_size=6)
    out = decoder.generate(prompt.expand(20_000, -1), max_new_tokens=4, seed=11, temperature=1.0)
    assert chi_square_p_value(joint_counts(out.sequences[:, 3:], 7), law) > SIGNIFICANCE
    assert out.stats.tokens_per_step > 1.1


@pytest.mark.parametrize(
    "method", [method if method in QUICK else pytest.param(method, marks=pytest.mark.slow) for method in DRAFTED]
)
def test_a_batch_of_different_prompts_is_decoded_as_each_alone(method, heads, target):
    decoder = SpeculativeDecoder(target, heads, method, tree_size=8)
    assert_a_batch_is_each_alone(decoder)


def test_a_later_turn_drafts_the_same_with_and_without_what_is_cached(heads, target):
    decoder = SpeculativeDecoder(target, heads, "sequoia", tree_size=8)
    first = decoder.generate(torch.tensor([[3, 1, 4, 1, 5, 2, 2]]), max_new_tokens=30, temperature=1.0)
    plain = SpeculativeDecoder(target, method="autoregressive").generate(first.sequences[:, :-1], max_new_tokens=1)
    for kept, cache, reused in ((36, first.cache, 36), (20, first.cache, 20), (20, plain.cache, 0)):
        other = (first.sequences[:, kept : kept + 1] + 1) % 7
        prompt = torch.cat([first.sequences[:, :kept], other, torch.tensor([[6, 2]])], 1)
        fresh, fresh_steps = steps_of(decoder, prompt, max_new_tokens=20, temperature=1.0)
        again, again_steps = steps_of(decoder, prompt, max_new_tokens=20, temperature=1.0, past=cache)
        assert again.stats.reused_tokens == reused, "rows without features are computed"
        assert torch.equal(fresh.sequences, again.sequences)
        for (_, one), (_, other) in zip(fresh_steps, again_steps, strict=True):
            if one.logits is not None:
                torch.testing.assert_close(one.logits[:, 0], other.logits[:, 0])


def test_kept_rows_do_not_keep_the_memory_of_the_cache_that_they_were_in(heads, target):
    cache = as_draft(heads, forward_of(target, "target"), target).new_cache(2, 40)
    kept = cache.trimmed(1, 5)
    held, whole = ({one.keys.untyped_storage().data_ptr(), one.logits.untyped_storage().data_ptr()} - {0}
                   for one in (kept, cache))  # fmt: skip
    assert not held & whole
    assert kept.nbytes == 5 * 16 * 8


def test_a_target_by_transformers_own_forward_pass(tmp_path):
    torch.manual_seed(3)
    config = GPTNeoXConfig(
        vocab_size=7, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=128, initializer_range=0.4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().double()
    heads, tensors = heads_of(model, tmp_path)
    out, steps = steps_of(SpeculativeDecoder(model, heads, "sequoia", tree_size=8), PROMPT, max_new_tokens=40)
    expected = oracle(tensors, model, out.sequences[0])
    for before, drafted in drafted_any(steps):
        root = expected[int(before[StateField.LENGTHS, 0]) - 1, 0]
        torch.testing.assert_close(drafted.logits[0, 0], root.float(), atol=1e-4, rtol=1e-4)
    plain = SpeculativeDecoder(model, method="autoregressive").generate(PROMPT, max_new_tokens=40)
    assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("method", ["chain", "dyspec"])
def test_heads_draft_above_and_beside_prompt_lookup(method, target, tmp_path):
    """Below their levels, or beyond them, a draft without a model goes on."""
    heads, tensors = heads_of(target, tmp_path, heads=2)
    for draft in (Cascade([heads, PromptLookup(2)], levels=[2, 3]), Mixture([heads, PromptLookup(2)])):
        decoder = SpeculativeDecoder(target, draft, method, tree_size=9)
        out, steps = steps_of(decoder, PROMPT, max_new_tokens=40)
        assert torch.equal(out.sequences, transformers_greedy(target, PROMPT, 40))
        assert out.stats.depth > 2
        for before, drafted in drafted_any(steps) if isinstance(draft, Cascade) else []:
            text = out.sequences[0, : int(before[StateField.LENGTHS, 0]) + 1]
            for node, path in inner_nodes(before, drafted, 0):
                if len(path) < 2:
                    expected = expected_after(tensors, target, text, len(path))
                    torch.testing.assert_close(drafted.logits[0, node], expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="can have one trained head among them, got 2"):
        SpeculativeDecoder(target, Mixture([heads, head_of(target)]))


@pytest.mark.parametrize("method", DRAFTED)
@pytest.mark.parametrize("count", [1, 3])
def test_no_tree_is_deeper_than_there_are_heads(method, count, target, tmp_path):
    heads, _ = heads_of(target, tmp_path, heads=count)
    for options in ({}, {"tree_size": 20}, {"threshold": 0.1, "tree_size": 9} if method == "chain" else {}):
        decoder = SpeculativeDecoder(target, heads, method, **options)
        assert 1 <= decoder.tree.depth <= count
        assert len(decoder.tree) <= options.get("tree_size", 5)
        out = decoder.generate(PROMPT, max_new_tokens=12, temperature=1.0)
        assert out.stats.depth == decoder.tree.depth
    costs = estimated_costs(forward_of(target, "target"), [], Device(2e12, 3e14, 2e13))
    assert default_tree(method, costs, count).depth <= count


def test_a_tree_that_is_asked_for_and_deeper_than_there_are_heads_is_refused(heads, target):
    draft = as_draft(heads, forward_of(target, "target"), target)
    assert most_levels(draft) == 4
    deep = TokenTree.from_branching([2, 1, 1, 1, 1])
    with pytest.raises(
        ValueError, match=r"has 4 heads, one for each level of a tree, got a tree of 5 levels; give at mo"
    ):
        SpeculativeDecoder(target, heads, "sequoia", tree=deep)
    with pytest.raises(ValueError, match="got max_depth 6; give at most 4 levels"):
        SpeculativeDecoder(target, heads, "dyspec", tree_size=20, max_depth=6)
    assert SpeculativeDecoder(target, heads, "sequoia", tree=deep.truncated(4)[0]).tree.depth == 4
    assert isinstance(SpeculativeDecoder(target, heads, "dyspec", tree_size=20, max_depth=4).tree, Growth)


def test_heads_that_do_not_fit_are_refused(heads, target):
    for changes in ({"hidden_size": 32}, {"vocab_size": 9}):
        shape = {"heads": 2, "layers": 1, "hidden_size": 16, "vocab_size": 7, "owns_lm_heads": True} | changes
        with pytest.raises(ValueError, match=r"made for a target of width .* tokens, got one of width 16 with 7"):
            SpeculativeDecoder(target, MedusaHeads(MedusaConfig(**shape)).double().eval())
    for wrong, message in (
        (heads_like(heads).train(), "training mode"),
        (heads_like(heads).float(), r"one dtype, got torch\.float64 and torch\.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(target, wrong)
    broken = heads_like(heads)
    with torch.no_grad():
        broken.bias[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="draft has NaN or infinite weights in bias"):
        SpeculativeDecoder(target, broken)


def heads_like(heads):
    """A copy that may be spoilt."""
    copy = MedusaHeads(heads.config).double().eval()
    copy.load_state_dict(heads.state_dict())
    return copy


@torch.inference_mode()
def test_acceptance_at_a_depth_is_that_of_the_head_for_it(target, tmp_path):
    """Calibration walks along texts token by token, and counts a token as drafted at the depth it would have."""
    heads, tensors = heads_of(target, tmp_path, heads=3)
    forward = forward_of(target, "target")
    draft, text = as_draft(heads, forward, target), torch.tensor([3, 1, 4, 1, 5, 2, 6])
    cache = draft.new_cache(1, 32)
    forward.prefill(text[None], forward.new_cache(1, 32), taps=draft.taps(cache))
    expected = oracle(tensors, target, text)
    for length, drafted in ((3, 0), (4, 1), (5, 2), (6, 0), (6, 3)):
        at = torch.tensor([length])
        feed = Feed(
            tokens=text[None, length - 1 : length + 1], positions=at[:, None], cache_rows=at[:, None],
            parent_rows=at[:, None] - 1, prefix_lengths=at, visible_rows=length + 2,
            ancestor_mask=torch.ones(1, 1, 1).bool(), news=9, levels=9, drafted=torch.tensor([drafted]),
        )  # fmt: skip
        logits = draft(feed, cache)[0, -1]
        if drafted < 3:
            said = expected[length - drafted - 1, drafted].float()
            torch.testing.assert_close(logits, said, atol=1e-4, rtol=1e-4)
        else:
            assert (logits == -torch.inf).all(), "nothing is proposed beyond the heads"


@pytest.mark.usefixtures("any_noise")
def test_calibration_knows_of_no_acceptance_beyond_the_heads(target, tmp_path):
    heads, _ = heads_of(target, tmp_path, heads=2)
    profile = calibrate(
        target, heads, prompts=[PROMPT[0]], temperatures=[0.0], sizes=[1, 2, 4, 96], batch_sizes=[1], tokens=12,
        sequences=4, limit=60,
    )  # fmt: skip
    accepted = torch.tensor(profile.acceptance[0].accepted)
    assert accepted[0].sum() > 0
    assert accepted[2:].sum() == 0
    assert max(profile.costs.at(1).step) <= 1 + 8 + 64, "trees of two levels have no more nodes"
    decoder = SpeculativeDecoder(target, heads, "sequoia", profile=profile)
    assert decoder.tree_for(Filters(0.0)).depth <= 2
    assert profile.draft == describe(heads)
    assert describe(heads).startswith("2 medusa heads, 1 layers, ")


def test_a_level_costs_one_head(heads, target, tmp_path):
    width, vocab = 16, 7
    own = width * width + width + vocab * width
    assert draft_parameter_count(heads, target) == own
    shared, _ = heads_of(target, tmp_path, owns=False)
    assert draft_parameter_count(shared, target) == own
    for each in (heads, shared):
        work = Work.of(as_draft(each, forward_of(target, "target"), target))
        assert (work.weights, work.weight_bytes) == (own, 8 * own)


def test_a_trace_says_who_drafted(heads, target, tmp_path):
    SpeculativeDecoder(target, heads, "sequoia").generate(PROMPT, max_new_tokens=4, trace=tmp_path / "trace")
    header, _ = read_trace(tmp_path / "trace")
    assert header["draft"]["type"] == "medusa"
    assert header["draft"]["parameters"] == sum(weight.numel() for weight in heads.parameters())
