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
from heavypath.kernels.native.library import compiled, thread_count
from heavypath.kernels.native.products import TYPES, NormStruct, WeightStruct
from heavypath.kernels.native.recording import Arguments, fields, launch
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Taps, TreeMask
from heavypath.speculative.models.linear import Linears, Packed, are_plain, is_silu

FEW_ROWS = 8  # with more rows, PyTorch's 16-bit products are faster


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
            norms = layer.norm, layer.mlp_norm, *(layer.head_norms or (None, None)), layer.hidden_norm
            for (name, _), norm in zip(own._fields_, norms, strict=False):
                getattr(own, name).take(norm)
            own.keeps_normed = layer.norm_before_residual
            own.project = packed(layer.projections)
            own.mix = packed([layer.mixing])
            own.gate_and_up = packed(layer.gates, paired=True)
            own.down = packed([layer.last])
            own.scaling = layer.scaling
            own.window = layer.window or 0
        embedding = ends.embedding
        first = layers[0]
        heads, kv_heads, _ = (len(projection.weight) // first.head_dim for projection in first.projections)
        self._model = _Model(
            len(layers),
            embedding.shape[1],
            heads,
            kv_heads,
            first.head_dim,
            len(first.gates[0].weight),
            addressof(structures),
            embedding.data_ptr(),
            ends.vocab_size or len(ends.lm_head.weight),
            None if ends.proposed is None else ends.proposed.data_ptr(),
            ends.given,
            ends.feeds_back_normed,
            head=packed([ends.lm_head]),
        )
        self._model.norm.take(ends.norm)
        if ends.join is not None:
            self._model.join = packed([ends.join])
        self._bytes = sum(kept.blocks.weight.nbytes for kept in self._kept if isinstance(kept, Packed))
        self._dtype = embedding.dtype

    def takes(self, rows: int) -> bool:
        """Whether the compiled pass is faster for this many rows. With many 16-bit rows PyTorch is faster."""
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
        """Logits [B, N, V] after each token, with arguments as in `Forward.__call__`.

        states: further inputs and outputs of a draft head; the logits are then [B, wanted, V]
        """
        lib = compiled()
        batch, nodes = tokens.shape
        rotary = cache.rotary
        assert rotary is not None
        lengths = mask.prefix_length.contiguous()
        keys, values = cache.read(0)
        layer_bytes = cache.read(1)[0].data_ptr() - keys.data_ptr() if self._model.layers > 1 else 0
        assert not isinstance(mask.ancestor_mask, PackedAncestors)  # which only a GPU packs
        ends, seen = (None if each is None else each.contiguous() for each in (mask.subtree_end, mask.ancestor_mask))
        shape = seen if ends is None else ends[..., None, :]
        assert shape is not None
        given, wanted, outputs, present = states or GivenStates(None, nodes)
        logits = torch.empty(batch, wanted if needs_logits else 0, self._model.vocab, dtype=self._dtype, device="cpu")
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
            None if given is None else given.contiguous(),
            wanted=wanted,
            outputs=outputs,
            outputs_stride=0 if outputs is None else outputs.stride(0),
            threads=thread_count(self._bytes),
        )
        numbers = () if taps is None else taps.numbers
        tapped = {number: logits.new_empty(batch, nodes, self._model.hidden) for number in numbers}
        if tapped:
            places = (c_void_p * (self._model.layers + 1))()
            for number, tap in tapped.items():
                places[number] = tap.data_ptr()
            call.taps = addressof(places)
            call.kept += places, tapped
        scratch = torch.empty(lib.llama_scratch(byref(self._model), byref(call)), dtype=torch.float32, device="cpu")
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
    every = [*(each for layer in layers for each in layer.linears), *filter(None, (ends.lm_head, ends.join))]
    one_type = len({(weight.dtype, weight.device) for weight in weights}) == 1 and weights[0].dtype in TYPES
    plain = all(type(weight) is nn.Parameter and weight.is_contiguous() for weight in weights)
    usual = all(is_silu(layer.activation) for layer in layers) and ends.embedding.shape[1] > 0
    if not (linears.can_copy and one_type and plain and usual and are_plain(every)):
        return None
    return NativePass(layers, ends, linears, rope_limit)
