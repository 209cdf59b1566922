"""The last positions of a target, and texts that are longer than a draft has positions."""

import copy
import logging

import pytest
import torch
from families import tiny
from http_server import NAME, client_of, running
from recurrent_families import recurrent
from rope_cases import DYNAMIC, LIMIT, LONGROPE
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import assert_same_text, exact_law, tiny_llama, transformers_greedy

from heavypath.kernels.filtering import Filters
from heavypath.speculative import Cascade, Merge, Mixture, PromptLookup, SpeculativeDecoder, Translated
from heavypath.speculative.drafts.blocks.pard import Pard

MOST = 24  # positions of the targets here


def limited(model, positions):
    """The same model with fewer positions."""
    short = copy.deepcopy(model)
    short.config.get_text_config(decoder=True).max_position_embeddings = positions
    return short


def prompts_of(batch, length, vocab_size=7):
    return torch.randint(3, vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def target():
    return tiny_llama(1, max_position_embeddings=MOST)


@pytest.fixture(scope="module")
def same_draft(target):
    """The target with 12 positions: all of its tokens are accepted."""
    return limited(target, 12)


@pytest.mark.parametrize("new", [1, 2, 5])
@pytest.mark.parametrize(("kind", "changes", "most"), [
    ("llama", {}, MOST), ("gpt2", {}, MOST), ("opt", {}, MOST), ("llama", DYNAMIC, 32),
    ("phi3", LONGROPE, LIMIT), ("gemma2", {}, MOST),
])  # fmt: skip
def test_the_last_token_of_a_text_needs_no_position(kind, changes, most, new):
    positions = {} if changes else {"max_position_embeddings": MOST}
    model = tiny(kind, **changes, **positions)
    decoder, ids = SpeculativeDecoder(model, model, tree_size=6), prompts_of(2, most + 1 - new, vocab_size=61)
    out = decoder.generate(ids, new, eos_token_id=None)
    assert_same_text(model, out.sequences, transformers_greedy(model, ids, new))
    with pytest.raises(ValueError, match=f"{most} (positions|tokens)"):
        decoder.generate(ids, new + 1)


def test_so_it_is_in_a_service_and_over_http(demo_pair):
    pair, tokenizer = demo_pair[:2], demo_pair[2]
    target, draft = (limited(model, 32) for model in pair)
    decoder, prompt = SpeculativeDecoder(target, draft, "ersd"), tokenizer("def f():").input_ids * 32
    expected = transformers_greedy(target, torch.tensor([prompt[:32]]), 1)[0, -1]
    with decoder.serve(slots=2) as service, running(service, tokenizer, max_tokens=33) as base:
        assert service.submit(prompt[:32], 1, 0.0, eos_token_id=None).result(60).tokens == [expected]
        assert len(service.submit(prompt[:30], 3, 0.0, eos_token_id=None).result(60).tokens) == 3
        with pytest.raises(ValueError, match="32 positions"):
            service.submit(prompt[:32], 2)
        answer = client_of(base).completions.create(model=NAME, prompt=prompt[:32], max_tokens=1, temperature=0)
        assert answer.choices[0].text == tokenizer.decode([expected])


@pytest.mark.parametrize(("method", "temperature"), [
    ("chain", 0), ("sequoia", 0), ("dyspec", 0), ("specinfer", 0), ("rsd-s", 0), ("ersd", 0.8), ("ersd", 0),
])  # fmt: skip
def test_a_text_goes_on_without_a_draft_that_has_no_more_positions(method, temperature, target, same_draft):
    """Until there all is accepted, and then each step brings one token."""
    ids = prompts_of(1, 5)
    plain = SpeculativeDecoder(target, None, "autoregressive").generate(ids, MOST - 4, temperature=temperature)
    out = SpeculativeDecoder(target, same_draft, method, tree_size=6).generate(ids, MOST - 4, temperature=temperature)
    assert torch.equal(out.sequences, plain.sequences)
    assert 12 <= out.stats.steps_of[0] <= 17
    assert out.stats.replans[-1][1] == "1 nodes, 0 levels"


def test_each_sequence_of_a_batch_is_drafted_as_far_as_there_are_positions(target, same_draft):
    """One has none from the beginning, and stays as it is alone."""
    ids, mask = prompts_of(3, 14), torch.ones(3, 14, dtype=torch.long)
    for row, padding in enumerate((0, 9, 5)):
        mask[row, :padding] = 0
    decoder = SpeculativeDecoder(target, same_draft, "chain", tree_size=4)
    out = decoder.generate(ids, 9, attention_mask=mask)
    assert_same_text(target, out.sequences, target.generate(ids, attention_mask=mask, max_new_tokens=9, pad_token_id=0))
    assert out.stats.steps_of[0] == 9 > out.stats.steps_of[2] > out.stats.steps_of[1]
    for row in range(3):
        one = decoder.generate(ids[row : row + 1, -int(mask[row].sum()) :], 9)
        assert torch.equal(one.sequences[0, -9:], out.sequences[row, -9:])


@pytest.mark.parametrize("method", ["sequoia", "specinfer", "rsd-s", "spectr", "dyspec", "naive", "rsd-c"])
def test_sampled_text_has_the_targets_distribution_across_the_draft_s_end(method, target):
    draft, ids = tiny_llama(2, max_position_embeddings=4), torch.tensor([[1, 2, 3]])
    decoder = SpeculativeDecoder(target, draft, method)
    out = decoder.generate(ids.expand(4000, -1), 3, temperature=0.8, seed=11)
    law = exact_law(target, ids[0], Filters(0.8), 3)
    assert chi_square_p_value(joint_counts(out.sequences[:, 3:], 7), law) > SIGNIFICANCE
    assert out.stats.replans


def kinds_of_draft(target, tokenizer):
    short, learned = limited(target, 12), tiny("gpt2", vocab_size=target.config.vocab_size, max_position_embeddings=12)
    return {
        "learned positions": learned,
        "recurrent": limited(recurrent("qwen3_5_text", vocab_size=target.config.vocab_size), 12),
        "pard": Pard(short, 5, depths=3),
        "translated": Translated(short, tokenizer, tokenizer),
        "cascade": Cascade([short, PromptLookup()], [2, 2]),
        "mixture": Mixture([PromptLookup(), short]),
        "merge": Merge([short, learned]),
    }


@pytest.mark.parametrize("kind", [
    "learned positions", "recurrent", "pard", "translated", "cascade", "mixture", "merge",
])  # fmt: skip
def test_so_it_is_with_drafts_of_all_kinds(kind, demo_pair):
    target, _, tokenizer = demo_pair
    method = "specinfer" if kind == "merge" else "sequoia"
    decoder = SpeculativeDecoder(target, kinds_of_draft(target, tokenizer)[kind], method, tree_size=6)
    ids = prompts_of(2, 9, vocab_size=900)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    out = decoder.generate(ids, 20, attention_mask=mask, eos_token_id=None)
    told = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert_same_text(target, out.sequences, target.generate(ids, **told))


def test_a_later_turn_takes_what_the_draft_has_read_and_no_more(target, same_draft):
    decoder = SpeculativeDecoder(target, same_draft, "chain", tree_size=4)
    ids = prompts_of(1, 5)
    first = decoder.generate(ids, 14)
    cache = first.cache
    for length in (8, 12, 17):
        prompt = torch.cat([first.sequences[:, :length], torch.tensor([[2]])], 1)
        again = decoder.generate(prompt, 6, past=cache)
        alone = decoder.generate(prompt, 6)
        assert torch.equal(again.sequences, alone.sequences)
        assert torch.equal(again.stats.steps_of, alone.stats.steps_of)
        assert again.stats.reused_tokens == min(length, 18)


def test_a_service_drafts_again_for_a_request_that_comes_while_a_long_text_is_written(target, same_draft, caplog):
    decoder, ids = SpeculativeDecoder(target, same_draft, "ersd", tree_size=4), prompts_of(1, 8)[0].tolist()
    texts = {length: decoder.generate(torch.tensor([ids[:length]]), 16, temperature=0.7).sequences for length in (8, 3)}
    with caplog.at_level(logging.WARNING), decoder.serve(slots=2, prefill_tokens=4) as service:
        for _ in range(2):  # the second time with what was kept of the first
            running = [service.submit(ids[:length], 16, 0.7, seed=0, eos_token_id=None) for length in (8, 3)]
            for length, completion in zip((8, 3), running, strict=True):
                assert completion.result(60).tokens == texts[length][0, length:].tolist()
    assert "the draft has 12 positions: longer texts go on without it" in caplog.text


def test_it_is_said_once(target, same_draft, caplog):
    decoder = SpeculativeDecoder(target, same_draft, "chain", tree_size=4)
    for new in (6, 14, 15):
        with caplog.at_level(logging.WARNING):
            decoder.generate(prompts_of(1, 6), new)
        assert caplog.text.count("the draft has 12 positions") == (new > 6)
