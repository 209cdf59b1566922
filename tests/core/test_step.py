"""A step can be a CUDA graph: it asks the host nothing, and done over again by rote it does the next step.

What CUDA does is played here without a GPU. `Tape` stands for a graph: it notes each operation and kernel launch of a
step with its arguments, and replays them without running any of our Python (`played_graphs` has the rules). The same
decoder under real graphs is a test below, for machines that have a GPU.
"""

import pytest
import torch
from head_cases import head_of
from medusa_checkpoints import published, write
from played_graphs import Event
from played_steps import PADDING, PROMPTS, Launches, Strict, Tape, on_meta, room_for, rules_of
from tiny_models import tiny_llama
from triton.runtime.interpreter import GridExecutor

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    METHODS,
    Cascade,
    Lookahead,
    Merge,
    Mixture,
    PromptLookup,
    SpeculativeDecoder,
    TokenTree,
    load_demo_pair,
)
from heavypath.speculative.decoding.device_tree import device_tree
from heavypath.speculative.decoding.growth import Growth
from heavypath.speculative.decoding.processing import Processing
from heavypath.speculative.decoding.snapshots import Snapshots
from heavypath.speculative.decoding.step import Step
from heavypath.speculative.drafts import LookaheadDraft, LookupDraft, ModelDraft
from heavypath.speculative.drafts.medusa.checkpoint import load_medusa
from heavypath.speculative.models.llama import LlamaForward

slow = pytest.mark.slow
CASES = [
    pytest.param("autoregressive", {}, {"temperature": 0.9}, id="autoregressive"),
    pytest.param("sequoia", {"tree": TokenTree.chain(2)}, {"repetition_penalty": 1.2}, id="greedy", marks=slow),
    pytest.param("sequoia", {"tree_size": 4}, {"temperature": 1.0}, id="sequoia", marks=slow),
    pytest.param("specinfer", {"tree_size": 5, "width": 2}, {"temperature": 0.8}, id="specinfer", marks=slow),
    pytest.param("spectr", {"tree_size": 3, "width": 2}, {"temperature": 0.8, "top_k": 5}, id="spectr", marks=slow),
    pytest.param("dyspec", {"tree_size": 4, "max_depth": 2, "width": 2}, {"temperature": 1.0}, id="dyspec", marks=slow),
    pytest.param("typical-lossy", {"tree_size": 4}, {"temperature": 1.0}, id="typical-lossy", marks=slow),
    pytest.param("rsd-s", {"tree_size": 5, "width": 2}, {"temperature": 1.0}, id="rsd-s", marks=slow),
    pytest.param(
        "ersd",
        {"tree_size": 3},
        {"temperature": 0.7, "eos_token_id": [5, 2], "min_new_tokens": 3},
        id="ersd",
        marks=slow,
    ),
]


@pytest.mark.parametrize(("method", "shape", "sampling"), CASES)
def test_steps_done_by_rote_write_the_same_text(method, shape, sampling, as_on_a_gpu):
    pair = [tiny_llama(seed, layers=1, hidden_size=32, num_attention_heads=2) for seed in (1, 2)]
    decoder = SpeculativeDecoder(*pair, method, **shape)
    options = {"attention_mask": PADDING, "max_new_tokens": 7, "pad_token_id": 0} | sampling
    expected = [decoder.generate(PROMPTS, seed=seed, **options) for seed in (3, -1)]
    as_on_a_gpu()
    decoder = SpeculativeDecoder(*pair, method, **shape)
    for seed, alone in zip((3, -1), expected, strict=True):
        out = decoder.generate(PROMPTS, seed=seed, **options)
        assert torch.equal(out.sequences, alone.sequences)
        assert torch.equal(out.stats.tokens_of, alone.stats.tokens_of)
        assert torch.equal(out.stats.steps_of, alone.stats.steps_of)
        assert torch.equal(out.stats.accepted, alone.stats.accepted)
    assert Tape.replays >= 4
    assert 0 < len(decoder.runner.idle.graphs) < 6


@pytest.mark.parametrize(
    ("variant", "method", "shape"),
    [
        pytest.param({}, "sequoia", {"tree_size": 4}, marks=slow),
        pytest.param({"draft_vocab_size": 4, "owns_lm_head": True}, "dyspec", {"tree_size": 4, "width": 2}, marks=slow),
        pytest.param({"generation": 1, "taps": (1,)}, "chain", {"tree_size": 3}, marks=slow),
    ],
    ids=["eagle-3", "eagle-3, four tokens", "eagle-1"],
)
def test_steps_of_a_head_done_by_rote_write_the_same_text(variant, method, shape, as_on_a_gpu):
    target = tiny_llama(1, layers=1, hidden_size=32, num_attention_heads=2)
    head = head_of(target, **({"taps": (0, 1), "head_dim": 16} | variant))
    options = {"attention_mask": PADDING, "max_new_tokens": 8, "pad_token_id": 0, "temperature": 1.0, "seed": 3}
    expected = SpeculativeDecoder(target, head, method, **shape).generate(PROMPTS, **options)
    as_on_a_gpu()
    decoder = SpeculativeDecoder(target, head, method, **shape)
    for _ in range(2):
        out = decoder.generate(PROMPTS, **options)
        assert torch.equal(out.sequences, expected.sequences)
        assert torch.equal(out.stats.accepted, expected.stats.accepted)
    assert Tape.replays >= 4


