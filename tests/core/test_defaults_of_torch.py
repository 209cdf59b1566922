"""The type and device that torch gives to tensors of which nobody says them: users set these, and no text changes."""

import pytest
import torch
from block_checkpoints import block_of
from head_cases import head_of
from recurrent_families import recurrent
from tiny_models import tiny_llama

from heavypath.speculative import METHODS, Lookahead, Mixture, PromptLookup, Retrieval, SpeculativeDecoder

PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 2, 6, 5]])
OPTIONS = {"max_new_tokens": 9, "temperature": 0.8, "top_p": 0.9, "eos_token_id": None, "seed": 3}
DRAFTS = {
    "head": lambda target, folder: head_of(target),
    "block": lambda target, folder: block_of(target, folder, block=4, term="gated"),
    "texts": lambda target, folder: Mixture([PromptLookup(), Retrieval([[3, 1, 4, 1, 5, 2, 6]])]),
    "lookahead": lambda target, folder: Lookahead(3, 3),
}


@pytest.fixture(params=[torch.bfloat16, torch.float64, "meta"], ids=str)
def default(request):
    """Sets another type, or a device on which nothing is computed: what is left there by mistake is noticed."""
    kind = request.param
    yield lambda: torch.set_default_device(kind) if kind == "meta" else torch.set_default_dtype(kind)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def decoded(target, draft, method="sequoia"):
    out = SpeculativeDecoder(target, draft, method, tree_size=6).generate(PROMPTS, **OPTIONS)
    return out.sequences.tolist(), out.stats.steps_of.tolist(), out.stats.accepted.tolist()


def served(target, draft):
    with SpeculativeDecoder(target, draft, "ersd", tree_size=4).serve(slots=2, max_tokens=32) as service:
        asked = {"temperature": 0.8, "eos_token_id": None, "seed": 1}
        sent = [service.submit(prompt.tolist(), 6, **asked) for prompt in PROMPTS]
        return [completion.result(60).tokens for completion in sent]


def by_transformers(target, draft):
    torch.manual_seed(5)
    options = {"max_new_tokens": 6, "do_sample": True, "pad_token_id": 0}
    return target.generate(PROMPTS, custom_generate=SpeculativeDecoder(target, draft), **options).tolist()


@pytest.mark.parametrize("method", [method for method in METHODS if method != "autoregressive"])
def test_a_method_writes_the_same_text(method, tiny_pair, default):
    expected = decoded(*tiny_pair, method)
    default()
    assert decoded(*tiny_pair, method) == expected


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_writes_the_same_text(draft, default, tmp_path):
    target = tiny_llama(1, layers=3)
    made = DRAFTS[draft](target, tmp_path)
    expected = decoded(target, made)
    default()
    assert decoded(target, made) == expected


def test_recurrent_layers_write_the_same_text(default):
    pair = recurrent("qwen3_next", 1), recurrent("qwen3_next", 2)
    expected = decoded(*pair)
    default()
    assert decoded(*pair) == expected


@pytest.mark.parametrize("text", [served, by_transformers])
def test_other_ways_to_decode_write_the_same_text(text, tiny_pair, default):
    expected = text(*tiny_pair)
    default()
    assert text(*tiny_pair) == expected
