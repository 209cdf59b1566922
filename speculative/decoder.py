"""Decode a Hugging Face Llama-family model through drafted token trees.

One step, for a batch of sequences that each accept their own number of tokens:

    draft the tree level by level -> target forward on all its nodes -> verify -> compact both caches -> commit

Between steps a sequence is its committed tokens: `length` of them in the target's cache, then the root, which is
committed but not yet cached.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heavypath.kernels.cache_compaction import compact_cache
from heavypath.kernels.filtering import Filters
from heavypath.kernels.tree_attention import MAX_NODES, prepared_attention
from heavypath.kernels.verification import verify_tree
from heavypath.speculative.drafting import Shape, draft_tree, tree_shape
from heavypath.speculative.llama import LlamaForward
from heavypath.speculative.methods import METHODS
from heavypath.speculative.request import Request, checked_request
from heavypath.speculative.sequences import Sequences
from heavypath.speculative.statistics import Statistics
from heavypath.speculative.tree import TokenTree

# Unconditional acceptance of children 0, 1, ... of the demo pair at temperature 0.6, drawn without replacement.
DEFAULT_ACCEPTANCE = (0.5688, 0.1168, 0.0582, 0.0373, 0.026, 0.0199, 0.0157, 0.0127)


class Streamer(Protocol):
    """What transformers' streamers have."""

    def put(self, value: Tensor) -> None: ...  # noqa: D102
    def end(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Generation:
    """sequences: LongTensor[B, T + new], the prompt as given, the new tokens, padding. stats: see `Statistics`."""

    sequences: Tensor
    stats: Statistics


class SpeculativeDecoder:
    """Generates a target model's own text, through trees that a draft model proposes.

    target, draft: transformers models (Llama, Mistral, Qwen2, Qwen3) with one vocabulary, on one device, in eval mode.
        draft may be None for method "autoregressive".
    method: one of `METHODS`: autoregressive, chain, specinfer, rsd-c, sequoia, ersd, top-k, naive.
    tree_size: nodes of the drafted tree, root included; shapes that cannot have so many take the next smaller.
    tree: a TokenTree to use instead.
    acceptance: [child] probability that child j of an accepted node is accepted, by which trees are planned.
    draft_temperature, draft_top_k, draft_top_p, draft_min_p: how the draft samples; None takes the target's.

    Text follows the target's distribution exactly, whatever the method, tree and draft. Raises TypeError or ValueError
    for models or options that do not fit.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        method: str = "sequoia",
        *,
        tree_size: int = 8,
        tree: TokenTree | None = None,
        acceptance: Sequence[float] | Tensor = DEFAULT_ACCEPTANCE,
        draft_temperature: float | None = None,
        draft_top_k: int | None = None,
        draft_top_p: float | None = None,
        draft_min_p: float | None = None,
    ):
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        if tree_size < 2:
            raise ValueError(f"tree_size counts the root and must be at least 2, got {tree_size}")
        if tree is not None and not isinstance(tree, TokenTree):
            raise TypeError(f"tree must be a TokenTree, got {type(tree).__name__}")
        self.method = method
        self._method = METHODS[method]
        self.tree = tree if tree is not None else self._method.shape(tree_size, torch.as_tensor(acceptance).tolist())
        self.tree = self.tree.reordered("heavy_path")[0]
        if len(self.tree) > MAX_NODES:
            raise ValueError(f"a tree may have at most {MAX_NODES} nodes, got {len(self.tree)}")
        self._draft_options = (draft_temperature, draft_top_k, draft_top_p, draft_min_p)
        self._drafting_filters(Filters()).check("draft_")

        self._target = LlamaForward(target, "target")
        self._draft: LlamaForward | None = None
        self._shapes: dict[int, Shape] = {}
        if draft is not None and len(self.tree) > 1:
            self._draft = LlamaForward(draft, "draft")
            if self._draft.vocab_size != self._target.vocab_size:
                raise ValueError(
                    f"target and draft must share one vocabulary, "
                    f"got {self._target.vocab_size} and {self._draft.vocab_size} tokens"
                )
            if self._draft.device != self._target.device:
                raise ValueError(
                    f"target and draft must be on one device, got {self._target.device} and {self._draft.device}"
                )
        elif len(self.tree) > 1:
            raise ValueError(f"method {method!r} needs a draft model, got None")
        for model in filter(None, (self._target, self._draft)):
            for name, weight in model.weights():
                if not weight.sum(dtype=torch.float32).isfinite():
                    raise ValueError(f"{model.name} has NaN or infinite weights in {name}")

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

        Raises ValueError before any work for arguments that do not fit, prompt + new tokens beyond the models'
        positions included, and during it for NaN logits.
        """
        begin = time.perf_counter()
        request = checked_request(
            self._target,
            self._draft,
            input_ids,
            attention_mask,
            max_new_tokens,
            Filters(temperature, top_k, top_p, min_p),
            seed,
            sequence_ids,
            eos_token_id,
            pad_token_id,
        )
        draft_filters = self._drafting_filters(request.filters)
        if streamer is not None:
            if len(input_ids) > 1:
                raise ValueError(f"a streamer takes one sequence, got a batch of {len(input_ids)}")
            streamer.put(input_ids.cpu())
        stats = Statistics(self.tree)
        with torch.inference_mode():
            sequences = self._decode(request, draft_filters, stats, streamer)
        if streamer is not None:
            streamer.end()
        stats.new_tokens = int(sequences.produced.sum())
        stats.total_seconds = time.perf_counter() - begin
        return Generation(torch.cat([input_ids, sequences.output[:, : int(sequences.produced.max())]], 1), stats)

    def _drafting_filters(self, target: Filters) -> Filters:
        """The draft's filters. Greedy text needs the draft's likeliest tokens, which is what temperature 0 draws."""
        filters = target.override(*self._draft_options)
        return filters if target.temperature > 0 else filters._replace(temperature=0.0)

    def _decode(
        self, request: Request, draft_filters: Filters, stats: Statistics, streamer: Streamer | None
    ) -> Sequences:
        """The loop over steps, until every sequence has ended."""
        batch, device = len(request.prompt), request.prompt.device
        rows = request.prompt.shape[1] + request.max_new_tokens + len(self.tree)
        target_cache = self._target.new_cache(batch, rows)
        draft_cache = self._draft.new_cache(batch, rows) if self._draft is not None else None
        with stats.phase("prefill"):
            logits = self._target.prefill(request.prompt, request.lengths, target_cache)
            if self._draft is not None and draft_cache is not None:
                self._draft.prefill(request.prompt, request.lengths, draft_cache)

        # The prompt's last token is the first root; verifying the tree of it alone draws the first new token.
        sequences = Sequences.begin(request.prompt, request.lengths, request.max_new_tokens, request.stops, request.pad)
        shape = self._shape(0)
        noise_rows = self._noise_rows(request.sequence_ids, sequences.lengths, shape)
        tokens, draft_logits = sequences.root[:, None], None
        while True:
            with stats.phase("verify"):
                verified = verify_tree(
                    tokens,
                    shape.parents,
                    logits,
                    draft_logits,
                    method="greedy" if request.filters.temperature == 0 else self._method.verify,
                    ranks=shape.ranks,
                    max_depth=len(shape.levels),
                    **request.filters._asdict(),
                    **{f"draft_{name}": value for name, value in draft_filters._asdict().items()},
                    seed=request.seed,
                    rows=noise_rows,
                )
            with stats.phase("compact"):
                for cache in (target_cache, draft_cache):
                    if cache is not None and len(shape) > 1:
                        compact_cache([cache.keys], [cache.values], verified.path, verified.length, sequences.lengths)
            with stats.phase("commit"):
                stats.count(shape.parents, shape.kept, tokens, verified, sequences.active)
                emitted = sequences.commit(tokens, verified)
                if streamer is not None:
                    streamer.put(emitted.cpu())
            if not sequences.active.any():
                return sequences

            lengths = sequences.lengths
            shape = self._shape(int(sequences.room[sequences.active].max()))
            visible_rows = int(lengths.max()) + len(shape)
            noise_rows = self._noise_rows(request.sequence_ids, lengths, shape)
            tokens, draft_logits = sequences.root[:, None], None
            with stats.phase("draft"):
                if self._draft is not None and draft_cache is not None and shape.levels:
                    tokens, draft_logits = draft_tree(
                        self._draft,
                        draft_cache,
                        shape,
                        sequences,
                        visible_rows,
                        noise_rows,
                        self._method,
                        draft_filters,
                        request.seed,
                    )
            with stats.phase("target"):
                logits = self._target(
                    tokens.clamp(min=0),
                    lengths[:, None] + shape.depths,
                    lengths[:, None] + torch.arange(len(shape), device=device),
                    target_cache,
                    prepared_attention(
                        prefix_length=lengths,
                        rows=visible_rows,
                        dtype=self._target.dtype,
                        subtree_end=shape.subtree_end,
                    ),
                )

    def _shape(self, depth: int) -> Shape:
        """The top of the tree, as deep as can still be emitted."""
        depth = min(depth, self.tree.depth)
        if depth not in self._shapes:
            self._shapes[depth] = tree_shape(self.tree, depth, self._target.device)
        return self._shapes[depth]

    def _noise_rows(self, sequence_ids: Tensor, lengths: Tensor, shape: Shape) -> Tensor:
        """Noise rows LongTensor[B, N]: (sequence, root position, node), never used twice.

        A race keys its noise by (sequence, the node's own position), so that it does not depend on the tree.
        """
        if self._method.verify == "race":
            position, node = lengths[:, None] + shape.depths, torch.zeros_like(shape.kept)
        else:
            position, node = lengths[:, None], shape.kept
        return (sequence_ids[:, None] << 36) | (position << 12) | node
