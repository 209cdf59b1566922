"""Is the tree that a profile chooses the fastest? End to end, against trees of every size of a sweep, in one run.

The pair is calibrated here and now. Then every prompt is decoded with the profile's tree and with the best tree of each
size from 2 to 32 (of every depth, at the depth expected to be fastest), in turn; ratios are taken prompt by prompt.

    python bench/profile_sweep.py --json bench/results/profile-sweep-cpu.json
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Column, Table

from heavypath.kernels.filtering import Filters
from heavypath.speculative import Profile, SpeculativeDecoder, load_demo_pair, select_tree
from heavypath.speculative.calibration import calibrate
from heavypath.speculative.demo import demo_prompts

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)


def tree_of(profile: Profile, size: int, filters: Filters):
    """The tree of `size` nodes that the profile expects to be fastest, for method sequoia."""
    cost = profile.costs.steps_of([size])
    return select_tree(
        profile.measured("sequoia", filters)[0].rates(), cost, profile.costs.level / profile.costs.step[1]
    )


def sweep(arguments: argparse.Namespace, temperature: float, profile: Profile, report) -> list[dict]:
    """A row for the profile's tree, then one for each size."""
    target, draft, tokenizer = load_demo_pair()
    filters = Filters(temperature)
    plans = {"profile": profile.plan("sequoia", filters).plan} | {
        size: tree_of(profile, size, filters) for size in SIZES
    }
    decoders = {name: SpeculativeDecoder(target, draft, "sequoia", tree=plan.tree) for name, plan in plans.items()}
    decoders["profile"] = SpeculativeDecoder(target, draft, "sequoia", profile=profile)
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in demo_prompts()[: arguments.prompts]]
    seconds: dict = {name: [] for name in decoders}
    for number, prompt in enumerate([prompts[0], *prompts]):
        names = list(decoders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            report(f"T = {temperature:g}, prompt {number} of {len(prompts)}: {name}")
            begin = time.perf_counter()
            decoders[name].generate(prompt, arguments.tokens, temperature=temperature, seed=number)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console, rows = Console(highlight=False), []
    target, draft, _ = load_demo_pair()
    with Console(stderr=True).status("") as status:
        begin = time.perf_counter()
        profile = calibrate(target, draft, temperatures=arguments.temperatures, on_progress=status.update)
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
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        content = {"torch": torch.__version__, "settings": settings, "calibration_seconds": calibrated, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
