"""Decode a Hugging Face Llama-family model through drafted token trees.

One step, for a batch of sequences that each accept their own number of tokens:

    draft a tree level by level -> target forward on all its nodes -> verify -> compact both caches -> commit

Between steps a sequence is its committed tokens: `length` of them in the target's cache, then the root, which is
committed but not yet cached.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

from heavypath.kernels.cache_compaction import compact_cache
from heavypath.kernels.filtering import Filters
from heavypath.kernels.tree_attention import MAX_NODES, prepared_attention
from heavypath.kernels.verification import verify_tree
from heavypath.speculative.custom_generate import Streamer, custom_generate
from heavypath.speculative.drafting import Drafted, Shape, draft_tree, root_alone, tree_shape
from heavypath.speculative.drafts import Cache, Draft, EarlyExit, ModelDraft, PromptLookup, as_draft
from heavypath.speculative.growing import VALUE_TEMPERATURE, Confidence, Growth, grow_tree
from heavypath.speculative.llama import LlamaForward
from heavypath.speculative.methods import METHODS
from heavypath.speculative.planning import Acceptance
from heavypath.speculative.profile import Profile
from heavypath.speculative.request import Request, checked_request
from heavypath.speculative.sequences import Sequences
from heavypath.speculative.statistics import Statistics
from heavypath.speculative.stopping import checked_criteria
from heavypath.speculative.trace import Recorder, recording
from heavypath.speculative.tree import TokenTree

DEFAULT_SIZE = {"cpu": 5, "cuda": 32}  # nodes of a tree: on a CPU what suits the shipped pair


@dataclass(frozen=True)
class Generation:
    """sequences: LongTensor[B, T + new], the prompt as given, the new tokens, padding. stats: see `Statistics`."""

    sequences: Tensor
    stats: Statistics


class SpeculativeDecoder:
    """Generates a target model's own text, through trees that a draft model proposes.

    target: a transformers model (Llama, Mistral, Qwen2, Qwen3) in eval mode.
    draft: another with its vocabulary, on its device; or `PromptLookup()`, or `EarlyExit(layers)`, which need none; may
        be None for method "autoregressive".
    method: one of `METHODS`: autoregressive, chain, specinfer, spectr, sequoia, dyspec, rsd-c, rsd-s, ersd, eagle-2,
        top-k, naive.
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
    ):
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        self.method = method
        self.clock = time.perf_counter
        self._method = METHODS[method]
        self._planned: dict[Filters, TokenTree | Growth] = {}
        self._draft_options = (draft_temperature, draft_top_k, draft_top_p, draft_min_p)
        self._drafting_filters(Filters()).check("draft_")

        self.target = target
        self._target = LlamaForward(target, "target")
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
        self._shapes: dict[tuple[TokenTree, int], Shape] = {}
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
            usual = self._method.shape(8)
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
            tree = self._method.shape(size, **given)
        if len(tree) > MAX_NODES:
            raise ValueError(f"a tree may have at most {MAX_NODES} nodes, got {len(tree)}")
        return tree.reordered("heavy_path")[0] if isinstance(tree, TokenTree) else tree

    def tree_for(self, filters: Filters) -> TokenTree | Growth:
        """The tree, or how trees grow, for a sampling: that of the options, or what the profile advises."""
        if self.tree is not None:
            return self.tree
        assert self.profile is not None
        if filters not in self._planned:
            self._planned[filters] = self.profile.shape(self.method, filters)
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
        begin = time.perf_counter()
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
        if self._method.verify == "kseq" and draft_filters.temperature == 0 < request.filters.temperature:
            raise ValueError(f"method {self.method!r} needs draft_temperature > 0 where it samples, got 0")
        if streamer is not None:
            if len(input_ids) > 1:
                raise ValueError(f"a streamer takes one sequence, got a batch of {len(input_ids)}")
            streamer.put(input_ids.cpu())
        tree = self.tree_for(request.filters)
        stats = Statistics(tree.depth, tree.branching, clock=self.clock)
        models = self._target, self._draft
        verify = self._verify(request.filters)
        with (
            torch.inference_mode(),
            recording(trace, tokenizer, self.method, verify, *models, request, draft_filters) as recorder,
        ):
            sequences = self._decode(request, tree, draft_filters, stats, streamer, recorder)
        if streamer is not None:
            streamer.end()
        stats.tokens_of = sequences.produced.cpu()
        stats.new_tokens = int(stats.tokens_of.sum())
        stats.total_seconds = time.perf_counter() - begin
        return Generation(torch.cat([input_ids, sequences.output[:, : int(sequences.produced.max())]], 1), stats)

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
        return "greedy" if filters.temperature == 0 else self._method.verify

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
    ) -> Sequences:
        """The loop over steps, until every sequence has ended."""
        device = request.prompt.device
        slots = tree.slots if isinstance(tree, Growth) else len(tree)
        size = len(request.prompt), request.prompt.shape[1] + request.max_new_tokens + slots
        target_cache = self._target.new_cache(*size)
        draft_cache = self._draft.new_cache(*size) if self._draft is not None and len(tree) > 1 else None
        caches = (target_cache, draft_cache) if draft_cache is not None else (target_cache,)
        stats.cache_bytes = sum(field.nbytes for cache in caches for field in (cache.keys, cache.values))
        with stats.phase("prefill"):
            logits = self._target.prefill(request.prompt, request.lengths, target_cache)
            if self._draft is not None and draft_cache is not None:
                self._draft.prefill(request.prompt, request.lengths, draft_cache)

        # The prompt's last token is the first root; verifying the tree of it alone draws the first new token.
        sequences = Sequences.begin(request.prompt, request.lengths, request.max_new_tokens, request.stops, request.pad)
        drafted = self._drafted(request, tree, draft_filters, sequences, None, 0)
        while True:
            with stats.phase("verify"):
                if request.processing is not None:
                    logits = request.processing(logits, drafted, sequences)
                verified = verify_tree(
                    drafted.tokens,
                    drafted.parents,
                    logits,
                    drafted.logits,
                    method=self._verify(request.filters),
                    ranks=drafted.ranks,
                    max_depth=min(tree.depth, drafted.tokens.shape[1] - 1),
                    **request.filters._asdict(),
                    **{f"draft_{name}": value for name, value in draft_filters._asdict().items()},
                    seed=request.seed,
                    rows=drafted.rows,
                )
            with stats.phase("compact"):
                if drafted.logits is not None:
                    path, length = verified.path, verified.length
                    compact_cache([target_cache.keys], [target_cache.values], path, length, sequences.lengths)
                    assert draft_cache is not None
                    rows = (
                        drafted.draft_rows.expand_as(drafted.tokens).gather(1, path.clamp(min=0)).where(path >= 0, -1)
                    )
                    compact_cache([draft_cache.keys], [draft_cache.values], rows, length, sequences.lengths)
            before = None if recorder is None else replace(sequences)
            with stats.phase("commit"):
                stats.count(drafted, verified, sequences.active)
                emitted = sequences.commit(drafted.tokens, verified, request.stopping)
                if streamer is not None:
                    streamer.put(emitted.cpu())
            if recorder is not None and before is not None:
                with stats.phase("trace"):
                    recorder.step(drafted, logits, verified, before, sequences)
            if not sequences.active.any():
                return sequences

            with stats.phase("draft"):
                deepest = int(sequences.room[sequences.active].max())
                drafted = self._drafted(request, tree, draft_filters, sequences, draft_cache, deepest)
            with stats.phase("target"):
                lengths, nodes = sequences.lengths, drafted.tokens.shape[1]
                logits = self._target(
                    drafted.tokens.clamp(min=0),
                    lengths[:, None] + drafted.depths,
                    lengths[:, None] + torch.arange(nodes, device=device),
                    target_cache,
                    prepared_attention(
                        prefix_length=lengths,
                        rows=int(lengths.max()) + nodes,
                        dtype=self._target.dtype,
                        subtree_end=drafted.subtree_end,
                    ),
                )

    def _drafted(
        self,
        request: Request,
        tree: TokenTree | Growth,
        filters: Filters,
        sequences: Sequences,
        cache: Cache | None,
        deepest: int,
    ) -> Drafted:
        """The tree that each sequence drafts, at most `deepest` levels.

        Noise rows are (sequence, root position, node), never used twice. A race keys its noise by (sequence, the node's
        own position), so that it does not depend on the tree.
        """
        name, lengths = request.sequence_ids << 36, sequences.lengths
        if isinstance(tree, Growth) and cache is not None and deepest > 0:
            assert self._draft is not None
            growth = replace(tree, depth=min(tree.depth, deepest))
            temperature = self._draft_options[0] or VALUE_TEMPERATURE
            first_row = name | (lengths << 12)
            return grow_tree(self._draft, cache, growth, sequences, first_row, filters, temperature, request.seed)
        shape = self._shape(tree if isinstance(tree, TokenTree) else TokenTree([-1]), deepest)
        if self._method.verify == "race":
            rows = name[:, None] | ((lengths[:, None] + shape.depths) << 12)
        else:
            rows = (name | (lengths << 12))[:, None] | shape.kept
        if self._draft is None or cache is None or not shape.levels:
            return root_alone(sequences, rows, shape)
        method = self._method
        return draft_tree(self._draft, cache, shape, sequences, rows, method.draw, method.fill, filters, request.seed)

    def _shape(self, tree: TokenTree, depth: int) -> Shape:
        """The top of a tree, as deep as can still be emitted."""
        key = tree, min(depth, tree.depth)
        if key not in self._shapes:
            self._shapes[key] = tree_shape(*key, self._target.device)
        return self._shapes[key]
