"""What finished sequences of a batch cost: slots that close up against slots that are carried along.

    python bench/ragged.py [--batch 8] [--rounds 7] [--threads 1] [--json bench/results/ragged-cpu.json]

The sequences of a batch end after 16, 32, 48, ... tokens. It is decoded in turn as it is, and with the closing up
switched off, so that a step computes all of them until the longest has ended. Medians of the rounds' pairs.
"""

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from common import made, processor

from heavypath.speculative import SpeculativeDecoder, load_demo_pair
from heavypath.speculative.decoding import loop
from heavypath.speculative.demo import demo_prompts

CLOSING_UP = loop.close_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target, draft, tokenizer = load_demo_pair(device=arguments.device)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    inputs = tokenizer(demo_prompts()[: arguments.batch], return_tensors="pt", padding=True).to(arguments.device)
    prompts = inputs["input_ids"]
    new = [16 * (row + 1) for row in range(len(prompts))]

    def ends(ids: torch.Tensor, scores: None) -> bool:
        """Each sequence, known by its prompt, after its own number of tokens."""
        row = int((prompts == ids[0, : prompts.shape[1]]).all(1).nonzero()[0, 0])
        return ids.shape[1] - prompts.shape[1] >= new[row]

    def seconds(decoder: SpeculativeDecoder, closing_up: bool) -> float:
        loop.close_up = CLOSING_UP if closing_up else lambda *slots: None
        length = {"max_new_tokens": new[-1], "eos_token_id": None, "pad_token_id": 0}
        stats = decoder.generate(**inputs, **length, stopping_criteria=[ends]).stats
        assert stats.tokens_of.tolist() == new
        return stats.total_seconds

    results = {}
    for method in ("autoregressive", "sequoia"):
        decoder = SpeculativeDecoder(target, draft, method)
        pairs = [(seconds(decoder, True), seconds(decoder, False)) for _ in range(arguments.rounds + 1)][1:]
        results[method] = {
            "closing up, s": median(pair[0] for pair in pairs),
            "carried along, s": median(pair[1] for pair in pairs),
            "ratio": median(pair[1] / pair[0] for pair in pairs),
        }
        print(f"{method:<16}" + "   ".join(f"{name} {value:.3f}" for name, value in results[method].items()))
    if arguments.json is not None:
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else processor()
        facts = {"device": device, "threads": arguments.threads, "torch": torch.__version__, "new_tokens": new}
        made(arguments.json).write_text(json.dumps({"environment": facts, "methods": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
