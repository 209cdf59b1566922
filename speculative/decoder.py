"""`SpeculativeDecoder`: decode a Hugging Face Llama-family model through token trees that a draft proposes.

The way of a step: `generate` checks the request and calls `decoding.loop.decode`, which asks `decoding.runner` for one
step after another; `decoding.step` runs one, in which `models` do the forward passes. Between steps a sequence is its
committed tokens: `length` of them in the target's cache, then the root, which is not cached yet: first a prompt's last.
"""

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from heavypath.kernels.filtering import Filters
from heavypath.speculative.custom_generate import GenerateCall, SpeculativeOutput
from heavypath.speculative.decoding.graphs import has_graphs
from heavypath.speculative.decoding.growing import Confidence, Growth
from heavypath.speculative.decoding.loop import Streamer, begin_alike, checked_streamers, decode
from heavypath.speculative.decoding.request import Ending, Prompts, Request, checked_request
from heavypath.speculative.decoding.rules import Verifier
from heavypath.speculative.decoding.runner import StepRunner
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.decoding.stopping import checked_criteria
from heavypath.speculative.drafts.draft import NO_DRAFT, Draft
from heavypath.speculative.drafts.kinds import AnyDraft, as_draft
from heavypath.speculative.generation_defaults import NOTHING, EosTokens, GivenSettings
from heavypath.speculative.method_rules import MethodRules
from heavypath.speculative.methods import check_laws, default_verifier
from heavypath.speculative.models.forward import check_no_autocast
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.text_cache import TextCache
from heavypath.speculative.output.generation import Generation
from heavypath.speculative.output.remark import Remark
from heavypath.speculative.output.scores import Chosen
from heavypath.speculative.output.trace import recording
from heavypath.speculative.processors.settings import GivenProcessors
from heavypath.speculative.profile import Profile
from heavypath.speculative.ranks.agreement import agreement_of, check_alone
from heavypath.speculative.serving.service import Service
from heavypath.speculative.serving.slots import Limits
from heavypath.speculative.trees.planning import Acceptance
from heavypath.speculative.trees.tree import TokenTree
from heavypath.speculative.trees_by_batch import TreesByBatch, TreeSource, checked_profile

logger = logging.getLogger(__name__)