@pytest.mark.parametrize(
    ("method", "shape", "temperature"),
    [
        ("chain", {"tree_size": 2}, 0.0),
        pytest.param("sequoia", {"tree_size": 4}, 0.8, marks=slow),
        pytest.param("dyspec", {"tree_size": 4, "width": 2}, 0.8, marks=slow),
    ],
)
def test_lookahead_done_by_rote_writes_the_same_text(method, shape, temperature, as_on_a_gpu):
    """In as many steps, of which those of a second generation know nothing of the first."""
    target = tiny_llama(1, layers=1, hidden_size=32, num_attention_heads=2)
    options = {"attention_mask": PADDING, "max_new_tokens": 5, "pad_token_id": 0, "temperature": temperature, "seed": 3}
    expected = SpeculativeDecoder(target, Lookahead(2, 3, 8), method, **shape).generate(PROMPTS, **options)
    as_on_a_gpu()
    decoder = SpeculativeDecoder(target, Lookahead(2, 3, 8), method, **shape)
    for _ in range(2):
        out = decoder.generate(PROMPTS, **options)
        assert torch.equal(out.sequences, expected.sequences)
        assert torch.equal(out.stats.steps_of, expected.stats.steps_of)
        assert torch.equal(out.stats.accepted, expected.stats.accepted)
    assert Tape.replays >= 4


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        pytest.param("chain", {"tree": TokenTree.chain(3)}, marks=slow),
        pytest.param("dyspec", {"tree_size": 5, "width": 2, "max_depth": 3}, marks=slow),
    ],
)
def test_steps_of_drafts_made_of_drafts_done_by_rote_write_the_same_text(method, shape, as_on_a_gpu):
    """A model of one level, given later what was accepted below it: the tokens that a kernel has moved."""
    shape_of_all = {"layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    target, upper, lower = (tiny_llama(seed, **shape_of_all) for seed in (1, 2, 6))
    draft = Mixture([Cascade([upper, lower], levels=[1, 2]), PromptLookup(2)])
    options = {"attention_mask": PADDING, "max_new_tokens": 9, "pad_token_id": 0, "temperature": 1.0, "seed": 4}
    expected = SpeculativeDecoder(target, draft, method, **shape).generate(PROMPTS, **options)
    assert expected.stats.accepted[-1].sum() > 0, "nothing was accepted below the model's own level"
    as_on_a_gpu()
    out = SpeculativeDecoder(target, draft, method, **shape).generate(PROMPTS, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.stats.steps_of, expected.stats.steps_of)
    assert torch.equal(out.stats.accepted, expected.stats.accepted)
    assert Tape.replays >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("method", "temperature"), [("specinfer", 1.0), ("naive", 0.8), ("top-k", 0.0)])
