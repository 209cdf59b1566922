"""Helpers of tests/mutants/test_mutations.py and its neighbours."""

import importlib.util
import inspect
import sys
from types import ModuleType


def mutated(module: ModuleType, original: str, replacement: str) -> ModuleType:
    """A copy of a module in which some text of its source is replaced."""
    source = inspect.getsource(module)
    assert original in source, f"{original!r} is not in {module.__name__}: update the mutation"
    spec = importlib.util.spec_from_loader(f"{module.__name__}_mutated", loader=None)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy  # dataclasses look their module up
    exec(compile(source.replace(original, replacement), f"<mutated {module.__name__}>", "exec"), copy.__dict__)
    return copy
