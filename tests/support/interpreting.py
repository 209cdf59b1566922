"""Triton's interpreter without what it does for nothing, for the same results.

* Its language is made to run in NumPy once a launch, not at every call of a function, by functions that are made once,
  and call those of the language at once.
* It computes each sum and product of whole numbers a second time, in 64 bits, for an assertion that it then does not
  make, because it makes none without `debug`. This is left out.
* The NumPy type of a type, and the shape of a tensor as constants, are looked up instead of being made for each tensor.
* The kernels' random words come from the reference at once, and not in the hundred operations of ten rounds.
  tests/kernels/test_noise.py runs these.
"""

import inspect
import math

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """Change the interpreter of this process."""
    _patch_once_a_launch()
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    _remember_types()
    _draw_at_once()


def _draw_at_once() -> None:
    from heavypath.kernels import noise

    def words(seed_low, seed_high, *counters):
        seed = int(seed_low.handle.data[0]) & 0xFFFFFFFF | int(seed_high.handle.data[0]) << 32
        found = noise.philox(seed, *np.broadcast_arrays(*(counter.handle.data for counter in counters)))
        blocks = any(counter.type.is_block() for counter in counters)
        kind = tl.block_type(tl.uint32, found.shape[:-1]) if blocks else tl.uint32
        return tuple(
            tl.tensor(interpreter.TensorHandle(found[..., place].astype(np.uint32), tl.uint32), kind)
            for place in range(4)
        )

    interpreter.InterpretedFunction.rewritten_fn[noise.philox_words.fn] = words


def _patch_once_a_launch() -> None:
    """Functions of one module share what the first of them has patched; the launch puts it back."""
    launch, patch, modules = interpreter.GridExecutor.__call__, interpreter._patch_lang, []

    def launched(executor, *arguments, **options):
        modules.append(set())  # by the identity of their names
        try:
            return launch(executor, *arguments, **options)
        finally:
            modules.pop()

    def patched(function):
        if modules and id(function.__globals__) in modules[-1]:
            return interpreter._LangPatchScope()
        if modules:
            modules[-1].add(id(function.__globals__))
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, patched
    made = {}

    def at_once(builtin):
        function = getattr(builtin, "__wrapped__", builtin)
        return lambda *given, _semantic=None, **named: function(
            *given, _semantic=interpreter.interpreter_semantic, **named
        )

    def patch_builtins(package, builder, scope):
        if package not in made:
            members = inspect.getmembers(package, tl.core.is_builtin)
            made[package] = [(name, at_once(member)) for name, member in members]
        for name, member in made[package]:
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch_builtins


def _remember_types() -> None:
    """Types of equal names are equal; what is remembered is not changed by anybody."""
    numpy_type, numpy_types = interpreter._get_np_dtype, {}
    describe, blocks, shapes, compare = tl.block_type.__init__, {}, {}, tl.core.tuple.__eq__
    scalar, yes, no = (tl.core.tuple([]), tl.constexpr(1)), tl.constexpr(True), tl.constexpr(False)
    unwrap, is_named, plain = tl.core._unwrap_if_constexpr, tl.dtype.__eq__, {tl.tensor, tl.dtype, int}

    def remembered(kind):
        if kind.name not in numpy_types:
            numpy_types[kind.name] = numpy_type(kind)
        return numpy_types[kind.name]

    def begin(tensor, handle, kind):
        super(tl.tensor, tensor).__init__()
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = kind.as_constants if kind.is_block() else scalar

    def begin_block(block, element, shape):
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if (element.name, sizes) not in blocks:
            describe(block, element, shape)
            shared = shapes.setdefault(sizes, block.shape)
            block.shape, block.as_constants = shared, (
                tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes)),
            )  # fmt: skip
            blocks[element.name, sizes] = dict(vars(block))
        vars(block).update(blocks[element.name, sizes])

    def equals(one, other):
        if one is other:
            return yes
        values = other.values if type(other) is tl.core.tuple else other
        if type(values) is not list:
            return compare(one, other)
        sizes = [[each.value if type(each) is tl.constexpr else each for each in both] for both in (one.values, values)]
        if any(type(each) is not int for both in sizes for each in both):
            return compare(one, other)
        return yes if sizes[0] == sizes[1] else no

    interpreter._get_np_dtype, tl.tensor.__init__, tl.block_type.__init__ = remembered, begin, begin_block
    tl.core.tuple.__eq__ = equals
    tl.core._unwrap_if_constexpr = lambda given: given if type(given) in plain else unwrap(given)
    tl.dtype.__eq__ = lambda one, other: one is other or is_named(one, other)
