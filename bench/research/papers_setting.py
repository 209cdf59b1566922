"""What the parts and tables of papers.py share: the pair, its prompts, and what is decoded with them.

Seconds are those of the processor, so that other work on the machine does not count. Standard errors take prompts as
the independent units (batches.py). A comparison of two ways is of the same prompts, and has an error of its own.
"""

import time
from collections.abc import Sequence
from functools import cached_property, lru_cache
from statistics import median
from typing import Any, NamedTuple

import beside  # noqa: F401
from batches import Texts, batch_of, more_per_forward, tokens_per_forward
from common import Row, paper_verifier, token_ids
from rejection import positions
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.demo import DemoPair
from heavypath.speculative.trees.growth import Confidence
from heavypath.speculative.visits import Watched

MEASURED = Confidence((0.41, 0.16, 0.12, 0.09, 0.08), (0.5, 0.5, 0.4, 0.3, 0.3))  # on the shipped pair, at T = 0.6


class Observer(Watched):
    """Keeps what each step drafts and accepts."""

    def __init__(self, decoder: SpeculativeDecoder):
        super().__init__(decoder)
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.parents: list[Tensor] = []  # LongTensor[B, N] of each step whose tree is its own

    def run(self, plan: StepPlan, workspace: Workspace, **where: Any) -> Stepped:
        stepped = super().run(plan, workspace, **where)
        self.drafted += (stepped.drafted.tokens[:, 1:] >= 0).sum(1).tolist()
        self.accepted += stepped.verified.length.tolist()
        if stepped.drafted.parents.ndim == 2:
            self.parents.append(stepped.drafted.parents)
        return stepped


class Decoded(NamedTuple):
    """A batch that was decoded: its row of the results, and what else it left."""

    row: Row
    stats: Statistics
    steps: Observer
    sequences: Tensor


class Setting:
    """The pair and the prompts that all parts use.

    small: whether it is a trial that runs every line. tokens: the most that are decoded after a prompt, if not as many
    as a part asks for.
    """

    def __init__(
        self, pair: DemoPair, prompts: Sequence[str], *, small: bool, seed: int = 0, tokens: int | None = None
    ):
        self.pair, self.small, self.seed = pair, small, seed
        self.most = 4 if small else tokens or 10**6
        self.prompts = [*prompts][: 2 if small else None]

    @cached_property
    def texts(self) -> Texts:
        """All prompts as one batch."""
        return batch_of(token_ids(self.pair.tokenizer, self.prompts))

    def decoder(self, method: str, draft: Any = None, **options: Any) -> SpeculativeDecoder:
        """By the rule of the method's paper, unless options name a verifier."""
        draft, rule = self.pair.draft if draft is None else draft, {"verifier": paper_verifier(method)}
        return SpeculativeDecoder(self.pair.target, draft, method, **rule | options)

    def decode(
        self, method: str, *, temperature: float = 0.6, top_p: float | None = None, tokens: int = 64,
        prompts: int | None = None, **options: Any,
    ) -> Decoded:  # fmt: skip
        """Continue the prompts, or the first `prompts`; options: those of `decoder`."""
        texts = self.texts if prompts is None else batch_of([*self.texts.prompts[:prompts]])
        own = self.decoder(method, **options)
        steps = Observer(own)
        begin = time.process_time()
        out = own.generate(
            texts.tokens, min(tokens, self.most), temperature=temperature, top_p=top_p, seed=self.seed,
            **texts.options,
        )  # fmt: skip
        seconds, found = time.process_time() - begin, tokens_per_forward(out.stats)
        sizes = [sum(weight.numel() for weight in model.parameters()) for model in (self.pair.draft, self.pair.target)]
        row = {
            "nodes": 1 + median(steps.drafted or [0]), "levels": out.stats.depth, "tokens": round(found.value, 4),
            "error": round(found.standard_error, 4), "tokens_per_second": round(out.stats.new_tokens / seconds, 1),
            "mbsu": round(found.value / (1 + out.stats.depth * sizes[0] / sizes[1]), 4),
        }  # fmt: skip
        return Decoded(row, out.stats, steps, out.sequences[:, texts.tokens.shape[1] :])

    @lru_cache(maxsize=1)  # noqa: B019 (there is one setting)
    def contexts(self, temperature: float) -> list[tuple[Tensor, Tensor]]:
        """Logits [R, V] of target and draft at each position of each text that the target wrote."""
        found = positions(
            self.pair, self.prompts, new_tokens=4 if self.small else 64, temperature=temperature, seed=self.seed
        )
        return [*found]

    def laws(self, temperature: float, top_p: float | None = None) -> list[tuple[Tensor, Tensor]]:
        """Probabilities [R, V] of target and draft, fp64, for each prompt."""
        filters = Filters(temperature, top_p=top_p)
        return [
            (filtered_logprobs(target, filters).exp().double(), filtered_logprobs(draft, filters).exp().double())
            for target, draft in self.contexts(temperature)
        ]


def difference(stats: Statistics, other: Statistics) -> list[float]:
    """How many more tokens per forward than another batch of the same prompts has, and the standard error."""
    return [round(each, 4) for each in more_per_forward(stats, other)]
