"""`heavypath compare` measures methods and drafts on a user's prompts, or by kind of work on those of a suite.

`heavypath demo` shows its table, too.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.progress import progress, starting

if TYPE_CHECKING:
    import torch

    from heavypath.speculative.comparison import ComparedWay

SUITE_METHODS = ("autoregressive", "chain", "sequoia")  # as in `suite.measure`, which is slow to import


def compare(
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts to continue. With --suite: a file of prompts by kind of work.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="A file with a text to continue on each line; in a .jsonl file, as JSON strings."
        ),
    ] = None,
    target: options.Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="A draft, as for `generate`; repeat it for several. Default: the shipped pair's; with a --target, "
            "recall."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Repeat it for several. Default: all lossless ones of {', '.join(options.METHODS)}; with --suite "
            f"{', '.join(SUITE_METHODS)}."
        ),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            min=0, help="0 takes the most probable token; > 0 samples. With --suite: repeat it for several. Default: 0."
        ),
    ] = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    tree_size: options.TreeSize = None,
    profile: options.ProfileFile = None,
    verifier: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Verifier for the methods that accept one: {', '.join(options.VERIFIERS)}; repeat it for several."
        ),
    ] = None,
    device: options.Device = None,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    offline: options.Offline = False,
    seed: options.Seed = 0,
    repeats: options.Repeats = 1,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also draw the ratios into this file, .png or .svg.")
    ] = None,
    suite: Annotated[
        bool,
        typer.Option("--suite", help="Compare by kind of work, on the shipped suite or the one in the file TEXTS."),
    ] = False,
    kind: Annotated[
        list[str] | None, typer.Option(help="With --suite: a kind of work; repeat it for several. Default: all.")
    ] = None,
    per_kind: Annotated[
        int | None, typer.Option(min=1, help="With --suite: how many prompts of each kind. Default: all.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="With --suite: write all figures into this file, as JSON, after each kind."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(dir_okay=False, help="With --suite: write a page with plots into this .html file.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare methods and drafts with transformers' own generate, on your prompts or by kind of work."""
    names = method or [*(SUITE_METHODS if suite else options.LOSSLESS_METHODS)]
    drafts = draft or []
    temperatures = temperature or [0.0]
    for name in names:
        options.check_word("--method", name, options.METHODS)
    for name in verifier or []:
        options.check_word("--verifier", name, options.VERIFIERS)
    for_suite = {"--kind": kind, "--per-kind": per_kind, "--save": save, "--page": page}
    _check_use(texts, suite, {"--prompts": prompts, "--plot": plot}, for_suite, temperatures)
    for option, file in {"--plot": plot, "--save": save, "--page": page}.items():
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"{option} must be in a folder that exists, got {str(file)!r}")
    with starting():
        from heavypath.kernels.filtering import Filters
        from heavypath.speculative.cli.suite import compare_kinds
        from heavypath.speculative.cli.support import fetch, load, say_if_busy, say_recall
        from heavypath.speculative.comparison import check_can_plot, plot_ratios
        from heavypath.speculative.comparison import compare as measure
        from heavypath.speculative.files.prompts import read_prompts
        from heavypath.speculative.loading import load_draft
        from heavypath.speculative.profile import Profile
        from heavypath.speculative.suite.prompts import part_of_suite, read_suite

    for each in temperatures:
        Filters(each, top_k, top_p, min_p).check()
    by_kind = part_of_suite(read_suite(*(texts or [])), kind, per_kind) if suite else None
    given = [*(texts or []), *(read_prompts(prompts) if prompts is not None else [])]
    if plot is not None:
        check_can_plot(plot)
    measured = None if profile is None else Profile.load(profile)
    recalls = target is not None and not drafts and names != ["autoregressive"]
    drafts = ["recall"] if recalls else drafts
    fetch(target, drafts, offline=offline)
    if recalls:
        say_recall()
    pair = load(target, drafts[0] if drafts else None, dtype, device=device, threads=threads, offline=offline)
    named = pair.draft
    if len(drafts) > 1:
        assert pair.draft is not None
        precision = None if dtype is None else pair.target.dtype
        named = {drafts[0]: pair.draft} | {
            name: load_draft(name, pair, target, precision, local_files_only=True) for name in drafts[1:]
        }
    shared = {"methods": names, "max_new_tokens": max_new_tokens, "tree_size": tree_size, "profile": measured}
    shared |= {"verifiers": verifier or (), "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    shared |= {"repeats": repeats}
    say_if_busy()
    if by_kind is not None:
        compare_kinds(pair, named, by_kind, shared | {"temperatures": temperatures}, save, page, as_json=as_json)
        return
    with progress("comparing", quiet=as_json) as report:
        rows = measure(
            pair.target,
            named,
            given,
            tokenizer=pair.tokenizer,
            temperature=temperatures[0],
            on_progress=report,
            **shared,
        )
    if plot is not None:
        plot_ratios(rows, plot)
    reported = ("max_new_tokens", "tree_size", "repeats", "top_k", "top_p", "min_p", "seed")
    settings = {"prompts": len(given), "temperature": temperatures[0]} | {name: shared[name] for name in reported}
    print_rows(rows, settings, pair.target.device, as_json=as_json)


def _check_use(
    texts: list[str] | None,
    suite: bool,
    for_prompts: dict[str, object],
    for_suite: dict[str, object],
    temperatures: list[float],
) -> None:
    """Raise BadParameter for options that do not go together.

    for_prompts, for_suite: options that are only for a user's prompts, and only for a suite, with their values
    """
    if suite and len(texts or []) > 1:
        raise typer.BadParameter(f"--suite takes one file, got {len(texts or [])}", param_hint="TEXTS")
    if not suite and not texts and for_prompts["--prompts"] is None:
        raise typer.BadParameter("give some texts, or --prompts FILE, or --suite", param_hint="TEXTS")
    if not suite and len(temperatures) > 1:
        raise typer.BadParameter("several temperatures need --suite", param_hint="--temperature")
    for option, value in (for_prompts if suite else for_suite).items():
        if value is not None:
            how = "does not go with" if suite else "needs"
            raise typer.BadParameter(f"it {how} --suite", param_hint=option)


def print_rows(rows: "list[ComparedWay]", settings: dict, device: "torch.device", *, as_json: bool) -> None:
    """Print the rows that `compare` measured on a device, with notes that explain the columns.

    settings: how it was measured, by name; the notes need prompts, temperature, max_new_tokens and repeats
    as_json:  print one JSON object instead of a table
    """
    from rich.console import Console

    from heavypath.speculative.cli.info import installation
    from heavypath.speculative.comparison import as_table, headline, over_plain
    from heavypath.speculative.ways import PLAIN, TIE

    here = installation(device)
    if as_json:
        options.print_json({"settings": settings, "environment": here, "rows": [asdict(row) for row in rows]})
        return
    console = Console(highlight=False)
    console.print(as_table(rows))
    new_tokens, temperature, repeats = (settings[name] for name in ("max_new_tokens", "temperature", "repeats"))
    often = "after a short run to warm up" + (f"; the fastest of {repeats} runs counts" if repeats > 1 else "")
    where = f"{here['device']} with {here['threads']} CPU thread{'' if here['threads'] == 1 else 's'}"
    against = ["to plain: the median over our plain decoding (autoregressive), which is the gain by drafts."]
    if all(gain is None for gain in over_plain(rows)):
        against = ["--method autoregressive would show the gain by drafts over our plain decoding."]
    notes = [
        f"prompts: {settings['prompts']}, up to {new_tokens} new tokens each, temperature {temperature:g}, on {where}, "
        f"one after the other; {often}.",
        "tokens/forward: new tokens for each forward pass of the target that yields some.",
        "tokens/s: new tokens a second; the time includes the prompt's prefill, for every way to decode.",
        f"ratio: tokens/s over those of {PLAIN}, prompt by prompt in this run: median and quartiles.",
        *against,
        f"text: equal is the text of {PLAIN}, token for token; tie: the texts first differ where the target scores two "
        f"tokens within {TIE:g} of each other, so that rounding decides; differs: any other difference."
        if temperature == 0
        else "text: ersd must give the text of autoregressive under the same seed. The others draw other tokens from "
        "the same distribution (same law), which the test suite checks and this table does not.",
    ]
    if any(row.text == "other law" for row in rows):
        notes.append("other law: the method changes the output's distribution, so its speed is not comparable.")
    for note in notes:
        console.print(note, style="dim")
    if (best := headline(rows)) is not None:
        console.print(f"\n{best}", style="bold", soft_wrap=True)
