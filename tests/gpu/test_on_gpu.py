"""What only a GPU can show: graphs that are replayed, over lengths, batches, methods, drafts, decoders and threads.

On a GPU that is only played (tests/support/stand_in_gpu.py) the same tests run in miniature, so that a misprint does
not wait for a machine that has one.
"""

import gc
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from commit_cases import Problem as CommitProblem
from devices import moved
from distil_cases import TINY, greedy, overlaps, silent, texts
from families import tiny
from gpu_cases import MINIATURE, Captured, assert_alike, prompts, pytestmark, size  # noqa: F401
from head_cases import head_of
from head_training_cases import random_rows
from in_time import in_time
from kernel_cases import captured
from recurrent_families import for_kernels
from tiny_models import tiny_llama

from heavypath.kernels.cache_compaction import compact_cache
from heavypath.kernels.layers import measured
from heavypath.kernels.layers.prefetch import prefetch_weight
from heavypath.kernels.nodes import DRAFT_AWARE
from heavypath.kernels.ordering import heavy_path_order
from heavypath.kernels.sampling import gumbel_topk, stochastic_beam
from heavypath.kernels.tree_attention import tree_attention
from heavypath.kernels.verification import VERIFICATION_METHODS, verify_tree
from heavypath.speculative import (
    METHODS,
    EarlyExit,
    Lookahead,
    PromptLookup,
    Retrieval,
    SpeculativeDecoder,
    TokenTree,
    distil,
    draft_of_layers,
    most_frequent,
    new_block,
    new_head,
    new_medusa,
)
from heavypath.speculative.decoding.graphs import Graph, Graphs
from heavypath.speculative.models import ahead


@pytest.fixture(scope="module")
def pair():
    if MINIATURE:
        models = [tiny_llama(seed, layers=1, hidden_size=32, vocab_size=50) for seed in (1, 2)]
        return [model.to("cuda") for model in models]
    from heavypath.speculative import load_demo_pair

    return load_demo_pair(device="cuda")[:2]


def with_and_without_graphs(pair, method, *, kind=Captured, **shape):
    if method == "autoregressive":
        shape = {}
    return kind(*pair, method, **shape, cuda_graphs=True), SpeculativeDecoder(*pair, method, **shape, cuda_graphs=False)


def test_a_graph_draws_what_its_logits_hold_when_it_is_replayed():
    vocab_size, k = size(32_000, 300), size(16, 3)
    logits, rows, seed = torch.zeros(4, vocab_size).cuda(), torch.arange(4).cuda(), torch.tensor(0).cuda()
    for options in ({}, {"top_k": 40, "top_p": 0.9}, {"replacement": True}, {"temperature": 0.0}):
        k_here = min(k, 3) if "replacement" in options else k
        graph, drawn = captured(lambda k=k_here, o=options: gumbel_topk(logits, k, rows=rows, seed=seed, **o))
        for number in range(size(5, 1)):
            logits.copy_(3 * torch.randn(4, vocab_size))
            seed.fill_(number + 5)
            graph.replay()
            expected = gumbel_topk(logits.cpu(), k_here, rows=rows.cpu(), seed=number + 5, **options)
            assert torch.equal(drawn.tokens.cpu(), expected.tokens)


