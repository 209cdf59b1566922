"""What the comparison says about a method is true: counts, ratios, and whether its text is the target's."""

import io

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.comparison import ASSISTED, PLAIN, as_table, compare

PROMPTS = [torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5, 9, 2]])]


def tiny_llama(seed):
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=11, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def pair():
    return tiny_llama(0), tiny_llama(1)


def verdicts(rows):
    return {row.method: row.text for row in rows}


def last_token_changed(monkeypatch, change):
    """Every decoder ends its text with another token: change(token)."""
    generate = SpeculativeDecoder.generate

    def changed(self, *arguments, **options):
        out = generate(self, *arguments, **options)
        out.sequences[:, -1] = change(out.sequences[:, -1])
        return out

    monkeypatch.setattr(SpeculativeDecoder, "generate", changed)


def test_plain_decoding_takes_one_forward_per_token_and_is_the_reference(pair):
    rows = compare(*pair, PROMPTS, max_new_tokens=8)
    plain = rows[0]
    assert (plain.method, plain.text, plain.ratio, plain.ratio_range) == (PLAIN, "reference", 1.0, (1.0, 1.0))
    assert all(row.tokens_per_forward == 1 for row in rows if row.method in (PLAIN, "autoregressive"))
    assert all(row.text == "equal" and row.logit_gap is None for row in rows[1:])
    assert all(row.ratio_range[0] <= row.ratio <= row.ratio_range[1] for row in rows)


def test_a_perfect_draft_emits_a_chain_and_one_more_for_each_forward(pair):
    rows = compare(pair[0], pair[0], PROMPTS, methods=["chain"], max_new_tokens=9, tree_size=5)
    assert rows[-1].tokens_per_forward == 9 / 2  # twice 4 and the bonus token, less 1


def test_another_token_counts_as_a_difference(pair, monkeypatch):
    last_token_changed(monkeypatch, lambda token: (token + 1) % 11)
    row = compare(*pair, PROMPTS, methods=["sequoia"], max_new_tokens=8)[-1]
    assert row.text == "differs"
    assert row.logit_gap > 1e-4


def test_a_token_of_the_same_logit_counts_as_a_tie(pair, monkeypatch):
    target, draft = pair
    target.lm_head.weight.data[1::2] = target.lm_head.weight[0:10:2]  # tokens 2i and 2i + 1 tie
    last_token_changed(monkeypatch, lambda token: torch.where(token < 10, token ^ 1, token))
    row = compare(target, draft, PROMPTS, methods=["sequoia"], max_new_tokens=8)[-1]
    assert row.text == "tie"
    assert row.logit_gap < 1e-4


def test_sampled_races_are_held_to_the_plain_text_and_the_rest_to_no_text(pair, monkeypatch):
    methods = ["autoregressive", "chain", "ersd"]
    options = {"methods": methods, "max_new_tokens": 8, "temperature": 1.0, "seed": 5}
    expected = {"autoregressive": "reference", "chain": "same law", "ersd": "equal"}
    assert verdicts(compare(*pair, PROMPTS, **options)) == {PLAIN: "same law", ASSISTED: "same law", **expected}
    steps = iter(range(100))
    last_token_changed(monkeypatch, lambda token: (token + next(steps)) % 11)
    assert verdicts(compare(*pair, PROMPTS, **options))["ersd"] == "differs"
    with pytest.raises(ValueError, match="compared with 'autoregressive'; add it"):
        compare(*pair, PROMPTS, methods=["ersd"], temperature=1.0)


def test_no_prompts_are_refused(pair):
    with pytest.raises(ValueError, match="at least one prompt, got none"):
        compare(*pair, [])


def test_the_table_fits_80_columns(pair):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(as_table(compare(*pair, PROMPTS, max_new_tokens=2)))
    lines = console.export_text().splitlines()
    assert any(line.split()[:2] == ["transformers", "generate"] for line in lines)
    assert not any("…" in line for line in lines)
