"""The forward pass of a Llama-family model on a CPU as one call of compiled code: `kernels/native/llama.cpp`.

`LlamaForward` does the same with PyTorch's operations. It is the reference, and runs where nothing can be compiled. A
step of a small model has some two hundred PyTorch operations, and each costs microseconds besides its computation.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heavypath.kernels.attention.masks import PackedAncestors
from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.native import library
from heavypath.kernels.native.library import compiled, thread_count
from heavypath.kernels.native.products import TYPES, NormStruct, WeightStruct
from heavypath.kernels.native.recording import Arguments, fields, launch
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Taps, TreeMask
from heavypath.speculative.models.linear import Linears, Packed, are_plain, is_silu

FEW_ROWS = 256  # with more rows, PyTorch's products of bf16 are faster on a CPU with AMX


class _NativeLayer(Structure):
    _fields_ = [
        *((name, NormStruct) for name in ("norm", "mlp_norm", "query_norm", "key_norm", "beside")),
        *((name, WeightStruct) for name in ("project", "mix", "gate_and_up", "down")),
        *fields(".scaling window keeps_normed"),
    ]


class _Model(Structure):
    _fields_ = [
        *fields("layers hidden heads kv_heads head_dim intermediate *layer *embedding vocab *proposed given"),
        ("feeds_back_normed", c_int64),
        ("norm", NormStruct),
        *((name, WeightStruct) for name in ("head", "join")),
    ]


class _Call(Arguments):
    _fields_ = fields(
        "batch nodes *present *tokens *positions *cache_rows *rotary rotary_positions rope_limit *keys *values "
        "cache_size batch_stride layer_stride head_stride *lengths length_step *mask *ends own_masks columns *given "
        "*scratch wanted *logits *outputs outputs_stride *taps threads"
    )


class Ends(NamedTuple):
    """The modules and weights of a pass before and after its layers. Fields with defaults are for draft heads.

    embedding:  [V, H]; norm: the last norm, or None
    vocab_size: the number of logits; None for the rows of the lm_head
    given:      F, the columns of the target states that a draft head reads besides tokens
    join:       the linear layer that makes the first layer's input from embedding and target states; None if the
                target states are that input themselves
    proposed:   LongTensor[Vd], which tokens the outputs of the lm_head stand for; None for all tokens in order
    feeds_back_normed: whether the outputs are those after the last norm
    """

    embedding: Tensor
    norm: Norm | None
    lm_head: nn.Linear
    vocab_size: int | None = None
    given: int = 0
    join: nn.Linear | None = None
    proposed: Tensor | None = None
    feeds_back_normed: bool = False


class GivenStates(NamedTuple):
    """Further inputs and outputs of a draft head's pass on a CPU.

    given:   [B, N, F], target states that are read besides tokens; None if there are none
    wanted:  how many of the last nodes need outputs and logits
    outputs: [B, rows, H], filled with the outputs of those nodes at their cache rows; None if they are not needed
    present: LongTensor[1], for a recorded call: only the first B * present rows are valid; None: all N nodes are
    """

    given: Tensor | None
    wanted: int
    outputs: Tensor | None = None
    present: Tensor | None = None


class NativePass:
    """The compiled pass, on a CPU, over the layers of a Llama-family model or of a draft head.

    layers:     an object for each layer, with its modules and shapes, as `llama` makes them
    linears:    makes the reordered copies of the weights
    rope_limit: as in `Forward`
    """

    def __init__(self, layers: Sequence[Any], ends: Ends, linears: Linears, rope_limit: int | None = None):
        self._rope_limit = -1 if rope_limit is None else rope_limit
        structures = (_NativeLayer * len(layers))()
        self._kept: list[object] = [layers, ends, structures]  # kept alive, since the C structures point to them

        def packed(modules: Sequence[nn.Linear], paired: bool = False) -> WeightStruct:
            copied = linears.copy_of(modules, paired)
            self._kept.append(copied)
            return copied.blocks.struct

        for own, layer in zip(structures, layers, strict=True):
            own.norm.take(layer.norm)
            own.mlp_norm.take(layer.mlp_norm)
            query_norm, key_norm = layer.head_norms or (None, None)
            own.query_norm.take(query_norm)
            own.key_norm.take(key_norm)
            own.beside.take(layer.hidden_norm)
            own.keeps_normed = layer.norm_before_residual
            own.project = packed(layer.projections)
            own.mix = packed([layer.mixing])
            own.gate_and_up = packed(layer.gates, paired=True)
            own.down = packed([layer.last])
            own.scaling = layer.scaling
            own.window = layer.window or 0
        embedding = ends.embedding
        first = layers[0]
        queries, keys, _ = first.projections
        gate, _ = first.gates
        proposed = None
        if ends.proposed is not None:
            proposed = ends.proposed.data_ptr()
        self._model = _Model(
            len(layers),
            embedding.shape[1],
            len(queries.weight) // first.head_dim,
            len(keys.weight) // first.head_dim,
            first.head_dim,
            len(gate.weight),
            addressof(structures),
            embedding.data_ptr(),
            ends.vocab_size or len(ends.lm_head.weight),
            proposed,
            ends.given,
            ends.feeds_back_normed,
            head=packed([ends.lm_head]),
        )
        self._model.norm.take(ends.norm)
        if ends.join is not None:
            self._model.join = packed([ends.join])
        self._bytes = 0
        for kept in self._kept:
            if isinstance(kept, Packed):
                self._bytes += kept.blocks.weight.nbytes
        self._dtype = embedding.dtype
        self._in_tiles = embedding.dtype == torch.bfloat16 and library.has_tiles()

    def takes(self, rows: int) -> bool:
        """Whether the compiled pass is faster for this many rows. PyTorch is where AMX multiplies many."""
        return rows <= FEW_ROWS or not self._in_tiles

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
        """Logits [B, N, V] after each token, with arguments as in `Forward.__call__`.

        states: further inputs and outputs of a draft head; the logits are then [B, wanted, V]
        """
        lib = compiled()
        batch, nodes = tokens.shape
        rotary = cache.rotary
        assert rotary is not None
        lengths = mask.prefix_length.contiguous()
        keys, values = cache.read(0)
        layer_bytes = 0  # between the keys of a layer and those of the next one
        if self._model.layers > 1:
            next_keys, _ = cache.read(1)
            layer_bytes = next_keys.data_ptr() - keys.data_ptr()
        ends = mask.subtree_end
        seen = mask.ancestor_mask
        assert not isinstance(seen, PackedAncestors)  # which only a GPU packs
        if seen is not None:
            seen = seen.contiguous()
        shape = seen
        if ends is not None:
            ends = ends.contiguous()
            shape = ends[..., None, :]
        assert shape is not None
        given, wanted, outputs, present = states or GivenStates(None, nodes)
        if given is not None:
            given = given.contiguous()
        rows = wanted if needs_logits else 0
        logits = torch.empty(batch, rows, self._model.vocab, dtype=self._dtype, device="cpu")
        call = _Call(
            batch,
            nodes,
            present,
            tokens.contiguous(),
            positions.contiguous(),
            cache_rows.contiguous(),
            rotary,
            rotary.shape[-3],
            self._rope_limit,
            keys,
            values,
            keys.shape[2],
            keys.stride(0),
            layer_bytes // keys.itemsize,
            keys.stride(1),
            lengths,
            int(lengths.dim() > 0 and len(lengths) > 1),
            seen,
            ends,
            shape.dim() > 2 and len(shape) > 1,
            shape.shape[-1],
            given,
            wanted=wanted,
            outputs=outputs,
            outputs_stride=0 if outputs is None else outputs.stride(0),
            threads=thread_count(self._bytes),
        )
        tapped: dict[int, Tensor] = {}
        if taps is not None and taps.numbers:
            places = (c_void_p * (self._model.layers + 1))()
            for number in taps.numbers:
                tap = logits.new_empty(batch, nodes, self._model.hidden)
                tapped[number] = tap
                places[number] = tap.data_ptr()
            call.taps = addressof(places)
            call.kept += places, tapped
        size = lib.llama_scratch(byref(self._model), byref(call))
        scratch = torch.empty(size, dtype=torch.float32, device="cpu")
        call.scratch = scratch.data_ptr()
        call.logits = logits.data_ptr() if needs_logits else None
        call.kept += self, scratch, logits
        launch(f"llama_{TYPES[self._dtype]}", self._model, call)
        if taps is not None:
            taps.take(tapped, tokens, positions, cache_rows)
        return logits


def native_pass(
    layers: Sequence[Any], weights: Sequence[Tensor], ends: Ends, linears: Linears, rope_limit: int | None = None
) -> NativePass | None:
    """The compiled pass of a model, with arguments as in `NativePass`.

    None if the model has unsupported parts, or there is no memory for copies of its weights.

    weights: all weights that the pass reads
    """
    if not linears.can_copy or ends.embedding.shape[1] == 0:
        return None
    for weight in weights:
        if type(weight) is not nn.Parameter or not weight.is_contiguous():
            return None
    types = {(weight.dtype, weight.device) for weight in weights}
    if len(types) != 1 or weights[0].dtype not in TYPES:
        return None
    products = [each for each in (ends.lm_head, ends.join) if each is not None]
    for layer in layers:
        if not is_silu(layer.activation):
            return None
        products += layer.linears
    if not are_plain(products):
        return None
    return NativePass(layers, ends, linears, rope_limit)
