"""`SpeculativeDecoder`: speculative decoding of a Hugging Face causal language model with token trees.

`generate` checks the request and calls `decoding.run.decode`, which runs steps until all sequences have ended. One step
(`decoding.step`) drafts a tree, runs the target's forward pass over its nodes, and accepts a path. Between steps a
sequence of L tokens has its first L - 1 tokens in the target's cache. The last token is not cached yet: it is the root
of the next tree.
"""

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heavypath.kernels.filtering import Filters
from heavypath.kernels.numbers import whole
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.run import StepRunner, decode, has_graphs
from heavypath.speculative.decoding.statistics import ENOUGH_STEPS, Statistics
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.drafts.kinds import AnyDraft, as_draft
from heavypath.speculative.methods import asked_row, default_verifier, draft_filters_of, rules_of
from heavypath.speculative.models.forward import check_no_autocast, host_can_read
from heavypath.speculative.models.forward_of import forward_of, peers_of
from heavypath.speculative.names import load
from heavypath.speculative.options import NOTHING, DecoderOptions, GenerateOptions, SamplingOptions, checked_options
from heavypath.speculative.output.generation import Generation
from heavypath.speculative.tree_policy import FixedTree, TreePolicy, policy_of
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tree import TokenTree

if TYPE_CHECKING:  # optional features, which are imported only where they are used
    from heavypath.speculative.custom_generate import SpeculativeOutput
    from heavypath.speculative.profile import Profile
    from heavypath.speculative.serving.service import Service

logger = logging.getLogger(__name__)

WATCHED = ("streamer", "trace", "output_scores", "output_logits")  # options that need a callback after each step


