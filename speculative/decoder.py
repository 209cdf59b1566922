"""`SpeculativeDecoder`: decode a Hugging Face model through token trees that a draft proposes.

The way of a step: `generate` checks the request and calls `decoding.loop.decode`, which asks `decoding.engine` for one
step after another; `decoding.step` does one, in which `models` do the forward passes. Between steps a sequence is its
committed tokens: `length` of them in the target's cache, then the root, which is not cached yet: first a prompt's last.
"""

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heavypath.kernels.filtering import Filters
from heavypath.kernels.numbers import whole
from heavypath.speculative.decoder_options import DecoderOptions
from heavypath.speculative.decoding.launching import has_graphs
from heavypath.speculative.decoding.loop import decode
from heavypath.speculative.decoding.request import Prompts, Request
from heavypath.speculative.decoding.runner import StepRunner
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.drafts.kinds import AnyDraft, as_draft
from heavypath.speculative.method_rules import asked_row, draft_filters_of, rules_of
from heavypath.speculative.methods import default_verifier
from heavypath.speculative.models.forward import check_no_autocast
from heavypath.speculative.models.forward_of import forward_of, peers_of
from heavypath.speculative.models.host import host_can_read
from heavypath.speculative.output.generation import Generation
from heavypath.speculative.output.options import NOTHING, GenerateOptions, SamplingOptions, checked_options, request_of
from heavypath.speculative.output.remark import Remark, in_words
from heavypath.speculative.output.watchers import checked_streamers, watching
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import TokenTree
from heavypath.speculative.trees_by_batch import TreeSource, checked_profile

if TYPE_CHECKING:  # options, which are loaded where they are asked for
    from heavypath.speculative.custom_generate import SpeculativeOutput
    from heavypath.speculative.serving.service import Service

logger = logging.getLogger(__name__)


