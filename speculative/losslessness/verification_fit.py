"""Whether a verification of drafted tokens outputs exactly the target's distribution: a test of any program.

P(. | c) is the target's distribution after a context c, and Q(. | c) the draft's. Children of a node with context c are
drawn from Q(. | c). A verification looks at the drafted tree, at P and Q after its nodes, and at random numbers of its
own. It outputs T tokens x_1, ..., x_T: T - 1 accepted ones, which spell a path of the tree, and one more. T is at most
L = depth + 1.

**What is tested.** Outputs shorter than L are completed from P. The verification is lossless if and only if these L
tokens have the distribution

    law(x_1, ..., x_L) = prod_t P(x_t | x_1, ..., x_{t-1})

on average over the drafted trees and the random numbers. For one fixed tree they do not have it, and need not.

1. If the completed output of each step has this distribution, so has a whole sequence, by induction over steps: the
   next step begins where this one ends, and its random numbers are fresh.
2. It is the same to say: if a step outputs x_1, ..., x_{t-1} and at least one more token, this one has the
   distribution P(. | x_1, ..., x_{t-1}). For let M_t be the probability that T >= t and the output begins with
   x_1, ..., x_t, and M'_t that T >= t and it begins with x_1, ..., x_{t-1}. A completed output begins with
   x_1, ..., x_t with the probability

       F_t = M_t + (F_{t-1} - M'_t) P(x_t | x_1, ..., x_{t-1}).

   So if F_{t-1} is the product of P, then F_t is it exactly if M_t = M'_t P(x_t | x_1, ..., x_{t-1}).

P and Q are random tables over a small vocabulary. A verification does not know how large its vocabulary is, and all
V ** L outputs can be counted. Each kind of P and Q (`verification_cases.py`) shows other mistakes: a wrong residual
shows where P and Q differ, a division by zero where they are equal, a wrong rule for excluded tokens where one of them
has zeros.

**The test** is `goodness_of_fit` of the completed outputs of each case: chi-square over all V ** L outputs, and a bound
for each token after each prefix. With C cases the p-value is C times the least one (Bonferroni). So a right
verification fails with a probability of at most `significance`, as far as chi-square is exact.

**Power.** Each case takes the number of draws with which a total variation of `detect` is found with a probability of
0.99 at the significance / C. `detectable_total_variation` has the bound and its source. The number of draws is about
proportional to 1 / detect ** 2.

**How far off.** Take the outputs, or first tokens, that come too often in one half of the draws, and count them in the
other half. Their share there less their probability is on average not above the total variation, and near it if the
departure is plain. The halves take turns. For a right verification its mean is 0.

A good fit does not show noise that two steps share (`check_losslessness` does), errors that need a large vocabulary, or
a total variation much below `detect`. Outputs in a batch must be independent of each other.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heavypath.speculative.losslessness.chi_square import (
    SIGNIFICANCE,
    detectable_total_variation,
    expected_total_variation,
    joint_counts,
)
from heavypath.speculative.losslessness.drawn_trees import (
    DRAWS,
    Draw,
    Tables,
    children_of,
    depths_of,
    draw_trees,
    generator_of,
    rows_at,
)
from heavypath.speculative.losslessness.goodness_of_fit import NAMED_BELOW, GoodnessOfFit, goodness_of_fit
from heavypath.speculative.losslessness.law import check_size
from heavypath.speculative.losslessness.verification_cases import VERIFICATION_CASES, Kind
from heavypath.speculative.losslessness.verified_outputs import checked_outputs, in_one_tensor

DRAWN_TOGETHER = 4096  # trees, for a verification of one tree at a time
MOST_NAMED = 3  # departures of a case that are printed


class CaseFit(NamedTuple):
    """How well a verification's outputs fit the target's distribution, for one kind of P and Q."""

    fit: GoodnessOfFit  # of the completed outputs
    total_variation: float  # an estimate that is not above it on average
    error: float  # its standard error, or somewhat more
    detectable: float  # the total variation that is found with a probability of 0.99
    accepted: float  # drafted tokens that are accepted, on average


class VerificationFit(NamedTuple):
    """Whether a verification has the target's distribution, case by case. Printed, it says so in words."""

    cases: dict[str, CaseFit]
    significance: float

    @property
    def p_value(self) -> float:
        """The least p-value of a case, times the number of cases (Bonferroni); at most 1."""
        return min(1.0, len(self.cases) * min(case.fit.p_value for case in self.cases.values()))

    @property
    def ok(self) -> bool:
        """Whether no case departs. A right verification gets False with probability `significance`."""
        return not self.departing

    @property
    def departing(self) -> list[str]:
        """The names of the cases that depart."""
        limit = self.significance / len(self.cases)
        return [name for name, case in self.cases.items() if case.fit.p_value < limit]

    def __str__(self) -> str:
        verdict = "no departure from the target's distribution"
        if not self.ok:
            verdict = f"departs from the target's distribution in {len(self.departing)} of {len(self.cases)} cases"
        lines = [f"{verdict}: p = {self.p_value:.3g} (departs below {self.significance:g})"]
        for name, case in self.cases.items():
            lines.append(
                f"  {name:17} p = {case.fit.p_value:<9.3g} total variation {case.total_variation:7.4f} "
                f"+- {case.error:.4f}, {case.detectable:.4f} would be found; "
                f"{case.accepted:.2f} accepted; {case.fit.sequences:,} draws"
            )
            if name in self.departing:
                named = [one for one in case.fit.tokens if one.p_value < NAMED_BELOW]
                lines += [f"    {departure}" for departure in named[:MOST_NAMED]]
        return "\n".join(lines)


