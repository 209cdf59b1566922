"""The forward pass of a Llama-family model on a CPU in one call of compiled code: `kernels/native/llama.cpp`.

PyTorch's operations are the reference: `LlamaForward` does the same with them, where nothing can be compiled. A step of
a small model has some two hundred of those, each of which costs microseconds beside what it computes.
"""

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_double, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heavypath.kernels.layers.gated import silu_product
from heavypath.kernels.layers.rms_norm import Norm
from heavypath.kernels.native.library import compiled, thread_count
from heavypath.kernels.native.products import TYPES, WeightStruct
from heavypath.kernels.native.recording import dense, do
from heavypath.speculative.models.caches import KeyValueCache
from heavypath.speculative.models.forward import Taps, TreeMask
from heavypath.speculative.models.linear import Linears, Packed, are_plain

FEW_ROWS = 8  # from which on PyTorch's products of 16 bits are faster


class _Norm(Structure):
    _fields_ = [("weight", c_void_p), ("epsilon", c_double)]


class _NativeLayer(Structure):
    _fields_ = [
        *((name, _Norm) for name in ("norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, WeightStruct) for name in ("project", "mix", "gate_and_up", "down")),
        ("scaling", c_double),
        ("window", c_int64),
    ]


class _Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        ("layer", c_void_p),
        ("embedding", c_void_p),
        ("norm", _Norm),
        ("head", WeightStruct),
    ]


class _Call(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "nodes")),
        *((name, c_void_p) for name in ("tokens", "positions", "cache_rows", "rotary")),
        *((name, c_int64) for name in ("rotary_positions", "rope_limit")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("cache_size", "batch_stride", "layer_stride", "head_stride")),
        ("lengths", c_void_p),
        ("length_step", c_int64),
        *((name, c_void_p) for name in ("mask", "ends")),
        *((name, c_int64) for name in ("mask_step", "columns")),
        *((name, c_void_p) for name in ("scratch", "logits", "taps")),
        ("threads", c_int64),
    ]


