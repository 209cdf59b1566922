"""Ways to decode that are compared on the same prompts: build them, time them in pairs, and check their texts.

A way is one of our decoders, or transformers' own `generate`. For each prompt all ways run one after the other, so that
a change of the machine's speed affects all of them. With several rounds the fastest run of each prompt counts, because
disturbances on a machine only add time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.drafts.composite import Cascade, Mixture
from heavypath.speculative.drafts.kinds import AnyDraft
from heavypath.speculative.drafts.merge import Merge
from heavypath.speculative.drafts.recall import Recall
from heavypath.speculative.methods import METHODS, row_of
from heavypath.speculative.options import NOTHING
from heavypath.speculative.profile import Profile
from heavypath.speculative.trees.tree import TokenTree

PLAIN = "transformers generate"
ASSISTED = "transformers assisted"
LOOKUP = "transformers prompt lookup"
TIE = 1e-4  # two tokens whose target logits differ by less are equally correct
WARM_UP_TOKENS = 8

Verdict = Literal["equal", "tie", "differs", "same law", "other law", "unchecked", "reference"]


class Decoded(NamedTuple):
    """The result of one way to decode for one prompt.

    sequence: LongTensor[1, T + new], prompt and output
    forwards: forward passes of the target. For transformers this includes the prefill, which yields a token; ours is
        not counted, because it leaves the prompt's last token to the first step
    stats: our statistics of the generation; None for transformers
    """

    sequence: Tensor
    forwards: int
    stats: Statistics | None = None


Runner = Callable[[Tensor, int], Decoded]  # of a prompt LongTensor[1, T] and the largest number of new tokens


class TimedRun(NamedTuple):
    """A timed run of one way to decode on one prompt. new_tokens: length of the output; seconds: with the prefill."""

    decoded: Decoded
    new_tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """New tokens a second."""
        return self.new_tokens / self.seconds


@dataclass(frozen=True, eq=False)
class Ways:
    """The ways to decode that are compared, all with one target.

    theirs: ways of transformers by name, each with its assistant: a draft model, the number of tokens to look up in
        the prompt, or None
    decoders: our ways by name
    assisted: for our ways whose draft is a model, by name: the name of transformers' way with the same draft
    recalls: the drafts in them that learn from earlier prompts
    """

    target: PreTrainedModel
    theirs: dict[str, PreTrainedModel | int | None]
    decoders: dict[str, SpeculativeDecoder]
    assisted: dict[str, str]
    recalls: list[Recall]

    @property
    def plain(self) -> str | None:
        """The name of our way that decodes without a draft ("autoregressive"); None if it is not among the ways."""
        return next((name for name, each in self.decoders.items() if _is_a_method(each, "autoregressive")), None)

    @property
    def racing(self) -> list[str]:
        """The names of our ways whose sampled text must equal that of plain decoding: those with method "ersd"."""
        return [name for name, each in self.decoders.items() if _is_a_method(each, "ersd")]

    def runners(self, sampling: Mapping[str, Any], seed: int) -> dict[str, Runner]:
        """For each way by name, transformers' first, a function that decodes a prompt.

        sampling: temperature, top_k, top_p and min_p, by name

        Raises ValueError if the text of a way cannot be checked, because plain decoding is missing.
        """
        if sampling["temperature"] > 0 and self.racing and self.plain is None:
            raise ValueError(
                f"at temperature > 0 the text of 'ersd' ({', '.join(self.racing)}) is compared with 'autoregressive'; "
                "add it"
            )
        theirs = {name: transformers_runner(self.target, each, sampling, seed) for name, each in self.theirs.items()}
        return theirs | {name: _speculative(decoder, sampling, seed) for name, decoder in self.decoders.items()}

    def verdict(
        self, name: str, runs: Mapping[str, Sequence[TimedRun]], temperature: float
    ) -> tuple[Verdict, float | None]:
        """The verdict on a way's texts, over all prompts, and the largest logit gap where greedy texts first differ.

        name: the way; runs: of all ways, by name. A verdict is one of the words that `ComparedWay.text` describes. The
        gap is None unless greedy texts differ
        """
        if name == (PLAIN if temperature == 0 else self.plain):
            return "reference", None
        if temperature == 0:
            return _greedy_verdict(self.target, runs[name], runs[PLAIN])
        if name in self.racing and self.plain is not None:
            pairs = zip(runs[name], runs[self.plain], strict=True)
            same = all(torch.equal(a.decoded.sequence, b.decoded.sequence) for a, b in pairs)
            return ("equal" if same else "differs"), None
        if name in self.decoders and callable(self.decoders[name].verifier):
            return "unchecked", None
        if name in self.decoders and not METHODS[self.decoders[name].method].is_lossless:
            return "other law", None
        return "same law", None


def build_ways(
    target: PreTrainedModel,
    draft: AnyDraft | Mapping[str, AnyDraft | SpeculativeDecoder] | None,
    methods: Sequence[str],
    *,
    verifiers: Sequence[str] = (),
    tree_size: int | None = None,
    tree: TokenTree | None = None,
    profile: Profile | str | Path | None = None,
    assistant: PreTrainedModel | None = None,
) -> Ways:
    """Build the ways to compare: each method with each draft and verifier, given decoders, and transformers' own.

    Arguments and errors are those of `comparison.compare`.
    """
    for name, several in (("methods", methods), ("verifiers", verifiers)):
        if isinstance(several, str) or not isinstance(several, Sequence):
            raise TypeError(f"{name} must be a list of names, got {several!r}")
    named = draft if isinstance(draft, Mapping) else {"": draft}
    drafts = {name: each for name, each in named.items() if not isinstance(each, SpeculativeDecoder)}
    theirs: dict[str, PreTrainedModel | int | None] = {PLAIN: None}
    for name, each in (drafts if assistant is None else {"": assistant}).items():
        if isinstance(each, PreTrainedModel):
            theirs[_label(ASSISTED, name)] = each
    for verifier in verifiers:
        if not any(verifier in row_of(method).verifiers for method in methods):
            row_of(methods[0], verifier)
    loaded = profile if profile is None or isinstance(profile, Profile) else Profile.load(profile)
    ways = Ways(target, theirs, decoders={}, assisted={}, recalls=[])
    for method in methods if drafts else ():
        if method == "autoregressive":
            ways.decoders[method] = SpeculativeDecoder(target, None, method)
            continue
        taken = [verifier for verifier in verifiers if verifier in row_of(method).verifiers]
        for name, each in drafts.items():
            for verifier in taken or [None]:
                way = _label(_label(method, verifier or ""), name)
                ways.decoders[way] = SpeculativeDecoder(
                    target,
                    _with_own(each, ways.recalls),
                    method,
                    tree_size=tree_size,
                    tree=tree,
                    profile=loaded,
                    verifier=verifier,
                )
                if isinstance(each, PreTrainedModel):
                    ways.assisted[way] = _label(ASSISTED, name if assistant is None else "")
    for name, each in named.items():
        if isinstance(each, SpeculativeDecoder):
            if name in ways.decoders or name in theirs:
                raise ValueError(f"two ways to decode are called {name!r}; give the decoder another name")
            if each.target is not target:
                raise ValueError(f"the decoder {name!r} decodes another target; all are compared on one")
            ways.decoders[name] = each
    return ways


def timed_runs(
    runners: Mapping[str, Runner],
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    *,
    repeats: int = 1,
    recalls: Sequence[Recall] = (),
    report: Callable[[str], object],
) -> dict[str, list[TimedRun]]:
    """Run each way on each prompt, and keep its fastest run: for each way by name, a run for each prompt.

    runners: the ways by name; prompts: LongTensors [1, T]
    repeats: rounds over all prompts
    recalls: drafts that are emptied at the beginning of each round
    report: called with a line of text before each run
    """
    runs: dict[str, list[TimedRun]] = {name: [] for name in runners}
    for repeat in range(repeats):
        for recall in recalls:
            recall.forget()
        turn = f"round {repeat + 1} of {repeats}, " if repeats > 1 else ""
        for number, prompt in enumerate(prompts):
            for name, runner in runners.items():
                report(f"{turn}prompt {number + 1} of {len(prompts)}: {name}")
                run = _timed(runner, prompt, max_new_tokens)
                if repeat == 0:
                    runs[name].append(run)
                elif run.seconds < runs[name][number].seconds:
                    runs[name][number] = run
    return runs


def transformers_runner(
    target: PreTrainedModel, assistant: PreTrainedModel | int | None, sampling: Mapping[str, Any], seed: int
) -> Runner:
    """A function that decodes a prompt by transformers' `generate`, plain or assisted.

    assistant: a draft model, or the number of tokens to look up in the prompt (`prompt_lookup_num_tokens`); None for
        plain generation
    sampling: temperature, top_k, top_p and min_p, by name
    """
    options = {"do_sample": False, "repetition_penalty": 1.0, "num_beams": 1, "pad_token_id": _pad_token(target)}
    if sampling["temperature"] > 0:
        filters = {"top_k": sampling["top_k"] or 0, "top_p": sampling["top_p"] or 1.0}  # None would mean its defaults
        filters["min_p"] = sampling.get("min_p")
        options |= {"do_sample": True, "temperature": sampling["temperature"], **filters}
    if assistant is not None:
        options["prompt_lookup_num_tokens" if isinstance(assistant, int) else "assistant_model"] = assistant

    def run(prompt: Tensor, max_new_tokens: int) -> Decoded:
        forwards = 0

        def count(*_: object) -> None:
            nonlocal forwards
            forwards += 1

        hook = target.register_forward_hook(count)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                sequence = target.generate(  # pyright: ignore[reportCallIssue]
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **options
                )
        finally:
            hook.remove()
        return Decoded(sequence, forwards)

    return run


def _speculative(decoder: SpeculativeDecoder, sampling: Mapping[str, Any], seed: int) -> Runner:
    options = NOTHING | {name: value for name, value in sampling.items() if value is not None}
    options["eos_token_id"] = "model"

    def run(prompt: Tensor, max_new_tokens: int) -> Decoded:
        out = decoder.generate(prompt, max_new_tokens, **options, seed=seed)
        return Decoded(out.sequences, out.stats.steps, out.stats)

    return run


def _timed(runner: Runner, prompt: Tensor, max_new_tokens: int) -> TimedRun:
    _synchronize(prompt.device)
    begin = time.perf_counter()
    decoded = runner(prompt, max_new_tokens)
    _synchronize(prompt.device)
    return TimedRun(decoded, decoded.sequence.shape[1] - prompt.shape[1], time.perf_counter() - begin)


def _with_own(draft: Any, recalls: list[Recall]) -> Any:
    """The draft with each `Recall` in it replaced by a new one, so that ways share none; `recalls` gets it, too."""
    if isinstance(draft, Recall):
        recalls.append(Recall(draft.tokens, max_ngram=draft.max_ngram))
        return recalls[-1]
    if isinstance(draft, (Cascade, Mixture, Merge)):
        return replace(draft, drafts=[_with_own(each, recalls) for each in draft.drafts])
    return draft


def _label(method: str, more: str) -> str:
    return f"{method}, {more}" if more else method


def _is_a_method(decoder: SpeculativeDecoder, method: str) -> bool:
    """Whether a decoder runs this method with the method's own verification."""
    return decoder.method == method and decoder.verifier is None


