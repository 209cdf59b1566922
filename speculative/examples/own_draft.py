"""Draft by a table of your own: what followed each token in a text, as often as it did. The target's text stays."""

import argparse
from pathlib import Path

import torch

from heavypath.speculative import RowCache, SpeculativeDecoder, load_demo_pair


class Bigrams:
    """A `Draft`: the logits after a token are the logarithms of how often each token followed it in a text."""

    def __init__(self, text, vocab_size):  # text LongTensor[T]
        counts = torch.zeros(vocab_size, vocab_size, device=text.device)
        self.logits = counts.index_put_((text[:-1], text[1:]), counts.new_ones(()), accumulate=True).log()

    def new_cache(self, batch, rows):  # a bigram needs to remember nothing
        nothing = self.logits.new_empty(batch, 1, rows, 0)
        return RowCache(nothing, nothing)

    def prefill(self, tokens, cache):
        pass

    def __call__(self, feed, cache):
        return self.logits[feed.tokens]  # [B, n, V]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--text", type=Path, default=Path(argparse.__file__), help="to count in; default: Python source"
    )
    args = parser.parse_args()
    target, _, tokenizer = load_demo_pair()
    table = Bigrams(tokenizer(args.text.read_text("utf-8"), return_tensors="pt").input_ids[0], target.vocab_size)
    prompt = tokenizer("def read_lines(path):", return_tensors="pt").input_ids
    for decoder in (SpeculativeDecoder(target, table, "ersd"), SpeculativeDecoder(target, None, "autoregressive")):
        out = decoder.generate(prompt, 64, temperature=0.6)
        print(
            f"{decoder.method}: {out.stats.tokens_per_step:.2f} tokens per step\n{tokenizer.decode(out.sequences[0])}"
        )
