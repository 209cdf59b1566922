"""What a program has not imported works all the same: each program here is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
BEGIN = """
import sys
import torch
from heavypath import SpeculativeDecoder
from tiny_models import tiny_llama

target, prompt = tiny_llama(1, layers=3), torch.tensor([[3, 1, 4]])
expected = SpeculativeDecoder(target, None, "autoregressive").generate(prompt, 9, temperature=0.0).sequences
options, decoded = {}, target
"""
END = """
assert "heavypath.speculative.drafts.trained" not in sys.modules
out = SpeculativeDecoder(decoded, draft).generate(prompt, 9, temperature=0.0, **options)
assert torch.equal(out.sequences, expected)
assert repr(SpeculativeDecoder(decoded, draft)).startswith("SpeculativeDecoder(")
"""
PROGRAMS = {
    "an EAGLE head": """
from head_cases import head_of
draft = head_of(target, taps=(0, 1))
""",
    "Medusa heads": """
from heavypath import MedusaHeads
from heavypath.speculative.drafts.medusa.heads import MedusaConfig
config = target.config
draft = MedusaHeads(MedusaConfig(8, 1, config.hidden_size, config.vocab_size, owns_lm_heads=True)).eval()
""",
    "a block draft": """
from block_checkpoints import random_block
draft = random_block(target)
""",
    "a lookup with a processor, stop strings and a trace": """
from pathlib import Path
from tempfile import mkdtemp
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria
from heavypath import PromptLookup
draft = PromptLookup()
options = {"logits_processor": [lambda ids, scores: scores], "stopping_criteria": [MaxLengthCriteria(12)]}
options |= {"trace": Path(mkdtemp()) / "trace.json", "output_scores": True, "repetition_penalty": 1.0}
""",
    "weights that accelerate left on disk": """
from copy import deepcopy
from tempfile import mkdtemp
from accelerate import disk_offload
draft, decoded = tiny_llama(2), deepcopy(target)
disk_offload(decoded, mkdtemp())
assert "heavypath.speculative.streaming.offloaded" not in sys.modules
""",
    "a model with recurrent layers": """
from recurrent_families import FOUR, recurrent
draft, decoded = recurrent(FOUR[0], 6), recurrent(FOUR[0], 5)
expected = SpeculativeDecoder(decoded, None, "autoregressive").generate(prompt, 9, temperature=0.0).sequences
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_decodes_with(name):
    program = BEGIN + PROGRAMS[name] + END
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT / 'tests/support'}"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
