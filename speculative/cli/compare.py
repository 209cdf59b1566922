"""`heavypath compare` measures methods and drafts on prompts of one's own; `heavypath demo` shows its table, too."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from heavypath.kernels.filtering import Filters
from heavypath.speculative.cli.support import (
    AsJson,
    MaxNewTokens,
    Seed,
    Target,
    Temperature,
    TopK,
    TopP,
    TreeSize,
    installation,
    load,
    print_json,
    progress,
    say_if_busy,
)
from heavypath.speculative.comparison import PLAIN, TIE, ComparedWay, as_table, headline
from heavypath.speculative.comparison import compare as measure
from heavypath.speculative.files.prompts import read_prompts
from heavypath.speculative.loading import load_draft
from heavypath.speculative.methods import LOSSLESS_METHODS, METHODS, VERIFIERS
from heavypath.speculative.profile import Profile
from heavypath.speculative.ratio_plot import check_can_plot, plot_ratios


def compare(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to continue.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of texts to continue, one on each line; in a .jsonl file, as JSON strings."),
    ] = None,
    target: Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="A draft, as for `generate`; repeat it for several. Default: the shipped pair's."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeat it for several. Default: all but lossy ones, of {', '.join(METHODS)}."),
    ] = None,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: Annotated[float | None, typer.Option(help="Sample among tokens of this share of the likeliest's.")] = None,
    tree_size: TreeSize = None,
    profile: Annotated[
        Path | None, typer.Option(help="A profile that `heavypath calibrate` wrote, which chooses the trees.")
    ] = None,
    verifier: Annotated[
        list[str] | None,
        typer.Option(help=f"What verifies methods that take it, of {', '.join(VERIFIERS)}; repeat it for several."),
    ] = None,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Also draw the ratios into this file, .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods and drafts with transformers' own generate, on prompts of your own."""
    Filters(temperature, top_k, top_p, min_p).check()
    names, drafts = method or [*LOSSLESS_METHODS], draft or []
    for name in names:
        if name not in METHODS:
            raise ValueError(f"--method must be one of {', '.join(METHODS)}, got {name!r}")
    if target is not None and not drafts and names != ["autoregressive"]:
        raise ValueError("compare needs a --draft with the --target; only --method autoregressive works without one")
    given = [*(texts or []), *(read_prompts(prompts) if prompts is not None else [])]
    if not given:
        raise typer.BadParameter("give some texts, or --prompts FILE", param_hint="TEXTS")
    if plot is not None:
        check_can_plot()
        if not plot.parent.is_dir():
            raise ValueError(f"--plot must be in a folder that exists, got {str(plot)!r}")
    measured = None if profile is None else Profile.load(profile)
    pair = load(target, drafts[0] if drafts else None)
    named = pair.draft
    if len(drafts) > 1:
        assert pair.draft is not None
        named = {drafts[0]: pair.draft} | {name: load_draft(name, pair, target) for name in drafts[1:]}
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    say_if_busy()
    with progress("comparing") as report:
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
            on_progress=report,
            **sampling,
        )
    if plot is not None:
        plot_ratios(rows, plot)
    settings = {"prompts": len(given), "max_new_tokens": max_new_tokens, "tree_size": tree_size, **sampling}
    print_rows(rows, settings, as_json)


def print_rows(rows: list[ComparedWay], settings: dict, as_json: bool) -> None:
    """Print what `compare` measured, with what one needs to know to read it; settings: by which it was measured."""
    if as_json:
        print_json({"settings": settings, "environment": installation(), "rows": [asdict(row) for row in rows]})
        return
    console = Console(highlight=False)
    console.print(as_table(rows))
    new_tokens, temperature = settings["max_new_tokens"], settings["temperature"]
    device, threads = installation()["device"], torch.get_num_threads()
    notes = [
        f"prompts: {settings['prompts']}, up to {new_tokens} new tokens each, temperature {temperature:g}, on {device} "
        f"with {threads} CPU thread{'' if threads == 1 else 's'}, one after the other; after a short run to warm up.",
        "tokens/forward: new tokens for each forward pass of the target that yields some.",
        "tokens/s: new tokens a second, with the time that reading the prompt takes, for all ways to decode alike.",
        f"ratio: tokens/s over those of {PLAIN}, prompt by prompt in this run: median and quartiles.",
        f"text: compared with {PLAIN}; a tie parts where two tokens' logits are less than {TIE:g} apart."
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
