"""Triton's interpreter without what it does for nothing, for the same results.

* Its language is made to run in NumPy once a launch, not at every call of a function.
* It computes each sum and product of whole numbers a second time, in 64 bits, for an assertion that it then does not
  make, because it makes none without `debug`. This is left out.
* The NumPy type of a type, and the shape of a tensor as constants, are looked up instead of being made for each tensor.
"""

import math

import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """Change the interpreter of this process."""
    _patch_once_a_launch()
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    _remember_types()


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


def _remember_types() -> None:
    """Types of equal names are equal; what is remembered is not changed by anybody."""
    numpy_type, numpy_types, shapes = interpreter._get_np_dtype, {}, {(): (tl.core.tuple([]), tl.constexpr(1))}
    describe, blocks, compare = tl.block_type.__init__, {}, tl.core.tuple.__eq__

    def remembered(kind):
        if kind.name not in numpy_types:
            numpy_types[kind.name] = numpy_type(kind)
        return numpy_types[kind.name]

    def begin(tensor, handle, kind):
        super(tl.tensor, tensor).__init__()
        shape = kind.shape if kind.is_block() else ()
        if shape not in shapes:
            shapes[shape] = tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = shapes[shape]

    def begin_block(block, element, shape):
        key = element.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in blocks:
            describe(block, element, shape)
            blocks[key] = dict(vars(block))
        vars(block).update(blocks[key])

    interpreter._get_np_dtype, tl.tensor.__init__, tl.block_type.__init__ = remembered, begin, begin_block
    tl.core.tuple.__eq__ = lambda one, other: tl.constexpr(True) if one is other else compare(one, other)
