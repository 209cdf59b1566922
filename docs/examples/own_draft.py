"""Draft by a table of your own: what followed each token in a text, as often as it did. The target's text stays."""

import argparse
from pathlib import Path

import torch

from heavypath.speculative import SpeculativeDecoder, load_demo_pair


class Bigrams:
    """A draft without a cache. After a token, each token is as likely as it is often found there in a text."""

    def __init__(self, text, vocab_size):  # text LongTensor[T]
        counts = torch.zeros(vocab_size, vocab_size, device=text.device)
        self.logits = counts.index_put_((text[:-1], text[1:]), counts.new_ones(()), accumulate=True).log()

    def __call__(self, feed, cache):
        """The logits [B, n, V] after each node."""
        return self.logits[feed.tokens]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="where to count")
    args = parser.parse_args()
    target, draft, tokenizer = load_demo_pair()
    text, prompt = (tokenizer(given).input_ids for given in (args.text.read_text("utf-8"), "def read_lines(path):"))
    draft = Bigrams(torch.tensor(text), target.vocab_size)
    for method, each in {"ersd": draft, "autoregressive": None}.items():
        out = SpeculativeDecoder(target, each, method).generate(torch.tensor([prompt]), 64, temperature=0.6)
        print(f"{method}: {out.stats.tokens_per_step:.2f} tokens per step\n{tokenizer.decode(out.sequences[0])}\n")
