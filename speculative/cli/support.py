"""What several commands need when they run: loading models, prompts and grammars, and checks of the machine."""

import json
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
import typer
from huggingface_hub.utils import disable_progress_bars

from heavypath.kernels.native.library import library
from heavypath.speculative.cli.info import current_load, is_kept
from heavypath.speculative.cli.options import Precision
from heavypath.speculative.cli.progress import PATIENCE, progress
from heavypath.speculative.cli.ranks import rank_count, this_rank
from heavypath.speculative.loading import Pair, find_models, load_pair
from heavypath.speculative.methods import row_of
from heavypath.speculative.processors.grammar import Grammar
from heavypath.speculative.suite.prompts import suite_tokens

WITHOUT_DRAFT = "ersd"  # the method if no draft is given: its text stays the same when speculation is paused


def load(
    target: str | None = None,
    draft: str | None = None,
    dtype: Precision | None = None,
    memory: str | None = None,
    host_memory: str | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    offline: bool = False,
) -> Pair:
    """Load the models, without the libraries' warnings and progress bars; problems are raised as errors.

    On a CPU the shipped pair gets one thread, unless the environment or `threads` sets the number: on a busy machine a
    second thread costs more time than it saves for so small a model. Raises ValueError for an unavailable device.
    """
    place = device_of(device)
    fetch(target, [] if draft is None else [draft], offline=offline)
    if threads is None and target is None and place.type == "cpu":
        threads = None if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & {*os.environ} else 1
    if threads is not None:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if place.type == "cpu" and not is_kept():
        with progress("compiling kernels for this CPU, once"):
            library()
    with progress("loading the models", first=PATIENCE):
        return load_pair(
            target,
            draft,
            place,
            dtype=None if dtype is None else getattr(torch, dtype),
            ranks=rank_count(),
            memory=memory,
            host_memory=host_memory,
            local_files_only=True,
        )


def fetch(target: str | None, drafts: Sequence[str], *, offline: bool) -> None:
    """Find the models, and download missing ones. Raises those errors of `load_pair` that need no weights.

    No other sign of progress is shown, since the Hub's progress bars need the terminal for themselves.
    """
    if this_rank() > 0:
        disable_progress_bars()
    find_models(target, drafts, local_files_only=offline)


def device_of(name: str | None) -> torch.device:
    """The device named by --device; by default a GPU if there is one. Raises ValueError for an unavailable device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if count else "cpu")
    if rank_count() > 1:
        raise ValueError(f"torchrun gives each process a device of its own; leave out --device, got {name!r}")
    here = {"cpu": torch.device("cpu")}
    if count:
        here["cuda"] = torch.device("cuda")
    here |= {f"cuda:{number}": torch.device("cuda", number) for number in range(count)}
    if name not in here:
        lack = "" if count else f"; PyTorch {torch.__version__} sees no GPU, `heavypath info` says more"
        raise ValueError(f"--device must be one of {', '.join(here)} on this machine, got {name!r}{lack}")
    if here[name].type == "cuda":
        torch.cuda.set_device(here[name])
    return here[name]


def say_if_busy() -> None:
    """Warn on standard error, before something is timed, if other processes use the machine."""
    load = current_load()
    if load.busy:
        typer.echo(f"heavypath: the machine is busy ({load}), so timings are noisy and long", err=True)


def choose(
    method: str | None,
    target: str | None,
    draft: str | None,
    verifier: str | None = None,
    *,
    default: str = "sequoia",
    offline: bool = False,
) -> tuple[str, str | None]:
    """Return the method and the draft, as given or by default.

    The defaults for a target without a draft are printed in a line.

    default: the method for a given draft, and for the shipped pair

    Raises ValueError or FileNotFoundError, before any model is loaded, for an unsuitable verifier or models.
    """
    recalls = target is not None and draft is None and method != "autoregressive"  # plain decoding needs no draft
    if recalls:
        default = WITHOUT_DRAFT
        draft = "recall"
    method = method or default
    row_of(method, verifier)
    fetch(target, [] if draft is None else [draft], offline=offline)
    if recalls:
        say_recall(f", method {method}")
    return method, draft


def say_recall(how: str = "") -> None:
    """Print to standard error which draft is used because none was given; how: text to append, such as the method."""
    if this_rank() == 0:
        typer.echo(f"heavypath: no --draft: drafting from text already written (Recall){how}", err=True)


def encode(pair: Pair, text: str, *, chat: bool = False) -> torch.Tensor:
    """The tokens of a text, LongTensor[1, T] on the target's device; with `chat` those of a user's message.

    Raises ValueError if `chat` is given and there is no chat template.
    """
    if not chat:
        return pair.tokenizer(text, return_tensors="pt").input_ids.to(pair.target.device)
    if not pair.tokenizer.chat_template:
        raise ValueError("--chat needs a target whose tokenizer has a chat template, and this one has none")
    return suite_tokens(text, pair.tokenizer, pair.target.device)


def read_schema(file: Path | None, regex: str | None) -> str | None:
    """The text of a JSON schema file, if one is given; called before any model is loaded.

    Raises OSError for a file that cannot be read, ValueError for one that is not JSON, or if a regex is given, too.
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
    except ValueError as error:  # includes UnicodeError and JSONDecodeError
        raise ValueError(f"--json-schema must be a file of JSON, got {str(file)!r}: {error}") from error
    return text


def grammar_of(schema: str | None, regex: str | None, pair: Pair) -> Grammar | None:
    """The grammar of a command's options, if any. Its texts end with the target's end-of-sequence tokens."""
    ends = pair.eos_token_ids or None
    if schema is not None:
        return Grammar.json_schema(schema, pair.tokenizer, whitespace=False, eos_token_id=ends)
    return None if regex is None else Grammar.regex(regex, pair.tokenizer, eos_token_id=ends)
