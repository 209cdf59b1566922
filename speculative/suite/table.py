"""The results of a suite as tables for a terminal, with what one needs to know to read them."""

from rich import box
from rich.table import Column, Table

from heavypath.speculative.suite.results import SuiteResults, SuiteRow
from heavypath.speculative.ways import TIE

SHOWN_DEPTHS = 3  # of acceptance; a file of results and the page have all
EXPECTED = ("equal", "reference", "same law")  # verdicts on texts that the table does not show


def table_at(results: SuiteResults, temperature: float) -> Table:
    """The table of one temperature, with a section for each kind."""
    headings = ("tokens/\npass", "tokens/s", "to\nplain", "to trans-\nformers", "to\nassisted", "accepted\nby depth")
    table = Table(
        Column("\nkind, way", overflow="fold"),
        *(Column(heading, justify="right", vertical="bottom", no_wrap=True) for heading in headings),
        title=f"temperature {temperature:g}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    last = None
    for row in results.rows:
        if row.temperature != temperature:
            continue
        if row.kind != last:
            table.add_section()
            table.add_row(row.kind, style="bold")
            last = row.kind
        table.add_row(*_cells(row))
    return table


def _cells(row: SuiteRow) -> list[str]:
    way = row.way if row.text in EXPECTED else f"{row.way} ({row.text})"
    ratios = [row.over_plain, row.over_transformers, row.over_assisted]
    shares = " ".join(f"{share.mean:.2f}".removeprefix("0") for share in row.acceptance[:SHOWN_DEPTHS])
    speed = f"{row.tokens_per_second.mean:.{1 if row.tokens_per_second.mean < 100 else 0}f}"  # its error is in the file
    figures = [row.tokens_per_pass.in_short(), speed, *("" if each is None else each.in_short() for each in ratios)]
    return [way, *figures, shares]


def notes_on(results: SuiteResults) -> list[str]:
    """Sentences on how it was measured and how to read the figures."""
    settings = results.settings
    counts = ", ".join(f"{count} of {kind}" for kind, count in settings["prompts"].items())
    often = f"; the fastest of {settings['repeats']} runs counts" if settings["repeats"] > 1 else ""
    notes = [
        f"prompts: {counts}; up to {settings['max_new_tokens']} new tokens each, one after the other, after a short "
        f"run to warm up{often}.",
        "Prompts are in the tokenizer's chat template."
        if results.chat_template
        else "The tokenizer has no chat template: prompts are plain text, and dialogues have the roles' names.",
        "±: standard error over the prompts of a kind.",
        "tokens/pass: new tokens for each forward pass of the target, mean over the prompts.",
        "tokens/s: with the time for reading the prompt, geometric mean over the prompts.",
        "to plain, to transformers, to assisted: ratios of tokens/s, prompt by prompt, to our plain decoding "
        "(autoregressive), to transformers' generate, and to its assisted generation: with the same draft model, else "
        "by lookup in the prompt.",
        "accepted by depth: of the accepted nodes that had children, the share of which a child was accepted; the root "
        "first.",
        "After a way's name: at temperature 0 (differs) is another text than transformers' generate has; (tie) is one "
        f"that first differs where the target scores two tokens within {TIE:g} of each other. At other temperatures "
        "ersd is compared with autoregressive. Other ways draw other tokens from the same distribution; this is not "
        "checked here.",
    ]
    if any(row.text == "other law" for row in results.rows):
        notes.append("(other law): the method changes the output distribution, so its speed is not comparable.")
    notes += [f"Left out: {way}, since transformers says: {reason}" for way, reason in results.left_out.items()]
    return notes
