"""Is the tree that a profile chooses the fastest? End to end, against trees of every size of a sweep, in one run.

    python bench/profile_sweep.py [--tokens 96] [--threads 2] [--json bench/results/profile_sweep-cpu.json]

The pair is calibrated first. Then every prompt is decoded with the profile's tree and with the best tree of each size
from 2 to 32, as far as calibrating timed them (of every depth, at the depth that is expected to be fastest), by turns;
ratios are taken prompt by prompt.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from common import argument_parser, environment, quiet_demo_pair, token_ids, write_results
from rich import box
from rich.console import Console
from rich.table import Column, Table

from heavypath.kernels.filtering import Filters
from heavypath.speculative import Profile, SpeculativeDecoder, select_tree
from heavypath.speculative.calibration import calibrate
from heavypath.speculative.demo import demo_prompts

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)


def tree_of(profile: Profile, size: int, filters: Filters):
    """The tree of `size` nodes that the profile expects to be fastest, for method sequoia."""
    cost = profile.costs.at(1).steps_of([size])
    return select_tree(
        profile.measured("sequoia", filters)[0].rates(), cost, profile.costs.at(1).level / profile.costs.at(1).step[1]
    )


def sweep(
    arguments: argparse.Namespace, temperature: float, profile: Profile, report: Callable[[str], object]
) -> list[dict]:
    """A row for the profile's tree, then one for each size."""
    target, draft, tokenizer = quiet_demo_pair()
    filters = Filters(temperature)
    plans = {"profile": profile.plan("sequoia", filters).plan} | {
        size: tree_of(profile, size, filters) for size in SIZES if size <= max(profile.costs.at(1).step)
    }
    decoders = {name: SpeculativeDecoder(target, draft, "sequoia", tree=plan.tree) for name, plan in plans.items()}
    decoders["profile"] = SpeculativeDecoder(target, draft, "sequoia", profile=profile)
    prompts = token_ids(tokenizer, demo_prompts()[: arguments.prompts])
    seconds: dict = {name: [] for name in decoders}
    for number, prompt in enumerate([prompts[0], *prompts]):
        names = list(decoders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            report(f"T = {temperature:g}, prompt {number} of {len(prompts)}: {name}")
            begin = time.perf_counter()
            decoders[name].generate(prompt, arguments.tokens, temperature=temperature, seed=number, eos_token_id=None)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - begin)
    rows = []
    for name, plan in plans.items():
        ratios = sorted(other / own for other, own in zip(seconds[name], seconds["profile"], strict=True))
        rows.append(
            {
                "temperature": temperature, "tree": str(name), "nodes": len(plan.tree), "depth": plan.tree.depth,
                "expected_speedup": plan.speedup, "tokens_per_second": arguments.tokens / median(seconds[name]),
                "all_tokens_per_second": arguments.tokens * len(prompts) / sum(seconds[name]),
                "profile_faster_by": median(ratios),
                "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console, rows = Console(highlight=False), []
    target, draft, _ = quiet_demo_pair()
    with Console(stderr=True).status("") as status:
        begin = time.perf_counter()
        profile = calibrate(
            target, draft, temperatures=arguments.temperatures, batch_sizes=[1], on_progress=status.update
        )
        calibrated = time.perf_counter() - begin
        for temperature in arguments.temperatures:
            rows += sweep(arguments, temperature, profile, status.update)
    console.print(f"calibrated in {calibrated:.0f} s, {arguments.threads} threads")
    for temperature in arguments.temperatures:
        table = Table(Column("tree", no_wrap=True), box=box.SIMPLE_HEAD, title=f"temperature {temperature:g}")
        for heading in ("nodes", "depth", "expected", "tokens/s", "profile's is faster by", "quartiles"):
            table.add_column(heading, justify="right")
        for row in rows:
            if row["temperature"] == temperature:
                low, high = row["quartiles"]
                table.add_row(
                    row["tree"], str(row["nodes"]), str(row["depth"]), f"{row['expected_speedup']:.2f}",
                    f"{row['all_tokens_per_second']:.0f}", f"{row['profile_faster_by']:.3f}", f"{low:.2f} - {high:.2f}",
                )  # fmt: skip
        console.print(table)
    facts = environment("cpu") | {name: getattr(arguments, name) for name in ("prompts", "tokens", "temperatures")}
    write_results(arguments.json, facts, calibration_seconds=calibrated, rows=rows)


if __name__ == "__main__":
    main()
