"""Options that commands share.

This module imports nothing slow: a command loads PyTorch and the models' code when it runs.

So `--help`, `--version` and errors of usage are answered at once. The names of methods and verifiers are copies of
those in the package; tests/cli/test_start.py compares them.
"""

import difflib
import json
import logging
import sys
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

LOSSLESS_METHODS = (
    "autoregressive",
    "chain",
    "specinfer",
    "spectr",
    "sequoia",
    "dyspec",
    "rsd-c",
    "rsd-s",
    "ersd",
    "eagle-2",
    "top-k",
    "naive",
    "naive-distinct",
)
METHODS = (*LOSSLESS_METHODS, "typical-lossy")
VERIFIERS = ("rejection", "held", "traversal", "held_traversal")
METHODS_WITH_VERIFIERS = ("chain", "specinfer", "sequoia", "dyspec", "rsd-c", "rsd-s")
MAX_NODES = 2048  # in a tree


class Precision(StrEnum):
    """The dtype of weights, activations and caches."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _show_log_lines(context: typer.Context, verbose: bool) -> bool:
    """For --verbose: write the package's log lines to standard error until the command ends. Returns `verbose`."""
    if verbose:
        logger = logging.getLogger("heavypath")
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        before = logger.level
        logger.setLevel(logging.DEBUG)
        context.call_on_close(lambda: (logger.removeHandler(handler), logger.setLevel(before)))
    return verbose


Method = Annotated[
    str | None,
    typer.Option(
        help=f"One of {', '.join(METHODS)}. Default: sequoia; ersd for `serve` and `batch`, and for a --target without "
        "a --draft."
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The largest number of tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token; > 0 samples.")]
TopK = Annotated[int | None, typer.Option(min=0, help="Sample among the k likeliest tokens; 0 for all.")]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Sample among the likeliest tokens that reach this probability, above 0."),
]
MinP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Sample among tokens at least this probable, as a share of the likeliest one."),
]
Target = Annotated[
    str | None, typer.Option(help="The target model: a folder, a GGUF file, or a name on the Hugging Face Hub.")
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="A draft model or trained head, given alike; or demo-head, smollm2-texts, prompt-lookup, recall, "
        "lookahead, early-exit:LAYERS, or retrieval:PATH (texts). Default with a --target: recall, which drafts from "
        "text already written. Several: A+B beside each other, 2*A+4*B for so many levels, merge:A+B for sequences of "
        "each (methods specinfer, naive, naive-distinct, top-k)."
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="Fetch nothing from the Hugging Face Hub: names must be in the cache. So does HF_HUB_OFFLINE=1.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="Where the models run: cpu, cuda, or cuda:1 for the second GPU. Default: a GPU if there is one."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="CPU threads. Default: as OMP_NUM_THREADS says, else 1 for the shipped pair on a CPU, else a thread for "
        "each core.",
    ),
]
Dtype = Annotated[
    Precision | None,
    typer.Option(
        help="Precision of the models; default: what they were saved in; of GGUF files float32, on a GPU bfloat16."
    ),
]
Slots = Annotated[int, typer.Option(min=1, help="How many texts are decoded side by side.")]
Room = Annotated[
    int, typer.Option(min=2, help="Room for a prompt with its new tokens; at most the target's positions and one.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End the text with this string; repeat it for several. It is part of the text.")
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(min=0.01, max=100, help="Above 1, tokens of the text so far, prompt included, become less likely."),
]
JsonSchema = Annotated[
    Path | None, typer.Option(help="Write JSON of the schema in this file, without whitespace between its tokens.")
]
Regex = Annotated[str | None, typer.Option(help="Write what matches this regular expression from begin to end.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="The prompt is a user's message: put it into the tokenizer's chat template.")
]
Template = Annotated[
    Path | None, typer.Option(help="A chat template (Jinja, UTF-8) in the place of the tokenizer's own.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="Memory for the target's weights, such as 8G, a GPU's if there is one; what is more is read from its "
        "folder, or from the host's memory, for each tree (needs accelerate)."
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(help="With --memory on a GPU: what layers may take of the host's memory; others are read from disk."),
]
TreeSize = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=MAX_NODES,
        help="Nodes of the drafted tree. Default: as many as pay by estimated costs, none where a draft does not pay.",
    ),
]
ProfileFile = Annotated[
    Path | None, typer.Option(help="A profile that `heavypath calibrate` wrote, which chooses the tree.")
]
Verifier = Annotated[
    str | None,
    typer.Option(
        help=f"How drafted tokens are verified: {', '.join(VERIFIERS)}. For {', '.join(METHODS_WITH_VERIFIERS)}; each "
        "has a default."
    ),
]
TraceFile = Annotated[
    Path | None, typer.Option(help="Also write into this file, for `trace`, what each step drafted and accepted.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Repeats = Annotated[int, typer.Option(min=1, help="How often each way decodes each prompt; its fastest run counts.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", callback=_show_log_lines, help="Say on standard error what is chosen and done."),
]


def check_word(option: str, given: str | None, expected: Collection[str]) -> None:
    """Raise ValueError for a word that is not one of the expected ones; the message suggests the nearest.

    None is accepted.
    """
    if given is None or given in expected:
        return
    near = difflib.get_close_matches(given, expected, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{option} must be one of {', '.join(expected)}, got {given!r}{meant}")


def check_method(name: str | None, verifier: str | None = None) -> None:
    """Raise ValueError for an unknown method or verifier."""
    check_word("--method", name, METHODS)
    check_word("--verifier", verifier, VERIFIERS)


def read_template(template: Path) -> str:
    """The text of a file with a chat template. Raises ValueError or OSError for one that cannot be read."""
    try:
        return template.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise ValueError(f"the template in {str(template)!r} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise OSError(f"cannot read the template in {str(template)!r}: {error.strerror}") from error


def print_json(content: dict) -> None:
    """Write one JSON object, on one line, to standard output."""
    typer.echo(json.dumps(content))


def write_now(text: str) -> None:
    """Write a piece of text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