def check_verification(
    verify: Callable[[Tensor, Tensor, Tensor, Tensor, int], Any],
    parents: Sequence[int],
    *,
    draw: str | Draw,
    batch_size: int | None = None,
    detect: float = 0.02,
    vocab_size: int = 4,
    cases: Mapping[str, Kind] = VERIFICATION_CASES,
    significance: float = SIGNIFICANCE,
    seed: int = 0,
) -> VerificationFit:
    """Test if the outputs of a verification have exactly the target's distribution.

    verify(tokens, parents, target, draft, seed) -> the accepted tokens and the one after them. With a batch_size it has

        tokens  LongTensor[B, N], the drafted tree; node 0 is the root, the last committed token, and -1 an absent node
        parents LongTensor[N], as given here
        target  fp32 [B, N, V], the probabilities P after each node
        draft   fp32 [B, N, V], the probabilities Q that the children of each node were drawn from
        seed    another one for each call

    all on the CPU and its own to change, and returns integers [B, at most L]: the accepted tokens in their order, the
    token after them, then -1. L is the tree's depth + 1. Rows must be independent of each other. The last batch may be
    smaller. Without a batch_size verify gets one tree at a time, without the dimension B, and returns a list of
    integers or a Tensor [T].

    parents:      of each node, -1 for node 0, and parents[i] < i. range(-1, K) is a chain of K drafted tokens
    draw:         how children are drawn: "with_replacement" (SpecInfer, SpecTr; the same as the next for a chain),
                  "without_replacement" (Sequoia, RSD; nodes are absent once Q has no token left), "top_k" (the draft's
                  likeliest tokens). Or a function (draft [B, V] float64, count, node, seed) -> LongTensor[B, count]
                  of them, where seed is that of the verification if there is a batch_size
    detect:       total variation that each case finds with a probability of 0.99
    vocab_size:   V, at least 2
    cases:        kinds of P and Q: functions (generator, rows, V) -> two tensors of probabilities [rows, V]
    significance: the probability with which a right verification fails, over all cases

    Raises TypeError and ValueError for arguments out of range, and for what verify returns if it has another shape, has
    tokens out of range or none, or accepts tokens that are no path of the tree.
    """
    parents = _checked_parents(parents)
    _check_numbers(batch_size, detect, vocab_size, significance, seed)
    depths = depths_of(parents)
    check_size(vocab_size, max(depths) + 1)
    sample = _checked_draw_function(draw, parents, vocab_size)
    if not cases:
        raise ValueError("cases must have at least one kind of distributions, got none")
    by_case = {}
    calls = _Calls(verify, parents, depths, batch_size, seed)
    for number, (name, kind) in enumerate(cases.items()):
        tables = _tables_of(name, kind, max(depths), vocab_size, generator_of(seed, number))
        share = significance / len(cases)
        by_case[name] = _fit_of(calls, tables, sample, draws_to_detect(tables.law(), detect, share), share)
    return VerificationFit(by_case, significance)


