"""Write and read traces: files that record what each step of a generation drafted, accepted and refused, and why.

A trace is a UTF-8 file of JSON lines. `read_trace` returns (header, steps). The first line is a `_Header`. Each other
line is a `_Step`: one step of one sequence that had not ended.

Probabilities, coins and thresholds have four significant digits, or more where a coin and its threshold would look
equal. Absent nodes of trees that were grown are left out. Example: a step of a chain of two, without a tokenizer:

    {"step":3,"sequence":0,"position":14,"tokens":[295,260,290],"parents":[-1,0,1],"ranks":[0,0,0],"depths":[0,1,2],
     "draft":[null,0.6442,0.038],"target":[null,0.6666,0.0031],"fates":["root","accepted","rejected"],
     "coins":[null,0.6474,0.4127],"thresholds":[null,1.0,0.0816],"path":[0,1],"length":1,"chosen":[0,1],"next":360,
     "kind":"recovered","next_target":0.6957,"emitted":[260,360]}
"""

import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NotRequired, TextIO, TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.decoding.sequences import Sequences
from heavypath.speculative.decoding.step import Stepped
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft, Drafting
from heavypath.speculative.files.typed_json import parsed, typed
from heavypath.speculative.models.forward import Forward
from heavypath.speculative.output.reasons import FATES, Reasons, VerifiedTree, explain, shown
from heavypath.speculative.output.text_stream import UNFINISHED, TextStream

FORMAT = 1


class _SequenceRecord(TypedDict):
    id: int  # selects its random numbers
    prompt: list[int]  # tokens, without padding
    text: NotRequired[str]  # the prompt's text, with a tokenizer


class _ModelRecord(TypedDict):
    name: str  # the only field for a draft without a model
    type: NotRequired[str]
    layers: NotRequired[int]
    parameters: NotRequired[int]


class _Sampling(TypedDict):
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None


class _Header(TypedDict):
    heavypath: NotRequired[str]  # version of the package
    trace: int  # version of this format; others are refused
    method: str  # one of `METHODS`
    verify: str  # `method` of `verify_tree`, "typical", or "own" for a user's verifier or the draft's
    law_changed_by: NotRequired[str]  # description of a change of the target's distribution; "" if there is none
    target: _ModelRecord
    draft: _ModelRecord | None
    filters: _Sampling  # how the target is sampled
    draft_filters: _Sampling
    shown: _Sampling  # the filters of the target's probabilities in the steps
    draft_shown: _Sampling
    seed: Any  # an integer
    max_new_tokens: NotRequired[int]
    eos_token_ids: NotRequired[list[int]]
    sequences: list[_SequenceRecord]


class _Step(TypedDict):
    """A step of one sequence, with a tree of N nodes, of which P are on the accepted path.

    N may differ from step to step. Node 0 is the root, the last token of the sequence before the step.
    """

    step: int  # number of the batch's step, from 0
    sequence: int  # index in `sequences`, from 0
    position: int  # index of the root in its sequence, from 0
    tokens: list[int]  # [N]; -1 for an absent node
    parents: list[int]  # [N]; -1 for the root; parents[i] < i
    ranks: list[int]  # [N]: index among the siblings, in the order in which they were drawn
    depths: list[int]  # [N]; 0 for the root
    draft: list[float | None]  # [N]: the draft's probability of the node's token given its parent; null for none
    target: list[float | None]  # [N]: the target's probability of it
    fates: list[str]  # [N]: why a node is on the path or not, one of `reasons.FATES`
    coins: list[float | None]  # [N]: the random number that a node was tried against; null if it was not tried
    # [N]: the node was accepted if its coin was below this. "typical" has no coins: there the target's probability had
    # to be above this. With "held" siblings share one coin: the first one in draw order whose threshold was above the
    # coin was accepted
    thresholds: list[float | None]
    path: list[int]  # [P]: accepted nodes from the root on
    length: int  # P - 1, how many drafted nodes were accepted
    chosen: list[int]  # [P]: the nodes by which these were accepted: themselves, or siblings with the same tokens
    next: int  # the token after them
    kind: str  # how `next` was chosen: "recovered", "bonus", or "plain" if nothing was drafted
    next_target: float  # the target's probability of `next`
    emitted: list[int]  # the new tokens: the accepted ones, then `next`; fewer if the sequence ended
    pieces: NotRequired[list[str]]  # with a tokenizer: the string that each new token adds to the text
    texts: NotRequired[dict[str, str]]  # with a tokenizer: texts of the tokens that occur for the first time