class SpeculativeDecoder:
    """Generates text from a target model, faster, by verifying token trees that a draft proposes.

    target: a causal language model of transformers, in eval mode
    draft: a smaller model with the target's vocabulary, on the same device; or a trained head (`load_draft`).
        `PromptLookup()`, `Lookahead()`, `Retrieval(texts, tokenizer)` and `EarlyExit(layers)` need no second model. Or
        your own object with the methods of `Draft`. None is allowed only for method "autoregressive"
    method: a row of `METHODS`: autoregressive, chain, specinfer, spectr, sequoia, dyspec, rsd-c, rsd-s, ersd, eagle-2,
        top-k, naive, naive-distinct or typical-lossy. All are lossless except typical-lossy
    options: shape of the trees, sampling and verification rules, and CUDA graphs, see `DecoderOptions`

    The output distribution is exactly the target's, for every method, tree and draft. The exception is typical-lossy
    when it samples; then `out.stats.law_changed_by` says so. A decoder can also be passed to transformers' own
    generate: `model.generate(**inputs, custom_generate=decoder)`. Raises TypeError or ValueError for models or options
    that do not fit.

    `trees` is the `TreePolicy` that chooses the tree of each step, see the option `trees`. `runner` runs the steps;
    you may replace it by an object that observes them. `runner.kept` holds the caches of the last two generations, for
    the option `past`; `runner.kept.clear()` frees them.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: AnyDraft | None = None,
        method: str = "sequoia",
        **options: Unpack[DecoderOptions],
    ):
        given: Any = checked_options("SpeculativeDecoder", options, DecoderOptions)
        self.method = method
        self.target = target
        self._given_draft = draft
        self.verifier = given.get("verifier")
        self.clock = time.perf_counter
        self._warned = set[str]()
        self._options = given
        row = asked_row(method, given)  # of METHODS
        self.profile: Profile | None = None
        if given.get("profile") is not None or given.get("replan"):
            self.profile = load("profile_of")(method, row, given)
        self._target = forward_of(target, "target")  # the forward pass of `self.target`
        device = self._target.device
        cuda_graphs = has_graphs(given.get("cuda_graphs"), self._target)
        self.runner = StepRunner(cuda_graphs=cuda_graphs)
        self._draft: Draft = NO_DRAFT
        if method != "autoregressive":
            if draft is None:
                raise ValueError(f"method {method!r} needs a draft, got None; only 'autoregressive' has none")
            self._draft = as_draft(draft, self._target, target)
        if self.verifier is None:
            by_default = default_verifier(method, device.type)
            row = row.verified_by(by_default)
        self._row = row
        self.trees: TreePolicy
        if self.profile is None:
            self.trees = policy_of(method, row, given, self._target, self._draft)
        else:
            self.profile.check(target, draft, method, row.verification)
            replan = given.get("replan", False)
            by_profile = load("TreeByProfile")
            self.trees = by_profile(self.profile, method, row, self._target, self._draft, replan=replan)
        self._trees_of_options = self.trees
        self._peers = peers_of(self._models, device, given.get("communication"))

    def __repr__(self) -> str:
        target = type(self.target).__name__
        draft = None
        if self._given_draft is not None:
            draft = type(self._given_draft).__name__
        tree = "by profile"
        if self.tree is not None:
            tree = f"{len(self.tree)} nodes"
        return f"SpeculativeDecoder(target={target}, draft={draft}, method={self.method!r}, tree={tree})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Support for copy and pickle, which build a new decoder from the models, the method and the options."""
        make = partial(type(self), **self._options)
        arguments = (self.target, self._given_draft, self.method)
        later = {}
        if self.trees is not self._trees_of_options:
            later["trees"] = self.trees
        return make, arguments, (None, later)

    @property
    def _models(self) -> list[Any]:
        """The target's forward pass, then those of the draft."""
        return [self._target, *self._draft.models]

    def _notice_changes(self) -> None:
        """Rebuild the target's forward pass and the draft if the target's modules have changed since they were made."""
        check_no_autocast(self._target.device)
        if self._peers.any(not self._target.is_current()):
            self._target = forward_of(self.target, "target")
            if self._draft is not NO_DRAFT:
                self._draft = as_draft(self._given_draft, self._target, self.target)

    def _notice_changes_of_draft(self) -> None:
        """Rebuild the draft if the modules of one of its models have changed since the last call."""
        are_current = all(model.is_current() for model in self._draft.models)
        if self._peers.any(not are_current):
            self._draft = as_draft(self._given_draft, self._target, self.target)

    @property
    def tree(self) -> TokenTree | Growth | None:
        """The tree that one sequence is decoded with; None with a profile, which chooses by sampling and batch size.

        Assign a tree to use it for every step instead.
        """
        return self.trees.alone

    @tree.setter
    def tree(self, tree: TokenTree | Growth) -> None:
        self.trees = FixedTree(tree, "set later")

    def tree_for(self, filters: Filters, batch: int = 1) -> TokenTree | Growth:
        """The tree, or the rule by which trees grow, of the first step of `batch` sequences sampled with `filters`."""
        return self.trees.tree(filters, batch)

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continue each prompt in input_ids, LongTensor[B, T], by up to max_new_tokens tokens.

        temperature: 0 is greedy; None takes the temperature of target.generation_config
        options: see `GenerateOptions`, which includes `RequestOptions` and `SamplingOptions`

        Raises TypeError for an unknown option, and ValueError for arguments that do not fit, before any work is done:
        for example more tokens than the models have positions. Raises ValueError while decoding if a model's logits are
        no distribution (such as NaN).
        """
        begin = self.clock()
        given = checked_options("generate", options, GenerateOptions, "max_new_tokens", "temperature")
        self._notice_changes()
        seed = given.get("seed", 0)
        request = self._request(input_ids, max_new_tokens, temperature, given, seed=seed)
        plan = self._plan(request)
        has_mask = given.get("attention_mask") is not None
        self._warn_of_request(request, plan, has_mask=has_mask)
        to_compare = request.to_compare()
        to_compare["tree"] = (plan.tree, plan.others)
        self._peers.begin_text(to_compare, self._target)
        stats = self._statistics(request, plan, begin)
        watched = nullcontext(([], None))
        asked = [given.get(name) for name in WATCHED]
        is_watched = any(each is not None and each is not False for each in asked)
        if is_watched or request.stopping is not None:
            watched = load("watching")(request, plan, self.method, self._draft, given, stats.lap)
        with (
            self._peers.interruptible(),
            torch.inference_mode(),
            watched as (watchers, chosen),
            self.runner.workspace(request, plan) as workspace,
        ):
            reused = workspace.begin(request, plan)
            before_roots = (request.lengths - 1).sum()
            stats.cache_bytes = workspace.cache_bytes
            stats.reused_tokens = sum(reused)
            stats.prefill_tokens = int(before_roots) - stats.reused_tokens
            stats.lap("prefill")
            trees = self._trees_of(request)
            batch = len(input_ids)
            candidates = trees.candidates(request.filters, batch)
            if len(candidates) > 1:
                adapting = trees.watcher(plan, request.filters, batch)
                watchers.append(adapting)
            new = decode(request, plan, self.runner, workspace, stats=stats, watchers=watchers)
            cache = self.runner.keep(workspace, request, plan)
        logger.debug("%d new tokens in %d steps, %.3f s", stats.new_tokens, stats.steps, stats.total_seconds)
        self._draft.learn(request.prompt, request.lengths, new, stats.tokens_of)
        self._warn_of_loss(request, plan, stats)
        scores = None
        if chosen and given.get("output_scores"):
            scores = chosen.scores(request.filters)
        logits = None
        if chosen and given.get("output_logits"):
            logits = chosen.logits()
        return Generation(
            sequences=torch.cat([input_ids, new], 1),
            stats=stats,
            scores=scores,
            logits=logits,
            _cache=weakref.ref(cache),
            _kept=self.runner.kept,
        )

    def _trees_of(self, request: Request) -> TreePolicy:
        """The policy for a request's longest prompt."""
        return self.trees.for_length(request.prompt.shape[1])

    def _statistics(self, request: Request, plan: StepPlan, begin: float) -> Statistics:
        """The statistics of a generation that began at `begin`, by `self.clock`; nothing is counted yet."""
        stream = self._target.stream
        stats = Statistics(plan.depth, plan.branching, clock=self.clock, begin=begin, stream=stream)
        trees = self._trees_of(request)
        stats.tree = trees.in_words(plan.tree, len(request.prompt))
        stats.law_changed_by = plan.rules.law_changed_by
        stats.verification = plan.rules.verification
        logger.debug(
            "%s, %d sequences, up to %d new tokens, a tree of %s, verified by %s%s",
            self.method,
            len(request.prompt),
            request.max_new_tokens,
            stats.tree,
            stats.verification,
            stats.law_changed_by and f"; the output distribution is changed by {stats.law_changed_by}",
        )
        return stats

    def serve(self, slots: int = 8, **limits: Any) -> "Service":
        """Start a service that decodes up to `slots` requests at a time; see `serving.opening.serve`."""

        def plan() -> StepPlan:
            self._notice_changes()
            self._notice_changes_of_draft()
            prompt = torch.zeros(1, 1, dtype=torch.long, device=self._target.device)
            request = self._request(prompt, 1, 1.0, NOTHING)
            of_prompt = self._plan(request)
            return replace(of_prompt, draft=self._draft)

        filters = partial(draft_filters_of, self._options)
        return load("serve")(plan, self.trees.for_serving, self._request, filters, slots, self.runner, **limits)

    def warm_up(
        self,
        *,
        batch_size: int = 1,
        prompt_tokens: int = 512,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> float:
        """Do the one-time work of the first `generate` call now; returns the seconds that it took.

        On a GPU this compiles kernels, allocates the caches, and captures a CUDA graph for each batch size that a batch
        may shrink to. Call it before a server's first request, once for each combination of sampling options.

        batch_size, prompt_tokens, max_new_tokens: the largest values that will be requested. Smaller requests reuse
            what was prepared here.

        The other arguments are those of `generate`. Raises ValueError for arguments that do not fit.
        """
        begin = time.perf_counter()
        given = checked_options("warm_up", options, SamplingOptions, "max_new_tokens", "temperature")
        self._notice_changes()
        batch = whole("batch_size", batch_size)
        width = whole("prompt_tokens", prompt_tokens)
        prompts = torch.zeros(batch, width, dtype=torch.long, device=self._target.device)
        request = self._request(prompts, max_new_tokens, temperature, given)
        plan = self._plan(request)
        trees = self._trees_of(request)
        tree_of = trees.to_warm_up(request.filters, batch_size)
        load("warm_up")(self.runner, request, plan, tree_of)
        seconds = time.perf_counter() - begin
        logger.debug("warmed up in %.2f s: up to %d sequences, %s", seconds, batch_size, request.filters)
        return seconds

    def _request(
        self, input_ids: Tensor, max_new_tokens: int, temperature: float | None, options: Mapping[str, Any], **more: Any
    ) -> Request:
        drafting = self._draft.models
        return Request.of(self._target, drafting, input_ids, max_new_tokens, temperature, options, **more)

    def _plan(self, request: Request) -> StepPlan:
        """What stays fixed during all steps of a request. Raises ValueError if the method cannot sample that way."""
        batch = len(request.prompt)
        trees = self._trees_of(request)
        tree = trees.tree(request.filters, batch)
        candidates = trees.candidates(request.filters, batch)
        sizes = [len(each) for each in candidates]
        drafts = max(sizes) > 1
        if drafts:
            self._notice_changes_of_draft()
        if drafts and self._draft is NO_DRAFT:
            raise ValueError(f"without a draft a tree must be the root alone, got one of {max(sizes)} nodes")
        levels = max(each.depth for each in candidates)
        most = self._draft.levels
        if most is not None and drafts and levels > most:
            raise ValueError(f"the draft can draft {most} levels of a tree, got one of {levels} levels")
        if drafts and not self._draft.can_rest and min(sizes) == 1:
            raise ValueError(
                "this draft cannot read later what was written in steps without drafting: the tree policy must give "
                "trees of two nodes and more in every step, or the root alone in every step"
            )
        rules = rules_of(self.method, self._row, self._options, request, self._draft, self.profile)
        if rules.verification == "held_traversal" and tree.grows and tree.branching > 1:
            raise ValueError(f"held traversal needs a static tree, got {tree}: take verifier 'traversal' or 'held'")
        draft = self._draft if drafts else NO_DRAFT
        plan = StepPlan(self._target, draft, tree, rules, candidates, peers=self._peers)
        shortest = int(request.lengths.min())
        return plan.after(shortest - 1)

    def _warn_of_request(self, request: Request, plan: StepPlan, *, has_mask: bool) -> None:
        """Warn once of prompts that look padded and have no mask, and of a draft with too few positions."""
        if not has_mask and len(request.prompt) > 1 and request.looks_padded:
            message = "some prompts begin with the padding token, and it is read as text: give attention_mask, too"
            self._warn_once("padding", message)
        if request.most_tokens > plan.draft.positions:
            message = f"the draft has {plan.draft.positions:.0f} positions: longer texts go on without it"
            self._warn_once("positions", message)

    def _warn_of_loss(self, request: Request, plan: StepPlan, stats: Statistics) -> None:
        """Warn once if drafting was slower than plain decoding, as measured or as estimated."""
        measures_steps = self.runner.cuda_graphs or host_can_read(self._target.device)  # else it times launches
        if not measures_steps:
            return
        fewest_nodes = min(map(len, plan.trees))
        if fewest_nodes == 1 or request.most_tokens > self._draft.positions:  # some steps did not draft
            return
        why = stats.does_not_pay
        expected = self._trees_of(request).expected_gain(stats, plan.tree)
        if not why and expected is not None and expected < 1 and stats.steps >= ENOUGH_STEPS:
            batch = len(stats.tokens_of)
            why = (
                f"the draft does not pay: {stats.tokens_per_step:.2f} tokens a step, by costs estimated for a batch of "
                f"{batch}, are {expected:.2f} times the speed of method 'autoregressive'. Sampled texts would change "
                "with the tree, so it stays; give tree_size=2, or take method 'ersd', which drafts less"
            )
        if not why:
            return
        if not self._draft.why_not_measured:
            why += "; `heavypath calibrate` finds out which trees pay"
        self._warn_once("loss", why)

    def _warn_once(self, about: str, message: str) -> None:
        """Log a warning, at most once for each `about`."""
        if about not in self._warned:
            self._warned.add(about)
            logger.warning(message)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        seed: int | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        trace: str | Path | None = None,
        **call: Any,
    ) -> "Tensor | SpeculativeOutput":
        """Answer `model.generate(**inputs, custom_generate=decoder, ...)`; see `custom_generate`."""
        call_of_generate = load("GenerateCall")
        made = call_of_generate.of(model, input_ids, seed, call)
        arguments = made.arguments(self._target.model, self._peers)
        out = self.generate(**arguments, stop_strings=stop_strings, tokenizer=tokenizer, trace=trace)
        return made.answer(out.sequences, out.cache, out.stats, out.scores, out.logits)
