"""The results of a suite: a row for each kind, temperature and way to decode."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from heavypath.speculative.suite.estimates import Estimate, geometric_mean_of, mean_of, share_of
from heavypath.speculative.ways import LOOKUP, PLAIN, TimedRun, Verdict, Ways

ALL = "all"  # the kind of rows over the prompts of all kinds


@dataclass(frozen=True)
class SuiteRow:
    """One way to decode the prompts of one kind at one temperature.

    kind: "all" for the prompts of all kinds together
    way: as `ComparedWay.method`
    tokens_per_pass: new tokens / forward passes of the target, mean over the prompts. For transformers this includes
        the prefill, which yields a token
    tokens_per_second: new tokens / seconds, prefill included, geometric mean over the prompts
    over_plain, over_transformers: ratios of tokens per second, prompt by prompt, to our own plain decoding and to
        transformers' `generate`; geometric means
    over_assisted: the same to transformers' assisted generation: with the same draft model, else by lookup in the
        prompt. None for plain decoding, for ways of transformers, and if transformers cannot assist this target
    acceptance: for each depth, of the accepted nodes at this depth that had children, the share of which a child was
        accepted. It ends before the first depth without such nodes; it is empty for ways that draft nothing, and for
        transformers
    text, logit_gap: as in `ComparedWay`
    new_tokens, passes, seconds: of each prompt, in order
    """

    kind: str
    temperature: float
    way: str
    tokens_per_pass: Estimate
    tokens_per_second: Estimate
    over_plain: Estimate
    over_transformers: Estimate
    over_assisted: Estimate | None
    acceptance: list[Estimate]
    text: Verdict
    logit_gap: float | None
    new_tokens: list[int] = field(repr=False)
    passes: list[int] = field(repr=False)
    seconds: list[float] = field(repr=False)


@dataclass(frozen=True)
class SuiteResults:
    """All that was measured by `compare_suite`.

    rows: by kind, then temperature, then way; transformers' ways first. After all kinds, if there are several, come the
        rows of kind "all"
    settings: by which it was measured
    chat_template: whether prompts were put into the tokenizer's chat template; otherwise they were taken as they are
    left_out: ways of transformers that cannot decode this target, each with the reason
    """

    rows: list[SuiteRow]
    settings: dict[str, Any]
    chat_template: bool
    left_out: dict[str, str]

    def as_json(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        """One object for a JSON file, with facts about the machine. An estimate is a list of its mean and its error."""
        return {"environment": environment, **asdict(self)}


def rows_of(kind: str, temperature: float, ways: Ways, runs: Mapping[str, Sequence[TimedRun]]) -> list[SuiteRow]:
    """A row for each way, from its runs on the prompts of a kind. Plain decoding must be among the ways."""
    assert ways.plain is not None
    rows = []
    for name, own in runs.items():
        assisted = _assisted(name, ways, runs)
        text, gap = ways.verdict(name, runs, temperature)
        rows.append(
            SuiteRow(
                kind=kind,
                temperature=temperature,
                way=name,
                tokens_per_pass=mean_of([run.new_tokens / run.decoded.forwards for run in own]),
                tokens_per_second=geometric_mean_of([run.speed for run in own]),
                over_plain=_ratio(own, runs[ways.plain]),
                over_transformers=_ratio(own, runs[PLAIN]),
                over_assisted=None if assisted is None else _ratio(own, runs[assisted]),
                acceptance=acceptance_by_depth(own),
                text=text,
                logit_gap=gap,
                new_tokens=[run.new_tokens for run in own],
                passes=[run.decoded.forwards for run in own],
                seconds=[run.seconds for run in own],
            )
        )
    return rows


def _assisted(name: str, ways: Ways, runs: Mapping[str, Sequence[TimedRun]]) -> str | None:
    """The name of transformers' assisted way that the way `name` is compared with: with its draft, or by lookup.

    None for plain decoding, for transformers' ways, and if transformers cannot assist this target.
    """
    if name not in ways.decoders or name == ways.plain:
        return None
    assisted = ways.assisted.get(name, LOOKUP)
    return assisted if assisted in runs else None


def _ratio(own: Sequence[TimedRun], others: Sequence[TimedRun]) -> Estimate:
    return geometric_mean_of([run.speed / other.speed for run, other in zip(own, others, strict=True)])


def acceptance_by_depth(runs: Sequence[TimedRun]) -> list[Estimate]:
    """For each depth, of the accepted nodes with children, the share with an accepted child; [] without a draft."""
    counted = [run.decoded.stats for run in runs if run.decoded.stats is not None]
    shares = []
    for depth in range(max((stats.depth for stats in counted), default=0)):
        reached = [stats for stats in counted if depth < len(stats.offered)]
        offered = [int(stats.offered[depth, 0]) for stats in reached]  # a node with children has one of rank 0
        if not sum(offered):
            break
        shares.append(share_of([int(stats.accepted[depth].sum()) for stats in reached], offered))
    return shares
