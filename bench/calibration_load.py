"""What does a busy machine do to a calibration? The plans of an idle one and of a busy one, compared.

    python bench/calibration_load.py [--busy 1] [--threads 1] [--json bench/results/calibration_load-cpu.json]

The shipped pair is calibrated twice: as the machine is, and beside processes that do nothing but run. Then, without
them, the prompts are decoded with the trees of both profiles, by turns; the ratio of their speeds is taken prompt by
prompt. A calibration that finds its figures to be noise is said to have been refused: that is an answer, too.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, quantiles

import torch
from common import argument_parser, environment, quiet_demo_pair, token_ids, write_results
from rich.console import Console

from heavypath.kernels.filtering import Filters
from heavypath.speculative import Profile, SpeculativeDecoder
from heavypath.speculative.calibration import calibrate
from heavypath.speculative.demo import demo_prompts


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that run all the time while the block does."""
    running = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def ratios(arguments: argparse.Namespace, profiles: dict[str, Profile], temperature: float) -> list[float]:
    """The speed of the busy machine's plan over that of the idle one's, for each prompt and round."""
    target, draft, tokenizer = quiet_demo_pair()
    decoders = {name: SpeculativeDecoder(target, draft, profile=profile) for name, profile in profiles.items()}
    prompts = token_ids(tokenizer, demo_prompts()[: arguments.prompts])
    found = []
    for number in range(arguments.rounds + 1):
        for prompt in prompts:
            seconds = {}
            for name in list(decoders)[:: 1 if number % 2 else -1]:
                begin = time.perf_counter()
                decoders[name].generate(prompt, arguments.tokens, temperature=temperature, seed=number)
                seconds[name] = time.perf_counter() - begin
            if number:  # the first round warms up
                found.append(seconds["idle"] / seconds["busy"])
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--busy", type=int, default=1, help="processes that run beside the second calibration")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(highlight=False)
    target, draft, _ = quiet_demo_pair()
    profiles, seconds, rows = {}, {}, []
    for name, processes in (("idle", 0), ("busy", arguments.busy)):
        with busy(processes), Console(stderr=True).status("") as status:
            begin = time.perf_counter()
            try:
                profiles[name] = calibrate(
                    target, draft, temperatures=arguments.temperatures, batch_sizes=[1], on_progress=status.update
                )
            except ValueError as error:
                raise SystemExit(f"{name}: refused after {time.perf_counter() - begin:.0f} s: {error}") from error
            seconds[name] = time.perf_counter() - begin
        console.print(f"{name}: calibrated in {seconds[name]:.0f} s, load {os.getloadavg()[0]:.1f}")
    for temperature in arguments.temperatures:
        plans = {name: profile.plan("sequoia", Filters(temperature)) for name, profile in profiles.items()}
        found = ratios(arguments, profiles, temperature)
        low, middle, high = quantiles(found, n=4)
        row = {"temperature": temperature, "busy_over_idle": median(found), "quartiles": [low, high]}
        for name, planned in plans.items():
            row[name] = {
                "nodes": len(planned.plan.tree), "depth": planned.plan.tree.depth, "speedup": planned.plan.speedup,
                "speedup_error": profiles[name].speedup_error(planned),
            }  # fmt: skip
        rows.append(row)
        shapes = ", ".join(
            f"{name} {row[name]['nodes']} nodes in {row[name]['depth']} levels, speed-up {row[name]['speedup']:.2f} "
            f"± {row[name]['speedup_error']:.2f}"
            for name in plans
        )
        console.print(f"temperature {temperature:g}: {shapes}; busy / idle {middle:.3f} ({low:.2f} - {high:.2f})")
    facts = environment("cpu") | {name: getattr(arguments, name) for name in ("busy", "prompts", "tokens", "rounds")}
    write_results(arguments.json, facts, calibration_seconds=seconds, rows=rows)


if __name__ == "__main__":
    main()
