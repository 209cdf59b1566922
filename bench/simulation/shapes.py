"""Models as numbers: what a forward pass reads and multiplies, for machines and models that are not here.

A pass reads every weight once and multiplies it with each of n rows: 2 n weights operations. Of the token embedding it
looks a few rows up, so that only its size counts. A Llama of l layers with h hidden channels, i channels in between, q
query heads and k key heads of size h / q, and V tokens has

    weights = l (2 h h + 2 h h k / q + 3 h i) + V h

beside its norms, which are thousands of times smaller. Where a token goes through a share s of the experts, a row is
multiplied with s of them. As if each chose by itself, n rows read 1 - (1 - s)^n of them.

`python bench/simulate.py --target NAME --draft NAME` takes two of them, or folders.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from heavypath.speculative.costs.estimates import experts_among

QWEN3_TOKENS = 151936  # of every Qwen3's vocabulary


@dataclass(frozen=True)
class ModelSize:
    """A model's size.

    weights: elements that a pass multiplies, the language-model head among them; itemsize: bytes of each
    layers, hidden, vocab: its layers, hidden channels and tokens
    embedding: elements of the token embedding, if it is not the head's weight, too
    experts: elements of all experts, among the weights; chosen: the share of them that a token goes through
    """

    weights: int
    layers: int
    hidden: int
    vocab: int
    embedding: int = 0
    itemsize: float = 2
    experts: int = 0
    chosen: float = 1.0

    @property
    def nbytes(self) -> float:
        """Bytes of all weights, which a pass over many rows reads."""
        return self.weights * self.itemsize

    @property
    def used(self) -> float:
        """Elements that a row is multiplied with."""
        return self.weights - self.experts * (1 - self.chosen)

    def read(self, rows: float) -> float:
        """Bytes that a pass over so many rows reads."""
        return (self.weights - self.experts * (1 - self.chosen) ** rows) * self.itemsize

    @classmethod
    def llama(
        cls, layers: int, hidden: int, between: int, heads: int, key_heads: int, vocab: int = 32000, itemsize: float = 2
    ) -> "ModelSize":  # fmt: skip
        """A Llama, in 16 bits by default; between: channels of the MLP."""
        layer = 2 * hidden * hidden + 2 * hidden * hidden * key_heads // heads + 3 * hidden * between
        return cls(layers * layer + vocab * hidden, layers, hidden, vocab, vocab * hidden, itemsize)

    @classmethod
    def qwen3(cls, layers: int, hidden: int, between: int, heads: int) -> "ModelSize":
        """A Qwen3 in 16 bits; it has 8 key heads, and all heads have 128 channels."""
        layer = 2 * hidden * 128 * (heads + 8) + 3 * hidden * between
        return cls(layers * layer + QWEN3_TOKENS * hidden, layers, hidden, QWEN3_TOKENS, QWEN3_TOKENS * hidden)

    def tied(self) -> "ModelSize":
        """The same with the token embedding for its head."""
        return replace(self, embedding=0)

    @classmethod
    def of_folder(cls, folder: str | Path) -> "ModelSize":
        """The shape of a model in a folder, by its config.json alone: weights need not be there.

        Raises OSError or ValueError for a folder without a config of a causal language model.
        """
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config(decoder=True)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        looked_up = 0 if head is embedding else embedding.numel()
        every = sum(weight.numel() for weight in model.parameters())
        itemsize = (text.dtype or torch.float32).itemsize
        experts, chosen = experts_among(text, model.named_parameters())
        return cls(
            every - looked_up, text.num_hidden_layers, text.hidden_size, text.vocab_size, looked_up, itemsize,
            sum(weight.numel() for weight in experts), chosen,
        )  # fmt: skip

    def stored_in(self, bits: float) -> "ModelSize":
        """The same with weights of so many bits each, such as 4.25 with their scales; products are as they were."""
        if not bits > 0:
            raise ValueError(f"bits of a weight must be above 0, got {bits:g}")
        return replace(self, itemsize=bits / 8)


SHAPES = {  # by the models' own config.json; the first are those of bench/research/offloading.py
    "llama-2-7b": ModelSize.llama(32, 4096, 11008, 32, 32),
    "llama-2-13b": ModelSize.llama(40, 5120, 13824, 40, 40),
    "llama-2-22b": ModelSize.llama(40, 6656, 17920, 52, 52),  # chargoddard/llama2-22b
    "llama-2-70b": ModelSize.llama(80, 8192, 28672, 64, 8),
    "vicuna-33b": ModelSize.llama(60, 6656, 17920, 52, 52),
    "tinyllama-1.1b": ModelSize.llama(22, 2048, 5632, 32, 4),
    "llama-3-8b": ModelSize.llama(32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": ModelSize.llama(80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-8b": ModelSize.llama(32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": ModelSize.llama(80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": ModelSize.llama(126, 16384, 53248, 128, 8, 128256),
    "llama-3.2-1b": ModelSize.llama(16, 2048, 8192, 32, 8, 128256).tied(),
    "llama-3.2-3b": ModelSize.llama(28, 3072, 8192, 24, 8, 128256).tied(),
    "llama-3.3-70b": ModelSize.llama(80, 8192, 28672, 64, 8, 128256),
    "qwen3-0.6b": ModelSize.qwen3(28, 1024, 3072, 16).tied(),
    "qwen3-1.7b": ModelSize.qwen3(28, 2048, 6144, 16).tied(),
    "qwen3-4b": ModelSize.qwen3(36, 2560, 9728, 32).tied(),
    "qwen3-8b": ModelSize.qwen3(36, 4096, 12288, 32),
    "qwen3-14b": ModelSize.qwen3(40, 5120, 17408, 40),
    "qwen3-32b": ModelSize.qwen3(64, 5120, 25600, 64),
}


def shape_of(name: str) -> ModelSize:
    """One of SHAPES, or that of a model in a folder. Raises ValueError for a text that names neither."""
    if name in SHAPES:
        return SHAPES[name]
    if not (Path(name).expanduser() / "config.json").is_file():
        raise ValueError(f"expected a folder with config.json or one of {', '.join(SHAPES)}, got {name!r}")
    return ModelSize.of_folder(Path(name).expanduser())
