"""Read a suite: prompts by kind of work, and turn them into tokens by the tokenizer's chat template.

A file of a suite is a JSON object of kinds, each with a list of prompts. A prompt is a string; or, for a dialogue, a
list of strings: the user's and the assistant's messages in turn, the first and the last one the user's.

    {"code": ["Write a function that ..."], "dialogue": [["Hello!", "Hello, how can I help?", "Tell me ..."]]}
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

SHIPPED = Path(__file__).with_name("suite.json")
ROLES = ("user", "assistant")

SuitePrompt = str | list[str]
Suite = Mapping[str, Sequence[SuitePrompt]]


def read_suite(path: str | Path | None = None) -> Suite:
    """The prompts of each kind in a suite's file; default: the shipped one.

    Raises OSError for a file that cannot be read, and ValueError for one that is no suite.
    """
    path = SHIPPED if path is None else Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(f"cannot read the suite in {str(path)!r}: {error.strerror}") from error
    except ValueError as error:  # includes UnicodeError and JSONDecodeError
        raise ValueError(f"a suite must be a file of JSON, got {str(path)!r}: {error}") from error
    return checked_suite(content, repr(str(path)))


def checked_suite(content: Any, name: str) -> Suite:
    """The content of a suite's JSON file, unchanged. Raises ValueError, with the suite's name, if it is no suite."""
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"the suite {name} must be an object of kinds with their prompts, got {str(content)[:60]!r}")
    for kind, prompts in content.items():
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
            raise ValueError(f"kind {kind!r} of the suite {name} must be a list of prompts, got {str(prompts)[:60]!r}")
        for number, prompt in enumerate(prompts, start=1):
            messages = [prompt] if isinstance(prompt, str) else prompt
            are_texts = isinstance(messages, list) and all(isinstance(each, str) and each.strip() for each in messages)
            if not are_texts or len(messages) % 2 == 0:
                raise ValueError(
                    f"prompt {number} of kind {kind!r} of the suite {name} must be a text, or a list of an odd number "
                    f"of texts, of the user and the assistant in turn; got {str(prompt)[:60]!r}"
                )
    return content


def part_of_suite(suite: Suite, kinds: Sequence[str] | None = None, prompts: int | None = None) -> Suite:
    """The first prompts of some kinds; default: all. Raises ValueError for an unknown kind, and for prompts < 1."""
    for kind in kinds or ():
        if kind not in suite:
            raise ValueError(f"a kind must be one of {', '.join(suite)}, got {kind!r}")
    if prompts is not None and prompts < 1:
        raise ValueError(f"prompts of each kind must be at least 1, got {prompts}")
    return {kind: suite[kind][:prompts] for kind in dict.fromkeys(kinds or suite)}


def suite_tokens(prompt: SuitePrompt, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Tensor:
    """The tokens of a prompt, LongTensor[1, T], by the tokenizer's chat template if it has one.

    Without a template a text is taken as it is, and each message of a dialogue has its role before it.
    """
    messages = [prompt] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template:
        spoken = [{"role": ROLES[turn % 2], "content": text} for turn, text in enumerate(messages)]
        encoded: Any = tokenizer.apply_chat_template(
            spoken, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(without_template(prompt), return_tensors="pt")
    return encoded["input_ids"].to(device)


def without_template(prompt: SuitePrompt) -> str:
    """The text of a prompt for a model without a chat template: each message of a dialogue has its role before it."""
    if isinstance(prompt, str):
        return prompt
    spoken = [f"{ROLES[turn % 2].capitalize()}: {text}" for turn, text in enumerate(prompt)]
    return "\n\n".join([*spoken, f"{ROLES[1].capitalize()}:"])
