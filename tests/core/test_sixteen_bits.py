"""Logits in the model's own dtype: the text is that of the same numbers in fp32, and users' code gets fp32."""

import pytest
import torch
from own_verifier import sample_the_target
from tiny_models import assert_alike, tiny_llama

from heavypath.speculative import EarlyExit, Lookahead, SpeculativeDecoder
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.run import Recordings
from heavypath.speculative.models import generic, llama
from heavypath.speculative.models.native import NativePass

PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [0, 6, 2, 6, 5]])
OPTIONS = {"attention_mask": (PROMPTS > 0).long(), "max_new_tokens": 10, "eos_token_id": None}
CASES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "eos_token_id": [5, 2], "min_new_tokens": 3},
}


def models(dtype):
    return [tiny_llama(seed, vocab_size=31, layers=layers).to(dtype) for seed, layers in ((1, 2), (2, 1))]


@pytest.fixture
def verified(monkeypatch):
    """The tokens of each drafted tree, and the dtype of the logits with which it is verified."""
    seen, verify = [], Rules.verify

    def noted(self, nodes, target_logits, *rest):
        seen.append((nodes.tokens, target_logits.dtype))
        return verify(self, nodes, target_logits, *rest)

    monkeypatch.setattr(Rules, "verify", noted)
    return seen


def take_fp32(monkeypatch):
    """From here on a model's logits are the same numbers in fp32."""
    for module in (llama, generic):
        monkeypatch.setattr(module, "as_logits", torch.Tensor.float)
    compiled = NativePass.__call__
    monkeypatch.setattr(NativePass, "__call__", lambda *args, **kwargs: compiled(*args, **kwargs).float())


@pytest.mark.parametrize(
    ("method", "case", "draft"),
    [(method, "sampled", None) for method in ("chain", "specinfer", "spectr", "ersd", "typical-lossy")]
    + [("rsd-s", "filtered", None), *(("sequoia", case, None) for case in CASES)]
    + [("sequoia", "sampled", draft) for draft in (Lookahead(3, 3), EarlyExit(1))],
    ids=str,
)
def test_text_is_that_of_the_same_logits_in_fp32(method, case, draft, verified, monkeypatch):
    dtype = torch.float16 if method in ("chain", "spectr") else torch.bfloat16
    target, model = models(dtype)
    decoder, options = SpeculativeDecoder(target, draft or model, method, tree_size=5), OPTIONS | CASES[case]
    out = decoder.generate(PROMPTS, **options)
    assert {each for _, each in verified} == {torch.float32 if case == "penalised" else dtype}
    take_fp32(monkeypatch)
    assert_alike(out, decoder.generate(PROMPTS, **options))
    assert verified[-1][1] == torch.float32


@pytest.mark.parametrize("method", ["dyspec", "eagle-2"])
def test_grown_trees_are_those_of_the_same_logits_in_fp32(method, verified, monkeypatch):
    """Which nodes stay hangs by the last bits of sums over the vocabulary."""

    def launched(self, step, slots, launch, lap, again):
        return launch(lap)

    monkeypatch.setattr(Recordings, "run", launched)  # a replayed step would not call what notes the trees
    target, draft = (tiny_llama(seed, 199, layers).to(torch.bfloat16) for seed, layers in ((1, 2), (2, 1)))
    decoder = SpeculativeDecoder(target, draft, method, tree_size=24, max_depth=4, width=8)
    options = {"temperature": 0.8, "seed": 1, "eos_token_id": None}
    decoder.generate(PROMPTS, 12, **options)
    steps = len(verified)
    take_fp32(monkeypatch)
    decoder.generate(PROMPTS, 12, **options)
    trees = [tokens for tokens, _ in verified]
    assert all(torch.equal(*pair) for pair in zip(trees[:steps], trees[steps:], strict=True))


def test_users_get_fp32(tmp_path):
    target, draft = models(torch.bfloat16)
    seen = set()

    def verifier(nodes, target_logits, draft_logits, **options):
        seen.update(logits.dtype for logits in (target_logits, draft_logits) if logits is not None)
        return sample_the_target(nodes, target_logits, draft_logits, **options)

    told = {"output_scores": True, "output_logits": True, "trace": tmp_path / "run.jsonl"}
    out = SpeculativeDecoder(target, draft).generate(PROMPTS, **OPTIONS, temperature=0.9, **told)
    SpeculativeDecoder(target, draft, verifier=verifier).generate(PROMPTS, **OPTIONS, temperature=0.9)
    assert {each.dtype for each in (*out.scores, *out.logits)} == seen == {torch.float32}
    with torch.no_grad():
        expected = target(out.sequences[:1]).logits[0, len(PROMPTS[0]) - 1 : -1].float()
    torch.testing.assert_close(torch.stack(out.logits)[:, 0], expected, atol=0.2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("whose", "method"), [("target", "sequoia"), ("draft", "sequoia"), ("draft", "dyspec")])
def test_logits_that_are_none_are_found(whose, method, dtype):
    target, draft = models(dtype)
    decoder = SpeculativeDecoder(target, draft, method)
    with torch.no_grad():
        {"target": target, "draft": draft}[whose].model.norm.weight[7] = torch.nan
    with pytest.raises(ValueError, match=f"the {whose}'s logits after position 4 of sequence 0 hold NaN"):
        decoder.generate(PROMPTS, **OPTIONS, temperature=0.9)