def test_steps_of_drafts_with_paths_of_their_own_done_by_rote_write_the_same_text(method, temperature, as_on_a_gpu):
    shape_of_all = {"layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    target, one, other = (tiny_llama(seed, **shape_of_all) for seed in (1, 2, 6))
    draft, tree = Merge([one, Cascade([other, PromptLookup(2)], levels=[1, 2])]), TokenTree([-1, 0, 1, 0, 3, 0])
    options = {"attention_mask": PADDING, "max_new_tokens": 7, "pad_token_id": 0, "temperature": temperature, "seed": 4}
    expected = SpeculativeDecoder(target, draft, method, tree=tree).generate(PROMPTS, **options)
    as_on_a_gpu()
    out = SpeculativeDecoder(target, draft, method, tree=tree).generate(PROMPTS, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.stats.steps_of, expected.stats.steps_of)
    assert torch.equal(out.stats.accepted, expected.stats.accepted)
    assert Tape.replays >= 2


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("top-k", {"tree": TokenTree([-1, 0, 1])}),
        pytest.param("dyspec", {"tree_size": 4, "width": 2, "max_depth": 2}, marks=slow),
    ],
)
def test_steps_of_medusa_heads_done_by_rote_write_the_same_text(method, shape, as_on_a_gpu, tmp_path):
    """Near the end of a text fewer levels are drafted, and fewer heads computed."""
    target = tiny_llama(1, layers=1, hidden_size=32, num_attention_heads=2)
    heads = load_medusa(write(tmp_path, published(target, heads=2)), target)
    options = {"attention_mask": PADDING[1:], "max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    expected = SpeculativeDecoder(target, heads, method, **shape).generate(PROMPTS[1:], **options)
    as_on_a_gpu()
    out = SpeculativeDecoder(target, heads, method, **shape).generate(PROMPTS[1:], **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.stats.accepted, expected.stats.accepted)
    assert Tape.replays >= 2


def llama_without_values(layers: int) -> LlamaForward:
    forward = LlamaForward(tiny_llama(1, layers=layers, hidden_size=32, vocab_size=50))
    forward.model.to("meta")
    forward._look_up()
    forward._rotary = torch.empty(200, 2, 16, device="meta")
    return forward


@pytest.mark.parametrize("draft", ["model", "prompt lookup", "lookahead", "early exit"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_a_step_asks_the_host_nothing(method, temperature, draft, without_values, monkeypatch):
    target, batch = llama_without_values(2), 3
    models = {
        "model": lambda: ModelDraft(llama_without_values(1), 50),
        "prompt lookup": lambda: LookupDraft(PromptLookup(), 50, target.device),
        "lookahead": lambda: LookaheadDraft(Lookahead(5, 3, 20), 50, target.device),
        "early exit": lambda: ModelDraft(target, 50),
    }
    source = None if method == "autoregressive" else models[draft]()
    shape = METHODS[method].tree_of(9)
    filters = Filters(temperature, top_k=20, top_p=0.9)
    tree = shape if isinstance(shape, Growth) else on_meta(device_tree(shape, shape.depth, torch.device("cpu")))
    step = Step(target, source, tree, shape.branching, shape.depth, rules_of(method, filters, Processing(1.2, 4)))
    caches = target.new_cache(batch, 200), None if source is None else source.new_cache(batch, 200)
    state = room_for(batch, target, shape, vocab_size=50)
    step(state, *caches, 160, lambda phase: None)  # as before a capture, which fills tables
    monkeypatch.setattr(torch, "tensor", None)  # which would copy numbers of the host, unseen by Strict
    with Strict():
        step(state, *caches, 160, lambda phase: None)


MOST_LAUNCHES = {  # of a step beside the models, at 32 nodes; both levels and launches
    "autoregressive": (0, 7),
    "sequoia": (5, 23),
    "ersd": (5, 24),
    "top-k": (5, 23),
    "typical-lossy": (5, 27),
    "naive": (5, 32),
    "rsd-c": (5, 23),
    "dyspec": (5, 29),
    "eagle-2": (5, 29),
    "rsd-s": (5, 24),
    "chain of 5": (5, 23),
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", MOST_LAUNCHES)
@torch.inference_mode()
def test_a_step_launches_little_beside_the_models(name, temperature, batch, without_values, monkeypatch):
    """Each is a launch, however few numbers it is about; and as few for a batch as for one sequence."""
    levels, most = MOST_LAUNCHES[name]
    method, size = ("chain", 6) if name == "chain of 5" else (name, 32)
    target = llama_without_values(2)
    source = None if levels == 0 else ModelDraft(llama_without_values(1), 50)
    shape = METHODS[method].tree_of(size)
    tree = shape if isinstance(shape, Growth) else on_meta(device_tree(shape, shape.depth, torch.device("cpu")))
    step = Step(target, source, tree, shape.branching, shape.depth, rules_of(method, Filters(temperature)))
    assert step.depth == levels
    caches = target.new_cache(batch, 300), None if source is None else source.new_cache(batch, 300)
    state = room_for(batch, target, shape, vocab_size=0)
    launches = Launches()
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: launches.note("kernel"))
    monkeypatch.setattr(LlamaForward, "__call__", launches.without(LlamaForward.__call__))
    step(state, *caches, 160, lambda phase: None)  # fills tables
    launches.names.clear()
    with launches:
        step(state, *caches, 160, lambda phase: None)
    assert 0 < len(launches.names) <= most, launches.names


def test_a_late_snapshot_is_one_step_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    counter = torch.zeros(2)
    late, prompt = Snapshots([counter], late=True), Snapshots([counter], late=False)
    for step in range(5):
        counter += 1
        (now,), slots = prompt.take(step)
        assert (now.tolist(), slots) == ([step + 1] * 2, step)
        seen = late.take(step)
        assert (seen is None) == (step == 0)
        if seen is not None:
            assert (seen[0][0].tolist(), seen[1]) == ([step] * 2, step - 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "repetition_penalty": 1.1}])
@pytest.mark.parametrize("method", METHODS)
def test_a_graph_writes_the_text_of_the_eager_step(method, sampling, monkeypatch):
    pair = load_demo_pair(device="cuda")[:2]
    graphs, eager = (SpeculativeDecoder(*pair, method, cuda_graphs=on) for on in (True, False))
    prompts = PROMPTS.cuda() + 40
    for seed, new in ((1, 40), (2, 64), (3, 20)):
        options = {"attention_mask": PADDING.cuda(), "seed": seed, "eos_token_id": 3, **sampling}
        a, b = (decoder.generate(prompts, new, **options) for decoder in (graphs, eager))
        assert torch.equal(a.sequences, b.sequences)
        assert torch.equal(a.stats.steps_of, b.stats.steps_of)
        assert torch.equal(a.stats.accepted, b.stats.accepted)
    assert len(graphs.runner.idle.graphs) >= 1
