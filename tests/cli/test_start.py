"""The start of the `heavypath` command: what it does not import, and that its words are those of the package."""

import os
import re
import subprocess
import sys

import pytest
import torch

from heavypath.kernels import ordering
from heavypath.kernels.attention import layouts
from heavypath.speculative import calibration, methods
from heavypath.speculative.cli import options, planning
from heavypath.speculative.training.losses import LOSSES, lk, tv_kl

SLOW = ("torch", "transformers", "triton", "heavypath.speculative.models", "heavypath.speculative.decoder")
COMMANDS = (
    "demo", "generate", "chat", "serve", "batch", "compare", "info", "calibrate", "plan", "distil", "layers", "trace",
)  # fmt: skip


def test_the_words_of_options_are_those_of_the_package():
    """They are written twice, since the package's own come with PyTorch."""
    assert tuple(methods.METHODS) == options.METHODS
    assert options.LOSSLESS_METHODS == methods.LOSSLESS_METHODS
    assert options.VERIFIERS == methods.VERIFIERS
    assert tuple(name for name, row in methods.METHODS.items() if row.verifiers) == options.METHODS_WITH_VERIFIERS
    assert options.MAX_NODES == layouts.MAX_NODES == ordering.MAX_NODES
    assert planning.LIMIT == calibration.LIMIT
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in options.Precision)
    assert {"tv-kl": tv_kl, "lk": lk} == LOSSES


def test_help_has_the_commands_that_are_needed_first_before_the_others(heavypath):
    code, text, _ = heavypath("--help")
    listed = re.findall(r"^│ (\w+)  ", text.partition("Commands")[2], re.MULTILINE)
    assert (code, listed) == (0, [*COMMANDS])


def loaded(*lines):
    """The modules that are slow to import and that a new process has imported after these command lines."""
    program = f"""
import contextlib, io, sys
from pathlib import Path
sys.argv = ["heavypath"]  # as the command has it
from heavypath.speculative.cli import app, info
info.DRIVER, info.DEVICES = Path("/none"), ()  # as on a machine without a GPU
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    codes = [app.main(line.split()) for line in {lines!r}]
print(*codes)
print(*[name for name in {(*SLOW, "numpy")!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    codes, modules = done.stdout.splitlines()
    return [int(code) for code in codes.split()], modules.split()


@pytest.mark.integration
def test_what_computes_nothing_imports_nothing_that_is_slow():
    asked = ("--version", "--help", "info", *(f"{command} --help" for command in COMMANDS))
    assert loaded(*asked) == (len(asked) * [0], [])
    wrong = ("generate", "generate x --beams 4", "generate x --method medusa", "compare", "serve --method medusa", "no")
    codes, modules = loaded(*wrong)
    assert all(codes)
    assert modules == []


WITHOUT_TRITON = """
import sys
if sys.argv.pop():
    sys.modules["triton"] = None
import torch
from heavypath import SpeculativeDecoder, load_demo_pair
from heavypath.kernels.layers.gated import silu_product
from heavypath.speculative.cli.app import main
target, draft, tokenizer = load_demo_pair()
ids = tokenizer("class Stack:", return_tensors="pt").input_ids
for method in ("sequoia", "dyspec", "ersd"):
    print(SpeculativeDecoder(target, draft, method).generate(ids, 12, 0.8, top_k=20, seed=2).sequences.tolist())
assert main(["generate", "def read_lines(path):", "--max-new-tokens", "12"]) == 0
if sys.modules["triton"] is None:
    try:
        silu_product(torch.ones(1, 2), torch.ones(1, 2), impl="triton")
    except ValueError as error:
        print(error, file=sys.stderr)
"""


@pytest.mark.integration
@pytest.mark.parametrize("native", ["0", "1"])
def test_without_triton_the_text_is_the_same_and_a_kernel_says_what_is_missing(native):
    both = [
        subprocess.run(
            [sys.executable, "-c", WITHOUT_TRITON, argument], capture_output=True, text=True, check=True,
            env=os.environ | {"HEAVYPATH_NATIVE": native, "TRITON_INTERPRET": "0"},
        )
        for argument in ("", "without")
    ]  # fmt: skip
    assert len(both[0].stdout) > 100
    assert both[0].stdout == both[1].stdout
    assert "silu_product: impl 'triton' needs the package triton, which is not installed" in both[1].stderr
