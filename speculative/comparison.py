"""Compare all methods on the same prompts in one run: tokens per target forward, speed, and whether the text is right.

The comparison is paired: on each prompt all methods run one after the other, and each method's speed is divided by that
of transformers' own `generate` on the same prompt.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from rich import box
from rich.table import Column, Table
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.generation_defaults import NOTHING
from heavypath.speculative.methods import METHODS

PLAIN, ASSISTED = "transformers generate", "transformers assisted"
TIE = 1e-4  # two tokens whose target logits are closer than this are equally right
_WARM_UP_TOKENS = 8

Verdict = Literal["equal", "tie", "differs", "same law", "reference"]
Runner = Callable[[Tensor, int], tuple[Tensor, int]]  # prompt [1, T], new tokens -> sequence [1, T + new], forwards


@dataclass(frozen=True)
class Row:
    """What one method did on all prompts.

    tokens_per_forward: new tokens / forward passes of the target, the prefill of each prompt included
    tokens_per_second:  new tokens / seconds, over all prompts together
    ratio:              tokens per second / those of transformers' generate, the median over the prompts
    ratio_range:        the smallest and the largest such ratio
    text:               at temperature 0, compared with transformers' greedy text, which is the "reference": "equal",
                        "tie" (the texts part where the target's logits of their two tokens are within 1e-4) or
                        "differs". At temperature > 0 the text of "ersd" is compared with that of "autoregressive" under
                        the same seed, which is the "reference": "equal" or "differs". The other methods draw other
                        tokens from the "same law", which is a property of the method and is not measured here
    logit_gap:          the largest gap between the target's logits of two tokens at which greedy texts part; None if
                        no texts part, or if they only end at different places
    """

    method: str
    tokens_per_forward: float
    tokens_per_second: float
    ratio: float
    ratio_range: tuple[float, float]
    text: Verdict
    logit_gap: float | None = None


@dataclass(frozen=True)
class _Run:
    sequence: Tensor  # [1, T + new]
    new_tokens: int
    forwards: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.new_tokens / self.seconds


def compare(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    methods: Sequence[str] = tuple(METHODS),
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    tree_size: int | None = None,
    seed: int = 0,
    on_progress: Callable[[str], object] | None = None,
) -> list[Row]:
    """Decode each prompt, LongTensor[1, T], with transformers' generate, plain and assisted, and with each method.

    A text ends at the target's own end-of-sequence token (of its generation_config) or after max_new_tokens. Each
    method first makes a short run that is not timed. on_progress is called with a line of text before each prompt and
    method.

    Returns a row for each method, after two rows for transformers. Raises what SpeculativeDecoder raises, and
    ValueError for no prompts.
    """
    if not prompts:
        raise ValueError("expected at least one prompt, got none")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    runners: dict[str, Runner] = {
        PLAIN: transformers_runner(target, None, sampling, seed),
        ASSISTED: transformers_runner(target, draft, sampling, seed),
    }
    for method in methods:
        decoder = SpeculativeDecoder(target, draft, method, tree_size=tree_size)
        runners[method] = _speculative(decoder, sampling, seed)
    if temperature > 0 and "ersd" in methods and "autoregressive" not in methods:
        raise ValueError("at temperature > 0 the text of 'ersd' is compared with 'autoregressive'; add it to methods")

    report = on_progress or (lambda line: None)
    for name, runner in runners.items():
        report(f"warm-up: {name}")
        runner(prompts[0], min(_WARM_UP_TOKENS, max_new_tokens))
    runs: dict[str, list[_Run]] = {name: [] for name in runners}
    for number, prompt in enumerate(prompts, start=1):
        for name, runner in runners.items():
            report(f"prompt {number} of {len(prompts)}: {name}")
            runs[name].append(_timed(runner, prompt, max_new_tokens))
    return [_row(name, runs, target, temperature) for name in runners]


def as_table(rows: Sequence[Row]) -> Table:
    """The rows as a table that fits a terminal of 80 columns."""
    table = Table(Column("\nmethod", no_wrap=True), box=box.SIMPLE_HEAD)
    for heading in ("tokens/\nforward", "tokens/s", "ratio", "range"):
        table.add_column(heading, justify="right", vertical="bottom")
    table.add_column("text", vertical="bottom")
    for row in rows:
        low, high = row.ratio_range
        numbers = f"{row.tokens_per_forward:.2f}", f"{row.tokens_per_second:.0f}", f"{row.ratio:.2f}"
        gap = f" ({row.logit_gap:.0e})" if row.logit_gap is not None else ""
        table.add_row(row.method, *numbers, f"{low:.2f} - {high:.2f}", row.text + gap)
    return table


def transformers_runner(target: PreTrainedModel, draft: PreTrainedModel | None, sampling: dict, seed: int) -> Runner:
    """A runner of transformers' generate, assisted generation if there is a draft."""
    options = {"do_sample": False, "repetition_penalty": 1.0, "num_beams": 1, "pad_token_id": _pad_token(target)}
    if sampling["temperature"] > 0:
        filters = {"top_k": sampling["top_k"] or 0, "top_p": sampling["top_p"] or 1.0}  # None would mean its defaults
        options |= {"do_sample": True, "temperature": sampling["temperature"], **filters}
    if draft is not None:
        options["assistant_model"] = draft

    def run(prompt: Tensor, max_new_tokens: int) -> tuple[Tensor, int]:
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        hook = target.register_forward_hook(count)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                sequence = target.generate(  # pyright: ignore[reportCallIssue]
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **options
                )
        finally:
            hook.remove()
        return sequence, forwards

    return run


def _speculative(decoder: SpeculativeDecoder, sampling: dict, seed: int) -> Runner:
    """A runner of one of the methods."""
    options = NOTHING | {name: value for name, value in sampling.items() if value is not None}
    options["eos_token_id"] = "model"

    def run(prompt: Tensor, max_new_tokens: int) -> tuple[Tensor, int]:
        out = decoder.generate(prompt, max_new_tokens, **options, seed=seed)
        return out.sequences, out.stats.steps

    return run


def _timed(runner: Runner, prompt: Tensor, max_new_tokens: int) -> _Run:
    _synchronize(prompt.device)
    begin = time.perf_counter()
    sequence, forwards = runner(prompt, max_new_tokens)
    _synchronize(prompt.device)
    return _Run(sequence, sequence.shape[1] - prompt.shape[1], forwards, time.perf_counter() - begin)


def _row(name: str, runs: dict[str, list[_Run]], target: PreTrainedModel, temperature: float) -> Row:
    own = runs[name]
    ratios = [run.speed / plain.speed for run, plain in zip(own, runs[PLAIN], strict=True)]
    tokens = sum(run.new_tokens for run in own)
    text, gap = "same law", None
    reference = PLAIN if temperature == 0 else "autoregressive"
    if name == reference:
        text = "reference"
    elif temperature == 0:
        text, gap = _greedy_verdict(target, own, runs[reference])
    elif name == "ersd":
        same = all(torch.equal(a.sequence, b.sequence) for a, b in zip(own, runs[reference], strict=True))
        text = "equal" if same else "differs"
    return Row(
        name,
        tokens / sum(run.forwards for run in own),
        tokens / sum(run.seconds for run in own),
        median(ratios),
        (min(ratios), max(ratios)),
        text,
        gap,
    )


def _greedy_verdict(target: PreTrainedModel, own: list[_Run], plain: list[_Run]) -> tuple[Verdict, float | None]:
    """The worst verdict over all prompts, and the largest gap between logits where texts part."""
    pairs = [
        (a.sequence, b.sequence) for a, b in zip(own, plain, strict=True) if not torch.equal(a.sequence, b.sequence)
    ]
    if not pairs:
        return "equal", None
    gaps = [_parting_gap(target, sequence, reference) for sequence, reference in pairs]
    known = [gap for gap in gaps if gap is not None]
    tie = all(gap is not None and gap < TIE for gap in gaps)
    return "tie" if tie else "differs", max(known, default=None)


@torch.no_grad()
def _parting_gap(target: PreTrainedModel, sequence: Tensor, reference: Tensor) -> float | None:
    """The gap between the target's logits of the first tokens that differ; None if one text ends before that.

    sequence, reference: LongTensor[1, L], prompt and text.
    """
    shorter = min(sequence.shape[1], reference.shape[1])
    differing = (sequence[0, :shorter] != reference[0, :shorter]).nonzero()
    if not len(differing):
        return None
    place = int(differing[0])
    logits = target(input_ids=reference[:, :place], use_cache=False).logits[0, -1].float()
    return abs(float(logits[sequence[0, place]] - logits[reference[0, place]]))


def _pad_token(target: PreTrainedModel) -> int:
    config = target.generation_config
    eos = config.eos_token_id if config is not None else None
    return eos if isinstance(eos, int) else eos[0] if eos else 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
