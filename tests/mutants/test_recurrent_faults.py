"""The tests of recurrent layers can fail: each of these faults, put into the program, is found by the test named here.

Some of them leave the text right, so that only a state or a draft's acceptance shows them. `make mutants` puts in many
more.
"""

import os
import subprocess
import sys
from typing import NamedTuple

import pytest
from mutant_runs import LINKS, ROOT, link_all

pytestmark = [pytest.mark.integration, pytest.mark.slow]
KERNELS, MODELS, PASSES = (
    f"tests/{name}.py::test_"
    for name in ("kernels/test_recurrent", "core/test_recurrent_models", "core/test_recurrent_passes")
)
CACHE, NODES = (f"speculative/models/recurrent/{name}.py" for name in ("cache", "nodes"))


class Fault(NamedTuple):
    """A change of a file, and the test that finds it. native: whether compiled code runs, or references."""

    file: str
    original: str
    changed: str
    test: str
    native: bool = False


RULES = KERNELS + "a_pass_gives_what_the_recurrence_gives_along_each_path"
DIGITS = KERNELS + "strong_gates_above_weak_ones_cost_no_digits"
GREEDY = MODELS + "greedy_texts_are_those_of_transformers_generate"
CLAMP = MODELS + "time_steps_are_clamped_in_prompts_alone_as_generate_does"
WITHOUT_PARENTS = """mask = paths.mask.clone()
    before = paths.before
    own = torch.arange(paths.new)
    parent = own.where(mask.tril(-1), -1).amax(-1)
    mask[torch.arange(len(mask))[:, None], own, parent.clamp(min=0)] &= parent >= own - 1
"""
BY_PATH = """states = getattr(target_cache, "states", None)
        produced = state.produced if states is None else states.position - target_cache.origin + verified.length + 1
        target_cache.advance(verified.path, produced)
"""
FAULTS = {
    "mask after exp": Fault(
        "kernels/recurrent/paths.py", "gap.masked_fill(~mask[:, None], -torch.inf).to(dtype).exp()",
        "gap.to(dtype).exp() * mask[:, None]", f"{RULES}[delta-100.0-1]",
    ),
    "mask after exp in the kernel": Fault(
        "kernels/recurrent/blocks_kernel.py", 'tl.exp(tl.where(seen, gap, float("-inf"))) * key_norm',
        "tl.exp(gap) * seen * key_norm", KERNELS + "kernels_give_what_the_references_give[delta-dtype0]",
    ),
    "sums of gates in fp32": Fault(
        "kernels/recurrent/totals.py", "mask[..., before:].double(), gates.double())",
        "mask[..., before:].float(), gates.float()).double()", f"{DIGITS}[delta-torch]",
    ),
    "sums of gates in fp32 in compiled code": Fault(
        "kernels/native/recurrent.py", "    launch(\"tree_rule\", call)\n",
        "    launch(\"tree_rule\", call)\n    totals = totals.float().double()\n", f"{DIGITS}[delta-auto]", native=True,
    ),
    "a parent's gate left out of all children but the first": Fault(
        "kernels/recurrent/totals.py", "mask = paths.mask\n    before = paths.before\n", WITHOUT_PARENTS,
        f"{RULES}[ssd-0.1-1]",
    ),
    "windows by number instead of ancestors": Fault(
        "kernels/recurrent/paths.py", "device=device).where(self.mask, -1), (0, max(0, taps",
        "device=device).where(torch.ones_like(self.mask).tril(self.before), -1), (0, max(0, taps",
        KERNELS + "a_window_is_the_path_and_the_state_before_it[4]",
    ),
    "states that move by the path, not by what was emitted": Fault(
        "speculative/decoding/step.py", "target_cache.advance(verified.path, state.produced)", BY_PATH,
        f"{GREEDY}[granitemoehybrid]", native=True,
    ),
    "an ended sequence that moves on": Fault(
        CACHE, "produced - self.states.position).clamp(min=0)", "produced - self.states.position).clamp(min=1)",
        PASSES + "a_sequence_that_has_ended_stays_as_it_is[qwen3_5_text]", native=True,
    ),
    "padding that is read": Fault(
        NODES, "(end - begin).clamp(0, self._width).maximum(self._first)", "torch.full_like(begin, self._width)",
        f"{GREEDY}[kimi_linear]", native=True,
    ),
    "the token before the root, read twice": Fault(
        CACHE, "self.ends.copy_((lengths - self._lag).clamp(min=0))", "self.ends.copy_(lengths)",
        MODELS + "a_draft_that_is_the_target_is_never_wrong[kimi_linear-chain]", native=True,
    ),
    "u in bf16": Fault(
        "kernels/recurrent/delta.py", "KeptNodes(key, update.transpose(1, 2), total)",
        "KeptNodes(key, update.transpose(1, 2).bfloat16().to(wide), total)",
        KERNELS + "a_state_keeps_its_digits_over_two_thousand_tokens",
    ),
    "time steps of all nodes clamped": Fault(NODES, ".where(prompted, steps)", "", f"{CLAMP}[nemotron_h]", native=True),
    "time steps never clamped": Fault(
        NODES, "prompted = None if self._limits is None else self._nodes.prompted()", "prompted = None",
        f"{CLAMP}[zamba2]", native=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_recurrent_layers_is_found(name, tmp_path):
    fault = FAULTS[name]
    changed = ROOT / fault.file
    source = changed.read_text()
    assert source.count(fault.original) == 1
    link_all(LINKS, tmp_path, changed, source.replace(fault.original, fault.changed))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}"} | ({} if fault.native else {"HEAVYPATH_NATIVE": "0"})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", fault.test],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