def draws_to_detect(law: Tensor, total_variation: float, significance: float) -> int:
    """How many draws find this total variation from a distribution law [V, ..., V] with a probability of 0.99."""
    draws = 1
    while (found := detectable_total_variation(law, draws, significance=significance)) > total_variation:
        draws = math.ceil(draws * min(2.0, (found / total_variation) ** 2))
    return draws


class _Calls:
    """Calls a verification on drawn trees, each time with another seed. The arguments are those of the check."""

    def __init__(
        self, verify: Callable[..., Any], parents: list[int], depths: list[int], batch_size: int | None, seed: int
    ):
        self.verify = verify
        self.parents = parents
        self.depths = depths
        self.batch_size = batch_size
        self.seed = seed

    def outputs(self, tables: Tables, draw: Draw, draws: int) -> Iterator[Tensor]:
        """What the verification outputs for `draws` new trees, LongTensor[B, L] with -1 after the tokens, by batch."""
        together = self.batch_size or DRAWN_TOGETHER
        for start in range(0, draws, together):
            trees = draw_trees(tables, self.parents, draw, min(together, draws - start), self.seed)
            target = rows_at(tables.target, trees.contexts, self.depths)
            draft = rows_at(tables.draft, trees.contexts, self.depths)
            called = self._of_batch if self.batch_size else self._one_by_one
            outputs = called(trees.tokens.clone(), target, draft)
            yield checked_outputs(outputs, trees.tokens, self.parents, tables.vocab_size)

    def _of_batch(self, tokens: Tensor, target: Tensor, draft: Tensor) -> Any:
        self.seed += 1
        return self.verify(tokens, torch.tensor(self.parents, device="cpu"), target, draft, self.seed - 1)

    def _one_by_one(self, tokens: Tensor, target: Tensor, draft: Tensor) -> Tensor:
        rows = []
        for tree, its_target, its_draft in zip(tokens, target, draft, strict=True):
            rows.append(self._of_batch(tree, its_target, its_draft))
        return in_one_tensor(rows, max(self.depths) + 1)


def _fit_of(calls: _Calls, tables: Tables, draw: Draw, draws: int, significance: float) -> CaseFit:
    law = tables.law()
    outputs = torch.cat([*calls.outputs(tables, draw, draws)])
    texts = _completed(outputs, tables, generator_of(calls.seed, len(tables.target), draws))
    total_variation, error = _estimated_total_variation(texts, law)
    return CaseFit(
        fit=goodness_of_fit(texts, law),
        total_variation=total_variation,
        error=error,
        detectable=detectable_total_variation(law, draws, significance=significance),
        accepted=float((outputs >= 0).sum(1).double().mean()) - 1,
    )


def _completed(outputs: Tensor, tables: Tables, generator: torch.Generator) -> Tensor:
    """The outputs LongTensor[B, L] with each -1 replaced by a token drawn from P after the tokens before it."""
    context = torch.zeros_like(outputs[:, 0])
    texts = []
    for level, output in zip(tables.target, outputs.unbind(1), strict=True):
        drawn = level[context].multinomial(1, generator=generator)[:, 0]
        texts.append(output.where(output >= 0, drawn))
        context = context * tables.vocab_size + texts[-1]
    return torch.stack(texts, 1)


