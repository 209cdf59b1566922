"""`heavypath generate`: continue a text."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.progress import reading, starting
from heavypath.speculative.cli.ranks import join_ranks, leave_ranks, this_rank

if TYPE_CHECKING:
    from heavypath.speculative.decoding.statistics import Statistics
    from heavypath.speculative.options import SamplingOptions


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue, or - for standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="File with the text to continue (UTF-8).")] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    method: options.Method = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    chat: options.Chat = False,
    tree_size: options.TreeSize = None,
    profile: options.ProfileFile = None,
    replan: Annotated[
        bool, typer.Option("--replan", help="With --profile: adapt the tree to the acceptance in this text.")
    ] = False,
    verifier: options.Verifier = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    offline: options.Offline = False,
    memory: options.Memory = None,
    host_memory: options.HostMemory = None,
    trace: options.TraceFile = None,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="Colour the tokens that the draft proposed and the target accepted.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Continue a text. Without --target and --draft this is done by the shipped pair, trained on Python source."""
    ranks = join_ranks()
    text = _read_prompt(prompt, file) if ranks is None else ranks.decided(lambda: _read_prompt(prompt, file))
    options.check_method(method, verifier)
    if stop and "" in stop:
        raise ValueError("--stop must be a text to end at, got an empty one")
    if trace is not None and not trace.parent.is_dir():
        raise ValueError(f"--trace must be in a folder that exists, got {str(trace)!r}")
    if profile is not None and tree_size is not None:
        raise ValueError("a profile chooses the trees; leave out --tree-size or --profile")
    on_terminal = sys.stdout.isatty() if ranks is None else ranks.decided(sys.stdout.isatty)
    if show_accepted and (as_json or not on_terminal):
        raise ValueError("--show-accepted colours a text on a terminal; leave it out with --json, files and pipes")

    with starting():
        from heavypath.kernels.filtering import Filters
        from heavypath.speculative.cli.support import choose, encode, grammar_of, load, read_schema
        from heavypath.speculative.cli.texts import ColouredStream, show_dimmed
        from heavypath.speculative.decoder import SpeculativeDecoder
        from heavypath.speculative.decoding.request import filters_of
        from heavypath.speculative.options import with_generation_config
        from heavypath.speculative.output.text_stream import TextStream
        from heavypath.speculative.profile import Profile

    Filters(temperature, top_k, top_p, min_p).check()
    measured = None if profile is None else Profile.load(profile)
    schema = read_schema(json_schema, regex)
    method, draft = choose(method, target, draft, verifier, offline=offline)
    pair = load(target, draft, dtype, memory, host_memory, device=device, threads=threads, offline=offline)
    ids = encode(pair, text, chat=chat)
    grammar = grammar_of(schema, regex, pair)
    sampling: SamplingOptions = {
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "eos_token_id": pair.eos_token_ids,
        "stop_strings": stop or None,
    }
    pieces: list[str] = []
    before = [f"{text}\n" if chat else text] if on_terminal and not as_json else []
    with reading(pair.target, ids.shape[1]) as end_status:

        def write(piece: str) -> None:
            end_status()
            while before:  # print the prompt only now, after the request has been checked
                show_dimmed(before.pop())
            (pieces.append if as_json else options.write_now)(piece)

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
            streamer=(ColouredStream if show_accepted else TextStream)(pair.tokenizer, write),
            tokenizer=pair.tokenizer,
            trace=trace,
        )
    if as_json:
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        vocab_size = pair.target.config.get_text_config(decoder=True).vocab_size
        in_force = with_generation_config(sampling, temperature, pair.target.generation_config, vocab_size)
        filters = filters_of(in_force)
        tree_size = len(decoder.tree_for(filters))
        settings = {
            "method": method,
            "verifier": verifier,
            **filters._asdict(),
            "repetition_penalty": in_force["repetition_penalty"],
        }
        settings |= {"stop": stop or [], "chat": chat, "seed": seed, "regex": regex}
        settings |= {"json_schema": None if schema is None else json.loads(schema)}
        settings |= {"max_new_tokens": max_new_tokens, "tree_size": tree_size, "prompt": text}
        answer = {"settings": settings, "text": "".join(pieces), "token_ids": tokens, "stats": summary(out.stats)}
        options.print_json(answer)
    else:
        options.write_now("\n")
        if this_rank() == 0:
            typer.echo(f"{out.stats}" if verbose else in_a_line(out.stats), err=True)
    leave_ranks()


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    place = f" in {str(file)!r}" if file is not None else ""
    try:
        if file is not None and prompt is None:
            text = file.read_text(encoding="utf-8")
        elif prompt is not None and file is None:
            text = sys.stdin.read() if prompt == "-" else prompt
            text.encode()  # fails for bytes that are not text, in an argument or standard input
        else:
            raise typer.BadParameter("give either a text (or - for standard input) or --file", param_hint="PROMPT")
    except UnicodeError as error:
        raise ValueError(f"the prompt{place} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise OSError(f"cannot read the prompt{place}: {error.strerror}") from error
    if not text:
        raise ValueError(f"the prompt{place} is empty; expected some text to continue")
    return text


def in_a_line(stats: "Statistics") -> str:
    """Return the most important statistics in a line; -v shows all."""
    counts = f"{stats.new_tokens} new tokens in {stats.steps} steps, {stats.tokens_per_step:.2f} tokens per step"
    law = f"; the output distribution is changed by {stats.law_changed_by}" if stats.law_changed_by else ""
    return f"[{counts}, {stats.tokens_per_second:.0f} tokens per second{law}]"


def summary(stats: "Statistics") -> dict:
    """Return the figures of a generation, by name, for --json."""
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
