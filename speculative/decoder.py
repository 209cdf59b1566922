"""Decode a Hugging Face Llama-family model through drafted token trees: what to do, with which memory.

`step` does a step of a batch, `decoding` repeats it. Between steps a sequence is its committed tokens: `length` of them
in the target's cache, then the root, which is committed but not yet cached. So is the last token of a prompt at first.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
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
from transformers.generation.utils import GenerateDecoderOnlyOutput

from heavypath.kernels.filtering import Filters
from heavypath.kernels.tree_attention import MAX_NODES
from heavypath.speculative.custom_generate import Streamer, custom_generate
from heavypath.speculative.decoding.drafting import Shape, tree_shape
from heavypath.speculative.decoding.graphs import Graphs
from heavypath.speculative.decoding.growing import VALUE_TEMPERATURE, Confidence, Growth
from heavypath.speculative.decoding.loop import decode
from heavypath.speculative.decoding.processing import Processing
from heavypath.speculative.decoding.request import Request, checked_request
from heavypath.speculative.decoding.snapshots import host_sees
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.decoding.step import Step, Stepped
from heavypath.speculative.decoding.stopping import checked_criteria
from heavypath.speculative.decoding.workspace import Size, Workspace
from heavypath.speculative.drafts.drafts import Draft, EarlyExit, ModelDraft, PromptLookup, as_draft
from heavypath.speculative.methods import METHODS
from heavypath.speculative.models.generic import forward_of
from heavypath.speculative.output.trace import Recorder, recording
from heavypath.speculative.profile import Profile
from heavypath.speculative.trees.planning import Acceptance
from heavypath.speculative.trees.tree import TokenTree

DEFAULT_SIZE = {"cpu": 5, "cuda": 32}  # nodes of a tree: on a CPU what suits the shipped pair
MOST_STEPS = 64  # kept: a step for each sampling, and for each depth near the end of a text


@dataclass(frozen=True)
class Generation:
    """sequences: LongTensor[B, T + new], the prompt as given, the new tokens, padding. stats: see `Statistics`."""

    sequences: Tensor
    stats: Statistics


class SpeculativeDecoder:
    """Generates a target model's own text, through trees that a draft model proposes.

    target: a causal language model of transformers, in eval mode.
    draft: another with its vocabulary, on its device; or `PromptLookup()`, or `EarlyExit(layers)`, which need none; may
        be None for method "autoregressive".
    method: one of `METHODS`: autoregressive, chain, specinfer, spectr, sequoia, dyspec, rsd-c, rsd-s, ersd, eagle-2,
        top-k, naive, naive-distinct.
    tree_size: nodes of the drafted tree, root included (default: 5 on a CPU, 32 on a GPU); shapes that cannot have so
        many take the next smaller.
    tree: a TokenTree to use instead, for methods whose trees do not grow.
    profile: instead of both, what `heavypath calibrate` measured, a file or a `Profile`: each generation takes the tree
        with which it is expected to be fastest.

    Options of some methods, refused by the others:

    acceptance: [child] or [depth, child] probability that child j of an accepted node is accepted, by which trees are
        planned.
    max_depth:  levels of planned and grown trees, at most (default: log2 of the nodes).
    width:      sequences of specinfer and spectr, branching of rsd-c, nodes a level of grown trees.
    threshold:  chain, dyspec, eagle-2: slots of less value stay empty, so that a chain ends early; see `growing`.
    confidence: dyspec: how the draft's probabilities tell acceptance, as a `Confidence` (default: as measured on the
        shipped pair), or "draft": they are it, as in the paper.

    draft_temperature, draft_top_k, draft_top_p, draft_min_p: how the draft samples; None takes the target's. Where it
        is greedy, draft_temperature is that of the probabilities by which trees grow (default: 0.6).

    cuda_graphs: replay a step as one CUDA graph (default: on a GPU); False runs the same step eagerly, for a debugger
        or a profiler. The decoder keeps the memory of its graphs, caches included, for the next call.

    Text follows the target's distribution exactly, whatever the method, tree and draft. A decoder is a function for
    transformers' own generate, too: `model.generate(**inputs, custom_generate=decoder)`. Raises TypeError or ValueError
    for models or options that do not fit.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | PromptLookup | EarlyExit | None,
        method: str = "sequoia",
        *,
        tree_size: int | None = None,
        tree: TokenTree | None = None,
        profile: Profile | str | Path | None = None,
        acceptance: Acceptance | None = None,
        max_depth: int | None = None,
        width: int | None = None,
        threshold: float | None = None,
        confidence: Confidence | Literal["draft"] | None = None,
        draft_temperature: float | None = None,
        draft_top_k: int | None = None,
        draft_top_p: float | None = None,
        draft_min_p: float | None = None,
        cuda_graphs: bool | None = None,
    ):
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        self.method = method
        self.clock = time.perf_counter
        self._method = METHODS[method]
        self._steps = lru_cache(MOST_STEPS)(self._new_step)
        self._idle: Workspace | None = None
        self._lock = threading.Lock()
        self._planned: dict[Filters, TokenTree | Growth] = {}
        self._draft_options = (draft_temperature, draft_top_k, draft_top_p, draft_min_p)
        self._drafting_filters(Filters()).check("draft_")

        self.target = target
        self._target = forward_of(target, "target")
        self._seen = host_sees(self._target.device)
        self.cuda_graphs = not self._seen if cuda_graphs is None else cuda_graphs
        if self.cuda_graphs and self._seen:
            raise ValueError(f"cuda_graphs needs models on a CUDA device, got {self._target.device}; leave it out")
        options = {"tree": tree, "tree_size": tree_size, "acceptance": acceptance, "max_depth": max_depth}
        options |= {"width": width, "threshold": threshold, "confidence": confidence}
        given = {name: value for name, value in options.items() if value is not None}
        self.tree: TokenTree | Growth | None = None
        self.profile = profile if profile is None or isinstance(profile, Profile) else Profile.load(profile)
        if self.profile is None:
            self.tree = self._checked_tree(given)
        elif given:
            raise ValueError(f"a profile says what trees to take; leave out {', '.join(given)}")
        self._draft: Draft | None = None
        models = [self._target]
        if method != "autoregressive":
            if draft is None:
                raise ValueError(f"method {method!r} needs a draft model, got None")
            self._draft = as_draft(draft, self._target, target)
            if isinstance(self._draft, ModelDraft):
                models.append(self._draft.forward)
        if self.profile is not None:
            self.profile.check(target, draft)
        for model in models:
            model.check_weights()

    def _checked_tree(self, given: dict[str, Any]) -> TokenTree | Growth:
        """What the method makes of the options given, in heavy-path order."""
        tree = given.pop("tree", None)
        if tree is not None:
            if not isinstance(tree, TokenTree):
                raise TypeError(f"tree must be a TokenTree, got {type(tree).__name__}")
            if given:
                raise ValueError(f"tree says all of the tree's shape; leave out {', '.join(given)}")
            usual = self._method.tree_of(8)
            if isinstance(usual, Growth):
                raise ValueError(f"method {self.method!r} grows its trees; give it tree_size, not tree")
            if len(usual) == 1 < len(tree):
                raise ValueError(f"method {self.method!r} drafts nothing, got a tree of {len(tree)} nodes")
        else:
            size = given.pop("tree_size", DEFAULT_SIZE.get(self._target.device.type, 8))
            if size < 2:
                raise ValueError(f"tree_size counts the root and must be at least 2, got {size}")
            for name in given:
                if name not in self._method.options:
                    has = ", ".join(self._method.options) or "none but tree_size"
                    raise ValueError(f"method {self.method!r} has no option {name!r}; it has {has}")
            tree = self._method.tree_of(size, **given)
        if len(tree) > MAX_NODES:
            raise ValueError(f"a tree may have at most {MAX_NODES} nodes, got {len(tree)}")
        return tree.reordered("heavy_path")[0] if isinstance(tree, TokenTree) else tree

    def tree_for(self, filters: Filters) -> TokenTree | Growth:
        """The tree, or how trees grow, for a sampling: that of the options, or what the profile advises."""
        if self.tree is not None:
            return self.tree
        assert self.profile is not None
        if filters not in self._planned:
            self._planned[filters] = self.profile.tree_for(self.method, filters)
        return self._planned[filters]

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        attention_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        streamer: Streamer | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        min_new_tokens: int = 0,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: Sequence[StoppingCriteria] | None = None,
        trace: str | Path | None = None,
    ) -> Generation:
        """Continue each prompt of input_ids LongTensor[B, T] by up to max_new_tokens tokens.

        temperature, top_k, top_p, min_p: how the target is sampled; temperature 0 is greedy and ignores the filters.
        seed: the same seed gives the same text, for each sequence on its own.
        eos_token_id: end of sequence, one or several; None never stops early. pad_token_id fills what follows (default:
            the first eos_token_id).
        attention_mask: [B, T], zeros for left padding.
        sequence_ids: LongTensor[B] in 0 .. 2**27 - 1 (default 0 .. B - 1) names each sequence's noise: a sequence
            decoded alone under its id gives its text of the batch.
        streamer: a transformers streamer; batch 1.
        repetition_penalty: 1 is none; more makes tokens of the text so far less likely, prompt included.
        min_new_tokens: until there are so many, no end-of-sequence token is drawn.
        stop_strings: a sequence ends with the token that completes one of them; needs the tokenizer.
        stopping_criteria: transformers' or your own, asked after each new token of each sequence, [1, T + new].
        trace: a file to write what each step drafted and why it was accepted or not; with a tokenizer, as text too.

        Raises ValueError before any work for arguments that do not fit, prompt + new tokens beyond the models'
        positions included, and during it for NaN logits.
        """
        begin = self.clock()
        request = checked_request(
            self._target,
            self._draft.forward if self._draft is not None else None,
            input_ids,
            attention_mask,
            max_new_tokens,
            Filters(temperature, top_k, top_p, min_p),
            seed,
            sequence_ids,
            eos_token_id,
            pad_token_id,
            repetition_penalty,
            min_new_tokens,
            checked_criteria(stop_strings, tokenizer, stopping_criteria),
        )
        draft_filters = self._drafting_filters(request.filters)
        if self._method.verification == "kseq" and draft_filters.temperature == 0 < request.filters.temperature:
            raise ValueError(f"method {self.method!r} needs draft_temperature > 0 where it samples, got 0")
        if streamer is not None:
            if len(input_ids) > 1:
                raise ValueError(f"a streamer takes one sequence, got a batch of {len(input_ids)}")
            streamer.put(input_ids.cpu())
        tree = self.tree_for(request.filters)
        stats = Statistics(tree.depth, tree.branching, clock=self.clock, begin=begin)
        models = self._target, self._draft
        verify = self._verify(request.filters)
        with (
            torch.inference_mode(),
            recording(trace, tokenizer, self.method, verify, *models, request, draft_filters) as recorder,
        ):
            new = self._decode(request, tree, draft_filters, stats, streamer, recorder)
        if streamer is not None:
            streamer.end()
        return Generation(torch.cat([input_ids, new], 1), stats)

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
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What `model.generate(**inputs, custom_generate=decoder, ...)` calls; model is the decoder's target.

        seed: of the noise; None draws one from torch's generator, so that torch.manual_seed makes a text repeatable.
        tokenizer: for stop_strings; transformers keeps its own to itself, so bind one with functools.partial:
            custom_generate=partial(decoder, tokenizer=tokenizer).

        The other settings of transformers mean what they mean there. Raises ValueError for those that the decoder
        does not have, by name.
        """
        stops = {"stop_strings": stop_strings, "tokenizer": tokenizer}
        given = input_ids, logits_processor, stopping_criteria, generation_config, streamer, seed, stops, model_kwargs
        return custom_generate(self.generate, self.target, model, *given)

    def _verify(self, filters: Filters) -> str:
        """What `verify_tree` does for a sampling."""
        return self._method.kind(filters.temperature).verification

    def _drafting_filters(self, target: Filters) -> Filters:
        """The draft's filters. Greedy text needs the draft's likeliest tokens, which is what temperature 0 draws."""
        filters = target.override(*self._draft_options)
        return filters if target.temperature > 0 else filters._replace(temperature=0.0)

    def _decode(
        self,
        request: Request,
        tree: TokenTree | Growth,
        draft_filters: Filters,
        stats: Statistics,
        streamer: Streamer | None,
        recorder: Recorder | None,
    ) -> Tensor:
        """The new tokens of each sequence, padding behind them."""
        draft = self._draft if len(tree) > 1 else None
        slots = tree.slots if isinstance(tree, Growth) else len(tree)
        batch, width = request.prompt.shape
        size = Size(
            sequences=batch,
            rows=width + request.max_new_tokens + slots,
            new_tokens=request.max_new_tokens,
            stops=max(1, len(request.stops)),
            places=tree.depth * tree.branching,
            penalised=int(request.processing is not None and request.processing.repetition_penalty != 1),
        )
        with self._workspace(size, draft) as workspace:
            stats.cache_bytes = workspace.cache_bytes
            given = request.prompt, request.lengths, request.max_new_tokens, request.stops
            workspace.state.begin(*given, request.sequence_ids, request.seed)
            if width > 1:
                before_roots = request.prompt[:, :-1]
                self._target.prefill(before_roots, workspace.target_cache.first(batch))
                if draft is not None and workspace.draft_cache is not None:
                    draft.prefill(before_roots, workspace.draft_cache.first(batch))
            stats.lap("prefill")
            step_for = partial(self._step, request, tree, draft, draft_filters)
            run = partial(self._run, workspace, slots, stats)
            return decode(request, workspace, step_for, run, stats, streamer, recorder)

    @contextmanager
    def _workspace(self, size: Size, draft: Draft | None) -> Iterator[Workspace]:
        """A workspace for one generation; that of the last one where it fits and has graphs."""
        if not self.cuda_graphs:
            yield Workspace(self._target, draft, size)
            return
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is None or not idle.size.covers(size) or (idle.draft_cache is None and draft is not None):
            del idle  # before memory is taken for another
            idle = Workspace(self._target, draft, size.rounded(), Graphs())
        yield idle  # what an exception leaves half done is not kept
        self._idle = idle

    def _run(
        self, workspace: Workspace, slots: int, stats: Statistics, step: Step, count: int, longest: int
    ) -> Stepped:
        """One step of the first `count` sequences, whose longest prefix has at most `longest` rows."""
        memory = workspace.first(count)
        if self._seen:
            return step(*memory, longest, stats.lap)
        visible = workspace.size.rows - slots
        if workspace.graphs is None:
            return step(*memory, visible, stats.lap)
        stepped = workspace.graphs.run((step, count), lambda: step(*memory, visible, _no_lap))
        stats.lap("step")
        return stepped

    def _step(
        self, request: Request, tree: TokenTree | Growth, draft: Draft | None, draft_filters: Filters, deepest: int
    ) -> Step:
        """The step with the top of a tree, as deep as can still be emitted; on a GPU with all of it, for its graph."""
        depth = min(tree.depth, deepest) if self._seen else tree.depth
        return self._steps(tree, depth, draft, request.filters, draft_filters, request.processing)

    def _new_step(
        self,
        tree: TokenTree | Growth,
        depth: int,
        draft: Draft | None,
        filters: Filters,
        draft_filters: Filters,
        processing: Processing | None,
    ) -> Step:
        """A step with the top of a tree."""
        top: Shape | Growth
        if isinstance(tree, Growth) and depth > 0:
            top = replace(tree, depth=depth)
        else:
            top = tree_shape(tree if isinstance(tree, TokenTree) else TokenTree([-1]), depth, self._target.device)
        return Step(
            target=self._target,
            draft=draft,
            method=self._method,
            tree=top,
            branching=tree.branching,
            verify=self._verify(filters),
            filters=filters,
            draft_filters=draft_filters,
            value_temperature=self._draft_options[0] or VALUE_TEMPERATURE,
            processing=processing,
        )


def _no_lap(phase: str) -> None:
    """What a graph does has no phases that the host could time."""