class NativePass:
    """The compiled pass over some of the layers of a Llama-family model.

    layers: as `LlamaForward` describes them; rope_limit: as `Forward`'s
    """

    def __init__(self, layers: Sequence[Any], model: Any, norm: Norm, linears: Linears, rope_limit: int | None):
        config, self._rope_limit = model.config, -1 if rope_limit is None else rope_limit
        self._kept: list[object] = []  # what the structures point to

        def packed(modules: Sequence[nn.Linear], paired: bool = False) -> WeightStruct:
            copied = linears.copy_of(modules, paired)
            self._kept.append(copied)
            return copied.blocks.struct

        structures = (_NativeLayer * len(layers))()
        for own, layer in zip(structures, layers, strict=True):
            own.norm, own.mlp_norm = self._norm(layer.norm), self._norm(layer.mlp_norm)
            if layer.head_norms is not None:
                own.query_norm, own.key_norm = map(self._norm, layer.head_norms)
            own.project, own.mix = packed(layer.projections), packed([layer.mixing])
            own.gate_and_up, own.down = packed(layer.gates, paired=True), packed([layer.last])
            own.scaling, own.window = layer.scaling, layer.window or 0
        embedding = model.get_input_embeddings().weight
        self._kept += [structures, embedding]
        first = model.model.layers[0]
        self._model = _Model(
            layers=len(layers),
            hidden=embedding.shape[1],
            heads=len(first.self_attn.q_proj.weight) // first.self_attn.head_dim,
            kv_heads=config.num_key_value_heads,
            head_dim=first.self_attn.head_dim,
            intermediate=len(first.mlp.gate_proj.weight),
            layer=addressof(structures),
            embedding=embedding.data_ptr(),
            norm=self._norm(norm),
            head=packed([model.lm_head]),
        )
        self._vocab_size: int = len(model.lm_head.weight)
        self._bytes = sum(kept.blocks.weight.nbytes for kept in self._kept if isinstance(kept, Packed))
        self._dtype = embedding.dtype

    def takes(self, rows: int) -> bool:
        """True if so many rows are faster by the compiled pass; for 16 bits processors may have instructions."""
        return self._dtype == torch.float32 or rows <= FEW_ROWS

    def _norm(self, norm: Norm) -> _Norm:
        self._kept.append(norm)
        return _Norm(norm.weight.data_ptr(), norm.epsilon)

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
    ) -> Tensor:
        """As of `LlamaForward`."""
        lib = compiled()
        assert cache.rotary is not None
        batch, nodes = tokens.shape
        rotary, lengths, (keys, values) = cache.rotary, dense(mask.prefix_length), cache.read(0)
        layer_bytes = cache.read(1)[0].data_ptr() - keys.data_ptr() if self._model.layers > 1 else 0
        given = [*map(dense, (tokens, positions, cache_rows))]
        ends = seen = None
        if mask.ancestor_mask is not None:
            seen = dense(mask.ancestor_mask)
            own, columns = seen.dim() > 2 and len(seen) > 1, seen.shape[-1]
        else:
            assert mask.subtree_end is not None
            ends = dense(mask.subtree_end)
            own, columns = ends.dim() > 1 and len(ends) > 1, nodes
        logits = torch.empty(batch, nodes if needs_logits else 0, self._vocab_size, dtype=self._dtype)
        call = _Call(
            batch=batch,
            nodes=nodes,
            tokens=given[0].data_ptr(),
            positions=given[1].data_ptr(),
            cache_rows=given[2].data_ptr(),
            rotary=rotary.data_ptr(),
            rotary_positions=rotary.shape[-3],
            rope_limit=self._rope_limit,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            cache_size=keys.shape[2],
            batch_stride=keys.stride(0),
            layer_stride=layer_bytes // keys.itemsize,
            head_stride=keys.stride(1),
            lengths=lengths.data_ptr(),
            length_step=int(lengths.dim() > 0 and len(lengths) > 1),
            mask=None if seen is None else seen.data_ptr(),
            ends=None if ends is None else ends.data_ptr(),
            mask_step=(columns if seen is None else nodes * columns) if own else 0,
            columns=columns,
            logits=logits.data_ptr() if needs_logits else None,
            threads=thread_count(self._bytes),
        )
        tapped: dict[int, Tensor] = {}
        if taps is not None:
            tapped = {number: logits.new_empty(batch, nodes, self._model.hidden) for number in taps.numbers}
            places = (c_void_p * (self._model.layers + 1))()
            for number, states in tapped.items():
                places[number] = states.data_ptr()
            call.taps = addressof(places)
        scratch = torch.empty(lib.llama_scratch(byref(self._model), byref(call)))
        call.scratch = scratch.data_ptr()
        run = getattr(lib, f"llama_{TYPES[self._dtype]}")
        kept = self, call, given, rotary, lengths, keys, values, seen, ends, scratch, logits, tapped
        do(partial(run, byref(self._model), byref(call)), kept)
        if taps is not None:
            taps.take(tapped, tokens, positions, cache_rows)
        return logits


def native_pass(
    layers: Sequence[Any], model: Any, norm: Norm, linears: Linears, rope_limit: int | None
) -> NativePass | None:
    """The compiled pass of a model, or None where it has parts that are not compiled, or no memory for their copies."""
    every = [each for layer in layers for each in layer.linears] + [model.lm_head]
    weights = [*model.parameters()]
    one_type = len({(weight.dtype, weight.device) for weight in weights}) == 1 and weights[0].dtype in TYPES
    plain = all(type(weight) is nn.Parameter and weight.is_contiguous() for weight in weights)
    usual = all(layer.gated is silu_product for layer in layers) and model.get_input_embeddings().weight.shape[1] > 0
    if not (linears.can_copy and one_type and plain and usual and are_plain(every)):
        return None
    return NativePass(layers, model, norm, linears, rope_limit)
