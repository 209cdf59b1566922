"""Triton's interpreter in half of its time: its language is made to run in NumPy once a launch, not at every call."""

from triton.runtime import interpreter


def patch_once_a_launch() -> None:
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
