"""What the parts of papers.py share: the pair, its prompts, contexts, and what is decoded or evaluated after them.

Standard errors take prompts as the independent units (batches.py). Two ways are compared after the same contexts, and
the difference has an error of its own.
"""

import time
from collections.abc import Sequence
from functools import cached_property, lru_cache
from statistics import fmean, median
from typing import Any, NamedTuple

import beside  # noqa: F401
import torch
from batches import Texts, batch_of, jackknife, tokens_per_forward
from common import Row, paper_verifier, token_ids
from exact import RULES, ExactSteps, Step
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.demo import DemoPair

WRITTEN, ROOM = 64, 64  # tokens of a recorded text, and those that a request leaves to its last tree


class Decoded(NamedTuple):
    """A batch that was decoded: its row of the results, and its statistics."""

    row: Row
    stats: Statistics


class Evaluated(NamedTuple):
    """Steps after the recorded contexts: a row of the results, the expected tokens [prompts], and all steps."""

    row: Row
    tokens: Tensor
    steps: list[Step]

    def over(self, other: "Evaluated") -> list[float]:
        """How many more expected tokens than another way has after the same contexts, and the standard error."""
        return mean_and_error(self.tokens - other.tokens)


class Setting:
    """The pair and the prompts that all parts use.

    small: whether it is a trial that runs every line. seed: of all random numbers
    tokens, contexts: the most that are decoded, or evaluated, after a prompt; None for what each part wants
    """

    def __init__(
        self,
        pair: DemoPair,
        prompts: Sequence[str],
        *,
        small: bool,
        seed: int = 0,
        tokens: int | None = None,
        contexts: int | None = None,
    ):
        self.pair, self.small, self.seed = pair, small, seed
        self.most_tokens = 4 if small else tokens or WRITTEN
        self.most_contexts = 2 if small else contexts or WRITTEN
        self.prompts = [*prompts][: 2 if small else None]

    @cached_property
    def texts(self) -> Texts:
        """All prompts as one batch."""
        return batch_of(token_ids(self.pair.tokenizer, self.prompts))

    def decode(
        self, method: str, *, temperature: float = 0.6, tokens: int = 64, prompts: int | None = None, draft: Any = None,
        **options: Any,
    ) -> Decoded:  # fmt: skip
        """Continue the prompts, or the first `prompts`, by the rule of the method's paper."""
        texts = self.texts if prompts is None else batch_of([*self.texts.prompts[:prompts]])
        draft = self.pair.draft if draft is None else draft
        own = SpeculativeDecoder(self.pair.target, draft, method, **{"verifier": paper_verifier(method)} | options)
        begin = time.process_time()
        out = own.generate(
            texts.tokens, min(tokens, self.most_tokens), temperature=temperature, seed=self.seed, **texts.options
        )
        seconds, found = time.process_time() - begin, tokens_per_forward(out.stats)
        row = {
            "levels": out.stats.depth, "tokens": round(found.value, 4), "error": round(found.standard_error, 4),
            "tokens_per_second": round(out.stats.new_tokens / seconds, 1),
            "prompts": len(texts.prompts), "new_tokens": min(tokens, self.most_tokens), "seed": self.seed,
        }  # fmt: skip
        return Decoded(row, out.stats)

    @cached_property
    def ratio(self) -> float:
        """The draft's parameters over the target's, which MBSU takes for the ratio of their times."""
        draft, target = (
            sum(weight.numel() for weight in model.parameters()) for model in (self.pair.draft, self.pair.target)
        )
        return draft / target

    @lru_cache(maxsize=16)  # noqa: B019 (there is one setting)
    def written(self, temperature: float, top_p: float | None, seed: int) -> Tensor:
        """What the target samples after each prompt: LongTensor[prompts, WRITTEN]."""
        decoder, texts = SpeculativeDecoder(self.pair.target, self.pair.draft, "autoregressive"), self.texts
        out = decoder.generate(texts.tokens, WRITTEN, temperature=temperature, top_p=top_p, seed=seed, **texts.options)
        return out.sequences[:, texts.tokens.shape[1] :]

    def evaluate(
        self, method: str, *, temperature: float = 0.6, top_p: float | None = None, contexts: int = 8, seeds: int = 1,
        draft: Any = None, **options: Any,
    ) -> Evaluated:  # fmt: skip
        """Expected tokens of a step by the rule of the method's paper, along the first tokens of recorded texts.

        A tree is drafted after each prompt and each recorded token, `contexts` times in all; then the next recorded
        token follows, whatever the tree has. seeds: texts of the target after each prompt
        """
        draft = self.pair.draft if draft is None else draft
        steps, count = [], min(contexts, self.most_contexts)
        for seed in range(self.seed + 1, self.seed + 1 + (1 if self.small else seeds)):
            recorded = self.written(temperature, top_p, seed)[:, : count - 1]
            end = min({*range(self.pair.target.config.vocab_size)} - {*recorded.flatten().tolist()})
            exact = ExactSteps(RULES[method], recorded, end)
            own = SpeculativeDecoder(self.pair.target, draft, method, verifier=exact, **options)
            own.generate(
                self.texts.tokens, count + ROOM, temperature=temperature, top_p=top_p, seed=seed,
                **self.texts.options | {"eos_token_id": end},
            )  # fmt: skip
            steps += exact.steps
        found = torch.tensor([step.expected for step in steps]).double()
        tokens = found.view(-1, len(self.prompts)).mean(0)
        value, error = mean_and_error(tokens)
        row = {
            "nodes": median(step.nodes for step in steps), "tokens": value, "error": error,
            "contexts": len(steps), "seeds": seeds,
        }  # fmt: skip
        return Evaluated(row, tokens, steps)

    @lru_cache(maxsize=1)  # noqa: B019
    @torch.no_grad()
    def contexts(self, temperature: float) -> list[tuple[Tensor, Tensor]]:
        """Logits [R, V] of target and draft before each token of each text that the target wrote."""
        count, found = 4 if self.small else WRITTEN, []
        for prompt, text in zip(self.texts.prompts, self.written(temperature, None, self.seed), strict=True):
            tokens = torch.cat([prompt, text[None, : count - 1]], dim=1)
            target, draft = (
                model(tokens, logits_to_keep=count).logits[0].float() for model in (self.pair.target, self.pair.draft)
            )
            found.append((target, draft))
        return found

    def laws(self, temperature: float, top_p: float | None = None) -> list[tuple[Tensor, Tensor]]:
        """Probabilities [R, V] of target and draft, fp64, for each prompt."""
        filters = Filters(temperature, top_p=top_p)
        return [
            (filtered_logprobs(target, filters).exp().double(), filtered_logprobs(draft, filters).exp().double())
            for target, draft in self.contexts(temperature)
        ]


def mean_and_error(values: Tensor) -> list[float]:
    """The mean of values [prompts], and its standard error."""
    found = jackknife(lambda kept: fmean(values[kept].tolist()), len(values))
    return [round(each, 4) for each in found]
