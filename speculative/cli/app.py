"""The `heavypath` command: its subcommands, in the order in which users need them, and its error messages.

Text and JSON go to standard output, everything else to standard error. Exit codes: 0; 1 for an error, reported in one
line; 2 for wrong usage; 130 for Ctrl-C.

A subcommand's module declares its options, and imports slow modules only when it runs.
"""

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from heavypath.speculative.cli import (
    batch,
    chat,
    compare,
    demo,
    distil,
    generate,
    info,
    layers,
    planning,
    serve,
    trace,
)
from heavypath.speculative.cli.ranks import check_command, this_rank

OTHER_ERRORS = {
    "torch": "OutOfMemoryError",
    "heavypath.speculative.ranks.agreement": "RankMismatchError",
    "heavypath.speculative.ranks.communication": "RankFailedError",
}

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Tree speculative decoding.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo.demo,
    generate.generate,
    chat.chat,
    serve.serve,
    batch.batch,
    compare.compare,
    info.info,
    planning.calibrate,
    planning.plan,
    distil.distil,
    layers.layers,
    trace.trace,
):
    app.command()(command)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"heavypath {importlib.metadata.version('heavypath')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tree speculative decoding."""
    check_command(context.invoked_subcommand)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: sys.argv) and return the exit code."""
    try:
        code = app(args=arguments, prog_name="heavypath", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the rest of the output
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if hasattr(error, "format_message"):
            return _fail_usage(error)
        if not isinstance(error, _expected()):
            raise
        return _fail(_in_words(error), 1)
    return code or 0


def _expected() -> tuple[type[Exception], ...]:
    """Exceptions that are reported in one line.

    Some of their classes are in modules that may not have been imported.
    """
    others = [(sys.modules[module], name) for module, name in OTHER_ERRORS.items() if module in sys.modules]
    return (ValueError, TypeError, OSError, ImportError, *(getattr(module, name) for module, name in others))


def _in_words(error: Exception) -> str:
    """The message of an error; for a missing package, how to install it."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers", "numpy"):
        return f"{error.name} is not installed; it comes with `pip install .` in a checkout ({error})"
    return str(error)


def _fail(message: str, code: int) -> int:
    who = f"heavypath, rank {this_rank()}" if this_rank() else "heavypath"
    typer.echo(f"{who}: {' '.join(message.split())}", err=True)
    return code


def _fail_usage(error: Exception) -> int:
    """Report wrong usage; the error's class is click's or typer's, depending on typer's version."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "heavypath"
    message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
    checked = getattr(error.__cause__, "errors", None)  # pydantic's, by which newer versions of typer check
    if checked is not None:
        given = checked()[0]["input"]
        if repr(given) not in message:
            message += f", got {given!r}"
    return _fail(f"{message} (see {command} --help)", 2)
