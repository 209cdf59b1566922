"""What a step launches on a GPU, by what drafts: bench/launches.json has the counts, and predictions are made of them.

Everything runs on the meta device, where kernels and PyTorch's operations are counted in place of being launched.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from block_checkpoints import random_block
from head_cases import head_of
from played_steps import Launches, llama_without_values, step_on_meta
from triton.runtime.interpreter import GridExecutor

from heavypath.kernels.filtering import Filters
from heavypath.speculative import Lookahead, Mixture, Pard, PromptLookup, Recall, Retrieval
from heavypath.speculative.drafts.blocks.pard import PardDraft
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.drafts.lookahead import LookaheadDraft
from heavypath.speculative.drafts.lookup import LookupDraft
from heavypath.speculative.drafts.medusa.heads import MedusaConfig, MedusaHeads
from heavypath.speculative.drafts.model import ModelDraft
from heavypath.speculative.drafts.recall import RecallDraft
from heavypath.speculative.drafts.retrieval import RetrievalDraft

COUNTED = json.loads((Path(__file__).parents[2] / "bench" / "launches.json").read_text())
EAGLE = {"taps": (0, 1, 2), "head_dim": 16}
OWN = {"draft_vocab_size": 4, "owns_lm_head": True}  # a vocabulary of its own
PLAIN = {"taps": (0, 1, 2), "head_dim": 16, "layers": 5, "causal": (False,) * 5, "windows": (None,) * 5}
WHOLE = PLAIN | {"draft_vocab_size": 50, "from_root": False}
TERMS = {  # of block drafts
    "dflash": ("dflash", {}),
    "dspark, vanilla": ("dspark", {"variant": "vanilla", "rank": 4, "bias": False}),
    "dspark, gated": ("dspark", {"variant": "gated", "rank": 4, "bias": False}),
    "dspark, rnn": ("dspark", {"variant": "rnn", "rank": 4, "bias": False}),
    "dflash2": ("dflash2", {"rank": 4, "selected": 6}),
    "domino": ("domino", {"rank": 4, "state": 6, "plain": 0}),
    "dfly": ("dfly", {"correction": 24}),
    "treeflash": ("treeflash", {"inner": 24}),
    "dspine": ("dspine", {"size": 4, "message": 6, "selected": 6}),
    "lilicorr": ("lilicorr", {
        "candidate_topk": 3, "num_layers": 1, "num_heads": 2, "factor_dim": 4, "mlp_ratio": 2.0, "vector_eps": 1e-6,
        "logit_scale": 8.0, "width": 32, "dimensions": 5,
    }),
}  # fmt: skip


def head(**options):
    shape = EAGLE | options
    return lambda target: as_draft(head_of(target.model, **shape).to("meta"), target, target.model)


def block(name):
    term, options = TERMS[name]
    return lambda target: as_draft(
        random_block(target.model, term=term, options=options, **WHOLE).to("meta"), target, target.model
    )


def medusa(target):
    heads = MedusaHeads(MedusaConfig(5, 1, 32, 50, True)).eval().to("meta")
    return as_draft(heads, target, target.model)


DRAFTS = {
    "a model of one layer": lambda target: ModelDraft(llama_without_values(1), 50),
    "a model of two layers": lambda target: ModelDraft(llama_without_values(2), 50),
    "eagle-1": head(generation=1, taps=(4,)),
    "eagle-3": head(),
    "eagle-3, a vocabulary of its own": head(**OWN),
    "eagle-3.1": head(tap_norms=True, feeds_back_normed=True, owns_lm_head=True),
    "p-eagle": head(mask_token_id=3),
    **{name: block(name) for name in TERMS},
    "pard": lambda target: PardDraft(llama_without_values(1), 50, Pard(target.model, 3)),
    "medusa": medusa,
    "lookup": lambda target: LookupDraft(PromptLookup(), 50, target.device),
    "retrieval": lambda target: RetrievalDraft(Retrieval([[1, 2, 3]]), 50, target.device),
    "recall": lambda target: RecallDraft(Recall(), 50, target.device),
    "eagle-3 and recall": lambda target: as_draft(
        Mixture([head_of(target.model, **EAGLE).to("meta"), Recall()]), target, target.model
    ),
    "lookahead": lambda target: LookaheadDraft(Lookahead(5, 3, 20), 50, target.device),
}


def counts_of(names):
    """Products, attentions and others among launches."""
    kinds = {"linear.default": "products", "mm.default": "products", "tree_attention.default": "attention"}
    kinds |= {"addmm.default": "products", "bmm.default": "products", "_few_rows_kernel": "products"}
    found = Counter(kinds.get(name, "others") for name in names)
    return [found["products"], found["attention"], found["others"]]


def phases_of(draft_of, layers, monkeypatch):
    """The launches of a step, as lists of (phase, names), in order."""
    target, launches, ended = llama_without_values(layers), Launches(), []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launches.note(self.fn.__name__))
    draft = None if draft_of is None else draft_of(target)
    method = "autoregressive" if draft is None else "sequoia"
    _, step = step_on_meta(method, Filters(0.7), target, draft, 32, 1)
    launches.names.clear()

    def lap(phase):
        ended.append((phase, len(launches.names)))

    with launches:
        step.func(*step.args[:-1], lap)
    bounds = [0, *(count for _, count in ended)]
    return [
        (phase, launches.names[begin:end]) for (phase, _), (begin, end) in zip(ended, pairwise(bounds), strict=True)
    ]


def step_launches(name, monkeypatch):
    """The launches of a step's parts: of its passes by the draft, of its taps, and of what is after the last pass."""
    phases = phases_of(DRAFTS[name], 4, monkeypatch)
    (target,) = [names for phase, names in phases if phase == "target"]
    passes = [names for phase, names in phases if phase == "draft"]
    draws = [names for phase, names in phases if phase == "sampling"]
    levels = [draw + further for draw, further in zip(draws, passes[1:], strict=False)]
    assert len(passes) == len(draws) == 5
    assert levels[1:] == 3 * levels[1:2]
    alone = dict(phases_of(DRAFTS["a model of one layer"], 4, monkeypatch))["target"]
    rest = [name for phase, names in phases if phase not in ("draft", "sampling", "target") for name in names]
    return {
        "first pass": counts_of(passes[0]),
        "level": counts_of(levels[1]),
        "draw of a level": counts_of(draws[1]),
        "taps": [one - other for one, other in zip(counts_of(target), counts_of(alone), strict=True)],
        "last draw and verification": counts_of(draws[-1] + rest),
    }


@pytest.mark.parametrize("name", DRAFTS)
@torch.inference_mode()
def test_a_step_launches_what_is_counted(name, without_values, monkeypatch):
    found = step_launches(name, monkeypatch)
    assert found == COUNTED[name], f"bench/launches.json should have {json.dumps({name: found})}"


@torch.inference_mode()
def test_a_targets_pass_launches_what_is_counted(without_values, monkeypatch):
    three, four = (
        counts_of(dict(phases_of(DRAFTS["a model of one layer"], layers, monkeypatch))["target"]) for layers in (3, 4)
    )
    layer = [one - other for one, other in zip(four, three, strict=True)]
    ends = [count - 4 * each for count, each in zip(four, layer, strict=True)]
    assert {"layer": layer, "ends": ends} == COUNTED["a target"]


def test_nothing_else_is_counted():
    assert COUNTED.keys() == DRAFTS.keys() | {"a target"}
