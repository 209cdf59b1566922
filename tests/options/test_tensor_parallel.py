"""A target split over ranks: the same texts as in one process, and ranks that differ are found in the same step."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from families import tiny
from rank_processes import on_ranks, start, wait
from rank_work import OPTIONS, PROMPTS, architectures, every_check, llama, load, texts
from transformers import LlamaConfig, LlamaForCausalLM

from heavypath.speculative import EarlyExit, SpeculativeDecoder
from heavypath.speculative.decoding.drafted import Drafted
from heavypath.speculative.ranks.agreement import Agreement, digest, row_digests

KINDS = (  # that transformers itself can split, and that run by its own forward pass
    "apertus", "arcee", "cohere", "deepseek_v3", "exaone4", "gemma2", "glm4", "gpt_neox", "gpt_oss", "granite",
    "mixtral", "nemotron", "olmo2", "phi3", "starcoder2",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saved models: a target, a draft that is often right, and a target of five heads."""
    folder = tmp_path_factory.mktemp("models")
    target, draft = llama(1), llama(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.03 * torch.randn_like(weight))
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    llama(2, heads=5).save_pretrained(folder / "five")
    return folder


@pytest.fixture(scope="module", params=[
    pytest.param(2, marks=pytest.mark.integration), *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4))
])  # fmt: skip
def group(folder, request):
    """Processes that have done every check, of which rank 1 was killed then.

    checks: of each rank; said: by those that were not killed
    """
    count, ready = request.param, folder / "ready-1"
    ready.unlink(missing_ok=True)
    processes = start(count, every_check, folder, 100 if count == 3 else 14)
    while not ready.exists() and any(process.is_alive() for process in processes):
        time.sleep(0.05)
    wait(processes)  # who has not ended after ten minutes is killed, which `exitcode` says
    said = [torch.load(one, weights_only=False) for one in sorted(folder.glob("result-*"))]
    assert ready.exists(), said
    checks = [torch.load(folder / f"checks-{rank}", weights_only=False) for rank in range(count)]
    return SimpleNamespace(checks=checks, processes=processes, said=said)


