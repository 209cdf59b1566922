"""Run the mixers of transformers' recurrent layers over the nodes of a tree.

All model families call functions of the same names for computations with a state, and get the state from the cache. So
the model is copied, over the same weights, and in the copy's mixers these names refer to our functions; the rest of
their code is unchanged. In place of a state, the cache returns a `Layer`, which knows how to process nodes. The
original model is not changed.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import Cache

from heavypath.kernels.recurrent.delta import tree_delta
from heavypath.kernels.recurrent.kda import tree_kda
from heavypath.kernels.recurrent.ssd import tree_ssd
from heavypath.speculative.models.functions import is_as_written, is_of_library

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# Names by which a mixer gets its state from a cache; the second of each is from before transformers 5.21.
CONVOLVED = {"get_conv_state", "conv_states"}
RECURRENT = {"get_recurrent_state", "recurrent_states"}


class Layer(Protocol):
    """Stands for one layer's state in a pass, and does the mixer's computations with it for the pass's tokens."""

    @property
    def state(self) -> Tensor:
        """The layer's recurrent state, fp32 [B, H, Dk, Dv]."""
        ...

    def convolved(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """The convolution [B, C, N] of inputs [B, C, N] along each path; weight [C, K], bias [C]."""
        ...

    def clamped(self, steps: Tensor, limits: tuple[float, float] | None) -> Tensor:
        """Time steps [B, N, H] of Mamba-2; those of prompt tokens are clamped.

        limits: least and most; None if the mixer does not pass them
        """
        ...

    def recur(self, rule: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        """The outputs [B, N, H, Dv] of a recurrence over the pass's tokens.

        rule: its function, such as `tree_delta`; inputs: the function's arguments before the state
        """
        ...


class NewColumns(NamedTuple):
    """The inputs [B, C, N] of a layer's convolution in this pass, and the `Layer` that has its state.

    A mixer gets this in place of one tensor with the state and the inputs, and passes it to the convolution.
    """

    layer: Layer
    columns: Tensor


class StatesCache(Cache):
    """A cache with the methods by which transformers' mixers get their states; here they get a `Layer` for each."""

    def state(self, layer: int, which: int) -> Any:
        """The `Layer` for state number `which` of a layer."""
        raise NotImplementedError

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """The `Layer` that a mixer gets in place of its convolution's state."""
        return self.state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """The `Layer` that a mixer gets in place of its recurrent state."""
        return self.state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """The `Layer` with the inputs of its convolution, given as conv_states [B, C, N]."""
        return NewColumns(self.state(layer_idx, state_idx), conv_states)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the states unchanged: they move when nodes are accepted."""
        return recurrent_states

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """True: a sequence without a token has states, too."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: no past states are recorded."""
        return False

    @property
    def layers(self) -> Any:
        """The states by layer, as in `layers[2].conv_states[0]`, for mixers before transformers 5.21."""
        return _By(
            lambda layer: SimpleNamespace(
                record_past=False,
                conv_states=_By(partial(self.get_conv_state, layer)),
                recurrent_states=_By(partial(self.get_recurrent_state, layer)),
            )
        )

    @layers.setter
    def layers(self, layers: Any) -> None:
        """Accept the list that every cache of transformers assigns; here it is always empty."""


class _By:
    """An object whose items are the results of a function of the index."""

    def __init__(self, function: Callable[[int], Any]):
        self._function = function

    def __getitem__(self, index: int) -> Any:
        return self._function(index)


def _conv_fn(
    hidden_states: NewColumns, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    return hidden_states.layer.convolved(hidden_states.columns, weight, bias, activation)


def _conv_update(
    hidden_states: Tensor, conv_state: Layer, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    return conv_state.convolved(hidden_states, weight, bias, activation)


def _rule(rule: Any) -> Any:
    """Wrap a rule over tree nodes, such as `tree_delta`, so that mixers can call it as transformers' delta rule."""

    def apply(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Layer,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        if not use_qk_l2norm_in_kernel:
            raise ValueError("delta rules are known with normalised keys alone, got use_qk_l2norm_in_kernel=False")
        return initial_state.recur(rule, (query, key, value, g, beta)), initial_state.state

    return apply


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    chunk_size: int | None = None,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_states: Layer,
    dt_limit: tuple[float, float] | None = None,
    return_final_states: bool = False,
    **more: Any,
) -> Any:
    """Mamba-2 of nodes: hidden_states [B, N, H, P], dt [B, N, H], decay [H], key and query [B, N, groups, D].

    more: D [H], the skip connection's weights
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = initial_states.clamped(softplus(dt) if dt_softplus else dt, dt_limit)
    values = hidden_states.float()
    skip = more.get("D")
    inputs = query, key, values * dt.float()[..., None], dt.float() * decay.float()
    out = initial_states.recur(tree_ssd, inputs)
    out = out if skip is None else out + skip[..., None] * values
    return (out, initial_states.state) if return_final_states else out


def mamba2_selective_state_update(
    state: Layer,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    skip: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Mamba-2 of one node, as mixers call it: each number of a head is repeated over the head's columns."""
    weight, bias = (None if each is None else each[:, 0] for each in (skip, dt_bias))
    out = mamba2_chunk_scan(
        x[:, None],
        dt[:, None, :, 0],
        decay[:, 0, 0],
        key[:, None],
        query[:, None],
        D=weight,
        dt_bias=bias,
        dt_softplus=dt_softplus,
        initial_states=state,
    )[:, 0]
    return (out if z is None else out * silu(z)).to(x.dtype)


CONVOLUTIONS = {"causal_conv1d_fn": _conv_fn, "causal_conv1d_update": _conv_update}
RULES = {
    "torch_chunk_gated_delta_rule": _rule(tree_delta),
    "torch_recurrent_gated_delta_rule": _rule(tree_delta),
    "chunk_kimi_delta_attention": _rule(tree_kda),
    "recurrent_kimi_delta_attention": _rule(tree_kda),
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba2_selective_state_update": mamba2_selective_state_update,
}


def mixers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that get a state from a cache, with their names."""
    return ((name, each) for name, each in model.named_modules() if (CONVOLVED | RECURRENT) & _names(each))


def check_mixers(model: nn.Module, name: str) -> None:
    """Raise ValueError for a mixer that uses its state by other than the known functions."""
    found = [*mixers_of(model)]
    if not found:
        raise ValueError(
            f"{name} of type {_type(model)} has a recurrent state, and no layer that asks a cache for it, as those of "
            f"transformers do that call {', '.join(RULES)}"
        )
    for where, mixer in found:
        names = _names(mixer)
        known = {*CONVOLUTIONS} <= names and (not RECURRENT & names or {*RULES} & names)
        replaced = _replaced(type(mixer))
        if replaced:
            raise ValueError(
                f"{name} of type {_type(model)} cannot be decoded by trees: in layer {where}, a "
                f"{type(mixer).__name__}, {', '.join(replaced)} is not transformers' own any more, so its state over "
                "a tree's nodes is not known; undo the patch"
            )
        if "forward" in vars(mixer) or not known:
            how = "a forward of its own" if "forward" in vars(mixer) else "functions that are not known"
            raise ValueError(
                f"{name} of type {_type(model)} cannot be decoded by trees: layer {where}, a {type(mixer).__name__}, "
                f"keeps a recurrent state by {how}; known are {', '.join([*CONVOLUTIONS, *RULES])}"
            )


def _replaced(kind: type[nn.Module]) -> list[str]:
    """Names of what was replaced in a class of mixers: its forward, or library functions that ours stand in for."""
    names: Any = inspect.unwrap(kind.forward).__globals__
    functions = (name for name in (*CONVOLUTIONS, *RULES) if not is_of_library(names.get(name)))
    return [*(() if is_as_written(kind) else ("forward",)), *functions]


def over_trees(model: ModuleT) -> ModuleT:
    """A copy of a model, over the same weights, whose recurrent layers compute over the nodes of a tree.

    Their mixers take a `Layer` from the cache in place of a state.
    """
    made: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            kind: Any = type(module)
            one = made[id(module)] = kind.__new__(kind)  # `copy` asks for a state, which parametrized modules refuse
            vars(one).update(vars(module))
            for name, hooks in vars(module).items():  # transformers adds hooks when hidden states are requested
                if name.endswith(("_hooks", "_with_kwargs", "_always_called")) and isinstance(hooks, dict):
                    vars(one)[name] = copy(hooks)
            one._modules = {name: child and copied(child) for name, child in module._modules.items()}
            if (CONVOLVED | RECURRENT) & _names(module):
                one.forward = MethodType(_with_our_functions(type(module)), one)
        return made[id(module)]

    found: Any = copied(model)
    return found


def _with_our_functions(kind: type[nn.Module]) -> FunctionType:
    """A copy of the forward of a class of mixers, in which convolutions and rules are our functions over nodes."""
    forward: Any = inspect.unwrap(kind.forward)
    ours = {**forward.__globals__, **CONVOLUTIONS, **RULES}
    made = FunctionType(forward.__code__, ours, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _names(module: nn.Module) -> set[str]:
    """The names in the code of a module's forward."""
    forward: Any = inspect.unwrap(type(module).forward)
    return {*getattr(getattr(forward, "__code__", None), "co_names", ())}


def _type(model: Any) -> str:
    return repr(model.config.model_type)