class Recorder:
    """Writes the lines of a generation's trace to a file, step by step.

    tokenizer: for the texts of tokens; None to write none
    rules:     how the generation verifies
    """

    def __init__(
        self,
        file: TextIO,
        tokenizer: PreTrainedTokenizerBase | None,
        rules: Rules,
        request: Request,
    ):
        self._file = file
        self._tokenizer = tokenizer
        self._request = request
        self._rules = rules
        self._step = 0
        self._known: set[int] = set()  # tokens whose text has been written
        self._pieces: list[list[str]] = [[] for _ in request.lengths]
        self._streams: list[TextStream] = []
        if tokenizer is not None:
            for prompt, pieces in zip(self._prompts(), self._pieces, strict=True):
                self._streams.append(TextStream(tokenizer, pieces.append))
                self._streams[-1].put(torch.tensor(prompt, device="cpu"))

    def header(self, method: str, target: Forward, draft: Draft) -> None:
        """Write the first line: method, models, sampling and prompts."""
        request = self._request
        sequences = [
            {"id": name, "prompt": prompt} | ({} if self._tokenizer is None else {"text": self._text(prompt)})
            for name, prompt in zip(request.sequence_ids.tolist(), self._prompts(), strict=True)
        ]
        self._write(
            {
                "heavypath": importlib.metadata.version("heavypath"),
                "trace": FORMAT,
                "method": method,
                "verify": self._rules.verification,
                "law_changed_by": self._rules.law_changed_by,
                "target": _described(target),
                "draft": None if draft is NO_DRAFT else _described_draft(draft),
                "filters": request.filters._asdict(),
                "draft_filters": self._rules.draft_filters._asdict(),
                "shown": shown(request.filters)._asdict(),
                "draft_shown": shown(self._rules.draft_filters)._asdict(),
                "seed": request.seed,
                "max_new_tokens": request.max_new_tokens,
                "eos_token_ids": request.stops.tolist(),
                "sequences": sequences,
            }
        )

    def step(self, stepped: Stepped, before: Sequences, after: Sequences) -> None:
        """Write a line for each sequence that took part in a step. before, after: the batch before and after it."""
        drafted = stepped.drafted
        logits = stepped.logits
        verified = stepped.verified
        parents, ranks, depths = (
            field.expand_as(drafted.tokens) for field in (drafted.parents, drafted.ranks, drafted.depths)
        )
        for slot in (before.left > 0).nonzero()[:, 0].tolist():
            sequence = int(before.member[slot])
            tokens = drafted.tokens[slot]
            nodes = len(tokens)
            if drafted.parents.dim() == 2:  # in trees that were grown, absent nodes come last
                nodes = int((tokens >= 0).sum())
            draft_logits = None if drafted.logits is None else drafted.logits[slot]
            if draft_logits is not None and len(draft_logits) == len(tokens):  # a Merge has further ones after the root
                draft_logits = draft_logits[:nodes]
            tree = VerifiedTree(
                tokens=tokens[:nodes],
                parents=parents[slot, :nodes],
                ranks=ranks[slot, :nodes],
                noise_rows=drafted.noise_rows[slot, :nodes],
                target_logits=logits[slot, :nodes],
                draft_logits=draft_logits,
            )
            path = verified.path[slot]
            next_token = int(verified.next_token[slot])
            reasons = explain(tree, self._rules, self._request.seed, path, next_token)
            shape = {
                "tokens": tree.tokens.tolist(),
                "parents": tree.parents.tolist(),
                "ranks": tree.ranks.tolist(),
                "depths": depths[slot, :nodes].tolist(),
            }
            accepted = path[path >= 0].tolist()
            emitted = after.output[sequence, int(before.produced[slot]) : int(after.produced[slot])].tolist()
            line: dict[str, Any] = {"step": self._step, "sequence": sequence, "position": int(before.lengths[slot])}
            line |= shape | _rounded(reasons)
            line |= {"path": accepted, "length": len(accepted) - 1, "chosen": reasons.chosen}
            line |= {"next": next_token, "kind": reasons.kind, "next_target": _short(reasons.next_target)}
            line |= {"emitted": emitted}
            if self._tokenizer is not None:
                line["pieces"] = [self._piece(sequence, token) for token in emitted]
                fresh = {*shape["tokens"], next_token, *emitted} - self._known - {-1}
                self._known |= fresh
                line["texts"] = {token: token_text(self._tokenizer, token) for token in sorted(fresh)}
            self._write(line)
        self._step += 1

    def _prompts(self) -> list[list[int]]:
        rows = zip(self._request.prompt.tolist(), self._request.lengths.tolist(), strict=True)
        return [prompt[:length] for prompt, length in rows]

    def _text(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _piece(self, sequence: int, token: int) -> str:
        """The text that a token adds. A character made of several tokens is added by the last of them."""
        pieces = self._pieces[sequence]
        pieces.clear()
        self._streams[sequence].put(torch.tensor([token], device="cpu"))
        if not "".join(pieces):  # a special token, which the stream leaves out, or part of a character
            own = self._text([token])
            return "" if UNFINISHED in own else own
        return "".join(pieces)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")


@contextmanager
def recording(
    trace: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    method: str,
    rules: Rules,
    target: Forward,
    draft: Draft,
    request: Request,
) -> Iterator[Recorder]:
    """A context with a `Recorder` that writes to the file `trace`, whose first line is written at once.

    tokenizer: for the texts of tokens; None to write none
    rules:     how the generation verifies

    Raises TypeError if `trace` is no path, and OSError if the file cannot be written.
    """
    if not isinstance(trace, (str, Path)):
        raise TypeError(f"trace must be the path of a file, got {type(trace).__name__}")
    with Path(trace).open("w", encoding="utf-8") as file:
        recorder = Recorder(file, tokenizer, rules, request)
        recorder.header(method, target, draft)
        yield recorder


def read_trace(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the steps of a trace. An incomplete last line is ignored.

    Raises ValueError for a file that is not a trace, or is a trace of another format.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
        header, *steps = [parsed(line) for line in lines or [""]]
        made = typed(header, dict[str, Any]).get("trace")
        if made == FORMAT:
            header = typed(header, _Header)
            return header, [_checked(typed(step, _Step, "a step"), len(header["sequences"])) for step in steps]
        if made is None:
            raise ValueError("its first line has no format")
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} is no trace that `generate` writes ({error}); make one with "
            "`heavypath generate --trace FILE`"
        ) from error
    raise ValueError(f"{str(path)!r} is a trace of format {made}, expected {FORMAT}; generate it again")


