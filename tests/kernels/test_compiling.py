"""Kernels are compiled side by side, and later launches find them; a GPU that is not there is compiled for."""

import pytest
import torch
from fresh_python import BENCH, python
from tiny_models import small_llama

from heavypath.kernels import compiling
from heavypath.speculative import SpeculativeDecoder

LAUNCHES = """
import sys, threading
sys.path.insert(0, BENCH)
import torch
from machine_code import compile_for
from triton import knobs
from triton.compiler import CompiledKernel
from heavypath.kernels.compiling import compile_all, uncompiled_launches

launched, compiled, loaded, devices = [], [], [], []
compile_for(90, launched.append)
run = CompiledKernel.run.fget
CompiledKernel.run = property(lambda kernel: loaded.append(threading.get_ident()) or run(kernel))
torch.cuda.set_device = devices.append
from compile_cases import CASES
cases = [CASES[name] for name in ("gate bf16 F11008", "norm bf16 K768 added", "rotary bf16 12:12 D64")]
knobs.runtime.jit_post_compile_hook = lambda **told: compiled.append(threading.get_ident())

before = knobs.runtime.jit_cache_hook
with torch.inference_mode():
    with uncompiled_launches() as noted:
        for case in cases * 2:  # what is launched twice is compiled once
            case()
        assert not launched and not compiled and not noted
        other = threading.Thread(target=torch.inference_mode()(cases[0]))  # another thread is not held up
        other.start()
        other.join()
        assert launched and len(compiled) == len(launched)
    assert knobs.runtime.jit_cache_hook is before
    alone = len(launched)
    compile_all(noted, torch.device("cuda", 0))
    assert len(compiled) == alone + len(noted) and threading.get_ident() not in compiled
    assert len(loaded) == len(launched) + len(noted) and threading.get_ident() not in loaded[len(launched) :]
    assert {*devices} == {torch.device("cuda", 0)}
    done = len(compiled)
    for case in cases:
        case()
    assert len(compiled) == done and len(launched) > alone
print(len(noted), len(launched))
"""


@pytest.mark.integration
def test_noted_launches_are_compiled_and_loaded_in_threads_and_found_again():
    done = python("-c", LAUNCHES.replace("BENCH", repr(str(BENCH))))
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_does_not_compile_says_so(monkeypatch):
    def fails():
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(RuntimeError, match="no such instruction"):
        compiling.compile_all([fails], torch.device("cpu"))


@pytest.mark.parametrize("graphs", [True, False])
def test_warming_up_compiles_what_a_captured_step_launches(graphs, as_on_a_gpu, monkeypatch):
    as_on_a_gpu()
    told = []
    monkeypatch.setattr("heavypath.speculative.decoding.graphs.compile_all", lambda _, device: told.append(device))
    decoder = SpeculativeDecoder(small_llama(1), small_llama(2), tree_size=2, cuda_graphs=graphs)
    decoder.warm_up(prompt_tokens=4, max_new_tokens=8, temperature=0.8)
    assert told == [torch.device("cpu")] * 2 * graphs, "prompts, and a step"