class SpeculativeDecoder:
    """Generates a target model's own text, through trees that a draft model proposes.

    target: a causal language model of transformers, in eval mode
    draft: another one with the target's vocabulary, on its device; or a trained head (`load_draft`). `PromptLookup()`,
        `Lookahead()`, `Retrieval(texts, tokenizer)` and `EarlyExit(layers)` need no second model. Or an object of your
        own that has the methods of `Draft`; None only for method "autoregressive"
    method: a row of `METHODS`: autoregressive, chain, specinfer, spectr, sequoia, dyspec, rsd-c, rsd-s, ersd, eagle-2,
        top-k, naive, naive-distinct, which keep the target's law; and typical-lossy, which does not
    options: the trees that are drafted, how they are drawn, verified and run, see `DecoderOptions`

    The text follows the target's distribution exactly, for any method, tree and draft. The exception is typical-lossy
    where it samples; then `out.stats.law_changed_by` says so. A decoder is also a function for transformers' own
    generate: `model.generate(**inputs, custom_generate=decoder)`. Raises TypeError or ValueError for models or options
    that do not fit.

    `trees` has the trees for any number of sequences. `runner` runs the steps, and may be replaced by an object that
    observes them. `runner.kept` are the caches of the last two generations, for `past`: its clear() frees them.
    """

    def __init__(
        self, target: PreTrainedModel, draft: AnyDraft | None = None, method: str = "sequoia",
        **options: Unpack[DecoderOptions],
    ):  # fmt: skip
        given: Any = checked_options("SpeculativeDecoder", options, DecoderOptions)
        self.method, self.target, self._given_draft, self.verifier = method, target, draft, given.get("verifier")
        self.clock, self._remark = time.perf_counter, Remark()
        self._options, self._row = given, asked_row(method, given)
        self.profile = checked_profile(method, self._row, given)
        self._target = forward_of(target, "target")
        self.runner = StepRunner(cuda_graphs=has_graphs(given.get("cuda_graphs"), self._target))
        self._draft: Draft | None = None
        if method != "autoregressive":
            if draft is None:
                raise ValueError(f"method {method!r} needs a draft model, got None")
            self._draft = as_draft(draft, self._target, target)
        if self.verifier is None:
            by_default = default_verifier(method, self._target.device.type)
            self._row = self._row.verified_by(by_default)
        if self.profile is not None:
            self.profile.check(target, draft, method, self._row.verification)
        self.trees = TreeSource(method, self._row, given, self.profile, self._target, self._draft)
        self._peers = peers_of(self._models, self._target.device)

    def __repr__(self) -> str:
        return in_words(self, self._given_draft)

    def __reduce__(self) -> tuple[Any, ...]:
        """For the modules copy and pickle: the models, the method and the options, of which a decoder is made anew."""
        later = {"tree": self.tree} if self.trees.tree_from == "set later" else {}
        return partial(type(self), **self._options), (self.target, self._given_draft, self.method), (None, later)

    @property
    def _models(self) -> list[Any]:
        """The forward passes of a step."""
        return [self._target, *(self._draft or NO_DRAFT).models]

    def _notice_changes(self) -> None:
        """Choose the forward passes of the models anew if one of them no longer consists of what it did."""
        check_no_autocast(self._target.device)
        stale = self._peers.any(not self._target.is_current())
        if stale:
            self._target = forward_of(self.target, "target")
        if self._peers.any(stale or not all(one.is_current() for one in self._models[1:])) and self._draft is not None:
            self._draft = as_draft(self._given_draft, self._target, self.target)

    @property
    def tree(self) -> TokenTree | Growth | None:
        """The tree of the options, or the default of one sequence; None by a profile. Another may take its place."""
        return self.trees.tree

    @tree.setter
    def tree(self, tree: TokenTree | Growth) -> None:
        self.trees.tree_from = "set later"
        self.trees.tree = tree if tree.grows else tree.reordered("heavy_path")[0]  # pyright: ignore[reportAttributeAccessIssue]

    def tree_for(self, filters: Filters, batch: int = 1) -> TokenTree | Growth:
        """The tree that so many sequences begin with, or how trees grow, where the target is sampled so."""
        return self.trees.first(filters, batch)[0]

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continue each prompt of input_ids LongTensor[B, T] by up to max_new_tokens tokens.

        temperature: 0 is greedy; None takes the one of target.generation_config
        options: see `GenerateOptions`, which has those of `RequestOptions` and of `SamplingOptions`

        Raises TypeError for an option that there is not. Raises ValueError for arguments that do not fit, before any
        work, such as too many tokens for the models' positions; and while decoding for logits that are no distribution.
        """
        begin = self.clock()
        given = checked_options("generate", options, GenerateOptions, "max_new_tokens", "temperature")
        self._notice_changes()
        prompts = Prompts(input_ids, *map(given.get, ("attention_mask", "sequence_ids", "past", "model_inputs")))
        request = self._request(prompts, max_new_tokens, temperature, given, seed=given.get("seed", 0))
        streamers = checked_streamers(given.get("streamer"), len(input_ids))
        plan = self._plan(request)
        self._remark.at_positions(plan.draft, request.most_tokens)
        self._peers.begin_text(request.to_compare() | {"tree": (plan.tree, plan.others)}, self._target)
        stats = Statistics(plan.depth, plan.branching, clock=self.clock, begin=begin, stream=self._target.stream)
        stats.tree = self.trees.in_words(plan.tree, len(input_ids))
        stats.law_changed_by, stats.verification = plan.rules.law_changed_by, plan.rules.verification
        logger.debug(
            "%s, %d sequences, up to %d new tokens, a tree of %s, verified by %s%s",
            self.method, len(input_ids), request.max_new_tokens, stats.tree, stats.verification,
            stats.law_changed_by and f"; the text's law is changed by {stats.law_changed_by}",
        )  # fmt: skip
        with (
            self._peers.interruptible(),
            torch.inference_mode(),
            watching(request, plan, self.method, self._draft, streamers, given, stats.lap) as (watchers, chosen),
            self.runner.workspace(request, plan) as workspace,
        ):
            stats.cache_bytes = workspace.cache_bytes
            stats.reused_tokens = sum(workspace.begin(request, plan))
            stats.prefill_tokens = int((request.lengths - 1).sum()) - stats.reused_tokens
            stats.lap("prefill")
            watchers += self.trees.changing(plan, request.filters, len(input_ids))
            new = decode(request, plan, self.runner, workspace, stats=stats, watchers=watchers)
            cache = self.runner.keep(workspace, request, plan)
        logger.debug("%d new tokens in %d steps, %.3f s", stats.new_tokens, stats.steps, stats.total_seconds)
        (self._draft or NO_DRAFT).learn(request.prompt, request.lengths, new, stats.tokens_of)
        tells_phases = self.runner.cuda_graphs or host_can_read(self._target.device)  # else it times launches
        drafting = self._draft if tells_phases and min(map(len, plan.trees)) > 1 else None
        if drafting is not None and request.most_tokens > drafting.positions:
            drafting = None  # what it did not draft says nothing of what it costs
        self._remark(stats, drafting, self.trees.expected_gain(stats, plan.tree))
        return Generation(
            sequences=torch.cat([input_ids, new], 1),
            stats=stats,
            scores=chosen.scores(request.filters) if chosen and given.get("output_scores") else None,
            logits=chosen.logits() if chosen and given.get("output_logits") else None,
            _cache=weakref.ref(cache),
            _kept=self.runner.kept,
        )

    def serve(self, slots: int = 8, **limits: Any) -> "Service":
        """Decode requests as they come, side by side, until the service is closed; see `serving.opening.serve`."""
        from heavypath.speculative.serving.opening import serve

        def plan() -> StepPlan:
            self._notice_changes()
            prompts = Prompts(torch.zeros(1, 1, dtype=torch.long, device=self._target.device))
            return replace(self._plan(self._request(prompts, 1, 1.0, NOTHING)), draft=self._draft)

        filters = partial(draft_filters_of, self._options)
        return serve(plan, self.trees.for_serving, self._request, filters, slots, self.runner, **limits)

    def warm_up(
        self,
        *,
        batch_size: int = 1,
        prompt_tokens: int = 512,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> float:
        """Do now what the first generation would do besides decoding; returns the seconds that it took.

        On a GPU that is to compile kernels, to allocate the caches and to capture a CUDA graph for each number of
        sequences that a batch may close up to. A server calls it before its first request, once for each way to sample.

        batch_size, prompt_tokens, max_new_tokens: the most that is to come. What is no larger uses what was made here.
        The other arguments are those of `generate`. Raises ValueError for arguments that do not fit.
        """
        from heavypath.speculative.decoding.graphs import warm_up

        begin = time.perf_counter()
        given = checked_options("warm_up", options, SamplingOptions, "max_new_tokens", "temperature")
        self._notice_changes()
        shape = whole("batch_size", batch_size), whole("prompt_tokens", prompt_tokens)
        prompts = Prompts(torch.zeros(shape, dtype=torch.long, device=self._target.device))
        request = self._request(prompts, max_new_tokens, temperature, given)
        plan = self._plan(request)
        warm_up(self.runner, request, plan, self.trees.of_slots(request.filters, batch_size))
        seconds = time.perf_counter() - begin
        logger.debug("warmed up in %.2f s: up to %d sequences, %s", seconds, batch_size, request.filters)
        return seconds

    def _request(
        self, prompts: Prompts, max_new_tokens: int, temperature: float | None, options: Any, **more: Any
    ) -> Request:
        """See `request_of`."""
        return request_of(prompts, self._target, self._models[1:], max_new_tokens, temperature, options, **more)

    def _plan(self, request: Request) -> StepPlan:
        """The plan of all steps of a request; ValueError where the method cannot sample so."""
        rules = rules_of(self.method, self._row, self._options, request, self._draft, self.profile)
        tree, trees = self.trees.first(request.filters, len(request.prompt))
        if rules.verification == "held_traversal" and tree.grows and tree.branching > 1:
            raise ValueError(f"held traversal needs a static tree, got {tree}: take verifier 'traversal' or 'held'")
        draft = self._draft if any(len(each) > 1 for each in trees.trees) else None
        plan = StepPlan(self._target, draft, tree, rules, trees.trees, peers=self._peers)
        return plan.after(int(request.lengths.min()) - 1)

    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, *, seed: int | None = None,
        stop_strings: str | Sequence[str] | None = None, tokenizer: PreTrainedTokenizerBase | None = None,
        trace: str | Path | None = None, **call: Any,
    ) -> "Tensor | SpeculativeOutput":  # fmt: skip
        """Answer `model.generate(**inputs, custom_generate=decoder, ...)`, see `custom_generate`."""
        from heavypath.speculative.custom_generate import GenerateCall

        made = GenerateCall.of(model, input_ids, seed, call)
        arguments = made.arguments(self._target.model, self._peers)
        out = self.generate(**arguments, stop_strings=stop_strings, tokenizer=tokenizer, trace=trace)
        return made.answer(out.sequences, out.cache, out.stats, out.scores, out.logits)
