"""Parts that the commands share: options, loading, a status line, log lines, and facts about this installation."""

import importlib.metadata
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console

from heavypath.kernels.attention.kernel import MAX_NODES
from heavypath.kernels.native.library import library
from heavypath.speculative.cli.ranks import rank_count, this_rank
from heavypath.speculative.loading import Pair, find_folder, load_pair
from heavypath.speculative.methods import METHODS, VERIFIERS, row_of
from heavypath.speculative.processors.grammar import Grammar
from heavypath.speculative.threads import Load, usable_cores

COMPILED = ("gumbel_topk", "verify_tree", "commit")  # on a CPU, where there is a compiler
KERNELS = ("tree_attention", "heavy_path_order", "gumbel_topk", "verify_tree", "commit", "compact_cache")


class Precision(StrEnum):
    """Of weights, activations and caches."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _show_log_lines(context: typer.Context, verbose: bool) -> bool:
    """Write the package's log lines to standard error until the command ends."""
    if verbose:
        logger, handler = logging.getLogger("heavypath"), logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        before = logger.level
        logger.setLevel(logging.DEBUG)
        context.call_on_close(lambda: (logger.removeHandler(handler), logger.setLevel(before)))
    return verbose


MaxNewTokens = Annotated[int, typer.Option(min=1, help="The largest number of tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; > 0 samples.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens; 0 for all.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens that reach this probability.")]
MinP = Annotated[
    float | None, typer.Option(help="Sample among tokens at least this probable, as a share of the likeliest one.")
]
Target = Annotated[str | None, typer.Option(help="The target model: a folder, or a name in the Hugging Face cache.")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="A draft model or trained head, given alike; or demo-head, prompt-lookup, lookahead, "
        "early-exit:LAYERS, or retrieval:PATH (texts). Several: A+B beside each other, 2*A+4*B for so many levels, "
        "merge:A+B for sequences of each (methods specinfer, naive, naive-distinct, top-k)."
    ),
]
Dtype = Annotated[Precision | None, typer.Option(help="Precision of the models; default: what they were saved in.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="End the text with this string; repeat it for several. It is part of the text.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1, tokens of the text so far, prompt included, become less likely.")
]
JsonSchema = Annotated[
    Path | None, typer.Option(help="Write JSON of the schema in this file, without whitespace between its tokens.")
]
Regex = Annotated[str | None, typer.Option(help="Write what matches this regular expression from begin to end.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="The prompt is a user's message: put it into the tokenizer's chat template.")
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
    int | None, typer.Option(min=2, max=MAX_NODES, help="Nodes of the drafted tree; default: 5 on a CPU, 32 on a GPU.")
]
Verifier = Annotated[
    str | None,
    typer.Option(help=f"What verifies, for methods of recursive rejection: {', '.join(VERIFIERS)}. Default: the own."),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", callback=_show_log_lines, help="Say on standard error what is chosen and done."),
]


def installation() -> dict:
    """The versions that are installed, the device, the threads, and the implementation that each kernel has here."""
    cuda = torch.cuda.is_available()
    return {
        "heavypath": importlib.metadata.version("heavypath"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "transformers": transformers.__version__,
        "device": f"cuda ({torch.cuda.get_device_name()})" if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "kernels": {name: "Triton" if cuda else _on_cpu(name) for name in KERNELS},
    }


def _on_cpu(kernel: str) -> str:
    """The implementation of a kernel's function for CPU tensors."""
    return "C++" if kernel in COMPILED and library() is not None else "reference"


def load(
    target: str | None = None,
    draft: str | None = None,
    dtype: Precision | None = None,
    memory: str | None = None,
    host_memory: str | None = None,
) -> Pair:
    """Load the models without the libraries' warnings and progress bars; what matters is raised as an error.

    On a CPU the shipped pair gets one thread, unless the environment says how many. On a busy machine a second thread
    takes more time than it saves for so small a model.
    """
    if target is None and not torch.cuda.is_available() and not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & {*os.environ}:
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        with progress("compiling kernels for this CPU, once"):
            library()
    with progress("loading the models"):
        precision = None if dtype is None else getattr(torch, dtype)
        return load_pair(target, draft, dtype=precision, ranks=rank_count(), memory=memory, host_memory=host_memory)


def say_if_busy() -> None:
    """Say on standard error, before something is timed, that other work will disturb it."""
    load = current_load()
    if load.busy:
        typer.echo(f"heavypath: the machine is busy ({load}), so timings are noisy and long", err=True)


def current_load() -> Load:
    """The load of the machine now."""
    return Load(os.getloadavg()[0], usable_cores(), torch.get_num_threads())


def check_choice(method: str, target: str | None, draft: str | None, verifier: str | None = None) -> None:
    """Raise ValueError or FileNotFoundError, before any model is loaded, for a method or models that cannot be."""
    if method not in METHODS:
        raise ValueError(f"--method must be one of {', '.join(METHODS)}, got {method!r}")
    row_of(method, verifier)
    if target is not None:
        find_folder("target", target)
    if target is not None and draft is None and method != "autoregressive":
        raise ValueError(f"--method {method} needs a --draft with the --target; only autoregressive works without one")


def encode(pair: Pair, text: str, *, chat: bool = False) -> torch.Tensor:
    """The tokens of a text, LongTensor[1, T] on the target's device; with `chat` those of a user's message.

    Raises ValueError if there is no chat template for it.
    """
    if chat:
        if not pair.tokenizer.chat_template:
            raise ValueError("--chat needs a target whose tokenizer has a chat template, and this one has none")
        message = [{"role": "user", "content": text}]
        encoded = pair.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = pair.tokenizer(text, return_tensors="pt")
    ids = encoded["input_ids"]  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert isinstance(ids, torch.Tensor)
    return ids.to(pair.target.device)


def read_schema(file: Path | None, regex: str | None) -> str | None:
    """The text of a file with a JSON schema, if one is given; before any model is loaded.

    Raises OSError for a file that cannot be read, ValueError for one that is no JSON and for two grammars.
    """
    if file is not None and regex is not None:
        raise ValueError("a text follows one grammar: give --json-schema or --regex")
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except OSError as error:
        raise OSError(f"cannot read the JSON schema in {str(file)!r}: {error.strerror}") from error
    except ValueError as error:  # UnicodeError and JSONDecodeError are such
        raise ValueError(f"--json-schema must be a file of JSON, got {str(file)!r}: {error}") from error
    return text


def grammar_of(schema: str | None, regex: str | None, pair: Pair) -> Grammar | None:
    """The grammar that a command was given, if any; its texts end as those of the target do."""
    ends = pair.eos_token_ids or None
    if schema is not None:
        return Grammar.json_schema(schema, pair.tokenizer, whitespace=False, eos_token_id=ends)
    return None if regex is None else Grammar.regex(regex, pair.tokenizer, eos_token_id=ends)


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], object]]:
    """A status line on standard error while the block runs, if that is a terminal."""
    console = Console(stderr=True)
    if console.is_terminal and this_rank() == 0:
        with console.status(text) as status:
            yield status.update
    else:
        yield lambda line: None


def print_json(content: dict) -> None:
    """Write one JSON object, in one line, to standard output."""
    typer.echo(json.dumps(content))
