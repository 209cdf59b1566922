"""Compare ways to decode by kind of work: `compare_suite`, which `heavypath compare --suite` calls."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heavypath.kernels.filtering import Filters
from heavypath.kernels.numbers import real, whole
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.drafts.kinds import AnyDraft
from heavypath.speculative.profile import Profile
from heavypath.speculative.suite.prompts import Suite, checked_suite, part_of_suite, read_suite, suite_tokens
from heavypath.speculative.suite.results import ALL, SuiteResults, rows_of
from heavypath.speculative.ways import (
    LOOKUP,
    PLAIN,
    WARM_UP_TOKENS,
    Runner,
    TimedRun,
    Ways,
    build_ways,
    timed_runs,
)

SUITE_METHODS = ("autoregressive", "chain", "sequoia")
LOOKUP_TOKENS = 10  # that transformers looks up in the prompt at a time, as its documentation has it


def compare_suite(
    target: PreTrainedModel,
    draft: AnyDraft | Mapping[str, AnyDraft | SpeculativeDecoder] | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    suite: Suite | str | Path | None = None,
    kinds: Sequence[str] | None = None,
    prompts: int | None = None,
    methods: Sequence[str] = SUITE_METHODS,
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = 64,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    tree_size: int | None = None,
    profile: Profile | str | Path | None = None,
    verifiers: Sequence[str] = (),
    seed: int = 0,
    repeats: int = 1,
    on_progress: Callable[[str], object] | None = None,
    on_results: Callable[[SuiteResults], object] | None = None,
) -> SuiteResults:
    """Decode prompts of several kinds of work with our ways and with transformers', and compare them within each kind.

        results = compare_suite(target, draft, tokenizer, kinds=["code", "maths"], prompts=3)
        for row in results.rows:
            print(row.kind, row.way, row.tokens_per_pass, row.over_plain)

    Each prompt is decoded by all ways, one after the other. Plain decoding (autoregressive) and transformers'
    `generate` are always among them. So is transformers' assisted generation: with each draft that is a model, and with
    a lookup in the prompt for all other drafts. The tokenizer's chat template is used if there is one.

    draft, methods, verifiers, tree_size, profile, seed, repeats: as in `compare`. A `Recall` is emptied at the
        beginning of each kind and temperature
    suite: prompts by kind, or a JSON file of them, see `heavypath.speculative.suite.prompts`; default: the shipped
        suite, of 8 kinds and 10 prompts each
    kinds, prompts: which kinds, and how many prompts of each; default: all
    temperatures, top_k, top_p, min_p: how the target is sampled
    on_progress: called with a line of text, with the time left, before each run
    on_results: called with all results so far after each kind and temperature

    Raises what `compare` raises, ValueError for no temperatures, for what is no suite, for an unknown kind, and for a
    prompt that is too long for the target with its new tokens.
    """
    repeats, seed, max_new_tokens = (
        whole(name, value) for name, value in (("repeats", repeats), ("seed", seed), ("max_new_tokens", max_new_tokens))
    )
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    if isinstance(temperatures, str) or not isinstance(temperatures, Sequence) or not temperatures:
        raise ValueError(f"temperatures must be a list of at least one number, got {temperatures!r}")
    for temperature in temperatures:
        Filters(real("temperature", temperature), top_k, top_p, min_p).check()
    whole_suite = checked_suite(suite, "given") if isinstance(suite, Mapping) else read_suite(suite)
    chosen = part_of_suite(whole_suite, kinds, prompts)
    tokens = {kind: [suite_tokens(each, tokenizer, target.device) for each in own] for kind, own in chosen.items()}
    _check_lengths(tokens, max_new_tokens, target)
    ways = build_ways(target, draft, methods, verifiers=verifiers, tree_size=tree_size, profile=profile)
    if ways.plain is None:
        if "autoregressive" in ways.decoders:
            raise ValueError("a decoder of another method is called 'autoregressive'; give it another name")
        plain = SpeculativeDecoder(target, None, "autoregressive")
        ways = replace(ways, decoders={"autoregressive": plain} | ways.decoders)
    if any(name != ways.plain and name not in ways.assisted for name in ways.decoders):
        ways.theirs[LOOKUP] = LOOKUP_TOKENS
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    runners = {each: ways.runners({"temperature": each, **filters}, seed) for each in dict.fromkeys(temperatures)}
    report = on_progress or (lambda line: None)
    first = next(iter(tokens.values()))[0]
    left_out = _warm_up(ways, runners, first, min(WARM_UP_TOKENS, max_new_tokens), report)
    settings = {"temperatures": [*runners], **filters, "max_new_tokens": max_new_tokens, "tree_size": tree_size}
    settings |= {"seed": seed, "repeats": repeats, "prompts": {kind: len(own) for kind, own in tokens.items()}}
    results = SuiteResults([], settings, bool(tokenizer.chat_template), left_out)
    _measure(results, ways, runners, tokens, report, on_results or (lambda results: None))
    return results


def _measure(
    results: SuiteResults,
    ways: Ways,
    runners: Mapping[float, dict[str, Runner]],
    tokens: Mapping[str, Sequence[Tensor]],
    report: Callable[[str], object],
    on_results: Callable[[SuiteResults], object],
) -> None:
    """Run all ways on all prompts, and add a row for each kind, temperature and way to the results.

    runners: for each temperature, a function for each way that decodes a prompt; tokens: the prompts of each kind
    report: called with lines of progress; on_results: called with the results after each kind and temperature
    """
    repeats = results.settings["repeats"]
    max_new_tokens = results.settings["max_new_tokens"]
    count = sum(len(own) for own in tokens.values()) * repeats * sum(len(own) for own in runners.values())
    with_time = _with_time_left(report, count)
    every: dict[float, dict[str, list[TimedRun]]] = {each: {name: [] for name in own} for each, own in runners.items()}
    for kind, own in tokens.items():
        for temperature, decoding in runners.items():
            runs = timed_runs(
                decoding,
                own,
                max_new_tokens,
                repeats=repeats,
                recalls=ways.recalls,
                report=lambda line, of=f"{kind}, temperature {temperature:g}": with_time(f"{of}, {line}"),
            )
            results.rows.extend(rows_of(kind, temperature, ways, runs))
            for name, each in runs.items():
                every[temperature][name] += each
            on_results(results)
    if len(tokens) > 1:
        for temperature, runs in every.items():
            results.rows.extend(rows_of(ALL, temperature, ways, runs))


def _check_lengths(tokens: Mapping[str, Sequence[Tensor]], max_new_tokens: int, target: PreTrainedModel) -> None:
    """Raise ValueError, with the prompt, if it is too long for the target with its new tokens."""
    most: Any = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if most is None:
        return
    for kind, prompts in tokens.items():
        for number, prompt in enumerate(prompts, start=1):
            if prompt.shape[1] + max_new_tokens > most:
                raise ValueError(
                    f"prompt {number} of kind {kind!r} has {prompt.shape[1]} tokens, so that the target's {most} "
                    f"positions leave no room for {max_new_tokens} new ones; take fewer, or other kinds"
                )


def _warm_up(
    ways: Ways,
    runners: Mapping[float, dict[str, Runner]],
    prompt: Tensor,
    new_tokens: int,
    report: Callable[[str], object],
) -> dict[str, str]:
    """Run each way once, which is not timed, and take out those of transformers' assisted ways that refuse this target.

    Returns the reasons by the names of these ways.
    """
    left_out: dict[str, str] = {}
    for temperature, own in runners.items():
        for name in [*own]:
            report(f"warm-up at temperature {temperature:g}: {name}")
            try:
                own[name](prompt, new_tokens)
            except ValueError as error:
                if name not in ways.theirs or name == PLAIN:
                    raise
                left_out[name] = str(error)
                del own[name]
    return left_out


def _with_time_left(report: Callable[[str], object], count: int) -> Callable[[str], object]:
    """A function to call with a line before each of `count` runs: it reports the line with the time left.

    The time left is estimated by the mean time of the runs before.
    """
    begin = time.perf_counter()
    done = 0

    def say(line: str) -> None:
        nonlocal done
        left = (time.perf_counter() - begin) / done * (count - done) if done else None
        report(line if left is None else f"{line}; about {in_words(left)} left")
        done += 1

    return say


def in_words(seconds: float) -> str:
    """A time in words: in whole seconds, minutes, or hours and minutes."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