def test_texts_are_those_of_one_process_and_logits_the_same_bits_on_all_ranks(group, folder):
    target, draft = load(folder, "target"), load(folder, "draft")
    alone = texts(target, {"whole": draft, "split": draft, "exit": EarlyExit(1)})
    (first, forward), *others = (checks["decode"] for checks in group.checks)
    assert forward == ("LlamaForward", 2 * 12 // len(group.checks)), "each rank has its own heads"
    for case, (sequences, _, logits) in alone.items():
        assert torch.equal(first[case][0], sequences), case
        torch.testing.assert_close(first[case][2], logits, atol=1e-4, rtol=1e-4)
        for other, _ in others:
            assert other[case][1] == first[case][1], f"logits of {case} are not the same bits on all ranks"
            assert torch.equal(other[case][0], sequences)


def test_what_ranks_cannot_do_is_refused_and_fsdp_runs_by_transformers_own_pass(group, folder):
    decoder = SpeculativeDecoder(load(folder, "target"), load(folder, "draft"), "sequoia")
    expected, count = decoder.generate(PROMPTS, 10, 0.6, **OPTIONS).sequences, len(group.checks)
    for found in (checks["refusals"] for checks in group.checks):
        assert f"target has 5 key heads, which cannot be split over {count} ranks; start 5" in found["heads"]
        assert "serve runs in one process" in found["serve"]
        assert torch.equal(found["fsdp"], expected)
        assert found["ranks of fsdp"] == count


def test_rank_0_draws_the_seed_that_transformers_generate_was_not_given(group):
    first, second = group.checks[0]["custom"]
    assert not torch.equal(first, second)
    for checks in group.checks:
        assert torch.equal(checks["custom"][0], first)
        assert torch.equal(checks["custom"][1], second)


def test_rank_0_alone_is_asked_whether_a_text_ends_and_streams_and_writes_the_trace(group):
    first, *others = (checks["decides"] for checks in group.checks)
    assert len(first["stopped"]) == 3
    assert first["asked"] > 0
    assert first["streamed"][6:] == [*first["stopped"], "end"]
    assert first["traced"]
    for other in others:
        assert other["stopped"] == first["stopped"]
        assert (other["asked"], other["streamed"], other["traced"]) == (0, [], False)


def test_what_fails_on_one_rank_ends_all_ranks_after_the_same_step_and_the_decoder_goes_on(group):
    for rank, found in enumerate(checks["decides"] for checks in group.checks):
        told = ("RankFailedError", "rank 0 has raised OSError: nobody reads") if rank else ("OSError", "nobody reads")
        assert found["streamer"] == (*told, 3)  # it fails after the second step, and says so in the third
        assert (found["ctrl-c"][0], found["ctrl-c"][2]) == ("KeyboardInterrupt", 3)  # it comes within the second step
        assert found["after all"]


def test_ranks_that_differ_are_found_in_the_same_step_and_named(group):
    expected = {
        "another seed": "seed", "noise": "draft", "draft": "draft", "growth": "draft", "logits": "target logits",
        "verdict": "verdict", "weight": "target weight model.layers.1.input_layernorm.weight",
    }  # fmt: skip
    results = [checks["divergences"] for checks in group.checks]
    assert all(result == results[0] for result in results), "ranks do not say the same"
    for kind, guilty, step, said in results[0]:
        assert said is not None, f"{kind} on rank {guilty} in step {step} was not found"
        rank, what, message, steps = said
        assert (rank, what) == (guilty, expected[kind]), message
        assert steps == (0 if kind in ("another seed", "weight") else step), message
        assert f"rank {guilty} has another {what}" in message


def test_a_rank_that_is_killed_ends_the_others(group):
    assert group.processes[1].exitcode == -9
    assert len(group.said) == len(group.processes) - 1
    assert all("RuntimeError" in one and "Connection" in one for one in group.said), group.said


@pytest.mark.slow
def test_architectures_that_transformers_splits_have_the_texts_of_one_process(tmp_path):
    draft, expected = tiny("llama"), {}
    draft.save_pretrained(tmp_path / "llama")
    for kind in KINDS:
        model = tiny(kind)
        model.save_pretrained(tmp_path / kind)
        expected[kind] = SpeculativeDecoder(model, draft, "dyspec").generate(PROMPTS, 12, 0.8, **OPTIONS).sequences
    for found in on_ranks(2, architectures, tmp_path, KINDS):
        for kind, (forward, sequences) in found.items():
            assert forward == "TransformersForward"
            assert torch.equal(sequences, expected[kind]), kind


@pytest.mark.slow
def test_the_command_prints_one_text_under_torchrun(demo_pair, tmp_path):
    config = LlamaConfig(**{**llama(1).config.to_dict(), "vocab_size": len(demo_pair.tokenizer)})
    torch.manual_seed(4)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    demo_pair.tokenizer.save_pretrained(tmp_path)
    command = ["-m", "heavypath.speculative", "generate", "-", "--target", str(tmp_path), "--draft", "prompt-lookup"]
    command += ["--max-new-tokens", "12", "--temperature", "0.7", "--json"]
    answers = []
    for before in ([], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]):
        done = subprocess.run(
            [sys.executable, *before, *command],
            input="import os\n", capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        answers.append(json.loads(done.stdout))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


def test_a_step_agrees_without_asking_the_host():
    """On the meta device every question of the host's is an error, as it is in a CUDA graph's capture."""
    agreement = Agreement(SimpleNamespace(largest=lambda numbers: numbers), torch.device("meta"))
    tokens, left = torch.zeros(2, 6, dtype=torch.long, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    logits = torch.zeros(2, 6, 33, dtype=torch.bfloat16, device="meta")
    drafted = Drafted(tokens, tokens[0], tokens[0], tokens[0], tokens[0], None, None, logits)
    agreement.check(drafted, logits, [tokens, left, left], left)
    with pytest.raises(RuntimeError, match="meta"):
        bool(left.sum())


def test_a_digest_sees_swapped_numbers_and_rows():
    tokens = torch.tensor([[3, 5, 9], [4, 4, 4]])
    logits = torch.randn(2, 3, 7)
    assert digest([tokens]) != digest([tokens[:, [1, 0, 2]]])
    assert digest([logits]) != digest([logits[:, [1, 0, 2]]])
    assert digest([tokens, logits]) == digest([tokens.clone(), logits.clone()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 2, 3, 8])
def test_a_digest_of_rows_sees_any_bit(dtype, columns):
    rows = torch.randn(5, columns).to(dtype)
    before = row_digests(rows)
    for row in range(5):
        changed = rows.clone()
        changed[row, -1] = torch.nextafter(changed[row, -1].float(), torch.tensor(9.0)) + 0.25
        assert (row_digests(changed) != before).nonzero().flatten().tolist() == [row]