def _estimated_total_variation(texts: Tensor, law: Tensor) -> tuple[float, float]:
    """An estimate of the total variation between outputs and `law`, on average not above it, and a standard error.

    The estimate is the mean of two, one by each half of the outputs, which depend on each other. The standard error is
    that of one half; the mean's is 0.7 to 1 times as large.
    """
    halves = [joint_counts(half, len(law)).view(law.shape).double() for half in (texts[::2], texts[1::2])]
    excesses = []
    variances = []
    for one, other in (halves, halves[::-1]):
        often = _too_often(one, law)
        share = other[often].sum() / other.sum()
        excesses.append(float(share - law[often].sum()))
        variances.append(float(share * (1 - share) / other.sum()))
    return sum(excesses) / 2, math.sqrt(sum(variances) / 2)


def _too_often(counts: Tensor, law: Tensor) -> Tensor:
    """Which outputs begin with a prefix that came more often than expected, BoolTensor[V, ..., V].

    All prefixes have one length: that for which the excess is largest compared to a right verification's.

    counts: [V, ..., V], how often each output came
    """
    sequences = int(counts.sum())
    found = []
    for length in range(1, law.ndim + 1):
        later = [*range(length, law.ndim)]
        seen, due = (each.sum(later) if later else each for each in (counts, law))
        often = seen > due * sequences
        excess = float(seen[often].sum() / sequences - due[often].sum())
        outstanding = excess - expected_total_variation(due, sequences)
        found.append((outstanding, often.view([*often.shape, *[1] * len(later)]).expand(law.shape)))
    return max(found, key=lambda each: each[0])[1]


def _tables_of(name: str, kind: Kind, depth: int, vocab_size: int, generator: torch.Generator) -> Tables:
    """P and Q of a kind for all contexts of at most `depth` tokens.

    Raises ValueError, with the kind's name, if it does not return distributions.
    """
    target = []
    draft = []
    for length in range(depth + 1):
        rows = vocab_size**length
        pair = kind(generator, rows, vocab_size)
        for table in pair:
            if table.shape != (rows, vocab_size) or not table.is_floating_point():
                raise ValueError(
                    f"case {name!r} must give probabilities [{rows}, {vocab_size}], got {table.dtype} {[*table.shape]}"
                )
            if not (table >= 0).all() or not (abs(table.sum(-1) - 1) < 1e-6).all():
                raise ValueError(f"case {name!r} must give rows that are at least 0 and sum to 1")
        target.append(pair[0].double())
        draft.append(pair[1].double())
    return Tables(target, draft)


def _checked_draw_function(draw: str | Draw, parents: list[int], vocab_size: int) -> Draw:
    if not isinstance(draw, str):
        return draw
    if draw not in DRAWS:
        raise ValueError(f"draw must be one of {', '.join(DRAWS)}, or a function, got {draw!r}")
    most = max(map(len, children_of(parents).values()))
    if draw != "with_replacement" and most > vocab_size:
        raise ValueError(
            f"draw {draw!r} needs a vocab_size of at least {most}, the most children of a node, got {vocab_size}"
        )
    return DRAWS[draw]


def _checked_parents(parents: Sequence[int]) -> list[int]:
    given = [int(parent) for parent in parents]
    right = len(given) > 1 and given[0] == -1 and all(0 <= parent < i for i, parent in enumerate(given) if i)
    if not right:
        raise ValueError(
            f"parents must be -1 for node 0 and an earlier node for each other one, at least one, got {given}: "
            f"range(-1, 2) is a chain of two drafted tokens"
        )
    return given


def _check_numbers(batch_size: int | None, detect: float, vocab_size: int, significance: float, seed: int) -> None:
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be None or at least 1, got {batch_size}")
    if not 0 < detect < 1:
        raise ValueError(f"detect must be a total variation between 0 and 1, got {detect}")
    if vocab_size < 2:
        raise ValueError(f"vocab_size must be at least 2, got {vocab_size}")
    if not 0 < significance < 1:
        raise ValueError(f"significance must be between 0 and 1, got {significance}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
