"""attn_implementation="heavypath" against sdpa: transformers' own calls on the target of the shipped pair, by turns.

    python bench/dropin.py [--rounds 25] [--threads 1 2] [--device cpu] [--json bench/results/dropin-cpu.json]

Decoding is generate of 64 tokens, for one prompt or a left-padded batch of four. In each round both do the same work,
the one that was second before goes first, and a ratio is taken within the round: above 1, heavypath is slower. What is
printed and written are medians, and the quartiles of the ratio. On a machine that others use, too, set
OMP_WAIT_POLICY=PASSIVE: otherwise most of what is timed is threads that spin while they wait.
"""

import os
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from common import argument_parser, environment, quiet_demo_pair, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heavypath.speculative.demo import demo_prompts

IMPLEMENTATIONS = ("sdpa", "heavypath")
NEW_TOKENS = 64


def main() -> None:
    parser = argument_parser(__doc__, threads=False, device=True)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()], help="one run for each")
    arguments = parser.parse_args()

    target, _, tokenizer = quiet_demo_pair(arguments.device)
    work = tasks(target, tokenizer)
    table = Table("threads", "work", "sdpa, ms", "heavypath, ms", "ratio", "its quartiles")
    results = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name, task in work.items():
            seconds = [in_turns(target, task, index) for index in range(-1, arguments.rounds)][1:]
            low, ratio, high = quantiles((each["heavypath"] / each["sdpa"] for each in seconds), n=4)
            milliseconds = {by: 1e3 * median(each[by] for each in seconds) for by in IMPLEMENTATIONS}
            results.append({"threads": threads, "work": name, **milliseconds, "ratio": ratio, "quartiles": [low, high]})
            figures = [f"{figure:.1f}" for figure in milliseconds.values()]
            table.add_row(str(threads), name, *figures, f"{ratio:.3f}", f"{low:.3f} - {high:.3f}")
    Console(highlight=False).print(table)
    facts = environment(arguments.device) | {
        "threads": arguments.threads,
        "dtype": str(target.dtype),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "rounds": arguments.rounds,
        "new_tokens": NEW_TOKENS,
    }
    write_results(arguments.json, facts, milliseconds=results)


def tasks(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Callable[[], Tensor]]:
    """The calls that are timed, by name."""
    one = tokenizer(demo_prompts()[0], return_tensors="pt").to(model.device)
    four = tokenizer(demo_prompts()[:4], return_tensors="pt", padding=True, padding_side="left").to(model.device)
    long = torch.arange(512, device=model.device)[None] + 100
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return {
        "decode": lambda: model.generate(**one, **length),
        "decode 4, padded": lambda: model.generate(**four, **length),
        "prefill 512": lambda: model(long, logits_to_keep=1).logits,
    }


@torch.inference_mode()
def in_turns(model: PreTrainedModel, task: Callable[[], Tensor], index: int) -> dict[str, float]:
    """Seconds of each implementation. Both must give the same output."""
    seconds, outputs = {}, []
    for name in IMPLEMENTATIONS if index % 2 else reversed(IMPLEMENTATIONS):
        model.set_attn_implementation(name)
        start = time.perf_counter()
        outputs.append(task().cpu())
        seconds[name] = time.perf_counter() - start
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
    return seconds


if __name__ == "__main__":
    main()
