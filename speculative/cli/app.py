"""The `heavypath` command: `demo`, `generate`, `chat`, `compare`, `trace`, `calibrate`, `plan`, `simulate`, `layers`,
`distil`, `serve`, and `info`.

Text and JSON go to standard output, everything else to standard error. Exit codes: 0; 1 for an error, which is said in
one line; 2 for wrong usage; 130 for Ctrl-C.
"""

import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from heavypath.kernels.filtering import Filters
from heavypath.speculative.cli import chat as chatting
from heavypath.speculative.cli import compare as comparing
from heavypath.speculative.cli import distil as training
from heavypath.speculative.cli import info, planning
from heavypath.speculative.cli import layers as choosing_layers
from heavypath.speculative.cli import serve as serving
from heavypath.speculative.cli import simulation as simulating
from heavypath.speculative.cli import trace as trace_page
from heavypath.speculative.cli.ranks import check_command, join_ranks, leave_ranks, this_rank
from heavypath.speculative.cli.reading import reading
from heavypath.speculative.cli.support import (
    AsJson,
    Chat,
    Draft,
    Dtype,
    HostMemory,
    JsonSchema,
    MaxNewTokens,
    Memory,
    MinP,
    Regex,
    RepetitionPenalty,
    Seed,
    Stop,
    Target,
    Temperature,
    TopK,
    TopP,
    TreeSize,
    Verbose,
    Verifier,
    check_choice,
    encode,
    grammar_of,
    load,
    print_json,
    progress,
    read_schema,
    say_if_busy,
)
from heavypath.speculative.comparison import compare
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.loading import Pair
from heavypath.speculative.methods import LOSSLESS_METHODS, METHODS
from heavypath.speculative.output.options import SamplingOptions, settings_of
from heavypath.speculative.output.text_stream import TextStream
from heavypath.speculative.profile import Profile
from heavypath.speculative.ranks.agreement import RankMismatchError
from heavypath.speculative.ranks.group import RankFailedError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Tree speculative decoding.")
app.command()(chatting.chat)
app.command()(comparing.compare)
app.command()(planning.calibrate)
app.command()(planning.plan)
app.command("simulate")(simulating.simulate_command)
app.command()(training.distil)
app.command()(choosing_layers.layers)
app.command()(serving.serve)
app.command()(trace_page.trace)
app.command()(info.info)


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


