"""A step can be a CUDA graph: it asks the host nothing, and done over again by rote it does the next step.

What CUDA does is played here without a GPU: `Tape` stands for a graph (`played_graphs` has the rules). All methods,
drafts and shapes are played by the conformance suite.
"""

import pytest
import torch
from block_checkpoints import random_block
from head_cases import head_of
from medusa_checkpoints import published, write
from played_steps import PADDING, PROMPTS, Launches, Strict, Tape, llama_without_values, step_on_meta
from tiny_models import assert_alike, small_llama
from triton.runtime.interpreter import GridExecutor

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    METHODS,
    Cascade,
    Lookahead,
    Mixture,
    Pard,
    PromptLookup,
    SpeculativeDecoder,
    TokenTree,
)
from heavypath.speculative.decoding.processing import Processing
from heavypath.speculative.drafts.blocks.pard import PardDraft
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.drafts.lookahead import LookaheadDraft
from heavypath.speculative.drafts.lookup import LookupDraft
from heavypath.speculative.drafts.medusa.checkpoint import load_medusa
from heavypath.speculative.drafts.merge import MergeDraft
from heavypath.speculative.drafts.model import ModelDraft
from heavypath.speculative.models.llama import LlamaForward


def block_of(target, term, **options):
    return random_block(target, head_dim=16, taps=(0,), block_size=4, term=term, options=options)


DRAFTS = {  # of a target
    "none": lambda target, folder: None,
    "medusa": lambda target, folder: load_medusa(write(folder, published(target, heads=2)), target),
    "block": lambda target, folder: random_block(target, head_dim=16, taps=(0,), block_size=4),
    "gated": lambda target, folder: block_of(target, "dspark", variant="gated", rank=4, bias=True),
    "selector": lambda target, folder: block_of(target, "dflash2", rank=4, selected=3),
    "domino": lambda target, folder: block_of(target, "domino", rank=4, state=6, plain=1),
    "dfly": lambda target, folder: block_of(target, "dfly", correction=24),
    "treeflash": lambda target, folder: block_of(target, "treeflash", inner=24),
    "pard": lambda target, folder: Pard(small_llama(2), mask_token_id=6, depths=3),
    "eagle-1": lambda target, folder: head_of(target, taps=(1,), head_dim=16, generation=1),
    "four tokens": lambda target, folder: head_of(
        target, taps=(0, 1), head_dim=16, draft_vocab_size=4, owns_lm_head=True
    ),
    # A model of one level is given later what was accepted below it: the tokens that a kernel has moved.
    "mixture": lambda target, folder: Mixture([Cascade([small_llama(2), small_llama(6)], [1, 2]), PromptLookup(2)]),
}


@pytest.mark.parametrize(
    ("method", "draft", "shape", "sampling", "batch", "new"),
    [
        ("autoregressive", "none", {}, {"temperature": 0.9, "eos_token_id": [5, 2]}, 2, 4),
        # fewer heads near the end of a text
        ("top-k", "medusa", {"tree": TokenTree([-1, 0, 1])}, {"temperature": 1.0}, 1, 4),
        ("chain", "block", {"tree": TokenTree.chain(2)}, {"temperature": 1.0}, 1, 4),
        ("chain", "pard", {"tree": TokenTree.chain(2)}, {"temperature": 1.0}, 1, 4),
        *(
            (
                "sequoia",
                term,
                {"tree": TokenTree([-1, 0, 0, 1, 2]), "verifier": "rejection"},
                {"temperature": 1.0},
                2,
                4,
            )
            for term in ("gated", "selector", "domino", "dfly", "treeflash")
        ),
        *(
            pytest.param(method, draft, shape, {"temperature": 1.0}, 3, 6, marks=pytest.mark.slow)
            for method, draft, shape in (
                ("chain", "eagle-1", {"tree_size": 3}),
                ("dyspec", "four tokens", {"tree_size": 4, "max_depth": 2, "width": 2}),
                ("chain", "mixture", {"tree": TokenTree.chain(3)}),
            )
        ),
    ],
)
def test_steps_done_by_rote_write_the_same_text(method, draft, shape, sampling, batch, new, as_on_a_gpu, tmp_path):
    """In as many steps, of which those of a second generation know nothing of the first."""
    target = small_llama(1)
    draft = DRAFTS[draft](target, tmp_path)
    options = {"attention_mask": PADDING[:batch], "max_new_tokens": new, "pad_token_id": 0} | sampling
    expected = SpeculativeDecoder(target, draft, method, **shape).generate(PROMPTS[:batch], seed=3, **options)
    as_on_a_gpu()
    decoder = SpeculativeDecoder(target, draft, method, **shape)
    for _ in range(1 + (batch == 3)):
        assert_alike(decoder.generate(PROMPTS[:batch], seed=3, **options), expected)
    assert Tape.replays >= 1
    assert 0 < len(decoder.runner.idle.launcher.graphs) < 6


