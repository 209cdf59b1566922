"""The type and device that torch gives to tensors of which nobody says them: users set these, and no text changes."""

import pytest
import torch
from block_checkpoints import block_of
from head_cases import head_of
from recurrent_families import recurrent
from tiny_models import assert_alike, tiny_llama

from heavypath.speculative import METHODS, Mixture, PromptLookup, Retrieval, SpeculativeDecoder

PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 2, 6, 5]])
OPTIONS = {"max_new_tokens": 9, "temperature": 0.8, "top_p": 0.9, "eos_token_id": None, "seed": 3}
DRAFTS = {
    "head": lambda target, folder: head_of(target),
    "block": lambda target, folder: block_of(target, folder, block=4, term="gated"),
    "texts": lambda target, folder: Mixture([PromptLookup(), Retrieval([[3, 1, 4, 1, 5, 2, 6]])]),
}


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default_type(request):
    yield request.param
    torch.set_default_dtype(torch.float32)


def text(target, draft, method):
    return SpeculativeDecoder(target, draft, method, tree_size=6).generate(PROMPTS, **OPTIONS)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "autoregressive"])
def test_a_method_writes_the_same_text(method, tiny_pair, default_type):
    expected = text(*tiny_pair, method)
    torch.set_default_dtype(default_type)
    assert_alike(text(*tiny_pair, method), expected)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_writes_the_same_text(draft, default_type, tmp_path):
    target = tiny_llama(1, layers=3)
    made = DRAFTS[draft](target, tmp_path)
    expected = text(target, made, "sequoia")
    torch.set_default_dtype(default_type)
    assert_alike(text(target, made, "sequoia"), expected)


def test_recurrent_layers_write_the_same_text(default_type):
    target, draft = recurrent("qwen3_next", 1), recurrent("qwen3_next", 2)
    expected = text(target, draft, "sequoia")
    torch.set_default_dtype(default_type)
    assert_alike(text(target, draft, "sequoia"), expected)
