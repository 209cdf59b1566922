"""bench/peers.py: models made wider compute the same, and what llama.cpp prints is read. It need not be there."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import enlarging
    import gguf_export
    import llama_programs
    import peers

    return SimpleNamespace(enlarging=enlarging, gguf_export=gguf_export, llama_programs=llama_programs, peers=peers)


def program(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_widened_model_computes_the_same(bench, demo_pair, which):
    model = getattr(demo_pair, which)
    ids = demo_pair.tokenizer("def read(self, size=-1):\n    return", return_tensors="pt").input_ids
    wide = bench.enlarging.widened(model, 3)
    assert wide.config.hidden_size == 3 * model.config.hidden_size
    assert wide.config.num_key_value_heads == 3 * model.config.num_key_value_heads
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


def test_a_model_is_not_made_narrower(bench, demo_pair):
    with pytest.raises(ValueError, match="factor of at least 1"):
        bench.enlarging.widened(demo_pair.draft, 0)


def test_rows_of_a_head_stand_in_the_pairs_that_are_rotated_together(bench):
    rows = torch.arange(8.0).view(8, 1)  # two heads of four channels: 0 with 2, 1 with 3
    assert bench.gguf_export.paired(rows, 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_tokens_are_spelled_so_that_they_can_be_read_again(bench):
    assert bench.gguf_export.spelled([7, 12345]) == "<0007><12345>"
    assert bench.gguf_export.tokens_spelled("\n <0007><12345>[end of text]") == [7, 12345]


def test_a_program_that_ends_without_its_figures_is_run_again(bench, tmp_path):
    figures = 'echo "0.1 I decoded    4 tokens in    0.002 seconds, speed: 2000.000 t/s" >&2'
    program(
        tmp_path, "llama-speculative", f"printf '<0001><0002><0003><0004><0005>'; [ -e $0.ran ] && {figures}; >$0.ran"
    )
    models = tmp_path / "a.gguf", tmp_path / "b.gguf"
    run = bench.llama_programs.speculative_runner(
        tmp_path, "llama-speculative", models, bench.llama_programs.Drafting(2)
    )
    timed = run([1, 2], bench.llama_programs.Asked(3, 0.0, 1, 0))
    assert timed == (4, 0.002, [3, 4, 5])


def test_plain_decoding_is_timed_by_its_passes_of_one_token(bench, tmp_path):
    lines = "prompt eval time = 9.00 ms / 2 tokens ( 4.5 ms per token)\nx:  eval time =  10.00 ms /   2 runs   (5.0"
    program(tmp_path, "llama-completion", f"printf '<0003><0004><0005>'; printf '{lines}' >&2")
    timed = bench.llama_programs.plain_runner(tmp_path, tmp_path / "a.gguf")(
        [1, 2], bench.llama_programs.Asked(3, 0.0, 1, 0)
    )
    assert timed == (2, 0.01, [3, 4, 5])


def test_a_program_that_never_has_figures_is_an_error_with_its_command(bench, tmp_path):
    program(tmp_path, "llama-completion", "echo 'no such option' >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"(?s)status 1.*-n 3.*no such option"):
        bench.llama_programs.plain_runner(tmp_path, tmp_path / "a.gguf")([1], bench.llama_programs.Asked(3, 0.0, 1, 0))


def test_each_counts_with_its_best_number_of_threads_and_the_best_of_llama_cpp_keeps_the_law(bench):
    """For two prompts ours takes 1 s and 2 s with one thread, the lossless one of llama.cpp 2 s each with two."""
    way, timed = bench.peers.Way, bench.llama_programs.Timed
    ways = {
        ("lossless", 1): way("llama.cpp", len),
        ("lossless", 2): way("llama.cpp", len),
        ("lossy", 1): way("llama.cpp", len, keeps_law=False),
        ("transformers generate", 1): way("transformers", len),
        ("transformers generate", 2): way("transformers", len),
        ("autoregressive", 1): way("ours", len),
        ("sequoia", 1): way("ours", len),
        ("sequoia", 2): way("ours", len),
    }
    seconds = dict(zip(ways, [(3, 3), (2, 2), (0.5, 0.5), (4, 4), (8, 8), (2, 2), (1, 2), (3, 3)], strict=True))
    groups = [{turn: timed(8, own[place], [1, 2]) for turn, own in seconds.items()} for place in (0, 1)]
    groups[1]["lossy", 1] = timed(8, 0.5, [1, 3])
    sampled = bench.peers.summary(ways, groups, greedy=False)
    assert sampled["best"] == {"ours": "sequoia", "llama.cpp": "lossless", "transformers": "transformers generate"}
    rows = {row["name"]: row for row in sampled["rows"]}
    assert {name: row["threads"] for name, row in rows.items()} == {
        "lossless": 2, "lossy": 1, "transformers generate": 1, "autoregressive": 1, "sequoia": 1,
    }  # fmt: skip
    ratios = [rows["sequoia"][f"over_{to}"].median for to in ("transformers", "llama_cpp", "plain")]
    assert ratios == [3, 1.5, 1.5]
    assert (rows["autoregressive"]["over_plain"].median, rows["lossless"]["over_plain"]) == (1, None)
    greedy = bench.peers.summary(ways, groups, greedy=True)
    assert greedy["best"]["llama.cpp"] == "lossy"
    assert [row["equal"] for row in greedy["rows"]] == [1, 0.5, 1, 1, 1]


def test_in_miniature_without_llama_cpp_it_says_what_is_missing(bench, tmp_path, capsys):
    path = tmp_path / "peers.json"
    threads = torch.get_num_threads()
    try:
        bench.peers.main(["--miniature", "--llama-cpp", str(tmp_path), "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "without llama-completion, llama-speculative, llama-speculative-simple" in said
    assert "pip download" in said
    assert "--build" in said
    cells = json.loads(path.read_text())["cells"]
    assert [(cell["pair"], cell["temperature"]) for cell in cells] == [
        ("shipped", 0.0), ("shipped", 0.6), ("enlarged", 0.0), ("enlarged", 0.6),
    ]  # fmt: skip
    assert all(row["equal"] == 1 for cell in cells if cell["temperature"] == 0 for row in cell["rows"])
