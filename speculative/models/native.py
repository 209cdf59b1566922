"""The forward pass of a Llama-family model on a CPU in one call of compiled code: `kernels/native/llama.cpp`.

PyTorch's operations are the reference: `LlamaForward` does the same with them, where nothing can be compiled. A step of
a small model has some two hundred of those, each of which costs microseconds beside what it computes.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_double, c_int64, c_void_p
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heavypath.kernels.layers.gated import silu_product
from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.native.library import compiled, thread_count
from heavypath.kernels.native.products import TYPES, NormStruct, WeightStruct
from heavypath.kernels.native.recording import Arguments, dense, do, fields
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Taps, TreeMask
from heavypath.speculative.models.linear import Linears, Packed, are_plain

FEW_ROWS = 8  # from which on PyTorch's products of 16 bits are faster


class _NativeLayer(Structure):
    _fields_ = [
        *((name, NormStruct) for name in ("norm", "mlp_norm", "query_norm", "key_norm", "beside")),
        ("keeps_normed", c_int64),
        *((name, WeightStruct) for name in ("project", "mix", "gate_and_up", "down")),
        ("scaling", c_double),
        ("window", c_int64),
    ]


class _Model(Structure):
    _fields_ = [
        *fields("layers hidden heads kv_heads head_dim intermediate *layer *embedding"),
        ("norm", NormStruct),
        ("head", WeightStruct),
        *fields("vocab *proposed given"),
        ("join", WeightStruct),
        ("feeds_back_normed", c_int64),
    ]


class _Call(Arguments):
    _fields_ = fields(
        "batch nodes *count *tokens *positions *cache_rows *rotary rotary_positions rope_limit *keys *values cache_size "
        "batch_stride layer_stride head_stride *lengths length_step *mask *ends own_masks columns *given *scratch wanted "
        "*logits *outputs outputs_stride *taps threads"
    )


class Ends(NamedTuple):
    """The parts of a pass before and after its layers; those with defaults are of heads that read given states.

    embedding:  [V, H]
    norm:       the last one; None for none
    lm_head:    a linear layer
    vocab_size: of the logits
    given:      columns of the given states
    join:       the linear layer that the first layer's input is made by, of embedding and given states side by side;
                None for the given states themselves
    proposed:   LongTensor[Vd], the tokens that the outputs of the lm_head are; None for all in their order
    feeds_back_normed: whether `Fed.outputs` are behind the last norm
    """

    embedding: Tensor
    norm: Norm | None
    lm_head: nn.Linear
    vocab_size: int
    given: int = 0
    join: nn.Linear | None = None
    proposed: Tensor | None = None
    feeds_back_normed: bool = False


class GivenStates(NamedTuple):
    """The further arguments of a pass of a head.

    given:   [B, N, F], hidden states beside the tokens
    count:   LongTensor[1], how many nodes there are now, at most N: then the first B * count rows are those of all
             tensors; None for N
    outputs: [B, rows, H]: what entries below these are given, written to their cache rows; None for nowhere
    wanted:  of how many of the last nodes there are outputs and logits
    """

    given: Tensor
    count: Tensor | None
    outputs: Tensor | None
    wanted: int


class NativePass:
    """The compiled pass over layers of a Llama-family model, or of a head.

    layers: as `LlamaForward` describes them; rope_limit: as `Forward`'s
    """

    def __init__(self, layers: Sequence[Any], ends: Ends, linears: Linears, rope_limit: int | None = None):
        self._rope_limit = -1 if rope_limit is None else rope_limit
        self._kept: list[object] = [layers, ends]  # what the structures point to

        def packed(modules: Sequence[nn.Linear], paired: bool = False) -> WeightStruct:
            copied = linears.copy_of(modules, paired)
            self._kept.append(copied)
            return copied.blocks.struct

        structures = (_NativeLayer * len(layers))()
        for own, layer in zip(structures, layers, strict=True):
            norms = layer.norm, layer.mlp_norm, *(layer.head_norms or (None, None)), layer.hidden_norm
            for place, norm in zip((own.norm, own.mlp_norm, own.query_norm, own.key_norm, own.beside), norms, strict=True):
                place.take(norm)
            own.keeps_normed = layer.norm_before_residual
            own.project, own.mix = packed(layer.projections), packed([layer.mixing])
            own.gate_and_up, own.down = packed(layer.gates, paired=True), packed([layer.last])
            own.scaling, own.window = layer.scaling, layer.window or 0
        query, key, _ = (len(projection.weight) // layers[0].head_dim for projection in layers[0].projections)
        self._kept.append(structures)
        self._model = _Model(
            layers=len(layers),
            hidden=ends.embedding.shape[1],
            heads=query,
            kv_heads=key,
            head_dim=layers[0].head_dim,
            intermediate=len(layers[0].gates[0].weight),
            layer=addressof(structures),
            embedding=ends.embedding.data_ptr(),
            head=packed([ends.lm_head]),
            vocab=ends.vocab_size,
            proposed=None if ends.proposed is None else ends.proposed.data_ptr(),
            given=ends.given,
            feeds_back_normed=ends.feeds_back_normed,
        )
        self._model.norm.take(ends.norm)
        if ends.join is not None:
            self._model.join = packed([ends.join])
        self._bytes = sum(kept.blocks.weight.nbytes for kept in self._kept if isinstance(kept, Packed))
        self._dtype = ends.embedding.dtype

    def takes(self, rows: int) -> bool:
        """True if so many rows are faster by the compiled pass; for 16 bits processors may have instructions."""
        return self._dtype == torch.float32 or rows <= FEW_ROWS

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache_rows: Tensor,
        cache: KeyValueCache,
        mask: TreeMask,
        *,
        needs_logits: bool = True,
        taps: Taps | None = None,
        states: GivenStates | None = None,
    ) -> Tensor:
        """As of `LlamaForward`; with `states` logits [B, wanted, V] of a head."""
        lib = compiled()
        assert cache.rotary is not None
        batch, nodes = tokens.shape
        rotary, lengths, (keys, values) = cache.rotary, dense(mask.prefix_length), cache.read(0)
        layer_bytes = cache.read(1)[0].data_ptr() - keys.data_ptr() if self._model.layers > 1 else 0
        ends = None if mask.subtree_end is None else dense(mask.subtree_end)
        seen = None if mask.ancestor_mask is None else dense(mask.ancestor_mask)
        shape = ends[..., None, :] if seen is None and ends is not None else seen
        assert shape is not None
        given, count, outputs, wanted = GivenStates(torch.empty(0), None, None, nodes) if states is None else states
        logits = torch.empty(batch, wanted if needs_logits else 0, self._model.vocab, dtype=self._dtype)
        call = _Call(
            batch=batch,
            nodes=nodes,
            count=count,
            tokens=dense(tokens),
            positions=dense(positions),
            cache_rows=dense(cache_rows),
            rotary=rotary,
            rotary_positions=rotary.shape[-3],
            rope_limit=self._rope_limit,
            keys=keys,
            values=values,
            cache_size=keys.shape[2],
            batch_stride=keys.stride(0),
            layer_stride=layer_bytes // keys.itemsize,
            head_stride=keys.stride(1),
            lengths=lengths,
            length_step=int(lengths.dim() > 0 and len(lengths) > 1),
            mask=seen,
            ends=ends,
            own_masks=shape.dim() > 2 and len(shape) > 1,
            columns=shape.shape[-1],
            given=dense(given),
            wanted=wanted,
            logits=logits if needs_logits else None,
            outputs=outputs,
            outputs_stride=0 if outputs is None else outputs.stride(0),
            threads=thread_count(self._bytes),
        )
        tapped: dict[int, Tensor] = {}
        if taps is not None:
            tapped = {number: logits.new_empty(batch, nodes, self._model.hidden) for number in taps.numbers}
            places = (c_void_p * (self._model.layers + 1))()
            for number, tap in tapped.items():
                places[number] = tap.data_ptr()
            call.taps = addressof(places)
            call.kept += places, tapped
        scratch = torch.empty(lib.llama_scratch(byref(self._model), byref(call)))
        call.scratch = scratch.data_ptr()
        call.kept += self, scratch
        do(partial(getattr(lib, f"llama_{TYPES[self._dtype]}"), byref(self._model), byref(call)), call)
        if taps is not None:
            taps.take(tapped, tokens, cache_rows)
        return logits


def native_pass(
    layers: Sequence[Any], weights: Sequence[Tensor], ends: Ends, linears: Linears, rope_limit: int | None = None
) -> NativePass | None:
    """The compiled pass of a model, or None where it has parts that are not compiled, or no memory for their copies.

    weights: all that the pass reads
    """
    further = [ends.lm_head] if ends.join is None else [ends.lm_head, ends.join]
    every = [each for layer in layers for each in layer.linears] + further
    one_type = len({(weight.dtype, weight.device) for weight in weights}) == 1 and weights[0].dtype in TYPES
    plain = all(type(weight) is nn.Parameter and weight.is_contiguous() for weight in weights)
    usual = all(layer.gated is silu_product for layer in layers) and ends.embedding.shape[1] > 0
    if not (linears.can_copy and one_type and plain and usual and are_plain(every)):
        return None
    return NativePass(layers, ends, linears, rope_limit)