def test_a_million_gumbels_order_tokens_as_on_a_cpu():
    """All bits of the noise matter where all logits are equal."""
    rows, vocab_size, k = size((1024, 1024, 64), (2, 64, 5))
    zeros, numbers = torch.zeros(rows, vocab_size), torch.arange(rows) * 3
    expected = gumbel_topk(zeros, k, rows=numbers, seed=77)
    drawn = gumbel_topk(zeros.cuda(), k, rows=numbers.cuda(), seed=77)
    assert torch.equal(drawn.tokens.cpu(), expected.tokens)
    torch.testing.assert_close(drawn.keys.cpu(), expected.keys, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("heads", [(8, 2), (8, 8)])
def test_a_graph_attends_at_any_length_in_parts(heads):
    """bfloat16, groups of heads, and prefixes that need one part, a few and many."""
    nodes, head_dim, most = size((24, 128, 4096), (3, 16, 600))
    dtype = torch.float32 if MINIATURE else torch.bfloat16  # the interpreter gets bfloat16 products wrong
    query = torch.randn(2, heads[0], nodes, head_dim).cuda().to(dtype)
    key, value = (torch.randn(2, heads[1], most + nodes, head_dim).cuda().to(dtype) for _ in range(2))
    lengths = torch.tensor([most, most]).cuda()
    tree = TokenTree([-1, *(max(0, node - 2) for node in range(1, nodes))]).reordered("heavy_path")[0]
    end, mask = tree.subtree_end.cuda(), tree.mask().cuda()
    graph, out = captured(lambda: tree_attention(query, key, value, prefix_length=lengths, subtree_end=end))
    for each in ([most, 0], [1, 300], [255, 257])[: size(3, 2)]:
        lengths.copy_(torch.tensor(each))
        graph.replay()
        for b, length in enumerate(each):
            seen = torch.cat([torch.ones(nodes, length, dtype=torch.bool).cuda(), mask], 1)
            past, rows = heads[0] // heads[1], length + nodes
            k, v = (x[b, :, :rows].repeat_interleave(past, 0).float() for x in (key, value))
            scores = (query[b].float() @ k.mT / head_dim**0.5).masked_fill(~seen, -torch.inf)
            expected = scores.softmax(-1) @ v
            torch.testing.assert_close(out[b].float(), expected, atol=size(2e-2, 1e-4), rtol=0)


@pytest.mark.skipif(MINIATURE, reason="nothing is compiled for a GPU that is played")
def test_transformers_compiles_its_steps_with_our_attention_into_cuda_graphs():
    """As it does with a static cache. The rows are enough for several parts, whose programs count tickets."""
    model = tiny_llama(1, hidden_size=64, vocab_size=50, max_position_embeddings=1024).cuda()
    given = prompts(1, 600)
    options = {"attention_mask": torch.ones_like(given), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(given, **options)
    model.set_attn_implementation("heavypath")
    assert torch.equal(model.generate(given, cache_implementation="static", **options), expected)


def test_a_graph_commits_what_was_verified_when_it_is_replayed():
    from heavypath.kernels.commit import State, commit
    from heavypath.kernels.nodes import Nodes, Verified

    problems = [CommitProblem(seed, per_sequence=True) for seed in range(size(40, 3))]
    problems = [each for each in problems if each.path.shape == problems[0].path.shape]
    problems = [each for each in problems if each.counts.shape == problems[0].counts.shape]
    names = ("whole", "output", "seen", "counts", "tokens", "path", "length", "after", "stops")
    held = {name: getattr(problems[0], name).to("cuda", copy=True) for name in names}
    shape = [field.to("cuda", copy=True) for field in problems[0].shape]
    state = State(
        held["whole"][:, : problems[0].batch], *(held[name] for name in ("output", "stops", "seen", "counts"))
    )
    nodes = Nodes(held["tokens"], shape[0], shape[1])
    verified = Verified(held["path"], held["length"], held["after"])
    graph, _ = captured(lambda: commit(state, nodes, shape[2], verified, problems[0].branching))
    for problem in problems:
        given = [*(getattr(problem, name) for name in names), *problem.shape]
        for field, value in zip([*held.values(), *shape], given, strict=True):
            field.copy_(value)
        graph.replay()
        found = [held[name].cpu() for name in ("whole", "output", "seen", "counts")]
        assert all(torch.equal(one, other) for one, other in zip(found, problem.expected(), strict=True))


@pytest.mark.parametrize("method", VERIFICATION_METHODS)
def test_the_tickets_of_a_thousand_verifications_are_found_at_zero(method):
    """A counter that is left, or two programs that both think to be the last, would change a later answer."""
    nodes, vocab_size, repeats = size((32, 32_000, 1000), (6, 40, 2))
    tree = TokenTree([-1, *(node // 3 for node in range(nodes - 1))])
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(2, nodes, vocab_size, generator=generator)
    draft = target + 0.5 * torch.randn(target.shape, generator=generator)
    tokens = target.topk(3).indices[:, tree.parents.clamp(min=0), tree.ranks.clamp(0, 2)]
    options = {"ranks": tree.ranks, "rows": torch.arange(2 * nodes).view(2, nodes), "max_depth": tree.depth}
    given = moved((tokens, tree.parents, target, draft if method in DRAFT_AWARE else None), "cuda")
    options = moved(options, "cuda") | {"method": method, "temperature": 0.0 if method == "greedy" else 0.8}
    first = verify_tree(*given, **options)
    differ = torch.zeros((), dtype=torch.long, device="cuda")
    for _ in range(repeats):
        again = verify_tree(*given, **options)
        differ += sum((one != other).sum() for one, other in zip(first, again, strict=True))
    assert int(differ) == 0


def test_one_launch_of_each_kernel():
    """Small and quick, for compute-sanitizer."""
    logits = torch.randn(2, 500).cuda()
    zero = torch.zeros(2).cuda()
    gumbel_topk(logits, 3)
    gumbel_topk(logits, 3, top_k=20, top_p=0.9)
    stochastic_beam(logits, zero, zero, 3)
    heavy_path_order(torch.tensor([[-1, 0, 0, 1, 2, 2]]).cuda())
    keys, values = ([torch.zeros(1, 2, 20, 16).cuda()] for _ in range(2))
    path, length, prefix = (torch.tensor(each).cuda() for each in ([[0, 2, 4]], [2], [5]))
    compact_cache(keys, values, path, length, prefix)
    query, rows = torch.randn(1, 2, 4, 16).cuda(), torch.randn(1, 2, 604, 16).cuda()
    end = torch.tensor([4, 2, 4, 4]).cuda()
    tree_attention(query, rows, rows, prefix_length=torch.tensor([600]).cuda(), subtree_end=end)
    tree_attention(query, rows, rows, prefix_length=600, ancestor_mask=torch.ones(4, 4).tril().bool().cuda())
    for method in ("without_replacement", "kseq", "race", "greedy"):
        nodes = torch.randn(2, 1, 3, 500).cuda()
        draft = nodes[1] if method in ("without_replacement", "kseq") else None
        options = {"rows": torch.arange(3)[None].cuda(), "temperature": 0.0 if method == "greedy" else 0.7}
        verify_tree(torch.tensor([[1, 2, 3]]).cuda(), torch.tensor([-1, 0, 0]).cuda(), nodes[0], draft, method=method,
                    **options)  # fmt: skip
    CommitProblem(1).check("triton")
    torch.cuda.synchronize()


SETTINGS = {
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k": {"temperature": 1.1, "top_k": 20},
    "penalty": {"temperature": 0.7, "repetition_penalty": 1.3},
    "least length": {"temperature": 0.9, "eos_token_id": [9, 12], "min_new_tokens": 6},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("method", ["sequoia", "dyspec", "ersd", "spectr"])
def test_graphs_write_the_eager_text_while_a_batch_becomes_smaller(method, settings, pair):
    """Four sequences of different lengths and ends: 4, 2 and 1 slots, each with a graph of its own."""
    if MINIATURE and (method, settings) not in (("sequoia", "top-p"), ("dyspec", "least length")):
        pytest.skip("too slow in miniature")
    given, new = prompts(4, 6), size(48, 6)
    mask = (torch.arange(6) >= torch.tensor([[0], [2], [4], [1]])).long().cuda()
    options = {"attention_mask": mask, "eos_token_id": [*range(10, size(30, 22))], "pad_token_id": 0}
    options |= SETTINGS[settings]
    graphs, eager = with_and_without_graphs(pair, method, tree_size=size(16, 4))
    for seed in range(size(3, 1)):
        out, expected = (decoder.generate(given, new, seed=seed, **options) for decoder in (graphs, eager))
        assert_alike(out, expected)
    for b in range(size(4, 1)):
        alone = eager.generate(given[b : b + 1, int(6 - mask[b].sum()) :], new, seed=size(2, 0),
                               sequence_ids=torch.tensor([b]), **{**options, "attention_mask": None})  # fmt: skip
        length = alone.stats.new_tokens
        assert torch.equal(out.sequences[b, 6 : 6 + length], alone.sequences[0, -length:])


def with_a_head(target):
    last = target.config.num_hidden_layers
    return head_of(target, taps=(0, last // 2, last), head_dim=16).cuda()


DRAFTS = {
    "prompt lookup": lambda target: PromptLookup(),
    "lookahead": lambda target: Lookahead(3, 3),
    "early exit": lambda target: EarlyExit(1),
    "retrieval": lambda target: Retrieval([[*range(50)] * 3]),
    # with the features of what was accepted, of which a GPU takes as many rows as a tree has levels
    "head": with_a_head,
}
FAMILIES = ("granite", "gemma2", "gpt_oss", "mistral")  # by transformers' own forward pass, with windows and without
STATES = ("qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2")  # with recurrent layers, as targets and drafts
ASK_THE_HOST = ("gpt_oss", "kimi_linear", "granitemoehybrid")  # which experts a token chose, so no step can be captured


def pair_of(kind, pair):
    if kind == "model":
        return pair
    if kind in FAMILIES:
        return 2 * [tiny(kind, head_dim=16, hidden_size=64, max_position_embeddings=128).to("cuda")]
    if kind in STATES:
        return [for_kernels(kind, seed).to("cuda") for seed in (5, 6)]
    target = tiny_llama(1, layers=2, hidden_size=32, vocab_size=50).to("cuda") if MINIATURE else pair[0]
    return target, DRAFTS[kind](target)


@pytest.mark.parametrize(("kind", "method", "tree_size", "new"), [
    *(("model", method, size(24, 4), 520) for method in ("rsd-s", "dyspec", "eagle-2")),
    *(("head", method, size(8, 3), 64) for method in ("sequoia", "dyspec", "ersd")),
    *((kind, "sequoia", size(8, 3), 64) for kind in (*DRAFTS, *FAMILIES, *STATES) if kind != "head"),
])  # fmt: skip
def test_graphs_of_any_draft_and_family_write_the_eager_text(kind, method, tree_size, new, pair):
    slow = ("gemma2", "gpt_oss", "mistral", "kimi_linear", "granitemoehybrid")
    if MINIATURE and (kind in slow or (kind == "model" and method != "rsd-s")):
        pytest.skip("too slow in miniature")
    made = SpeculativeDecoder if kind in ASK_THE_HOST else Captured
    graphs, eager = with_and_without_graphs(pair_of(kind, pair), method, kind=made, tree_size=tree_size)
    options = {"temperature": 0.8, "eos_token_id": None, "seed": 3}
    assert_alike(*(decoder.generate(prompts(2, 9), size(new, 5), **options) for decoder in (graphs, eager)))


def test_weights_that_graphs_request_ahead_change_no_text(pair, monkeypatch):
    while_capturing = []

    def request(weight, nbytes):
        while_capturing.append(torch.cuda.is_current_stream_capturing())
        prefetch_weight(weight, nbytes)

    monkeypatch.setattr(ahead, "prefetch_weight", request)
    monkeypatch.setattr(measured, "AHEAD", {torch.cuda.get_device_name(): measured.Amounts(1 << 20, 1 << 18)})
    graphs, _ = with_and_without_graphs(pair, "sequoia", tree_size=size(16, 3))
    monkeypatch.setattr(measured, "AHEAD", {})
    _, eager = with_and_without_graphs(pair, "sequoia", tree_size=size(16, 3))
    options = {"temperature": 0.8, "eos_token_id": None, "seed": 3}
    assert_alike(*(decoder.generate(prompts(2, 9), size(64, 5), **options) for decoder in (graphs, eager)))
    assert any(while_capturing)


@pytest.mark.parametrize("method", [*METHODS])
def test_a_second_larger_prompt_and_one_beyond_a_chunk_of_the_prefill(method, pair, monkeypatch):
    """The memory of the first text is too small for the others."""
    if MINIATURE and method != "sequoia":
        pytest.skip("too slow in miniature")
    monkeypatch.setattr("heavypath.speculative.models.forward.PREFILL_CHUNK", size(512, 7))
    monkeypatch.setattr("heavypath.speculative.models.forward.PREFILL_ROWS", 1)
    graphs, eager = with_and_without_graphs(pair, method, tree_size=size(8, 3))
    for length in size((20, 200, 600, 30), (3, 20)):
        options = {"max_new_tokens": size(24, 5), "temperature": 0.7, "eos_token_id": None, "seed": length}
        assert_alike(*(decoder.generate(prompts(1, length), **options) for decoder in (graphs, eager)))


def test_two_decoders_in_turn_and_two_threads_write_their_own_texts(pair):
    made = [with_and_without_graphs(pair, method, tree_size=size(12, 3)) for method in ("sequoia", "ersd")]
    given = [prompts(1, 9, seed) for seed in range(2)]
    options = {"max_new_tokens": size(64, 5), "temperature": 0.8, "eos_token_id": None, "seed": 2}
    expected = [eager.generate(prompt, **options) for (_, eager), prompt in zip(made, given, strict=True)]
    for _ in range(size(3, 1)):
        for (graphs, _), prompt, right in zip(made, given, expected, strict=True):
            assert_alike(graphs.generate(prompt, **options), right)

    def write(number):
        for _ in range(size(4, 1)):
            out = made[number][0].generate(given[number], **options)
        return out

    for out, right in zip(in_time(partial(write, 0), partial(write, 1), seconds=300), expected, strict=True):
        assert_alike(out, right)


def test_a_decoder_writes_its_text_when_another_one_has_gone(pair):
    """All graphs are captured on one stream, by which torch knows the memory that cuBLAS works in."""
    options = {"max_new_tokens": size(48, 2), "temperature": 0.8, "eos_token_id": None, "seed": 2}
    first, second = (Captured(*pair, method, tree_size=size(8, 2), cuda_graphs=True) for method in ("sequoia", "ersd"))
    _, expected = (decoder.generate(prompts(1, 9), **options) for decoder in (first, second))
    del first
    gc.collect()
    torch.cuda.empty_cache()
    assert_alike(second.generate(prompts(1, 9), **options), expected)


@pytest.mark.parametrize("method", ["sequoia", "dyspec", "spectr"])
def test_the_default_type_of_torch_changes_no_text(method, pair, request):
    """Users set it, and the kernels' own memory is fp32 all the same."""
    if MINIATURE:
        pytest.skip("too slow in miniature")
    options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "eos_token_id": None, "seed": 2}
    given, new = prompts(size(2, 1), 9), size(48, 3)
    eager = SpeculativeDecoder(*pair, method, tree_size=size(12, 3), cuda_graphs=False)
    expected = eager.generate(given, new, **options)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    for decoder in with_and_without_graphs(pair, method, tree_size=size(12, 3)):
        assert_alike(decoder.generate(given, new, **options), expected)


def test_a_capture_that_fails_leaves_torchs_random_numbers():
    one = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError):
        Graphs(one.device).of("what asks the host").capture(one.item)
    torch.randn(1, device="cuda")
    torch.cuda.empty_cache()


def test_served_texts_are_those_of_each_prompt_alone(pair):
    """One after the other, with the shapes of a text alone, to the token; side by side all come to their ends."""
    decoder = SpeculativeDecoder(*pair, "ersd", tree_size=size(6, 2))
    ways = [(9, {"temperature": 0.0}), (40, {"temperature": 0.8}), (3, {"temperature": 0.7, "top_k": 9, "top_p": 0.9})]
    wanted = [
        (prompts(1, size(length, 3), seed=length)[0], {"max_new_tokens": size(60, 3), **sampling}, length)
        for length, sampling in ways[size(0, 2) :]
    ]
    for slots in size((1, 2), (1,)):
        with decoder.serve(slots=slots, max_tokens=128, prefill_tokens=16) as service:
            sent = [
                service.submit(prompt, **settings, seed=seed, eos_token_id=None) for prompt, settings, seed in wanted
            ]
            found = [completion.result(300) for completion in sent]
        for done, (prompt, settings, seed) in zip(found, wanted, strict=True):
            ids = torch.tensor([seed], device="cuda")
            alone = decoder.generate(prompt[None], **settings, sequence_ids=ids, eos_token_id=None)
            assert (len(done.tokens), done.reason) == (settings["max_new_tokens"], "length")
            if slots == 1:
                assert done.tokens == alone.sequences[0, len(prompt) :].tolist()


@pytest.mark.skipif(MINIATURE, reason="nothing is busy where a GPU is played")
def test_a_service_takes_a_request_while_the_gpu_is_busy(pair):
    decoder = SpeculativeDecoder(*pair, "ersd", tree_size=6)
    with decoder.serve(slots=2, max_tokens=64, prefill_tokens=16) as service:
        for _ in range(3):  # later nothing is compiled, loaded or captured, for which CUDA waits until the GPU is idle
            for completion in [service.submit([1, 2, 3], 4, eos_token_id=None) for _ in range(4)]:
                completion.result(300)
        busy = torch.cuda.Event()
        torch.cuda._sleep(4_000_000_000)  # cycles, of which there are two billion a second
        busy.record()
        completions = [service.submit([1, 2, 3], 4, eos_token_id=None) for _ in range(4)]
        assert not busy.query()
        assert [completion.result(300).reason for completion in completions] == ["length"] * 4


@pytest.fixture
def done(monkeypatch):
    """What is done with graphs: what is captured and what is replayed, by the name."""
    names = []

    def watch(name):
        kept = getattr(Graph, name)

        def watched(*args):
            kept(*args)
            names.append(name)

        monkeypatch.setattr(Graph, name, watched)

    watch("capture")
    watch("replay")
    return names


@pytest.mark.parametrize("method", ["sequoia", "dyspec", "autoregressive"])
def test_after_warming_up_each_step_is_a_graph_that_is_there(method, pair, done):
    if MINIATURE and method == "sequoia":
        pytest.skip("too slow in miniature")
    graphs, eager = with_and_without_graphs(pair, method, tree_size=size(16, 3))
    new = size(40, 5)
    graphs.warm_up(batch_size=size(4, 1), prompt_tokens=9, max_new_tokens=new, temperature=0.8)
    assert len(graphs.runner.idle.launcher.graphs) == size(3, 1)  # of 4 sequences, 2 and 1
    assert "replay" in done
    done.clear()
    options = {"max_new_tokens": new, "temperature": 0.8, "eos_token_id": None, "seed": 3}
    out, expected = (decoder.generate(prompts(size(4, 1), 9), **options) for decoder in (graphs, eager))
    assert_alike(out, expected)
    assert {*done} == {"replay"}
    assert len(done) >= out.stats.steps_of.max()


def test_a_service_captures_its_steps_before_the_first_request(pair, done):
    decoder = SpeculativeDecoder(*pair, "ersd", tree_size=size(6, 2))
    with decoder.serve(slots=size(4, 1), max_tokens=64, prefill_tokens=16) as service:
        assert done.count("capture") >= size(3, 1)
        done.clear()
        service.submit(prompts(1, 5)[0], max_new_tokens=size(30, 3), temperature=0.8, eos_token_id=None).result(300)
        assert {*done} == {"replay"}


def test_streamers_criteria_and_traces_see_what_an_eager_text_shows(pair, tmp_path):
    seen, texts = [], []
    for number, decoder in enumerate(with_and_without_graphs(pair, "sequoia", tree_size=size(8, 3))):
        recorder, calls = Mock(), []

        def criterion(ids, scores, calls=calls):
            calls.append(ids[0].tolist())
            return torch.tensor([ids.shape[1] >= 14], device=ids.device)

        out = decoder.generate(
            prompts(1, 5), size(40, 9), temperature=0.8, eos_token_id=None, seed=1, streamer=recorder,
            stopping_criteria=[criterion], trace=tmp_path / f"{number}.jsonl",
        )  # fmt: skip
        given = [call.args[0].flatten() for call in recorder.put.call_args_list]
        assert torch.equal(torch.cat(given).cpu(), out.sequences[0].cpu())
        recorder.end.assert_called_once()
        seen.append(calls)
        texts.append(out)
    assert_alike(*texts)
    assert seen[0] == seen[1]
    traces = [(tmp_path / f"{number}.jsonl").read_text().splitlines()[1:] for number in range(2)]
    assert len(traces[0]) == len(traces[1]) > 0


@pytest.mark.parametrize("kind", ["head", "few tokens", "layers", "block", "medusa"])
def test_a_draft_is_trained_on_the_gpu(kind, tmp_path):
    target, documents = tiny_llama(1, layers=2, hidden_size=32, vocab_size=50).cuda(), texts()
    few = most_frequent(documents, 20, 50) if kind == "few tokens" else None
    drafts = {"layers": lambda: draft_of_layers(target, [1]), "block": lambda: new_block(target)}
    drafts["medusa"] = lambda: new_medusa(target)
    draft = drafts.get(kind, lambda: new_head(target, few))()
    settings = replace(TINY, epochs=4, written=size(0.2, 0.0))
    record = distil(draft, target, documents, tmp_path / "draft", settings, say=silent)
    before, after = overlaps(record)
    assert all(late > early + 0.02 for early, late in zip(before, after, strict=True))
    assert {weight.device.type for weight in draft.parameters()} == {"cuda"}
    prompt = random_rows(3, 1, 6).tokens.long().cuda()
    new_tokens = size(32, 2)
    out = SpeculativeDecoder(target, draft, tree_size=size(8, 2)).generate(prompt, max_new_tokens=new_tokens)
    assert torch.equal(out.sequences, greedy(target, prompt, new_tokens))
