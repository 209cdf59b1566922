"""gumbel_topk against the same draw in plain PyTorch, and against the hardware's roofs.

    python -m pytest bench/kernels/bench_sampling.py --benchmark-only [-k plain] [--benchmark-json FILE]

plain     1 / 16 / 64 rows of 32,000 / 128,256 / 151,936 bfloat16 logits, k = 1 / 4 / 16 / 32, temperature 0.6
float32   some of these shapes in float32
filtered  with top_k 50 and top_p 0.9, too: 128,256 tokens, k = 4 / 16

A CPU times 1 and 16 rows of 32,000 and 128,256 tokens with k = 4 and 32 (float32 and filtered: 128,256 tokens, k = 4),
and heavypath is its compiled code there, or without a compiler its reference. The peers draw without replacement from
the same logits, in float32:

softmax, noise, topk   probabilities / fresh exponential noise, then topk: as Sequoia's code, which keeps its noise
softmax, noise, sort   the same with a full sort
multinomial            torch.multinomial of the softmax, without replacement
topk alone             topk of the bare logits, without noise or filters: less work, to see what the selection costs

In the filtered table the peers use transformers' own warpers. Logits are normal with a standard deviation of 3. Bytes
are the least that the problem needs: logits and outputs once. A second roof, on a GPU and without filters, are the
INSTRUCTIONS of all elements at the rate at which all lanes issue them at the highest clock: noise costs more than
reading.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
from common import DEVICE, Run, problems_of
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from heavypath.kernels.sampling import gumbel_topk

TEMPERATURE, TOP_K, TOP_P = 0.6, 50, 0.9
LANES = 128  # instructions that a multiprocessor issues a cycle, one for each lane
INSTRUCTIONS = 26  # for each 16-bit logit, read off the compiled kernel
MOST_OF_REFERENCE = 1 << 20  # logits; it draws its noise on the host


class Case(NamedTuple):
    """A shape of logits, and how many tokens are drawn from each row."""

    table: str
    rows: int
    vocabulary: int
    k: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.table} {self.rows} x {self.vocabulary} k={self.k}"

    def runs_here(self) -> bool:
        few = (4,) if self.table != "plain" else (4, 32)
        return DEVICE == "cuda" or (self.rows <= 16 and self.vocabulary <= 128256 and self.k in few)


CASES = [
    *(Case("plain", rows, size, k) for size in (32000, 128256, 151936) for rows in (1, 16, 64) for k in (1, 4, 16, 32)),
    *(Case("float32", rows, 128256, k, torch.float32) for rows in (1, 16, 64) for k in (4, 32)),
    *(Case("filtered", rows, 128256, k) for rows in (1, 16, 64) for k in (4, 16)),
]
MINIATURE = [Case("plain", 1, 100, 2), Case("filtered", 2, 100, 2)]


class Problem:
    """The logits of a case, and their probabilities as the peers compute them."""

    def __init__(self, case: Case):
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.case, self.rows = case, torch.arange(case.rows, device=DEVICE)
        logits = torch.randn(case.rows, case.vocabulary, generator=generator, device=DEVICE)
        self.logits = (3 * logits).to(case.dtype)
        self.filters = {"top_k": TOP_K, "top_p": TOP_P} if case.table == "filtered" else {}
        self.warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)])
        self.warpers += [TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)] if self.filters else []

    def ours(self, impl: str) -> Run:
        options = {"temperature": TEMPERATURE, **self.filters, "rows": self.rows, "impl": impl}
        return lambda: gumbel_topk(self.logits, self.case.k, **options)

    def probs(self) -> torch.Tensor:
        return self.warpers(None, self.logits.float()).softmax(-1)

    def raced(self) -> torch.Tensor:
        draft = self.probs()
        return draft / torch.empty_like(draft).exponential_()


def eager(problem: Problem) -> Run | None:
    return problem.ours("auto") if DEVICE == "cuda" else None


def reference(problem: Problem) -> Run | None:
    return problem.ours("torch") if DEVICE == "cuda" and problem.logits.numel() <= MOST_OF_REFERENCE else None


WAYS: dict[str, Callable[[Problem], Run | None]] = {
    "heavypath": lambda problem: problem.ours("auto"),
    "heavypath, eager": eager,
    "its reference, eager": reference,
    "softmax, noise, topk": lambda problem: lambda: problem.raced().topk(problem.case.k),
    "softmax, noise, sort": lambda problem: lambda: problem.raced().sort(descending=True).indices[:, : problem.case.k],
    "multinomial, eager": lambda problem: (
        lambda: torch.multinomial(problem.probs(), problem.case.k)
    ),  # waits for the host
    "topk alone": lambda problem: lambda: problem.logits.topk(problem.case.k),
}


def instruction_seconds(case: Case) -> float:
    """What issuing the instructions of all elements takes; 0 on a CPU."""
    if DEVICE == "cpu" or case.table == "filtered":
        return 0.0
    facts = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    each_second = facts["multiprocessor_count"] * LANES * facts["sm_clock_rate"] * 1e3
    return INSTRUCTIONS * case.rows * case.vocabulary / each_second


def test_sampling(case, way, timed):
    outputs = case.rows * case.k * (8 + 4 + 4)  # tokens, keys, log-probabilities
    read = case.rows * case.vocabulary * case.dtype.itemsize + outputs
    timed(*map(WAYS[way], problems_of(partial(Problem, case), read)), read=read, roof=instruction_seconds(case))
