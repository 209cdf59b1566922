"""What the steps of the shipped pair spend their time on: milliseconds by phase, and the share beside the models.

    python bench/phases.py [--prompts 8] [--threads 2] [--json bench/results/phases-cpu.json]

Each prompt is continued by 64 tokens; of three rounds over the prompts the fastest counts. "beside" is the share of all
phases but the forward passes of the draft and the target; the prefill belongs to no step. On a GPU steps are run
eagerly here, since a CUDA graph has no phases to time, and the host waits for the GPU after each phase: they add up to
more than a step takes.
"""

import torch
from common import argument_parser, clock_of, environment, quiet_demo_pair, token_ids, until_stopped, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts

PHASES = ("draft", "sampling", "target", "verification", "compaction", "host")
CASES = [
    (method, temperature) for temperature in (0.0, 0.6) for method in ("autoregressive", "sequoia", "ersd", "top-k")
]
ROUNDS = 3


def milliseconds_by_phase(
    decoder: SpeculativeDecoder, prompts: list[Tensor], temperature: float, new_tokens: int = 64
) -> dict[str, float]:
    """Milliseconds of each phase of one step: means over a round's steps, of the round whose steps were fastest."""
    rounds = []
    for _ in range(ROUNDS + 1):  # the first is for warming up
        seconds, steps = dict.fromkeys(PHASES, 0.0), 0
        for prompt in prompts:
            stats = decoder.generate(
                prompt, max_new_tokens=new_tokens, temperature=temperature, seed=1, eos_token_id=None
            ).stats
            seconds = {phase: seconds[phase] + stats.seconds.get(phase, 0.0) for phase in PHASES}
            steps += stats.steps
        rounds.append({phase: 1e3 * spent / steps for phase, spent in seconds.items()})
    return min(rounds[1:], key=lambda each: sum(each.values()))


def main() -> None:
    parser = argument_parser(__doc__, device=True)
    parser.add_argument("--prompts", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target, draft, tokenizer = quiet_demo_pair(arguments.device)
    prompts = token_ids(tokenizer, demo_prompts()[: arguments.prompts], arguments.device)
    table, rows = Table("method", "T", *PHASES, "step, ms", "beside"), []
    if arguments.miniature:
        prompts = prompts[:1]
    with until_stopped():
        for method, temperature in CASES[1:2] if arguments.miniature else CASES:
            decoder = SpeculativeDecoder(target, draft, method, cuda_graphs=False)
            decoder.clock = clock_of(arguments.device)
            phases = milliseconds_by_phase(decoder, prompts, temperature, 4 if arguments.miniature else 64)
            step = sum(phases.values())
            beside = 1 - (phases["draft"] + phases["target"]) / step
            rows.append({"method": method, "temperature": temperature, "milliseconds": phases, "beside": beside})
            figures = (f"{spent:.2f}" for spent in phases.values())
            table.add_row(method, f"{temperature}", *figures, f"{step:.2f}", f"{beside:.1%}")
            write_results(arguments.json, environment(arguments.device) | {"prompts": len(prompts)}, rows=rows)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
