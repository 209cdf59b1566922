"""gumbel_topk against the same draw in plain PyTorch, and against the hardware's roofs.

    python bench/kernel_sampling.py [--only plain] [--instructions 26] [--json FILE] [--plot FILE]

plain     1 / 16 / 64 rows of 32,000 / 128,256 / 151,936 bfloat16 logits, k = 1 / 4 / 16 / 32, temperature 0.6
float32   some of these shapes in float32
filtered  with top_k 50 and top_p 0.9, too: 128,256 tokens, k = 4 / 16

Without a GPU, 1 and 16 rows of 32,000 and 128,256 tokens with k = 4 and 32 are timed (float32 and filtered: 128,256
tokens, k = 4), and heavypath is its PyTorch reference, whose noise comes from counters, with float32 keys and float64
log-probabilities. The peers draw without replacement from the same logits, in float32:

softmax, noise, topk   probabilities / fresh exponential noise, then topk: as Sequoia's code, which keeps its noise
softmax, noise, sort   the same with a full sort
multinomial            torch.multinomial of the softmax, without replacement
topk alone             topk of the bare logits, without noise or filters: less work, to see what the selection costs

In the filtered table the peers use transformers' own warpers. Logits are normal with a standard deviation of 3.

On a GPU each time is the median of triton.testing.do_bench, which empties the L2 cache before every run, of a CUDA
graph; multinomial, which waits for the host, and the reference of heavypath are called from Python, as is "eager",
which is heavypath. On a CPU it is the median of alternating runs, and a ratio is the median of the ratios within a
round. Bytes are the least that the problem needs: logits and outputs once. The roof is the later of two times: the
bytes at the speed of a large copy, measured in the same run, and, on a GPU and without filters, the instructions of
all elements (--instructions for each, read off the compiled kernel for 16-bit logits) at the rate at which all lanes
issue them at the highest clock: noise costs more than reading.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from common import DEVICE, PICTURE, argument_parser, environment
from rich.table import Table
from timing import alternated, compared, copy_bandwidth, gpu_milliseconds, in_graphs, measure_cases
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from heavypath.kernels.sampling import gumbel_topk

TEMPERATURE, TOP_K, TOP_P = 0.6, 50, 0.9
EAGER = ("its reference", "multinomial")  # never captured in a graph: multinomial waits for the host
LANES = 128  # instructions that a multiprocessor issues a cycle, one for each lane


class Case(NamedTuple):
    """A shape of logits, and how many tokens are drawn from each row."""

    table: str
    rows: int
    vocabulary: int
    k: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.table} {self.rows} x {self.vocabulary} k={self.k}"

    def fits_a_cpu(self) -> bool:
        few = (4,) if self.table != "plain" else (4, 32)
        return self.rows <= 16 and self.vocabulary <= 128256 and self.k in few


CASES = [
    *(Case("plain", rows, size, k) for size in (32000, 128256, 151936) for rows in (1, 16, 64) for k in (1, 4, 16, 32)),
    *(Case("float32", rows, 128256, k, torch.float32) for rows in (1, 16, 64) for k in (4, 32)),
    *(Case("filtered", rows, 128256, k) for rows in (1, 16, 64) for k in (4, 16)),
]


MINIATURE = [Case("plain", 1, 100, 2), Case("filtered", 2, 100, 2)]
MOST_OF_REFERENCE = 1 << 20  # logits; it draws its noise on the host


def cases(miniature: bool) -> list[Case]:
    """Those that run on this machine."""
    return MINIATURE if miniature else [case for case in CASES if DEVICE == "cuda" or case.fits_a_cpu()]


def warm_up(case: Case) -> None:
    """Compile what our kernel needs for a case."""
    with torch.inference_mode():
        contenders(case)["heavypath"]()


def contenders(case: Case) -> dict[str, Callable[[], object]]:
    """The ways to solve a case, by name."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = (3 * torch.randn(case.rows, case.vocabulary, generator=generator, device=DEVICE)).to(case.dtype)
    rows = torch.arange(case.rows, device=DEVICE)
    filters = {"top_k": TOP_K, "top_p": TOP_P} if case.table == "filtered" else {}
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)])
    if filters:
        warpers += [TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)]

    def ours(impl: str) -> Callable[[], object]:
        return lambda: gumbel_topk(logits, case.k, temperature=TEMPERATURE, **filters, rows=rows, impl=impl)

    def probs() -> torch.Tensor:
        return warpers(None, logits.float()).softmax(-1)

    def raced() -> torch.Tensor:
        draft = probs()
        return draft / torch.empty_like(draft).exponential_()

    return {
        "heavypath": ours("auto"),
        **({"its reference": ours("torch")} if DEVICE == "cuda" and logits.numel() <= MOST_OF_REFERENCE else {}),
        "softmax, noise, topk": lambda: raced().topk(case.k),
        "softmax, noise, sort": lambda: raced().sort(descending=True).indices[:, : case.k],
        "multinomial": lambda: torch.multinomial(probs(), case.k),
        "topk alone": lambda: logits.topk(case.k),
    }


def instructions_a_second() -> float | None:
    if DEVICE == "cpu":
        return None
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    return properties["multiprocessor_count"] * LANES * properties["sm_clock_rate"] * 1e3


def measured(case: Case, facts: dict) -> dict:
    """One row of the table."""
    row = {"case": str(case)} | case._asdict() | {"dtype": str(case.dtype).removeprefix("torch.")}
    elements, outputs = case.rows * case.vocabulary, case.rows * case.k
    row["bytes"] = elements * case.dtype.itemsize + outputs * (8 + 4 + 4)  # tokens, keys, log-probabilities
    row["bandwidth_milliseconds"] = row["roof_milliseconds"] = row["bytes"] / facts["bytes_a_second"] * 1e3
    if facts["instructions_a_second"] and case.table != "filtered":
        issued = facts["instructions"] * elements / facts["instructions_a_second"] * 1e3
        row["instruction_milliseconds"], row["roof_milliseconds"] = issued, max(issued, row["roof_milliseconds"])
    runs = contenders(case)
    with torch.inference_mode():
        if DEVICE == "cuda":
            row["eager_milliseconds"] = gpu_milliseconds(runs["heavypath"])
            times, row["failed"] = in_graphs({name: lambda run=run: run for name, run in runs.items()}, eager=EAGER)
            row |= compared(times)
        else:
            row |= compared(alternated(runs, seconds=2 if elements > 1000 else 0.01))
    for roof in ("bandwidth", "roof"):
        row[f"fraction_of_{roof}"] = row[f"{roof}_milliseconds"] / row["milliseconds"]["heavypath"]
    return row


def as_table(rows: list[dict]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("case", "us", "MB", "of bandwidth", "of roof", "times as fast as"):
        table.add_column(heading, justify="left" if heading in ("case", "times as fast as") else "right")
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['milliseconds']['heavypath'] * 1e3:.1f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['fraction_of_bandwidth']:.1%}",
            f"{row['fraction_of_roof']:.1%}",
            "; ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items()),
        )
    return table


def main() -> None:
    parser = argument_parser(__doc__, plot=PICTURE)
    parser.add_argument("--only", choices=tuple(dict.fromkeys(case.table for case in CASES)), help="one of the tables")
    parser.add_argument("--instructions", type=float, default=26, help="for each 16-bit logit, without filters")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts = environment() | {
        "bytes_a_second": copy_bandwidth(arguments.miniature),
        "instructions": arguments.instructions,
        "instructions_a_second": instructions_a_second(),
    }
    measure_cases(cases(arguments.miniature), measured, as_table, facts, arguments)


if __name__ == "__main__":
    main()
