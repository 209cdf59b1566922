"""`heavypath compare` measures methods and drafts on prompts of one's own; `heavypath demo` shows its table, too."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.progress import progress, starting

if TYPE_CHECKING:
    import torch

    from heavypath.speculative.comparison import ComparedWay


def compare(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to continue.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="A file of texts to continue, one on each line; in a .jsonl file, as JSON strings."
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
        typer.Option(help=f"Repeat it for several. Default: all but lossy ones, of {', '.join(options.METHODS)}."),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    tree_size: options.TreeSize = None,
    profile: options.ProfileFile = None,
    verifier: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What verifies methods that take it, of {', '.join(options.VERIFIERS)}; repeat it for several."
        ),
    ] = None,
    device: options.Device = None,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    offline: options.Offline = False,
    seed: options.Seed = 0,
    repeats: options.Repeats = 1,
    plot: Annotated[Path | None, typer.Option(help="Also draw the ratios into this file, .png or .svg.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare methods and drafts with transformers' own generate, on prompts of your own."""
    names, drafts = method or [*options.LOSSLESS_METHODS], draft or []
    for name in names:
        options.check_word("--method", name, options.METHODS)
    for name in verifier or []:
        options.check_word("--verifier", name, options.VERIFIERS)
    if not texts and prompts is None:
        raise typer.BadParameter("give some texts, or --prompts FILE", param_hint="TEXTS")
    if plot is not None and not plot.parent.is_dir():
        raise ValueError(f"--plot must be in a folder that exists, got {str(plot)!r}")
    with starting():
        from heavypath.kernels.filtering import Filters
        from heavypath.speculative.cli.support import fetch, load, say_if_busy, say_recall
        from heavypath.speculative.comparison import check_can_plot, plot_ratios
        from heavypath.speculative.comparison import compare as measure
        from heavypath.speculative.files.prompts import read_prompts
        from heavypath.speculative.loading import load_draft
        from heavypath.speculative.profile import Profile

    Filters(temperature, top_k, top_p, min_p).check()
    given = [*(texts or []), *(read_prompts(prompts) if prompts is not None else [])]
    if plot is not None:
        check_can_plot()
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
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    say_if_busy()
    with progress("comparing", quiet=as_json) as report:
        rows = measure(
            pair.target,
            named,
            given,
            tokenizer=pair.tokenizer,
            methods=names,
            max_new_tokens=max_new_tokens,
            tree_size=tree_size,
            profile=measured,
            verifiers=verifier or (),
            repeats=repeats,
            on_progress=report,
            **sampling,
        )
    if plot is not None:
        plot_ratios(rows, plot)
    settings = {"prompts": len(given), "max_new_tokens": max_new_tokens, "tree_size": tree_size, "repeats": repeats}
    print_rows(rows, settings | sampling, pair.target.device, as_json=as_json)


def print_rows(rows: "list[ComparedWay]", settings: dict, device: "torch.device", *, as_json: bool) -> None:
    """Print what `compare` measured on a device, with what one needs to know to read it.

    settings: by which it was measured
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
    against = ["to plain: the median over our own plain decoding (autoregressive), which is what drafts bring."]
    if all(gain is None for gain in over_plain(rows)):
        against = ["--method autoregressive would show what drafts bring over our own plain decoding."]
    notes = [
        f"prompts: {settings['prompts']}, up to {new_tokens} new tokens each, temperature {temperature:g}, on {where}, "
        f"one after the other; {often}.",
        "tokens/forward: new tokens for each forward pass of the target that yields some.",
        "tokens/s: new tokens a second, with the time that reading the prompt takes, for all ways to decode alike.",
        f"ratio: tokens/s over those of {PLAIN}, prompt by prompt in this run: median and quartiles.",
        *against,
        f"text: equal is the text of {PLAIN}, token for token; tie: the texts differ from a place on where the target "
        f"scores two tokens within {TIE:g} of each other, so that rounding decides; differs: any other difference."
        if temperature == 0
        else "text: ersd must have that of autoregressive under the same seed. The others draw other tokens from the "
        "same law, which the test suite checks and this table does not.",
    ]
    if any(row.text == "other law" for row in rows):
        notes.append("other law: the method changes the law of the text, so that its speed buys another text.")
    for note in notes:
        console.print(note, style="dim")
    if (best := headline(rows)) is not None:
        console.print(f"\n{best}", style="bold", soft_wrap=True)
