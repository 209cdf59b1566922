"""How many tokens methods accept compared to counts of acceptance, for `calibrate`, measured in real decoding.

Acceptance is counted for rejection and static trees (`walking`). Held siblings and traversal accept more, by an amount
that depends on the whole tree; what a grown tree accepts differs, too. Both are measured by decoding with the method's
own plan. If only the verifier differs, each step is also verified by rejection with the same random numbers. Then both
verify the same trees, and their ratio is accurate after few steps. With m accepted drafted tokens per step

    factor = m / m by rejection        or, for trees that grow,        m / m by the counted ranks for the static tree
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxLengthCriteria

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes, Verified, VerifyInputs
from heavypath.kernels.noise import Noise
from heavypath.kernels.step_kernels import step_kernels
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.drafts.kinds import AnyDraft
from heavypath.speculative.methods import LOSSLESS_METHODS, VERIFIERS
from heavypath.speculative.options import NOTHING
from heavypath.speculative.profile import MethodGain, Profile
from heavypath.speculative.visits import together

SEQUENCES = 16  # number and default length of the sequences of a visit that measures a gain
TOKENS = 32
ROUNDS_OF_GAINS = 32  # a gain is measured until this many visits, or until its error is at most this
SURE = 0.01


class Both:
    """A `Verifier` that verifies each tree by a verification and also by rejection, and records what each accepts.

    The step gets the verification's result.

    draw, verification: as `Method.at` returns them
    accepted: for each step fp64 [2, B], the drafted tokens accepted by the verification, and by rejection
    """

    def __init__(self, draw: str, verification: str):
        self._draw = draw
        self._verification = verification
        self.accepted: list[Tensor] = []

    def __call__(
        self,
        nodes: Nodes,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        *,
        max_depth: int,
        target_filters: Filters,
        draft_filters: Filters,
        noise: Noise,
    ) -> Verified:
        """Verify a step's trees by the verification, as `Verifier` describes."""
        replacement = self._draw == "with_replacement"
        given = VerifyInputs(
            nodes=nodes,
            target_logits=target_logits,
            draft_logits=draft_logits,
            method=self._verification,
            replacement=replacement,
            max_depth=max_depth,
            target_filters=target_filters,
            draft_filters=draft_filters,
            noise=noise,
        )
        verify = step_kernels(nodes.tokens.device).verify
        found = verify(given)
        other = verify(given._replace(method=self._draw))
        self.accepted.append(torch.stack([found.length, other.length]).double().cpu())
        return found


@dataclass
class GainJob:
    """What is needed to measure a method's gain: how many more tokens it accepts than counts of acceptance predict.

    filters: how the target is sampled
    decoder: decodes with the method's planned tree
    nodes: of this tree
    counted: expected tokens per step by the counts
    tokens: number of new tokens of each sequence
    both: the verifier that also counts rejection; None for trees that grow
    """

    method: str
    filters: Filters
    decoder: SpeculativeDecoder
    nodes: int
    counted: float
    tokens: int
    both: Both | None

    def visit(self, prompts: Tensor, mask: Tensor, seed: int, positions: int) -> Tensor | None:
        """Decode a batch once. Returns accepted drafted tokens, and those to compare with, fp64 [2, n].

        With `both` n is the number of steps, and the others are those that rejection accepts; otherwise n is the number
        of sequences, and the others are those that counts predict. None if prompts are too long.

        prompts, mask: LongTensors [B, T], left-padded; positions: how many the models have
        """
        tree = self.decoder.tree
        assert tree is not None
        tokens = min(self.tokens, positions - prompts.shape[1] - tree.depth - 1)
        if tokens < 1:
            return None
        end = MaxLengthCriteria(prompts.shape[1] + tokens)
        given = {name: value for name, value in self.filters._asdict().items() if value is not None}
        out = self.decoder.generate(
            prompts,
            tokens + tree.depth + 1,
            **NOTHING | given,
            seed=seed,
            attention_mask=mask,
            stopping_criteria=[end],
            pad_token_id=0,
        )
        if self.both is not None:
            steps = torch.cat(self.both.accepted, 1)
            self.both.accepted = []
            return steps
        steps_of = out.stats.steps_of.double().cpu()
        kept = out.stats.tokens_of.double().cpu() - steps_of
        whole = float(out.stats.accepted.sum()) / max(1.0, float(kept.sum()))  # the last step's tokens may be cut off
        return torch.stack([whole * kept, (self.counted - 1) * steps_of])


