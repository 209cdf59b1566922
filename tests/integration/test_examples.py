"""Each example does what it says, with the shipped pair and with models from folders; and each is short."""

import ast
import builtins
import io
import json
import re
import runpy
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from http_server import client_of
from matplotlib import image
from tiny_models import tiny_llama
from transformers import PreTrainedTokenizerFast

from heavypath.speculative import (
    LOSSLESS_METHODS,
    METHODS,
    SpeculativeDecoder,
    TokenTree,
    load_demo_pair,
)
from heavypath.speculative.comparison import ASSISTED, PLAIN
from heavypath.speculative.demo import FOLDER, demo_prompts

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
PYTHONS_OWN = {"__name__", "__doc__", "__file__", "__init__", "__call__"}


@pytest.fixture
def example(monkeypatch, capsys):
    """Run an example in this process: what it prints."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def answers(monkeypatch):
    """Type these lines where a program asks for input."""
    typed = []
    monkeypatch.setattr(builtins, "input", lambda prompt="": typed.pop(0))
    return lambda *lines: typed.extend(lines)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft of random weights with the shipped tokenizer, without padding and with a chat template."""
    folders = [tmp_path_factory.mktemp("models") / name for name in ("target", "draft")]
    for seed, folder in enumerate(folders):
        tiny_llama(seed, 1024, max_position_embeddings=2048, eos_token_id=[0, 13]).save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
        tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        tokenizer.save_pretrained(folder)
    return folders


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_and_tested_and_uses_public_names_alone(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 40
    assert any(name.startswith(f"test_{path.stem}_") for name in globals())
    assert ast.get_docstring(ast.parse(source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "heavypath.speculative":
            assert {alias.name for alias in node.names} <= set(sys.modules[node.module].__all__)
        names = {getattr(node, field, None) for field in ("attr", "id", "name", "module")} - PYTHONS_OWN
        assert not any(part.startswith("_") for name in names if name for part in name.split("."))


def test_the_page_of_examples_lists_them():
    page = (EXAMPLES / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`(\w+)\.py`\]\(\1\.py\) \|", page, re.MULTILINE)
    assert sorted(listed) == [path.stem for path in SCRIPTS]


def numbers_of(table):
    """{method: [tokens per forward, tokens/s, ratio]} and {method: text} of a printed comparison."""
    line = re.compile(r"^ +(\S+(?: \S+)?) +([\d.]+) +(\d+) +([\d.]+) +[\d.]+ ?- ?[\d.]+ +\S+ +(\S.*?) *$", re.MULTILINE)
    found = line.findall(table)
    return {row[0]: [float(number) for number in row[1:4]] for row in found}, {row[0]: row[4] for row in found}


def test_compare_methods_prints_all_methods_and_draws_them(example, tmp_path):
    prompts, plot = tmp_path / "prompts.txt", tmp_path / "plot.png"
    prompts.write_text("def read(self, size=-1):\n\nimport os\n")
    numbers, texts = numbers_of(example("compare_methods", "--prompts", prompts, "--plot", plot, "--max-new-tokens", 6))
    assert [*numbers] == [PLAIN, ASSISTED, *LOSSLESS_METHODS]
    assert texts.pop(PLAIN) == "reference"
    assert all(text.startswith(("equal", "tie")) for text in texts.values())
    assert numbers[PLAIN][0] == numbers["autoregressive"][0] == 1 < numbers["sequoia"][0]
    assert image.imread(plot).shape[1] == 800


def test_serving_prints_each_text_as_it_comes_and_its_end(example):
    printed = example("serving", "import os", "def f(x):", "class A:")
    for number in range(3):
        pieces = re.findall(rf"^\[{number}\] ('.*'|\".*\")$", printed, re.MULTILINE)
        assert len(pieces) > 5
        assert re.search(rf"^\[{number}\] (length|stop): \d+ tokens in \d+ steps", printed, re.MULTILINE)
    assert "submitted=3, completed=3" in printed


def test_own_tree_draws_a_tree_says_what_is_expected_of_it_and_decodes_with_it(example):
    by_hand = example("own_tree", "import os", "--parents", 0, 0, 1, 0, "--acceptance", 0.5, 0.25)
    assert by_hand.startswith(f"{TokenTree([-1, 0, 0, 1, 0])}\nexpected: 2.00 tokens per step\n")  # 1 + 3/4 + 1/2 * 1/2
    _, decoded, accepted, text = example("own_tree").split("\nexpected: ")[1].split("\n", 3)
    assert float(re.fullmatch(r"decoded:  ([\d.]+) tokens per step", decoded)[1]) > 1.2
    assert 0.2 < float(accepted.split()[1]) < 1
    assert text.startswith("def read_lines(path):")


def test_kinds_of_draft_writes_one_text_with_all_drafts(example):
    printed = example("kinds_of_draft", "--seed", 4)
    speed = dict(re.findall(r"^(.+?) {2,}([\d.]+) tokens per step$", printed, re.MULTILINE))
    assert [*speed] == ["trained head", "draft model", "prompt lookup", "early exit", "retrieval", "no draft"]
    assert speed.pop("no draft") == "1.00"
    assert all(float(value) > 1.1 for value in speed.values())
    assert "def max(a, b):" in printed.split("different texts: 1\n\n")[1]


def test_own_draft_writes_the_targets_text_in_fewer_steps(example):
    pattern = r"^(\w+): ([\d.]+) tokens per step\n(.*?)\n\n(?=autoregressive|\Z)"
    ersd, plain = re.findall(pattern, example("own_draft"), re.S | re.M)
    assert (ersd[0], plain[0], plain[1]) == ("ersd", "autoregressive", "1.00")
    assert float(ersd[1]) > 1.2
    assert ersd[2] == plain[2] != ""


def test_own_verifier_writes_the_text_of_the_built_in_one(example):
    pattern = r"^(?:built in|of your own): (.*?)\n\n(?=of your own|\Z)"
    built_in, own = re.findall(pattern, example("own_verifier"), re.S | re.M)
    assert built_in == own
    assert float(own.split()[0]) > 1.5


def test_own_method_decodes_its_trees_by_its_rule(example, monkeypatch):
    monkeypatch.setitem(METHODS, "last-child", METHODS["chain"])  # which is taken back at the end
    printed = dict(re.findall(r"^(rejection|the last child): ([\d.]+) tokens", example("own_method"), re.M))
    assert [len(METHODS["last-child"].tree_of(size)) for size in (2, 3, 6, 7, 14, 15)] == [2, 3, 3, 7, 7, 15]
    assert min(float(printed[name]) for name in ("rejection", "the last child")) > 1.2


def test_losslessness_finds_the_planted_bug_and_nothing_in_transformers_own_decoding(example):
    assisted, planted = example("losslessness", "--sequences", 60).split("\n\n")
    assert assisted.startswith("assisted generation: no departure from the distribution: p = ")
    assert "60 sequences" in assisted
    assert planted.startswith("with a mistake: departs from the distribution: p = ")
    assert re.search(r"^  position 1: token 2 came \d+ times, expected ", planted, re.MULTILINE)


def test_constrained_writes_what_it_is_told(example):
    found = re.findall(r"^(\w+): ('.*'), ([\d.]+) tokens per step$", example("constrained"), re.M)
    texts = {name: (ast.literal_eval(text), float(speed)) for name, text, speed in found}
    assert {*json.loads(texts["schema"][0])} == {"name", "size"}
    assert re.fullmatch(r"[a-z]+\.py(, [a-z]+\.py){2}", texts["pattern"][0])
    assert texts["rule"][0]
    assert all(speed > 1.2 for _, speed in texts.values())


def test_batch_streaming_shows_each_text_as_it_grows(example):
    printed = example("batch_streaming", demo_prompts()[3], "import os", "def read(self, size=-1):")
    pieces = [(int(number), ast.literal_eval(piece)) for number, piece in re.findall(r"^\[(\d)\] (.+)$", printed, re.M)]
    assert {number for number, _ in pieces[:3]} == {0, 1, 2}  # a step of all of them, then the next
    assert len(pieces) > 12
    assert all(piece for _, piece in pieces)
    assert re.search(r"^new tokens +\d+$", printed, re.MULTILINE)


def test_tensor_parallel_decodes_in_one_process_what_torchrun_splits(example):
    text, _, stats = example("tensor_parallel", "import os\n").partition("\nnew tokens")
    assert "import" in text
    assert " 64\n" in stats.splitlines(keepends=True)[0]


def test_chat_remembers_the_turns_before(example, answers, demo_pair):
    target, draft, tokenizer = demo_pair
    decoder, text, expected = SpeculativeDecoder(target, draft), "", []
    for turn, question in enumerate(("def read(path):", "class Stack:")):
        text += question
        ids = tokenizer(text, return_tensors="pt").input_ids
        new = decoder.generate(ids, max_new_tokens=16, temperature=0.6, seed=2 * turn + 1, eos_token_id=0)
        expected.append(tokenizer.decode(new.sequences[0, ids.shape[1] :], skip_special_tokens=True))
        text += f"{expected[-1]}\n"
    answers("def read(path):", "class Stack:", "")
    assert example("chat", "--max-new-tokens", 16) == "".join(f"{answer}\n" for answer in expected)


def test_chat_reads_standard_input_until_its_end(example, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    before, answer, after = example("chat", "--max-new-tokens", 8).split("> ")
    assert (before, after) == ("", "")
    assert answer.strip()


@pytest.mark.parametrize(("name", "arguments", "printed"), [
    ("compare_methods", ["--max-new-tokens", 2], "\n naive "),
    ("own_tree", ["import os", "--branching", 2, 1, "--acceptance", 0.5, 0.25], "\nexpected: 2.12 tokens per step\n"),
    ("kinds_of_draft", ["--layers", 1], "\ndifferent texts: 1\n"),
    ("own_verifier", [], "of your own: "),
    ("batch_streaming", [], "\n[2] "),
    ("chat", [], "\n"),
])  # fmt: skip
def test_models_are_taken_from_folders(name, arguments, printed, example, answers, folders):
    answers("import os", "")
    assert printed in example(name, *arguments, "--models", *folders)


HUB = ROOT / "bench" / "hub_generate"


def test_the_folder_for_the_hub_generates_as_transformers_does(tmp_path, monkeypatch):
    """A copy of it, as a download is one; its own decoder goes on from call to call."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(HUB, tmp_path / "hub")
    target, draft, tokenizer = load_demo_pair()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    both = tokenizer(["import os\n", "class Stack:\n    def"], return_tensors="pt", padding=True)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "import re"}], return_tensors="pt", return_dict=True
    )
    options = {"max_new_tokens": 12, "pad_token_id": 0}
    ours = partial(target.generate, custom_generate=str(folder), trust_remote_code=True, **options)
    for inputs in (both, chat, {name: given[:1] for name, given in both.items()}):
        expected = target.generate(**inputs, do_sample=False, **options)
        for given in ({"draft": draft}, {"draft": draft, "method": "ersd", "tree_size": 9}, {}):
            assert torch.equal(ours(**inputs, do_sample=False, **given), expected)
    streamed = []
    streamer = SimpleNamespace(put=lambda tokens: streamed.extend(tokens.flatten().tolist()), end=lambda: None)
    one = {"input_ids": both.input_ids[1:], "draft": draft, "do_sample": True, "temperature": 0.8}
    torch.manual_seed(3)
    text = ours(**one, streamer=streamer)
    decoder = target.heavypath_decoder[1]
    torch.manual_seed(3)
    assert torch.equal(ours(**one), text)
    assert streamed == text[0].tolist()
    assert target.heavypath_decoder[1] is decoder
    with pytest.raises(ValueError, match="method"):
        ours(**one, method="sequoja")


def test_ray_serve_has_replicas_that_answer_and_stream():
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = next(path for path in SCRIPTS if path.stem == "ray_serve")
    command = [sys.executable, str(script), "--port", str(port), "--replicas", "2"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("serving") for line in running.stdout)
        with client_of(f"http://127.0.0.1:{port}") as client:
            asked = {"model": "heavypath-demo", "prompt": "def read_lines(path):", "max_tokens": 8, "temperature": 0}
            texts = {client.completions.create(**asked).choices[0].text for _ in range(8)}
            events = client.completions.create(**asked, stream=True)
            assert {"".join(event.choices[0].text for event in events)} == texts
    finally:
        running.terminate()
        running.communicate()
