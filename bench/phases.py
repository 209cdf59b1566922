"""What a step of the demo pair spends its time on: milliseconds by phase, and the share beside the models.

    python bench/phases.py [--prompts 8] [--threads 2]

The least of three rounds over the prompts, 64 new tokens each. "beside" is all but the draft's and the target's forward
passes; the prefill belongs to no step. On a GPU steps are run eagerly here: a graph has no phases.
"""

import argparse

import torch
import transformers
from rich.console import Console
from rich.table import Table

from heavypath.speculative import SpeculativeDecoder, load_demo_pair
from heavypath.speculative.demo import demo_prompts

PHASES = ("draft", "sampling", "target", "verification", "compaction", "host")
CASES = [
    (method, temperature) for temperature in (0.0, 0.6) for method in ("autoregressive", "sequoia", "ersd", "top-k")
]
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.disable_progress_bar()
    target, draft, tokenizer = load_demo_pair(device=arguments.device)
    prompts = [
        tokenizer(text, return_tensors="pt").input_ids.to(arguments.device)
        for text in demo_prompts()[: arguments.prompts]
    ]
    table = Table("method", "T", *PHASES, "step, ms", "beside")
    for method, temperature in CASES:
        decoder = SpeculativeDecoder(target, draft, method, cuda_graphs=False)
        rounds = []
        for _ in range(ROUNDS + 1):  # the first is for warming up
            seconds, steps = dict.fromkeys(PHASES, 0.0), 0
            for prompt in prompts:
                stats = decoder.generate(prompt, max_new_tokens=64, temperature=temperature, seed=1).stats
                seconds = {phase: seconds[phase] + stats.seconds.get(phase, 0.0) for phase in PHASES}
                steps += stats.steps
            rounds.append({phase: 1e3 * spent / steps for phase, spent in seconds.items()})
        least = min(rounds[1:], key=lambda each: sum(each.values()))
        step = sum(least.values())
        beside = 1 - (least["draft"] + least["target"]) / step
        figures = (f"{least[phase]:.2f}" for phase in PHASES)
        table.add_row(method, f"{temperature}", *figures, f"{step:.2f}", f"{beside:.1%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
