"""`heavypath layers`: find the layers of a target that make the best early-exit draft."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.progress import progress, starting

if TYPE_CHECKING:
    from rich.table import Table

    from heavypath.speculative.layer_choice import LayerChoice

OWN_PROMPTS = 8
OWN_LENGTH = 32


def layers(
    target: options.Target = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="A file with a prompt on each line, or a .jsonl file; without it the target samples some."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens after each prompt on which drafts are measured.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of the texts and of both distributions; above 0.")] = 1.0,
    device: options.Device = None,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    offline: options.Offline = False,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Find the layers of a target that draft best for it, for --draft early-exit:LAYERS. Nothing is trained."""
    from rich.console import Console

    with starting():
        from heavypath.speculative.calibration import own_prompts
        from heavypath.speculative.cli.support import load
        from heavypath.speculative.files.prompts import tokens_of
        from heavypath.speculative.layer_choice import choose_layers

    pair = load(target, None, dtype, device=device, threads=threads, offline=offline)
    if prompts is not None:
        given = tokens_of(prompts, pair.tokenizer, pair.target.device)
    else:
        given = [text[None] for text in own_prompts(pair.target, OWN_PROMPTS, OWN_LENGTH, seed)]
    with progress("looking for layers", quiet=as_json) as report:
        choices = choose_layers(
            pair.target, given, tokens=tokens, temperature=temperature, seed=seed, on_progress=report
        )
    if as_json:
        options.print_json({"choices": [choice._asdict() for choice in choices]})
        return
    console = Console(highlight=False)
    console.print(_table(choices))
    if choices[0].drafts == 0:
        console.print("No layers of this target draft well enough to pay.")
    else:
        size = choices[0].drafts + 1
        console.print(f"The best: --draft early-exit:{_listed(choices[0])} --method chain --tree-size {size}")


def _listed(choice: "LayerChoice") -> str:
    """Return the layers in the form of `--draft early-exit:`."""
    first = choice.layers == tuple(range(len(choice.layers)))
    return str(len(choice.layers)) if first else ",".join(map(str, choice.layers))


def _table(choices: "list[LayerChoice]") -> "Table":
    from rich import box
    from rich.table import Column, Table

    table = Table(Column("layers"), box=box.SIMPLE_HEAD)
    for heading in ("overlap", "share of weights", "chain", "speed-up at most"):
        table.add_column(heading, justify="right")
    for choice in choices:
        figures = f"{choice.overlap:.2f}", f"{choice.share:.2f}", str(choice.drafts), f"{choice.speedup:.2f}"
        table.add_row(",".join(map(str, choice.layers)), *figures)
    return table
