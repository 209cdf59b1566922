"""The models that ship with the package: a small Llama target, a smaller draft, their tokenizer, and a trained head.

Everything is read from this folder; nothing is downloaded. `record.json` next to the weights says how they were trained
and what they reach. `bench/train_demo_pair.py` of the repository trains them again. In `texts/` is what a published
model wrote, as a draft for it, by `bench/real/train.py`.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent


class DemoPair(NamedTuple):
    """Two models over one vocabulary, both in eval mode, and the tokenizer of that vocabulary."""

    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast


def load_demo_pair(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> DemoPair:
    """Load the shipped target, draft and tokenizer from the package's own folder, offline.

    The pair was trained on the source code of Python's standard library, so it continues Python code. Weights are
    stored in fp16 and converted to `dtype`; use float32 for exact comparisons and on CPUs.

        target, draft, tokenizer = load_demo_pair()
        inputs = tokenizer("def read(self, size=-1):", return_tensors="pt")

    Prompts work better without a newline at the end, because the tokenizer joins a newline and the indentation after
    it.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER, local_files_only=True, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return DemoPair(_load_model("target", dtype, device), _load_model("draft", dtype, device), tokenizer)


def demo_prompts() -> list[str]:
    """About two dozen beginnings of functions and classes, 30 to 80 tokens each, from files kept out of training."""
    return json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))


def _load_model(name: str, dtype: torch.dtype, device: torch.device | str) -> LlamaForCausalLM:
    if not (FOLDER / name / "model.safetensors").exists():
        raise FileNotFoundError(
            f"no weights of the shipped pair in {str(FOLDER / name)!r}: heavypath was built with HEAVYPATH_DEMO=0; "
            "install it without that, or name models of your own (--target, --draft)"
        )
    model = LlamaForCausalLM.from_pretrained(FOLDER / name, dtype=dtype, local_files_only=True, use_safetensors=True)
    return model.to(torch.device(device)).eval()  # pyright: ignore[reportArgumentType]
