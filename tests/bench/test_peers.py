"""bench/peers.py: what llama.cpp prints is read, and whose numbers count. llama.cpp need not be there."""

import pytest
import torch
from bench_scripts import script


def program(folder, name, lines):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def asked(tokens=3):
    return script("llama_cpp").Asked(tokens, 0.0, 1, 0)


def test_weights_and_tokens_are_exported_as_llama_cpp_reads_them():
    """Rows of a head stand in the pairs that are rotated together: of two heads of four channels 0 and 2, 1 and 3."""
    export = script("llama_cpp")
    assert export.paired(torch.arange(8.0).view(8, 1), 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert export.spelled([7, 12345]) == "<0007><12345>"
    assert export.tokens_spelled("\n <0007><12345>[end of text]") == [7, 12345]


def test_plain_decoding_is_timed_by_its_passes_of_one_token_and_none_without_figures(tmp_path):
    lines = "prompt eval time = 9.00 ms / 2 tokens ( 4.5 ms per token)\nx:  eval time =  10.00 ms /   2 runs   (5.0"
    program(tmp_path, "llama-completion", f"printf '<0003><0004><0005>'; printf '{lines}' >&2")
    run = script("llama_cpp").plain_runner(tmp_path, tmp_path / "a.gguf")
    assert run([1, 2], asked()) == (2, 0.01, [3, 4, 5])
    program(tmp_path, "llama-completion", "echo 'no such option' >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"(?s)status 1.*-n 3.*no such option"):
        run([1], asked())


def test_each_counts_with_its_best_number_of_threads_and_the_best_of_llama_cpp_is_lossless():
    """For two prompts ours takes 1 s and 2 s with one thread, the lossless one of llama.cpp 2 s each with two."""
    peers, timed = script("peers"), script("llama_cpp").Timed
    table = {  # program and seconds for either prompt, by way and number of threads
        ("lossless", 1): ("llama.cpp", 3, 3), ("lossless", 2): ("llama.cpp", 2, 2),
        ("lossy", 1): ("llama.cpp", 0.5, 0.5), ("transformers generate", 1): ("transformers", 4, 4),
        ("transformers generate", 2): ("transformers", 8, 8), ("autoregressive", 1): ("ours", 2, 2),
        ("sequoia", 1): ("ours", 1, 2), ("sequoia", 2): ("ours", 3, 3),
    }  # fmt: skip
    ways = {turn: peers.Way(who, len, lossless=turn[0] != "lossy") for turn, (who, *_) in table.items()}
    groups = [{turn: timed(8, row[1 + place], [1, 2]) for turn, row in table.items()} for place in (0, 1)]
    groups[1]["lossy", 1] = timed(8, 0.5, [1, 3])
    sampled = peers.summary(ways, groups, greedy=False)
    assert sampled["best"] == {"ours": "sequoia", "llama.cpp": "lossless", "transformers": "transformers generate"}
    rows = {row["name"]: row for row in sampled["rows"]}
    assert {name: row["threads"] for name, row in rows.items()} == {
        "lossless": 2, "lossy": 1, "transformers generate": 1, "autoregressive": 1, "sequoia": 1,
    }  # fmt: skip
    assert [rows["sequoia"][f"over_{to}"].median for to in ("transformers", "llama_cpp", "plain")] == [3, 1.5, 1.5]
    assert (rows["autoregressive"]["over_plain"].median, rows["lossless"]["over_plain"]) == (1, None)
    greedy = peers.summary(ways, groups, greedy=True)
    assert greedy["best"]["llama.cpp"] == "lossy"
    assert [row["equal"] for row in greedy["rows"]] == [1, 0.5, 1, 1, 1]
