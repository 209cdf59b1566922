"""What the parts of papers.py share: the pair, its prompts, contexts, and what is decoded or evaluated after them.

Standard errors take prompts as the independent units (batches.py). Two ways are compared after the same contexts, and
the difference has an error of its own.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from statistics import fmean, median
from typing import Any, NamedTuple

import beside  # noqa: F401
import torch
from batches import Texts, batch_of, jackknife
from common import Row, paper_verifier, token_ids
from exact import RULES, ExactSteps, Step, Tree, without_replacement
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.demo import DemoPair
from heavypath.speculative.drafts.kinds import draft_parameter_count, parameter_count
from heavypath.speculative.loading import Pair

WRITTEN, ROOM = 64, 64  # tokens of a recorded text, and those that a request leaves to its last tree


class Evaluated(NamedTuple):
    """Steps after the recorded contexts: a row of the results, the expected tokens [prompts], and all steps."""

    row: Row
    tokens: Tensor
    steps: list[Step]

    def over(self, other: "Evaluated") -> list[float]:
        """How many more expected tokens than another way has after the same contexts, and the standard error."""
        return mean_and_error(self.tokens - other.tokens)


class Laws(ExactSteps):
    """Keeps the logits [V] of target and draft after each root, of all sequences in turn."""

    def __init__(self, texts: Tensor, end: int):
        super().__init__(without_replacement, texts, end)
        self.found: list[tuple[Tensor, Tensor]] = []

    def expected(self, tree: Tree, target: Tensor, drafts: Any, row: int, *filters: Filters) -> float:
        self.found.append((target[0].float().clone(), drafts[row, 0].float().clone()))
        return 1.0


class Setting:
    """The pair and the prompts that all parts use.

    small: whether it is a trial that runs every line. seed: of all random numbers
    prompts: texts, or their tokens [1, T]
    tokens, contexts: the most that are decoded, or evaluated, after a prompt; None for what each part wants
    written: tokens of a recorded text
    """

    def __init__(
        self,
        pair: DemoPair | Pair,
        prompts: Sequence[str] | Sequence[Tensor],
        *,
        small: bool,
        seed: int = 0,
        tokens: int | None = None,
        contexts: int | None = None,
        written: int = WRITTEN,
    ):
        self.pair, self.small, self.seed = pair, small, seed
        self.most_tokens = 4 if small else tokens or WRITTEN
        self.most_contexts = 2 if small else contexts or WRITTEN
        self.prompts = [*prompts][: 2 if small else None]
        self.length = 4 if small else written
        self.draws, self.sizes = (8, (8, 32, 128, 512)) if self.length == WRITTEN else (1, (8, 32, 128))
        self.recorded: dict[str, list] = {}  # tokens of recorded texts, by temperature, top-p and seed

    @cached_property
    def texts(self) -> Texts:
        """All prompts as one batch."""
        return batch_of([
            token_ids(self.pair.tokenizer, [each])[0] if isinstance(each, str) else each for each in self.prompts
        ])  # fmt: skip

    @cached_property
    def past(self) -> Any:
        """The caches of all prompts, so that they are read once."""
        own = SpeculativeDecoder(self.pair.target, self.pair.draft, tree=TokenTree.chain(1))
        return own.generate(self.texts.tokens, 1, seed=self.seed, **self.texts.options).cache

    def decode(self, method: str, *, temperature: float = 0.6, tokens: int = 64, prompts: int | None = None,
               draft: Any = None, **options: Any) -> Statistics:  # fmt: skip
        """Statistics of texts after the prompts, or the first `prompts`, by the rule of the method's paper."""
        texts = batch_of([*self.texts.prompts[:prompts]])
        options = {"verifier": paper_verifier(method)} | options
        own = SpeculativeDecoder(self.pair.target, draft or self.pair.draft, method, **options)
        given = {"temperature": temperature, "seed": self.seed} | texts.options
        return own.generate(texts.tokens, min(tokens, self.most_tokens), **given).stats

    @cached_property
    def ratio(self) -> float:
        """The draft's parameters over the target's, which MBSU takes for the ratio of their times."""
        return draft_parameter_count(self.pair.draft, self.pair.target) / parameter_count(self.pair.target)

    @lru_cache(maxsize=16)  # noqa: B019 (there is one setting)
    def written(self, temperature: float, top_p: float | None, seed: int) -> Tensor:
        """What the target samples after each prompt: LongTensor[prompts, length]."""
        own, texts = SpeculativeDecoder(self.pair.target, method="autoregressive"), self.texts
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        out = own.generate(texts.tokens, self.length, past=self.past, **sampling, **texts.options)
        found = out.sequences[:, texts.tokens.shape[1] :]
        self.recorded[", ".join(map(str, sampling.values()))] = found.tolist()
        return found

    def follow(self, recorded: Tensor, steps: type[ExactSteps], method: str, draft: Any, seed: int, *rule: Any,
               sampling: dict, **options: Any) -> Any:  # fmt: skip
        """Draft a tree after each prompt and each recorded token [prompts, C - 1], and return what `steps` keeps."""
        end = min({*range(self.pair.target.config.vocab_size)} - {*recorded.flatten().tolist()})
        kept = steps(*rule, recorded, end)
        own = SpeculativeDecoder(self.pair.target, draft or self.pair.draft, method, verifier=kept, **options)
        given, count = self.texts.options | {"eos_token_id": end}, recorded.shape[1] + 1
        own.generate(self.texts.tokens, count + ROOM, past=self.past, seed=seed, **sampling, **given)
        return kept

    def evaluate(
        self, method: str, *, temperature: float = 0.6, top_p: float | None = None, contexts: int = 8, seeds: int = 1,
        draft: Any = None, **options: Any,
    ) -> Evaluated:  # fmt: skip
        """Expected tokens of a step by the rule of the method's paper, along the first tokens of recorded texts.

        A tree is drafted after each prompt and each recorded token, `contexts` times in all; then the next recorded
        token follows, whatever the tree has. seeds: texts of the target after each prompt
        """
        steps, sampling = [], {"temperature": temperature, "top_p": top_p}
        for seed in range(self.seed + 1, self.seed + 1 + (1 if self.small else seeds)):
            recorded = self.written(temperature, top_p, seed)[:, : min(contexts, self.most_contexts) - 1]
            rule = RULES[method]
            steps += self.follow(recorded, ExactSteps, method, draft, seed, rule, sampling=sampling, **options).steps
        found = torch.tensor([step.expected for step in steps]).double()
        tokens = found.view(-1, len(self.prompts)).mean(0)
        value, error = mean_and_error(tokens)
        row = {
            "nodes": median(step.nodes for step in steps), "tokens": value, "error": error,
            "contexts": len(steps), "seeds": seeds,
        }  # fmt: skip
        return Evaluated(row, tokens, steps)

    @lru_cache(maxsize=1)  # noqa: B019
    def contexts(self, temperature: float) -> list[tuple[Tensor, Tensor]]:
        """Logits [R, V] of target and draft before each token of each text that the target wrote."""
        recorded, tree = self.written(temperature, None, self.seed)[:, : self.length - 1], TokenTree.chain(1)
        kept = self.follow(recorded, Laws, "sequoia", None, self.seed, sampling={"temperature": 0.6}, tree=tree)
        both = (torch.stack(each).view(self.length, len(self.prompts), -1) for each in zip(*kept.found, strict=True))
        return [*zip(*(each.unbind(1) for each in both), strict=True)]

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
