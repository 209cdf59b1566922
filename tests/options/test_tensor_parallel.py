"""A target split over ranks: the same texts as in one process, and ranks that differ are found in the same step."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from families import tiny
from rank_cases import llama
from rank_processes import on_ranks, start, wait
from rank_work import (
    METHODS,
    PADDING,
    PROMPTS,
    architectures,
    custom_generate,
    decode,
    die,
    divergences,
    load,
    one_rank_decides,
    refusals,
    texts,
)
from transformers import LlamaConfig, LlamaForCausalLM

from heavypath.speculative import EarlyExit, SpeculativeDecoder, load_demo_pair
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


@pytest.fixture(scope="module")
def alone(folder):
    """What one process decodes."""
    target, draft = load(folder, "target"), load(folder, "draft")
    return {
        "whole": texts(target, draft),
        "split": texts(target, draft, METHODS[-3:]),
        "exit": texts(target, EarlyExit(1), METHODS[-3:]),
    }


def every_check(folder, trials):
    """All that two ranks do in the default tests, in one pair of processes: imports take most of the time."""
    found = {
        "decode": decode(folder, METHODS),
        "refusals": refusals(folder),
        "custom": custom_generate(folder),
        "decides": one_rank_decides(folder),
        "divergences": divergences(folder, trials),
    }
    torch.save(found, Path(folder, f"checks-{dist.get_rank()}"))
    dist.barrier()
    die(folder)


@pytest.fixture(scope="module")
def pair(folder):
    """A pair of processes that have done every check, and of which one was killed then."""
    return ended(start(2, every_check, folder, 14), folder)


def ended(processes, folder):
    """The processes when all have ended, the seconds since rank 1 was to be killed, and what the others said."""
    ready = Path(folder, "ready-1")
    while not ready.exists() and any(process.is_alive() for process in processes):
        time.sleep(0.05)
    begin = time.monotonic()
    wait(processes, 60)
    seconds = time.monotonic() - begin
    results = [Path(folder, f"result-{rank}") for rank in range(len(processes))]
    return processes, seconds, {each.name: torch.load(each, weights_only=False) for each in results if each.exists()}


@pytest.fixture(scope="module")
def two_ranks(pair, folder):
    found = [Path(folder, f"checks-{rank}") for rank in range(2)]
    assert all(each.exists() for each in found), pair[2]
    return [torch.load(each, weights_only=False) for each in found]


def assert_as_alone(ranks, alone):
    for kind, expected in alone.items():
        for case, (sequences, _, logits) in expected.items():
            first = ranks[0][kind][case]
            assert torch.equal(first[0], sequences), (kind, case)
            torch.testing.assert_close(first[2], logits, atol=1e-4, rtol=1e-4)
            for other in ranks[1:]:
                assert other[kind][case][1] == first[1], f"logits of {kind}, {case} are not the same bits on all ranks"
                assert torch.equal(other[kind][case][0], sequences)


def test_texts_are_those_of_one_process_and_logits_the_same_bits_on_all_ranks(two_ranks, alone):
    assert_as_alone([found["decode"] for found in two_ranks], alone)


def test_a_rank_runs_its_own_heads_by_our_own_pass(two_ranks):
    assert all(found["decode"]["forward"] == ("LlamaForward", 2 * 6) for found in two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_texts_of_more_ranks_are_those_of_one_process(count, folder, alone):
    assert_as_alone(on_ranks(count, decode, folder), alone)


def test_heads_that_cannot_be_shared_are_refused_by_their_number(two_ranks):
    for found in two_ranks:
        said = found["refusals"]["heads"]
        assert "target has 5 key heads, which cannot be split over 2 ranks; start 5" in said


def test_a_service_is_refused_over_ranks(two_ranks):
    assert all("serve runs in one process" in found["refusals"]["serve"] for found in two_ranks)


def test_a_target_split_by_fsdp_runs_by_transformers_own_forward_pass(two_ranks, alone, folder):
    decoder = SpeculativeDecoder(load(folder, "target"), load(folder, "draft"), "sequoia")
    expected = decoder.generate(PROMPTS, 10, 0.6, seed=7, attention_mask=PADDING, eos_token_id=None).sequences
    for found in two_ranks:
        assert torch.equal(found["refusals"]["fsdp"], expected)
        assert found["refusals"]["ranks of fsdp"] == 2


def test_rank_0_draws_the_seed_that_transformers_generate_was_not_given(two_ranks):
    (first, second), others = two_ranks[0]["custom"], two_ranks[1]["custom"]
    assert torch.equal(first, others[0])
    assert torch.equal(second, others[1])
    assert not torch.equal(first, second)


def test_rank_0_alone_is_asked_whether_a_text_ends(two_ranks):
    first, second = (found["decides"] for found in two_ranks)
    assert first["stopped"] == second["stopped"]
    assert len(first["stopped"]) == 3
    assert first["asked"] > 0 == second["asked"]


def test_rank_0_alone_streams_and_writes_the_trace(two_ranks):
    first, second = (found["decides"] for found in two_ranks)
    assert first["streamed"][6:] == [*first["stopped"], "end"]
    assert second["streamed"] == []
    assert first["traced"]
    assert not second["traced"]


def test_a_streamer_that_fails_on_rank_0_ends_all_ranks_after_the_same_step(two_ranks):
    (kind, said, steps), (other, told, other_steps) = (found["decides"]["streamer"] for found in two_ranks)
    assert (kind, said) == ("OSError", "nobody reads")
    assert (other, told) == ("RankFailedError", "rank 0 has raised OSError: nobody reads")
    assert steps == other_steps == 3  # it fails after the second step, and says so in the third


def test_ctrl_c_on_one_rank_ends_all_ranks_after_the_same_step(two_ranks):
    for found in two_ranks:
        kind, _, steps = found["decides"]["ctrl-c"]
        assert (kind, steps) == ("KeyboardInterrupt", 3)  # it comes within the second step


def test_a_decoder_goes_on_behind_what_ended_a_text(two_ranks):
    assert all(found["decides"]["after all"] for found in two_ranks)


def assert_found(results, trials):
    expected = {
        "another seed": "seed",
        "noise": "draft",
        "draft": "draft",
        "growth": "draft",
        "logits": "target logits",
        "verdict": "verdict",
        "weight": "target weight model.layers.1.input_layernorm.weight",
    }
    assert all(result == results[0] for result in results), "ranks do not say the same"
    assert len(results[0]) == trials
    for kind, guilty, step, said in results[0]:
        assert said is not None, f"{kind} on rank {guilty} in step {step} was not found"
        rank, what, message, steps = said
        assert (rank, what) == (guilty, expected[kind]), message
        assert steps == (0 if kind in ("another seed", "weight") else step), message
        assert f"rank {guilty} has another {what}" in message


def test_ranks_that_differ_are_found_in_the_same_step_and_named(two_ranks):
    assert_found([found["divergences"] for found in two_ranks], 14)


@pytest.mark.slow
def test_a_hundred_of_a_hundred_divergences_are_found(folder):
    assert_found(on_ranks(3, divergences, folder, 100), 100)


def assert_ended(processes, seconds, said):
    assert seconds < 30
    assert processes[1].exitcode == -9
    assert len(said) == len(processes) - 1
    assert all("RuntimeError" in one and "Connection" in one for one in said.values()), said


def test_a_rank_that_is_killed_ends_the_other(pair):
    processes, seconds, said = pair
    assert_ended(processes, seconds, said)


@pytest.mark.slow
def test_a_rank_of_three_that_is_killed_ends_the_others(folder, tmp_path):
    for name in ("target", "draft"):
        tmp_path.joinpath(name).symlink_to(folder / name)
    processes, seconds, said = ended(start(3, die, tmp_path), tmp_path)
    assert_ended(processes, seconds, said)


@pytest.mark.slow
def test_architectures_that_transformers_splits_have_the_texts_of_one_process(tmp_path):
    draft = tiny("llama")
    draft.save_pretrained(tmp_path / "llama")
    expected = {}
    for kind in KINDS:
        model = tiny(kind)
        model.save_pretrained(tmp_path / kind)
        decoder = SpeculativeDecoder(model, draft, "dyspec")
        options = {"attention_mask": PADDING[:2], "seed": 2}
        expected[kind] = [decoder.generate(PROMPTS[:2], 12, each, **options).sequences for each in (0.0, 0.8)]
    for found in on_ranks(2, architectures, tmp_path, KINDS):
        for kind, (forward, sequences) in found.items():
            assert forward == "TransformersForward"
            assert all(map(torch.equal, sequences, expected[kind])), kind


@pytest.mark.slow
def test_the_command_prints_one_text_under_torchrun(folder, tmp_path):
    tokenizer = load_demo_pair()[2]
    config = LlamaConfig(**{**llama(1).config.to_dict(), "vocab_size": len(tokenizer)})
    torch.manual_seed(4)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    command = ["-m", "heavypath.speculative", "generate", "-", "--target", str(tmp_path), "--draft", "prompt-lookup"]
    command += ["--max-new-tokens", "12", "--temperature", "0.7", "--json"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    answers = []
    for before in ([], torchrun):
        done = subprocess.run(
            [sys.executable, *before, *command],
            input="import os\n", capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        answers.append(json.loads(done.stdout))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


class _OneRank:
    """Ranks of which there is one, on a device without values."""

    def largest(self, numbers):
        return numbers


def test_a_step_agrees_without_asking_the_host():
    """On the meta device every question of the host's is an error, as it is in a CUDA graph's capture."""
    agreement = Agreement(_OneRank(), torch.device("meta"))
    tokens, left = torch.zeros(2, 6, dtype=torch.long, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    logits = torch.zeros(2, 6, 33, dtype=torch.bfloat16, device="meta")
    drafted = Drafted(tokens, tokens[0], tokens[0], tokens[0], tokens[0], None, None, logits)
    agreement.check([drafted.to_compare(), [logits], [tokens, left, left]], left)
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