class SpeculativeDecoder:
    """Generates a target model's own text, through trees that a draft model proposes.

    target: a causal language model of transformers, in eval mode
    draft: another one with the target's vocabulary, on its device; or a trained head (`load_draft`); `PromptLookup()`,
        `Lookahead()`, `Retrieval(texts, tokenizer)` or `EarlyExit(layers)`, which need no second model; or an object of
        your own that has the methods of `Draft`; None only for method "autoregressive"
    method: a row of `METHODS`: autoregressive, chain, specinfer, spectr, sequoia, dyspec, rsd-c, rsd-s, ersd, eagle-2,
        top-k, naive, naive-distinct, which keep the target's law; and typical-lossy, which does not
    tree_size: nodes of the drafted tree, root included; a method whose trees cannot have that size takes the next
        smaller one. Default: 5 on a CPU; 256 where weights are streamed; on a GPU the size and the levels that pay by
        costs which `costs.roofline` estimates from the device and the models, for one sequence. At temperature 0, and
        for ersd, whose texts do not depend on trees, the default follows the batch: several sequences have smaller
        trees by estimated costs, down to plain decoding, and larger ones again while the batch shrinks
    tree: a TokenTree to use instead, for methods whose trees do not grow
    profile: instead of both, what `heavypath calibrate` measured, as a file or a `Profile`: each step takes the tree
        with which decoding is expected to be fastest, for as many sequences as are running. So a sampled text, other
        than by ersd, is another sample of the same law in another batch, for the same seed and id; where that must not
        be, calibrate with batch_sizes=[1]
    replan: with a profile, change the tree every few steps by what was accepted of this text so far, see `replanning`
    verifier: what decides about drafted nodes. For methods whose papers have recursive rejection (chain, specinfer,
        sequoia, dyspec, rsd-c, rsd-s) "rejection", or what accepts more of the same trees: "held" holds siblings back
        (`heavypath.kernels.verifying.held`), "traversal" tries leaves before what is above them (`.traversal`),
        "held_traversal" does both, for trees that do not grow; default: `methods.DEFAULT_VERIFIERS`. Or, for any method
        and also at temperature 0, a callable as `Verifier` describes it, such as `top_down(rule)`: then the promise
        below is yours to keep, and there can be no profile, which measures the built-in ones

    Options of some methods, which the others refuse:

    acceptance: [child] or [depth, child], the chance that child j of an accepted node is accepted, for planned trees
    max_depth:  at most so many levels of planned and grown trees (default: log2 of the nodes)
    width:      sequences of specinfer and spectr, children of a node in rsd-c, nodes on a level of grown trees
    branching:  for rsd-c: children of a node at each level (default: those that promise most by `acceptance`)
    threshold:  for chain, dyspec, eagle-2: slots of less value stay empty; see `decoding.growing`
    confidence: for dyspec: how the draft's probabilities tell acceptance, as a `Confidence` (default: as measured on
        the shipped pair), or "draft" for the paper's, where they are the acceptance
    epsilon, delta: for typical-lossy: a drafted token is accepted iff P > min(epsilon, delta exp(-H(P))), where the
        target samples (default: 0.09 and 0.3)

    draft_temperature, draft_top_k, draft_top_p, draft_min_p: how the draft is sampled; None takes the target's setting.
        Where the draft takes its likeliest tokens, draft_temperature is that of the probabilities by which trees grow
        (default: 0.6)

    cuda_graphs: replay each step as one CUDA graph (default: on a GPU); False runs the same step eagerly, for a
        debugger or a profiler. With graphs the decoder keeps their memory, caches included, for the next call

    The text follows the target's distribution exactly, whatever the method, the tree and the draft; but for
    typical-lossy where it samples, and then `out.stats.law_changed_by` says so. A decoder is also a function for
    transformers' own generate: `model.generate(**inputs, custom_generate=decoder)`. Raises TypeError or ValueError for
    models or options that do not fit.

    `runner` runs the steps, and may be replaced by an object that observes them; `clock` returns seconds.
    `runner.kept` are the caches of the last two generations, for `past`; runner.kept.clear() frees their memory.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: AnyDraft | None = None,
        method: str = "sequoia",
        *,
        tree_size: int | None = None,
        tree: TokenTree | None = None,
        profile: Profile | str | Path | None = None,
        replan: bool = False,
        verifier: Verifier | str | None = None,
        acceptance: Acceptance | None = None,
        max_depth: int | None = None,
        width: int | None = None,
        branching: Sequence[int] | None = None,
        threshold: float | None = None,
        confidence: Confidence | Literal["draft"] | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        draft_temperature: float | None = None,
        draft_top_k: int | None = None,
        draft_top_p: float | None = None,
        draft_min_p: float | None = None,
        cuda_graphs: bool | None = None,
    ):
        self.method = method
        self.clock = time.perf_counter
        draft_options = {"temperature": draft_temperature, "top_k": draft_top_k}
        draft_options |= {"top_p": draft_top_p, "min_p": draft_min_p}
        self._rules = MethodRules(method, verifier, epsilon, delta, draft_options)
        self.verifier, is_own_verifier = verifier, self._rules.own_verifier is not None
        row = self._rules.row
        self.profile = checked_profile(profile, method, row, is_own_verifier=is_own_verifier, replan=replan)
        self._remark = Remark()
        self.target = target
        self._given_draft = draft
        self._target = forward_of(target, "target")
        self.runner = StepRunner(cuda_graphs=has_graphs(cuda_graphs, self._target))
        options = {"tree": tree, "tree_size": tree_size, "acceptance": acceptance, "max_depth": max_depth}
        options |= {"width": width, "branching": branching, "threshold": threshold, "confidence": confidence}
        given = {name: value for name, value in options.items() if value is not None}
        if self.profile is not None and given:
            raise ValueError(f"a profile says what trees to take; leave out {', '.join(given)}")
        self._draft: Draft | None = None
        models = [self._target]
        if method != "autoregressive":
            if draft is None:
                raise ValueError(f"method {method!r} needs a draft model, got None")
            self._draft = as_draft(draft, self._target, target)
            check_laws(method, row, self._draft, own_verifier=callable(verifier))
            models += self._draft.models
        by_default = default_verifier(method, self._target.device.type, (self._draft or NO_DRAFT).laws)
        row = self._rules.verified_by(by_default) if verifier is None else row
        if self.profile is not None:
            self.profile.check(target, draft, method, row.verification)
        self._trees = TreeSource(
            method, row, given, self.profile, replan=replan, is_own_verifier=is_own_verifier,
            target=self._target, draft=self._draft,
        )  # fmt: skip
        self.tree_from = self._trees.tree_from
        self._peers = agreement_of(models, self._target.device)

    def _notice_changes(self) -> None:
        """Choose the forward passes of the models anew if one of them no longer consists of what it did."""
        check_no_autocast(self._target.device)
        stale = self._peers.any(not self._target.is_current())
        if stale:
            self._target = forward_of(self.target, "target")
        stale = self._peers.any(stale or not all(model.is_current() for model in (self._draft or NO_DRAFT).models))
        if stale and self._given_draft is not None and self._draft is not None:
            self._draft = as_draft(self._given_draft, self._target, self.target)

    @property
    def tree(self) -> TokenTree | Growth | None:
        """The tree of the options, or the default of one sequence; None by a profile. Another may take its place."""
        return self._trees.tree

    @tree.setter
    def tree(self, tree: TokenTree | Growth) -> None:
        self._trees.tree = tree

    def trees_by_batch(self, filters: Filters, most: int, *, rests: bool = True) -> TreesByBatch:
        """What steps draft while 1 to `most` sequences are decoded together, where the target is sampled so.

        It is one tree where that was given by options; and where a sampled text would be another one in another batch,
        unless a profile was given. rests: whether steps may draft nothing, which asks for `Workspace.turn`
        """
        return self._trees.by_batch(filters, most, rests)

    def tree_for(self, filters: Filters, batch: int = 1) -> TokenTree | Growth:
        """The tree that so many sequences begin with, or how trees grow, where the target is sampled so."""
        return self._trees.first(filters, batch)[0]

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos_token_id: EosTokens = "model",
        pad_token_id: int | None = None,
        attention_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        streamer: Streamer | Sequence[Streamer] | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        min_new_tokens: int | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: Sequence[StoppingCriteria] | None = None,
        trace: str | Path | None = None,
        output_scores: bool = False,
        output_logits: bool = False,
        past: TextCache | None = None,
        logits_processor: Sequence[Any] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    ) -> Generation:
        """Continue each prompt of input_ids LongTensor[B, T] by up to max_new_tokens tokens.

        temperature, top_k, top_p, min_p: how the target is sampled; temperature 0 is greedy and ignores the filters.
            0 for top_k and min_p, and 1 for top_p, are off.
        seed: the same seed gives the same text, for each sequence on its own.
        eos_token_id: end of sequence, one token or several; None never stops early. pad_token_id fills what follows
            (default: the first eos_token_id).
        attention_mask: [B, T], with zeros for left padding.
        sequence_ids: LongTensor[B] in 0 .. 2**27 - 1 (default 0 .. B - 1) names each sequence's noise: a sequence
            decoded alone under its id gets the text that it has in the batch; but see `profile`.
        streamer: a transformers streamer for one sequence, or a list with one streamer for each sequence.
        repetition_penalty: 1 is none; more makes tokens of the text so far less likely, prompt included.
        min_new_tokens: until there are so many, no end-of-sequence token is drawn.
        stop_strings: a sequence ends with the token that completes one of them; needs the tokenizer.
        stopping_criteria: transformers' or your own, asked after each new token of each sequence, [1, T + new].
        trace: a file to write what each step drafted and why it was accepted or not; with a tokenizer, as text too.
        output_scores, output_logits: also return what each token was sampled from, and the model's own logits, as
            transformers does. The host then waits for each step, and memory for B x new tokens x V numbers is needed.
        past: the .cache of an earlier generation with this target, by this decoder or another. The longest prefix that
            a prompt has in common with any of its texts is not computed again; input_ids are whole prompts all the
            same. The cache is left as it is. The text is the same with and without, up to ties of rounding.
        logits_processor: transformers' processors, `Grammar`s and functions of (input_ids LongTensor[R, T'], scores
            fp32 [R, V]), one after the other on the logits of both models before the filters; in a batch also a list
            with a list, or None, for each sequence. They are shown the prompt as given and what follows on the path to
            a node. Other classes than transformers' own have one row at a time, and must answer by their arguments
            alone. The host takes part in each step, so that on a GPU no CUDA graph is used.
        prefix_allowed_tokens_fn: of (sequence, its text LongTensor[T']), the tokens that may follow.

        What is left out of temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens, stop_strings,
        eos_token_id and pad_token_id is taken from target.generation_config: without do_sample the temperature is 0.
        What is not set there either is off. A setting there that changes the text and is no argument here is an error;
        max_length and max_new_tokens are not looked at.

        Raises ValueError for arguments that do not fit, before any work; prompt + new tokens beyond the models'
        positions are such arguments. Raises ValueError while decoding for logits that are no distribution.
        """
        begin = self.clock()
        self._notice_changes()
        request = self._request(
            Prompts(input_ids=input_ids, attention_mask=attention_mask, sequence_ids=sequence_ids, past=past),
            GivenSettings(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                min_new_tokens=min_new_tokens,
                eos_token_id=eos_token_id,
                pad_token_id=pad_token_id,
                stop_strings=stop_strings,
            ),
            max_new_tokens=max_new_tokens,
            seed=seed,
            tokenizer=tokenizer,
            stopping_criteria=stopping_criteria,
            processors=GivenProcessors(logits_processor, prefix_allowed_tokens_fn),
        )
        streamers = checked_streamers(streamer, len(input_ids))
        plan = self._plan(request)
        streamers, trace = begin_alike(plan, request, streamers, trace)
        logger.debug(
            "%s, %d sequences, up to %d new tokens, a tree of %d nodes and %d levels, verified by %s%s",
            self.method, len(input_ids), request.max_new_tokens, len(plan.tree), plan.tree.depth,
            plan.rules.verification,
            plan.rules.law_changed_by and f"; the text's law is changed by {plan.rules.law_changed_by}",
        )  # fmt: skip
        stats = Statistics(plan.depth, plan.branching, clock=self.clock, begin=begin, stream=self._target.stream)
        stats.tree = self._trees.in_words(plan.tree, len(input_ids))
        stats.law_changed_by, stats.verification = plan.rules.law_changed_by, plan.rules.verification
        with (
            self._peers.interruptible(),
            torch.inference_mode(),
            recording(trace, tokenizer, self.method, plan.rules, self._target, self._draft, request) as recorder,
            self.runner.workspace(request, plan) as workspace,
        ):
            stats.cache_bytes = workspace.cache_bytes
            chosen = Chosen(len(input_ids)) if output_scores or output_logits else None
            reused = sum(workspace.begin(request, plan))
            stats.reused_tokens = reused
            stats.prefill_tokens = int(request.lengths.sum()) - len(request.lengths) - reused
            stats.lap("prefill")
            new = decode(
                request,
                plan,
                self.runner,
                workspace,
                stats=stats,
                streamers=streamers,
                observers=[each.step for each in (recorder, chosen) if each is not None],
                replan=self._trees.changing(plan, request.filters, len(input_ids)),
            )
            cache = workspace.finish(request, plan)
        logger.debug(
            "%d new tokens in %d steps, %.3f s, of which prefill %.3f s",
            stats.new_tokens, stats.steps, stats.total_seconds, stats.seconds["prefill"],
        )  # fmt: skip
        kept = self.runner.kept
        kept.append(cache)
        self._remark(stats, self._draft if plan.drafts_always else None)
        return Generation(
            sequences=torch.cat([input_ids, new], 1),
            stats=stats,
            scores=chosen.scores(request.filters) if chosen is not None and output_scores else None,
            logits=chosen.logits() if chosen is not None and output_logits else None,
            _cache=weakref.ref(cache),
            _kept=kept,
        )

    def serve(
        self,
        slots: int = 8,
        *,
        max_tokens: int | None = None,
        queue: int = 64,
        prefill_tokens: int = 256,
        seed: int = 0,
    ) -> Service:
        """Decode requests as they come, side by side, until the service is closed; see `Service` and its `Limits`.

        max_tokens: default 2,048, and never more than the models have positions. seed: of the noise

        Raises ValueError for numbers below 1, and torch.OutOfMemoryError where the caches do not fit.
        """
        self._notice_changes()
        check_alone("serve", self._target)
        prompts = Prompts(torch.zeros(1, 1, dtype=torch.long, device=self._target.device))
        plan = self._plan(self._request(prompts, GivenSettings(1.0, **NOTHING), max_new_tokens=1))
        positions = min(model.max_positions for model in (self._target, *(self._draft or NO_DRAFT).models))
        room = min(2048 if max_tokens is None else max_tokens, positions)
        limits = Limits(slots, room, queue, prefill_tokens).check()
        trees = self._trees.for_serving(slots)
        return Service(
            replace(plan, tree=trees.of(slots), others=trees.trees),
            trees.of,
            lambda prompts, given, **rest: self._request(prompts, GivenSettings(**given), **rest),
            self._rules.draft_filters,
            limits=limits,
            seed=seed,
            cuda_graphs=self.runner.cuda_graphs,
        )

    def warm_up(
        self,
        *,
        batch_size: int = 1,
        prompt_tokens: int = 512,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
    ) -> float:
        """Do now what the first generation would do besides decoding; returns the seconds that it took.

        On a GPU that is to compile kernels, to allocate the caches and to capture a CUDA graph for each number of
        sequences that a batch may close up to. A server calls it before its first request, once for each way to sample.

        batch_size, prompt_tokens, max_new_tokens: the most that is to come. Generations of that size or less use what
            was made here; a larger one makes its own.
        The other arguments are those of `generate`. Raises ValueError for arguments that do not fit.
        """
        begin = time.perf_counter()
        self._notice_changes()
        settings = GivenSettings(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        )  # fmt: skip
        prompts = torch.zeros(batch_size, prompt_tokens, dtype=torch.long, device=self._target.device)
        request = self._request(Prompts(prompts), settings, max_new_tokens=max_new_tokens)
        plan = self._plan(request)
        with torch.inference_mode(), self.runner.workspace(request, plan) as workspace:
            workspace.begin(request, plan)
            follow = self._trees.changing(plan, request.filters, batch_size)
            tree_of = None if follow is None else follow.tree_of
            self.runner.warm_up(plan, workspace, batch_size, prompt_tokens + max_new_tokens, tree_of)
            workspace.state.numbers.cpu()  # waits for the device
        seconds = time.perf_counter() - begin
        logger.debug("warmed up in %.2f s: up to %d sequences, %s", seconds, batch_size, request.filters)
        return seconds

    def _request(
        self,
        prompts: Prompts,
        given: GivenSettings,
        *,
        max_new_tokens: int,
        seed: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: Sequence[StoppingCriteria] | None = None,
        processors: GivenProcessors = GivenProcessors(),  # noqa: B008
    ) -> Request:
        """What `generate` was asked for, with what the model's generation config adds to it."""
        settings = given.filled_from(self.target.generation_config, self._target.vocab_size)
        return checked_request(
            self._target,
            (self._draft or NO_DRAFT).models,
            prompts,
            Ending(
                max_new_tokens=max_new_tokens,
                min_new_tokens=settings.min_new_tokens,
                eos_token_id=settings.eos_token_id,
                pad_token_id=settings.pad_token_id,
                criteria=checked_criteria(settings.stop_strings, tokenizer, stopping_criteria),
            ),
            filters=settings.filters,
            seed=seed,
            repetition_penalty=settings.repetition_penalty,
            processors=replace(processors, config=settings.config),
        )

    def _plan(self, request: Request) -> StepPlan:
        """What the steps of a request have in common; ValueError where the method cannot sample so."""
        masked = request.processors is not None
        rules = self._rules.of(request.filters, self._draft, request.processing, masked=masked)
        tree, trees = self._trees.first(request.filters, len(request.prompt))
        if rules.verification == "held_traversal" and tree.grows and tree.branching > 1:
            raise ValueError(f"held traversal needs a static tree, got {tree}: take verifier 'traversal' or 'held'")
        draft = self._draft if any(len(each) > 1 for each in trees.trees) else None
        return StepPlan(self._target, draft, tree, rules, trees.trees, peers=self._peers)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        streamer: Streamer | None = None,
        seed: int | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        trace: str | Path | None = None,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeOutput:
        """What `model.generate(**inputs, custom_generate=decoder, ...)` calls; model is the decoder's target.

        seed: of the noise; None draws one from torch's generator, so that torch.manual_seed makes a text repeatable.
        tokenizer: for stop_strings and trace; transformers keeps its own to itself, so bind one with functools.partial:
            custom_generate=partial(decoder, tokenizer=tokenizer).
        trace: as in `generate`; custom_generate=partial(decoder, trace=FILE, tokenizer=tokenizer).

        The other settings of transformers mean what they mean there. With return_dict_in_generate=True the answer is a
        `SpeculativeOutput`: transformers' own, with the field `stats`, and a TextCache as cache (past_key_values before
        transformers 5.24), which a later call takes under that name, with the whole text as input_ids. Raises
        ValueError for those that the decoder does not have, by name.
        """
        call = GenerateCall(
            model=model,
            input_ids=input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=streamer,
            seed=seed,
            model_kwargs=model_kwargs,
        )
        arguments = call.arguments(self._target.model, self._peers)
        out = self.generate(**arguments, stop_strings=stop_strings, tokenizer=tokenizer, trace=trace)
        return call.answer(out.sequences, out.cache, out.stats, out.scores, out.logits)
