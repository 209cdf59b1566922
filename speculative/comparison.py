"""Compare methods, drafts and decoders on the same prompts: tokens per forward pass, speed, and whether outputs are
equal.

The comparison is paired: for each prompt, all of them run one after the other, and each one's speed is divided by that
of transformers' own `generate` on this prompt. The report has the median and the spread of these ratios. With several
runs the fastest counts, because disturbances on a machine only add time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from rich import box
from rich.table import Column, Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heavypath.kernels.filtering import Filters
from heavypath.kernels.numbers import real, whole
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.drafts.kinds import AnyDraft
from heavypath.speculative.files.prompts import Prompt, tokens_of
from heavypath.speculative.methods import LOSSLESS_METHODS
from heavypath.speculative.profile import Profile
from heavypath.speculative.trees.tree import TokenTree
from heavypath.speculative.ways import (
    ASSISTED,
    PLAIN,
    WARM_UP_TOKENS,
    TimedRun,
    Verdict,
    build_ways,
    timed_runs,
)

GRAY = "#9aa1ab"  # colours of the plot, as the next one
BLUE = "#2b6cb8"


@dataclass(frozen=True)
class ComparedWay:
    """Results of one way to decode, over all prompts.

    method: name of the way: a method; "method, verifier" if it used one of the given verifiers; with several drafts
        followed by ", draft"; or the name of a given decoder
    tokens_per_forward: new tokens / forward passes of the target. For transformers this includes the prefill, which
        yields a token; ours is not counted, because it leaves the prompt's last token to the first step
    tokens_per_second: new tokens / seconds, prefill included, over all prompts together
    ratio: tokens per second / those of transformers' generate, median over the prompts
    ratio_range: the smallest and the largest such ratio
    text: the verdict on the output. At temperature 0 it is compared with transformers' greedy output, the "reference":
        "equal"; "tie" (where the outputs first differ, the target's logits of the two tokens differ by less than 1e-4);
        or "differs". At temperature > 0 the output of "ersd" is compared with that of "autoregressive" with the same
        seed, the "reference": "equal" or "differs". The other methods are other samples from the "same law", the same
        distribution; that is a property of the method and is not measured here. A decoder with a user's own verifier is
        "unchecked". A lossy method, such as "typical-lossy", has an "other law"
    logit_gap: the largest difference between the target's logits of two tokens at which greedy outputs first differ;
        None if all are equal, or differ only in length
    ratio_quartiles: a quarter of the prompts have a ratio below the first, a quarter above the second
    ratios: the ratio of each prompt, in order
    """

    method: str
    tokens_per_forward: float
    tokens_per_second: float
    ratio: float
    ratio_range: tuple[float, float]
    text: Verdict
    logit_gap: float | None = None
    ratio_quartiles: tuple[float, float] = (1.0, 1.0)
    ratios: tuple[float, ...] = ()


def compare(
    target: PreTrainedModel,
    draft: AnyDraft | Mapping[str, AnyDraft | SpeculativeDecoder] | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    methods: Sequence[str] = LOSSLESS_METHODS,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    tree_size: int | None = None,
    tree: TokenTree | None = None,
    profile: Profile | str | Path | None = None,
    verifiers: Sequence[str] = (),
    assistant: PreTrainedModel | None = None,
    seed: int = 0,
    repeats: int = 1,
    on_progress: Callable[[str], object] | None = None,
) -> list[ComparedWay]:
    """Decode each prompt with transformers' generate, and with each given method, draft or decoder.

        compare(target, draft, prompts)                                                 # all methods
        compare(target, {"small": draft, "lookup": PromptLookup()}, prompts, methods=["chain", "sequoia"])
        compare(target, {"wide": SpeculativeDecoder(...), "deep": SpeculativeDecoder(...)}, prompts)

    draft: any that SpeculativeDecoder takes. Or a dictionary of names: drafts, each of which is combined with each
        method, and decoders of this target, which run as they are. For drafts that are models, transformers' assisted
        generation is measured, too. None is enough for methods=["autoregressive"]. A `Recall` is copied for each
        method, and emptied at the beginning of each round: it learns from earlier prompts of the round, never from the
        same prompt or another method
    prompts: strings, LongTensors [1, T], and Paths of files that `read_prompts` of
        `heavypath.speculative.files.prompts` reads, mixed in any way; or one of these. All but LongTensors need the
        tokenizer
    methods, tree_size, tree, profile: for the decoders built for the drafts, as in SpeculativeDecoder; default: all
        lossless methods
    verifiers: names of verifiers, as in SpeculativeDecoder; methods that accept them are measured with each
    assistant: a model for transformers' assisted generation, instead of the drafts that are models
    temperature, top_k, top_p, min_p, seed: how the target is sampled
    repeats: rounds over all prompts; for each prompt the fastest run of each way counts
    on_progress: called with a line of text before each warm-up and each prompt

    Generation ends at an end-of-sequence token of the target's generation_config, or after max_new_tokens. Each way to
    decode first makes a short run that is not timed.

    Returns a row for each way to decode, transformers' first. Raises what SpeculativeDecoder raises, and ValueError for
    no prompts, for repeats < 1, for a name given twice, for a verifier that no method accepts, and for a decoder of
    another target.
    """
    repeats = whole("repeats", repeats)
    seed = whole("seed", seed)
    max_new_tokens = whole("max_new_tokens", max_new_tokens)
    temperature = real("temperature", temperature)
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    Filters(temperature, top_k, top_p, min_p).check()
    inputs = tokens_of(prompts, tokenizer, target.device)
    ways = build_ways(
        target,
        draft,
        methods,
        verifiers=verifiers,
        tree_size=tree_size,
        tree=tree,
        profile=profile,
        assistant=assistant,
    )
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    runners = ways.runners(sampling, seed)
    report = on_progress or (lambda line: None)
    for name, runner in runners.items():
        report(f"warm-up: {name}")
        runner(inputs[0], min(WARM_UP_TOKENS, max_new_tokens))
    runs = timed_runs(runners, inputs, max_new_tokens, repeats=repeats, recalls=ways.recalls, report=report)
    rows = []
    for name, own in runs.items():
        text, gap = ways.verdict(name, runs, temperature)
        rows.append(_row(name, own, runs[PLAIN], text, gap))
    return rows


def as_table(rows: Sequence[ComparedWay]) -> Table:
    """The rows of `compare` as a table of rich for a terminal of 80 columns. `print` of rich shows it."""
    table = Table(Column("\nmethod", overflow="fold"), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    gains = over_plain(rows)
    against = ["to\nplain"] if any(gain is not None for gain in gains) else []
    for heading in ("tokens/\nforward", "tokens/s", "ratio", "quartiles", *against):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    table.add_column("text", vertical="bottom")
    for row, gain in zip(rows, gains, strict=True):
        low, high = row.ratio_quartiles
        numbers = f"{row.tokens_per_forward:.2f}", f"{row.tokens_per_second:.0f}", f"{row.ratio:.2f}"
        gap = f" ({row.logit_gap:.0e})" if row.logit_gap is not None else ""
        shown = ["" if gain is None else f"{gain:.2f}"] if against else []
        table.add_row(row.method, *numbers, f"{low:.2f}-{high:.2f}", *shown, row.text + gap)
    return table


def over_plain(rows: Sequence[ComparedWay]) -> list[float | None]:
    """For each row of `compare`, its speed divided by that of plain decoding ("autoregressive"), median over prompts.

    All are None if plain decoding was not measured.
    """
    plain = next((row for row in rows if row.method == "autoregressive"), None)
    if plain is None:
        return [None] * len(rows)
    return [median(own / base for own, base in zip(row.ratios, plain.ratios, strict=True)) for row in rows]


def headline(rows: Sequence[ComparedWay]) -> str | None:
    """One line about our fastest way that is not lossy, with its speed-ups; None if only transformers decoded.

    Its ratio to plain decoding (the row "autoregressive") is the effect of speculation. The ratio of plain decoding to
    transformers is the effect of the rest of the decoder. Both are medians over the prompts.
    """
    ours = [row for row in rows if row.method.split(", ")[0] not in (PLAIN, ASSISTED) and row.text != "other law"]
    if not ours:
        return None
    fastest = max(ours, key=lambda row: row.ratio)
    prompts = len(fastest.ratios)
    of = f"median of {prompts} prompts" if prompts > 1 else "one prompt"
    text = f"fastest ({of}): {fastest.method}, {fastest.ratio:.2f} times {PLAIN}"
    (gain,) = (gain for row, gain in zip(rows, over_plain(rows), strict=True) if row is fastest)
    if gain is None:
        return text
    if fastest.method == "autoregressive":
        return f"{text}; no draft pays here"
    return f"{text} and {gain:.2f} times plain decoding (autoregressive)"


def _row(
    name: str, own: Sequence[TimedRun], plain: Sequence[TimedRun], text: Verdict, gap: float | None
) -> ComparedWay:
    """The row of one way. own: its runs; plain: the runs of transformers' generate on the same prompts, in order."""
    ratios = [run.speed / reference.speed for run, reference in zip(own, plain, strict=True)]
    low, _, high = quantiles(ratios, method="inclusive") if len(ratios) > 1 else 3 * ratios
    tokens = sum(run.new_tokens for run in own)
    return ComparedWay(
        method=name,
        tokens_per_forward=tokens / sum(run.decoded.forwards for run in own),
        tokens_per_second=tokens / sum(run.seconds for run in own),
        ratio=median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        text=text,
        logit_gap=gap,
        ratio_quartiles=(low, high),
        ratios=tuple(ratios),
    )


def check_can_plot(path: str | Path) -> None:
    """Raise ImportError, with the package to install, if matplotlib is missing, and ValueError for a file type that it
    does not support.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"a plot needs matplotlib: `pip install '.[figures]'` in a checkout ({error})") from None
    from matplotlib.figure import Figure

    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in ("", *Figure().canvas.get_supported_filetypes()):
        raise ValueError(f"a plot must be a .png, .svg or .pdf file, got {str(path)!r}")


def plot_ratios(rows: Sequence[ComparedWay], path: str | Path) -> None:
    """Plot the ratios in the rows of `compare` into a .png, .svg or .pdf file.

    A ratio is tokens/s over those of transformers' `generate`, which itself is not drawn. Each dot is a prompt; a way's
    bar is from the first to the third quartile, and the line in it is the median.

    Raises ImportError if matplotlib is missing, and ValueError for a file type that it does not support.
    """
    check_can_plot(path)
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.method != PLAIN][::-1]  # the ratio of PLAIN is 1 by definition
    figure = Figure(figsize=(8, 1.1 + 0.34 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(shown):
        low, high = row.ratio_quartiles
        axes.barh(place, high - low, 0.62, left=low, color=BLUE, alpha=0.3)
        axes.plot(2 * [row.ratio], [place - 0.31, place + 0.31], color=BLUE, linewidth=2)
        axes.plot(row.ratios, len(row.ratios) * [place], linestyle="", marker=".", color=GRAY, markersize=4)
    axes.set_yticks(range(len(shown)), [row.method for row in shown])
    axes.axvline(1, color=GRAY, linewidth=1)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"tokens/s over those of {PLAIN}: each prompt, median and quartiles")
    figure.savefig(path)