OTHERS = ("lookup", "lookahead", "early exit", "block", "pard", "p-eagle")


@pytest.mark.parametrize(
    ("method", "draft", "temperature"),
    [
        *((method, "no" if method == "autoregressive" else "model", heat) for method in METHODS for heat in (0.0, 0.7)),
        *((method, draft, 0.7) for method in ("sequoia", "dyspec") for draft in OTHERS),
        ("specinfer", "merge", 0.7),
        ("sequoia", "merge", 0.7),
    ],
)
@torch.inference_mode()
def test_a_step_asks_the_host_nothing(method, temperature, draft, without_values, monkeypatch):
    target = llama_without_values(2)
    models = {
        "no": lambda: None,
        "model": lambda: ModelDraft(llama_without_values(1), 50),
        "lookup": lambda: LookupDraft(PromptLookup(), 50, target.device),
        "lookahead": lambda: LookaheadDraft(Lookahead(5, 3, 20), 50, target.device),
        "merge": lambda: MergeDraft([models["model"](), models["lookahead"]()], target.device),
        "early exit": lambda: ModelDraft(target, 50),
        "block": lambda: as_draft(random_block(target.model, head_dim=16).to("meta"), target, target.model),
        "pard": lambda: PardDraft(llama_without_values(1), 50, Pard(target.model, 3)),
        "p-eagle": lambda: as_draft(
            head_of(target.model, taps=(0, 1), head_dim=16, mask_token_id=3).to("meta"), target, target.model
        ),
    }
    filters = Filters(temperature, top_k=20, top_p=0.9)
    _, step = step_on_meta(method, filters, target, models[draft](), vocab_size=50, processing=Processing(1.2, 4))
    monkeypatch.setattr(torch, "tensor", None)  # which would copy numbers of the host, unseen by Strict
    with Strict():
        step()


MOST_LAUNCHES = {  # of a step beside the models, at 32 nodes; both levels and launches
    "autoregressive": (0, 7),
    "sequoia": (5, 23),
    "ersd": (5, 24),
    "top-k": (5, 23),
    "typical-lossy": (5, 157),  # whose verifier is plain PyTorch
    "naive": (5, 32),
    "rsd-c": (5, 23),
    "dyspec": (5, 29),
    "eagle-2": (5, 29),
    "rsd-s": (5, 24),
    "chain of 5": (5, 23),
}


@pytest.mark.parametrize(("batch", "temperature"), [(1, 0.7), (4, 0.0)])
@pytest.mark.parametrize("name", MOST_LAUNCHES)
@torch.inference_mode()
def test_a_step_launches_little_beside_the_models(name, temperature, batch, without_values, monkeypatch):
    """Each is a launch, however few numbers it is about; and as few for a batch as for one sequence."""
    levels, most = MOST_LAUNCHES[name]
    method, size = ("chain", 6) if name == "chain of 5" else (name, 32)
    target, launches = llama_without_values(2), Launches()
    draft = None if levels == 0 else ModelDraft(llama_without_values(1), 50)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: launches.note("kernel"))
    monkeypatch.setattr(LlamaForward, "__call__", launches.without(LlamaForward.__call__))
    depth, step = step_on_meta(method, Filters(temperature), target, draft, size, batch)
    assert depth == levels
    launches.names.clear()
    with launches:
        step()
    assert 0 < len(launches.names) <= most, launches.names