@app.command()
def demo(
    max_new_tokens: MaxNewTokens = 64,
    prompts: Annotated[int, typer.Option(min=1, help="How many of the shipped prompts to continue.")] = 3,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    tree_size: TreeSize = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Continue real prompts with the shipped pair, then compare all methods with transformers."""
    Filters(temperature, top_k, top_p).check()
    texts = demo_prompts()
    if prompts > len(texts):
        raise ValueError(f"--prompts must be at most {len(texts)}, the number of shipped prompts, got {prompts}")
    pair = load()
    inputs = [encode(pair, text) for text in texts[:prompts]]
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if not as_json:
        decoder = SpeculativeDecoder(pair.target, pair.draft, tree_size=tree_size)
        for text, ids in zip(texts, inputs, strict=False):
            _stream_demo_text(decoder, pair, text, ids, {**sampling, "max_new_tokens": max_new_tokens})
    say_if_busy()
    if not as_json:
        typer.echo(f"comparing {len(LOSSLESS_METHODS) + 2} ways to decode ...", err=True)
    with progress("comparing the methods") as report:
        rows = compare(
            pair.target,
            pair.draft,
            inputs,
            max_new_tokens=max_new_tokens,
            tree_size=tree_size,
            on_progress=report,
            **sampling,
        )
    settings = {"prompts": prompts, "max_new_tokens": max_new_tokens, "tree_size": tree_size, **sampling}
    comparing.print_rows(rows, settings, as_json)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue, or - for standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="File with the text to continue (UTF-8).")] = None,
    target: Target = None,
    draft: Draft = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "sequoia",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    chat: Chat = False,
    tree_size: TreeSize = None,
    profile: Annotated[
        Path | None, typer.Option(help="A profile that `heavypath calibrate` wrote, which chooses the tree.")
    ] = None,
    replan: Annotated[
        bool, typer.Option("--replan", help="With --profile: choose the tree anew by what is accepted of this text.")
    ] = False,
    verifier: Verifier = None,
    seed: Seed = 0,
    dtype: Dtype = None,
    memory: Memory = None,
    host_memory: HostMemory = None,
    trace: trace_page.TraceFile = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Continue a text. Without --target and --draft it is continued by the shipped pair, which knows Python source."""
    ranks = join_ranks()
    text = _read_prompt(prompt, file) if ranks is None else ranks.decided(lambda: _read_prompt(prompt, file))
    Filters(temperature, top_k, top_p, min_p).check()
    if repetition_penalty is not None and not (math.isfinite(repetition_penalty) and repetition_penalty > 0):
        raise ValueError(f"--repetition-penalty must be a finite number > 0, got {repetition_penalty:g}")
    if stop and "" in stop:
        raise ValueError("--stop must be a text to end at, got an empty one")
    check_choice(method, target, draft, verifier)
    if trace is not None and not trace.parent.is_dir():
        raise ValueError(f"--trace must be in a folder that exists, got {str(trace)!r}")
    if profile is not None and tree_size is not None:
        raise ValueError("a profile says what trees to take; leave out --tree-size or --profile")
    measured = None if profile is None else Profile.load(profile)
    schema = read_schema(json_schema, regex)
    pair = load(target, draft, dtype, memory, host_memory)
    ids = encode(pair, text, chat=chat)
    grammar = grammar_of(schema, regex, pair)
    sampling: SamplingOptions = {
        "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty,
        "eos_token_id": pair.eos_token_ids, "stop_strings": stop or None,
    }  # fmt: skip
    pieces: list[str] = []
    with reading(pair.target, ids.shape[1]) as end_status:

        def write(piece: str) -> None:
            end_status()
            (pieces.append if as_json else _write)(piece)

        decoder = SpeculativeDecoder(
            pair.target, pair.draft, method, tree_size=tree_size, profile=measured, replan=replan, verifier=verifier
        )
        out = decoder.generate(
            ids,
            max_new_tokens,
            temperature,
            **sampling,
            logits_processor=None if grammar is None else [grammar],
            seed=seed,
            streamer=TextStream(pair.tokenizer, write),
            tokenizer=pair.tokenizer,
            trace=trace,
        )
    if as_json:
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        vocab_size = pair.target.config.get_text_config(decoder=True).vocab_size
        in_force = settings_of(temperature, sampling, pair.target.generation_config, vocab_size)
        tree_size = len(decoder.tree_for(in_force.filters))
        settings = {
            "method": method,
            "verifier": verifier,
            **in_force.filters._asdict(),
            "repetition_penalty": in_force.repetition_penalty,
        }
        settings |= {"stop": stop or [], "chat": chat, "seed": seed, "regex": regex}
        settings |= {"json_schema": None if schema is None else json.loads(schema)}
        settings |= {"max_new_tokens": max_new_tokens, "tree_size": tree_size, "prompt": text}
        answer = {"settings": settings, "text": "".join(pieces), "token_ids": tokens, "stats": _summary(out.stats)}
        print_json(answer)
    else:
        _write("\n")
        if this_rank() == 0:
            typer.echo(f"{out.stats}", err=True)
    leave_ranks()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: sys.argv) and return the exit code."""
    try:
        code = app(args=arguments, prog_name="heavypath", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads the rest
        return 1
    except KeyboardInterrupt:
        return 130
    except (
        ValueError,
        TypeError,
        OSError,
        ImportError,
        torch.OutOfMemoryError,
        RankMismatchError,
        RankFailedError,
    ) as error:
        return _fail(str(error), 1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _fail_usage(error)
    return code or 0


def _fail(message: str, code: int) -> int:
    who = f"heavypath, rank {this_rank()}" if this_rank() else "heavypath"
    typer.echo(f"{who}: {' '.join(message.split())}", err=True)
    return code


def _fail_usage(error: Exception) -> int:
    """Report a wrong usage, whose error is of click's or of typer's class, depending on typer's version."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "heavypath"
    return _fail(f"{error.format_message()} (see {command} --help)", 2)  # pyright: ignore[reportAttributeAccessIssue]


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    place = f" in {str(file)!r}" if file is not None else ""
    try:
        if file is not None and prompt is None:
            text = file.read_text(encoding="utf-8")
        elif prompt is not None and file is None:
            text = sys.stdin.read() if prompt == "-" else prompt
            text.encode()  # an argument or standard input may have bytes that are no text, too
        else:
            raise typer.BadParameter("give either a text (or - for standard input) or --file", param_hint="PROMPT")
    except UnicodeError as error:
        raise ValueError(f"the prompt{place} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise OSError(f"cannot read the prompt{place}: {error.strerror}") from error
    if not text:
        raise ValueError(f"the prompt{place} is empty; expected some text to continue")
    return text


def _stream_demo_text(decoder: SpeculativeDecoder, pair: Pair, text: str, ids: torch.Tensor, options: dict) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(text, style="dim"), end="")
    stream = TextStream(pair.tokenizer, _write)
    stats = decoder.generate(ids, eos_token_id=pair.eos_token_ids, streamer=stream, **options).stats
    counts = f"{stats.new_tokens} tokens, {stats.tokens_per_step:.2f} per target forward"
    console.print(Text(f"\n\n[{decoder.method}: {counts}]\n", style="dim"))


def _summary(stats: Statistics) -> dict:
    waiting = None if math.isnan(stats.waiting_share) else stats.waiting_share  # JSON has no NaN
    return {
        "law_changed_by": stats.law_changed_by,
        "verification": stats.verification,
        "steps": stats.steps,
        "new_tokens": stats.new_tokens,
        "tokens_per_step": stats.tokens_per_step,
        "tokens_per_second": stats.tokens_per_second,
        "acceptance_by_rank": stats.acceptance_by_rank,
        "acceptance_by_depth": stats.acceptance_by_depth,
        "cache_bytes": stats.cache_bytes,
        **({} if stats.streaming is None else stats.streaming._asdict() | {"waiting_share": waiting}),
        "seconds": stats.seconds,
        "total_seconds": stats.total_seconds,
    }


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