def measure_gains(
    jobs: Sequence[GainJob],
    prompts: Sequence[Tensor],
    *,
    positions: int,
    until: float,
    seed: int,
    report: Callable[[str], object],
) -> tuple[MethodGain, ...]:
    """Measure the gains of jobs, in turn, until each is certain enough or time is over. Jobs without data are left out.

    prompts: LongTensors [T]
    positions: how many positions the models have
    until: the value of time.perf_counter() after which no visit begins. After the first, none begins either that would
        end later, if it takes as long as the longest one so far
    report: called with lines of text about the progress
    """
    longest = 0.0
    gains: dict[int, MethodGain] = {}
    found: dict[int, list[Tensor]] = {number: [] for number in range(len(jobs))}
    for round_ in range(ROUNDS_OF_GAINS):
        padded, mask = together([prompts[(round_ * SEQUENCES + place) % len(prompts)] for place in range(SEQUENCES)])
        for number, job in enumerate(jobs):
            sure = number in gains and gains[number].error <= SURE
            fresh = SEQUENCES if job.filters.temperature else max(0, len(prompts) - round_ * SEQUENCES)
            begin = time.perf_counter()
            if begin + longest >= until or sure or not fresh:  # greedy decoding repeats itself on the same prompt
                continue
            report(f"decoding with {job.method} at temperature {job.filters.temperature:g}, round {round_ + 1}")
            seen = job.visit(padded[:fresh], mask[:fresh], seed + round_, positions)
            longest = max(longest, time.perf_counter() - begin)
            if seen is None:
                continue
            found[number].append(seen)
            own, counted = torch.cat(found[number], 1)
            if counted.sum() > 0:
                factor = float(own.sum() / counted.sum())
                error = math.sqrt(float((own - factor * counted).square().sum())) / float(counted.sum())
                gains[number] = MethodGain(job.method, job.filters, job.nodes, factor, error)
    return tuple(gains.values())


def jobs_of(
    target: PreTrainedModel, draft: AnyDraft, profile: Profile, methods: Sequence[str] = LOSSLESS_METHODS
) -> Iterator[GainJob]:
    """Make a job for each sampling whose acceptance was counted, and each method that may accept more than counted."""
    for filters in dict.fromkeys(entry.filters for entry in profile.acceptance):
        for method in methods:
            row = profile.row(method)
            counted = any(
                entry.filters == filters and entry.is_of(row, filters.temperature) for entry in profile.acceptance
            )
            if method == "autoregressive" or not counted:
                continue
            draw, verification = row.at(filters.temperature)
            planned, entry, _ = profile.plan(method, filters)
            tree = profile.tree_for(method, filters)
            as_counted = verification not in VERIFIERS
            if len(tree) == 1 or (as_counted and not tree.grows):
                continue
            both = None if tree.grows else Both(draw, verification)
            word = profile.verifier if profile.verifier in row.verifiers else None
            options: dict[str, Any] = {"verifier": both or word} if row.verifiers else {}
            decoder = SpeculativeDecoder(target, draft, method, tree_size=2, **options)
            decoder.tree = tree
            decoder.profile = profile  # for its drawing temperatures
            tokens = max((len(text) for text in entry.counts.texts), default=TOKENS)
            yield GainJob(method, filters, decoder, len(tree), planned.expected_tokens, tokens, both)