def _checked(step: dict[str, Any], sequences: int) -> dict[str, Any]:
    """Return a step as it is. Raises ValueError unless its fields have matching lengths and valid indices."""
    nodes = len(step["tokens"])
    path = step["path"]
    chosen = step["chosen"]
    per_node = ("parents", "ranks", "depths", "draft", "target", "fates", "coins", "thresholds")
    fits = nodes > 0 and all(len(step[name]) == nodes for name in per_node) and 0 <= step["sequence"] < sequences
    fits = fits and step["parents"][0] == -1 and all(0 <= step["parents"][i] < i for i in range(1, nodes))
    fits = fits and bool(path) and len(path) == len(chosen) and all(0 <= node < nodes for node in path + chosen)
    fits = fits and all(fate in FATES for fate in step["fates"])
    if not fits or len(step.get("pieces", step["emitted"])) != len(step["emitted"]):
        raise ValueError(f"the nodes of step {step['step']} of sequence {step['sequence']} do not fit each other")
    return step


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of a token, with a leading space that some tokenizers drop at the beginning of a text."""
    once, twice = (tokenizer.decode([token] * times, clean_up_tokenization_spaces=False) for times in (1, 2))
    assert isinstance(once, str)
    assert isinstance(twice, str)
    text = twice[len(once) :] if twice.startswith(once) else once
    return text or once


def _described_draft(draft: Draft) -> dict[str, Any]:
    """The header's record of a draft: that of its model, or only a name, without a model or with several parts."""
    facts = [{"name": leaf.name} if leaf.forward is None else _described(leaf.forward) for leaf in draft.leaves]
    return facts[0] if len(facts) == 1 else {"name": " and ".join(each["name"] or "model" for each in facts)}


def _described(model: Drafting) -> dict[str, Any]:
    """The header's record of a model: name, type, number of layers and of parameters."""
    return {
        "name": Path(str(getattr(model.config, "name_or_path", ""))).name,
        "type": model.config.model_type,
        "layers": model.layers,
        "parameters": sum(weight.numel() for _, weight in model.weights()),
    }


def _rounded(reasons: Reasons) -> dict[str, Sequence[Any]]:
    """The fields of a step's line that have the reasons for each node, with numbers rounded to four digits or more."""
    coins: list[float | None] = []
    thresholds: list[float | None] = []
    for coin, threshold in zip(reasons.coins, reasons.thresholds, strict=True):
        digits = 4
        if coin is not None and threshold is not None:
            while coin != threshold and _short(coin, digits) == _short(threshold, digits):
                digits += 1
        coins.append(None if coin is None else _short(coin, digits))
        thresholds.append(None if threshold is None else _short(threshold, digits))
    return {
        "draft": [None if chance is None else _short(chance) for chance in reasons.draft],
        "target": [None if chance is None else _short(chance) for chance in reasons.target],
        "fates": reasons.fates,
        "coins": coins,
        "thresholds": thresholds,
    }


def _short(number: float, digits: int = 4) -> float:
    """The number with this many significant digits."""
    return float(f"{number:.{digits}g}")