def _greedy_verdict(
    target: PreTrainedModel, own: Sequence[TimedRun], plain: Sequence[TimedRun]
) -> tuple[Verdict, float | None]:
    """The worst verdict on greedy texts over all prompts, and the largest logit gap where outputs first differ.

    own, plain: the runs of a way and of transformers on the same prompts
    """
    pairs = [(a.decoded.sequence, b.decoded.sequence) for a, b in zip(own, plain, strict=True)]
    gaps = [_parting_gap(target, one, other) for one, other in pairs if not torch.equal(one, other)]
    if not gaps:
        return "equal", None
    known = [gap for gap in gaps if gap is not None]
    tie = all(gap is not None and gap < TIE for gap in gaps)
    return "tie" if tie else "differs", max(known, default=None)


@torch.no_grad()
def _parting_gap(target: PreTrainedModel, sequence: Tensor, reference: Tensor) -> float | None:
    """The difference of the target's logits of the first two tokens that differ; None if one sequence begins the other.

    sequence, reference: LongTensor[1, L], prompt and output
    """
    shorter = min(sequence.shape[1], reference.shape[1])
    differing = (sequence[0, :shorter] != reference[0, :shorter]).nonzero()
    if not len(differing):
        return None
    place = int(differing[0])
    logits = target(input_ids=reference[:, :place], use_cache=False).logits[0, -1].float()
    return abs(float(logits[sequence[0, place]] - logits[reference[0, place]]))


def _pad_token(target: PreTrainedModel) -> int:
    config = target.generation_config
    eos = config.eos_token_id if config is not None else None
    return eos if isinstance(eos, int) else eos[0] if eos else 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
