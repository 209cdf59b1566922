"""The `heavypath` command: what it prints where, and one line and the right exit code for each mistake."""

import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
import transformers
from command_line import WORDS, assert_refused, save_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from heavypath.kernels.native import library as native_library
from heavypath.speculative import LOSSLESS_METHODS, calibration, comparison, layer_choice, load_demo_pair
from heavypath.speculative.cli import planning, support
from heavypath.speculative.cli.info import advice_of
from heavypath.speculative.cli.options import Precision
from heavypath.speculative.comparison import PLAIN, ComparedWay
from heavypath.speculative.costs.threads import Load
from heavypath.speculative.layer_choice import LayerChoice

PROMPT = "def read(self, size=-1):\n"
MODULE = [sys.executable, "-m", "heavypath.speculative"]


@pytest.fixture(scope="module")
def greedy(demo_pair):
    """The target's own greedy text by transformers, with a line's end."""

    def text(count, **more):
        inputs = demo_pair.tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
        out = demo_pair.target.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0, **more)
        return demo_pair.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]) + "\n"

    return text


def test_generate_reads_a_file_or_standard_input_and_prints_json(heavypath, tmp_path, monkeypatch):
    (tmp_path / "prompt.py").write_text(PROMPT)
    options = ("--max-new-tokens", 9, "--temperature", 0.8, "--top-p", 0.9, "--seed", 3)
    _, streamed, _ = heavypath("generate", PROMPT, *options)
    code, output, errors = heavypath("generate", "--file", tmp_path / "prompt.py", *options, "--json")
    answer = json.loads(output)
    assert (code, errors) == (0, "")
    assert answer["text"] + "\n" == streamed
    assert len(answer["token_ids"]) == answer["stats"]["new_tokens"] == 9
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert json.loads(heavypath("generate", "-", *options, "--json")[1])["token_ids"] == answer["token_ids"]


def test_generate_writes_json_of_a_schema_or_what_matches_a_pattern(heavypath, tmp_path):
    schema = {"type": "object", "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}}}
    schema |= {"required": ["size"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for options in ((), ("--temperature", 0.9, "--seed", 2, "--method", "dyspec")):
        code, text, _ = heavypath("generate", "config = ", "--json-schema", tmp_path / "schema.json", *options)
        content = json.loads(text)
        assert (code, [*content]) == (0, ["size"])
        assert 0 <= content["size"] <= 99
    pattern = "[a-z]{3,5}\\.py"
    answer = json.loads(heavypath("generate", "import ", "--regex", pattern, "--json")[1])
    assert re.fullmatch(pattern, answer["text"])
    assert (answer["settings"]["regex"], answer["settings"]["json_schema"]) == (pattern, None)


def test_generate_says_what_is_wrong_with_a_grammar(heavypath, tmp_path):
    (tmp_path / "text").write_text("{")
    (tmp_path / "schema").write_text('{"type": "objekt"}')
    for options, message in (
        (("--json-schema", tmp_path / "none"), "cannot read the JSON schema in .*none': No such file"),
        (("--json-schema", tmp_path / "text"), "--json-schema must be a file of JSON, got .*: Expecting property name"),
        (("--json-schema", tmp_path / "schema"), "the JSON schema cannot be followed: Invalid type: objekt"),
        (("--regex", "(a"), "regular expression .* unclosed group"),
        (("--regex", "a", "--json-schema", tmp_path / "schema"), "one grammar: give --json-schema or --regex"),
    ):
        assert_refused(heavypath("generate", "import", *options), 1, message)


@pytest.mark.parametrize("method", ["sequoia", "autoregressive"])
def test_generate_takes_models_from_folders_and_ends_at_their_end_token(heavypath, folders, tmp_path, method):
    models = ("--target", folders / "target", "--draft", folders / "draft")
    options = ("--method", method, "--max-new-tokens", 6, "--temperature", 1, "--seed", 1, "--json")
    answer = json.loads(heavypath("generate", "one two", *models, *options)[1])
    assert answer["text"] == " " + " ".join(WORDS[token] for token in answer["token_ids"])
    assert len(answer["token_ids"]) == 6
    last = answer["token_ids"][2]
    assert last not in answer["token_ids"][:2]
    model = save_llama(tmp_path / "target")
    model.generation_config.eos_token_id = [last]
    model.save_pretrained(tmp_path / "target")
    ended = json.loads(heavypath("generate", "one two", "--target", tmp_path / "target", *models[2:], *options)[1])
    assert ended["token_ids"] == answer["token_ids"][:3]


def test_demo_compares_all_methods_with_transformers(heavypath):
    code, output, errors = heavypath("demo", "--prompts", 1, "--max-new-tokens", 3, "--repeats", 1, "--json")
    answer = json.loads(output)
    assert (code, errors) == (0, "")
    rows = {row["method"]: row for row in answer["rows"]}
    assert list(rows) == ["transformers generate", "transformers assisted", *LOSSLESS_METHODS]
    assert {row["text"] for row in rows.values()} <= {"reference", "equal", "tie"}
    assert rows["transformers generate"]["tokens_per_forward"] == rows["autoregressive"]["tokens_per_forward"] == 1
    assert rows["sequoia"]["tokens_per_forward"] > 1
    assert (answer["settings"]["max_new_tokens"], answer["settings"]["repeats"]) == (3, 1)


def test_demo_shows_the_text_and_then_a_table_and_names_a_busy_machine(heavypath, monkeypatch):
    """Drafted by the model, which is faster on a CPU than the head; each way has three runs."""
    drafts = []
    rows = [
        ComparedWay(PLAIN, 1, 1, 1, (1, 1), "reference", None, (1, 1), (1, 1)),
        ComparedWay("ersd", 2, 2, 2, (1, 4), "equal", None, (1.5, 3), (1, 1.5, 2, 3, 4)),
    ]

    def compared(target, draft, *given, repeats, **more):
        drafts.append((type(draft), repeats))
        return rows

    monkeypatch.setattr(comparison, "compare", compared)
    monkeypatch.setattr(support, "current_load", lambda: Load(3.1, 2, 2))
    options = ("--max-new-tokens", 2, "--temperature", 0.7, "--seed", 1)
    code, output, errors = heavypath("demo", "--prompts", 1, *options)
    shown = {line[:23].strip(): line.split()[-1] for line in output.splitlines() if line.strip()}
    assert code == 0
    assert drafts == [(LlamaForCausalLM, 3)]
    assert "the fastest of 3 runs counts" in " ".join(output.split())
    assert (shown[PLAIN], shown["ersd"]) == ("reference", "equal")
    assert output.splitlines()[-1].startswith("fastest (")
    assert "the machine is busy (load 3.1 on 2 cores, 2 threads), so timings are noisy" in errors
    assert "busy" not in heavypath("generate", PROMPT, "--max-new-tokens", 1)[2]


@pytest.fixture
def calibrated(heavypath, folders, monkeypatch, any_noise):
    """A profile of the small models, from a text of one's own; no test changes it."""
    models = ("--target", folders / "target", "--draft", folders / "draft")
    path, text = folders / "profile.json", folders / "own.txt"
    if not path.exists():
        quick = partial(calibration.calibrate, sizes=(1, 2, 6), tokens=6, sequences=3)
        monkeypatch.setattr(calibration, "calibrate", quick)
        text.write_text("one two three four five six " * 30)
        options = ("--text", text, "--out", path, "--limit", 3600, "--batch-sizes", "1,2")
        code, output, errors = heavypath("calibrate", *models, *options)
        assert (code, output) == (0, ""), errors
        assert "heavypath plan" in errors
    return models, path


def test_a_short_text_to_calibrate_by_is_named(demo_pair, capsys):
    pieces = planning.pieces(demo_pair, "import os\n" * 20)
    assert len(pieces) == 1
    assert "has 60 tokens" in capsys.readouterr().err
    assert len(planning.pieces(demo_pair, "import os\n" * 400)) == 18
    assert capsys.readouterr().err == ""


def test_plan_shows_a_table_for_each_temperature_and_draws_a_tree(heavypath, calibrated, tmp_path):
    _, path = calibrated
    drawn = ("--svg", tmp_path / "tree.svg")
    code, output, errors = heavypath("plan", path, "--method", "chain", "--temperature", 1, *drawn)
    assert (code, errors) == (0, f"wrote {tmp_path / 'tree.svg'}\n")
    nowhere = heavypath("plan", path, "--svg", tmp_path / "none" / "tree.svg")
    assert_refused(nowhere, 1, "--svg must be in a folder that exists")
    assert re.findall(r"^temperature ([\d.]+)$", output, re.M) == ["0.0", "0.6", "1.0"]
    assert {*re.findall(r"^ *(\S+)", output, re.M)} > {*LOSSLESS_METHODS} - {"autoregressive"}
    assert "The tree of chain, temperature 1.0:" in output.replace("\n", " ")
    assert (tmp_path / "tree.svg").read_text().startswith("<svg")
    answer = json.loads(heavypath("plan", path, "--json")[1])
    assert len(answer["plans"]) == 3 * (len(LOSSLESS_METHODS) - 1)
    assert all(row["expected_tokens"] >= 1 for row in answer["plans"])
    assert all(row["expected_tokens_error"] >= 0 <= row["speedup_error"] for row in answer["plans"])
    words, cost = " ".join(output.split()), r"[\d.e+-]+ ± [\d.e+-]+"
    assert re.search(rf"milliseconds of a step of 1 sequence by nodes, in \d+ rounds: 1: {cost}, 2: ", words)
    assert "chain by the number of sequences decoded together" in output
    assert "milliseconds of a step of 2 sequences by nodes" in words
    assert [row["sequences"] for row in answer["by_batch"]] == 3 * [1, 2]
    assert {row["method"] for row in answer["by_batch"]} == {"sequoia"}
    assert re.search(r"^ *2 +\d+ +\d+ +[\d.]+ ± ", output, re.MULTILINE), "a row for two sequences"
    assert re.search(r"sequoia +\d+ +\d+ +[\d.]+ ± [\d.]+ +[\d.]+ ± [\d.]+ ", output)


def test_generate_plans_its_tree_by_a_profile(heavypath, calibrated):
    models, path = calibrated
    options = ("--max-new-tokens", 4, "--json")
    plain = json.loads(heavypath("generate", "one two", *models, *options)[1])
    code, output, _ = heavypath("generate", "one two", *models, *options, "--profile", path)
    assert (code, json.loads(output)["token_ids"]) == (0, plain["token_ids"])
    for given, message in (
        (("generate", "one", "--profile", path), "the profile was measured with a target of llama"),
        (("plan", path, "--method", "autoregressive"), "--method must be one of chain, "),
        (("calibrate", "--text", path.parent / "no.txt"), "No such file"),
        (("calibrate", "--out", path / "below"), "--out must be in a folder that exists"),
    ):
        assert_refused(heavypath(*given), 1, message)
    assert_refused(heavypath("calibrate", "--out", path.parent), 2, "--out.* is a directory")


@pytest.mark.parametrize("draft", [
    "prompt-lookup", "lookahead", "early-exit:4", "early-exit:0,5,7", f"retrieval:{__file__}",
    "demo-head+prompt-lookup", "2*demo-head+4*prompt-lookup", "merge:demo-head+prompt-lookup",
])  # fmt: skip
def test_generate_drafts_without_a_draft_model(heavypath, draft, greedy):
    options = ["--method", "specinfer"] if draft.startswith("merge:") else []
    out = heavypath("generate", PROMPT, "--max-new-tokens", 6, "--draft", draft, *options)
    assert out[:2] == (0, greedy(6))


@pytest.mark.slow
def test_layers_are_found_for_a_target_and_prompts_of_ones_own(heavypath, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\nclass Stack:\n")
    assert_refused(heavypath("layers", "--temperature", 0), 1, "temperature must be above 0")
    choose, found = layer_choice.choose_layers, []
    monkeypatch.setattr(layer_choice, "choose_layers", lambda *given, **more: found or choose(*given, **more))
    code, output, _ = heavypath("layers", "--prompts", prompts, "--tokens", 2, "--json")
    choices = json.loads(output)["choices"]
    assert code == 0
    assert sorted(len(choice["layers"]) for choice in choices) == [1, 2, 3, 4, 5, 6, 7]
    for chosen, said in (((4, 5), "The best: --draft early-exit:4,5"), ((0, 1), "--draft early-exit:2 ")):
        found[:] = [LayerChoice(**choices[0] | {"layers": chosen, "drafts": 2})]
        assert said in " ".join(heavypath("layers", "--prompts", prompts)[1].split())
    found[:] = [found[0]._replace(drafts=0)]
    assert "No layers of this target draft well enough" in heavypath("layers", "--prompts", prompts)[1]


def test_info_reports_what_is_installed(heavypath):
    code, output, _ = heavypath("info", "--json")
    facts = json.loads(output)
    assert code == 0
    assert (facts["torch"], facts["transformers"]) == (torch.__version__, transformers.__version__)
    assert facts["kernels"]["tree_attention"] == ("Triton" if torch.cuda.is_available() else "reference")
    compiled = "C++" if facts["cpu_kernels"] == "compiled" else "reference"
    assert facts["kernels"]["verify_tree"] == ("Triton" if torch.cuda.is_available() else compiled)
    width = facts["cpu_kernels_for"]
    assert width is None if facts["cpu_kernels"] != "compiled" else re.fullmatch(r".+, \d+-bit vectors(, AMX)?", width)
    assert facts["openmp"] in ("GNU", "Intel", "LLVM")
    assert facts["cores"] >= 1
    assert {"system", "processor", "compiler", "cache", "environment"} <= facts.keys(), "what a report of a bug needs"
    assert isinstance(facts["advice"], list)
    assert heavypath("--version") == (0, f"heavypath {importlib.metadata.version('heavypath')}\n", "")
    rows, _, advice = heavypath("info", "-v")[1].partition("\n\n")
    assert torch.__version__ in rows
    assert all(re.fullmatch(r"\S.* {2,}\S.*", line) for line in rows.splitlines()), "a space behind every name"
    assert "kernel heavy_path_order  " in rows
    assert advice.startswith("* ")


def test_info_says_why_kernels_are_not_compiled_and_shows_no_other_variables(heavypath, monkeypatch):
    native_library.library.cache_clear()
    monkeypatch.setenv("HEAVYPATH_NATIVE", "0")
    monkeypatch.setenv("HEAVYPATH_KEY", "secret")
    try:
        code, output, _ = heavypath("info", "--json")
    finally:
        native_library.library.cache_clear()
    assert code == 0
    assert json.loads(output)["cpu_kernels_lack"].startswith("HEAVYPATH_NATIVE=0")
    assert "HEAVYPATH_NATIVE=0" in json.loads(output)["environment"]
    assert "secret" not in output


def test_info_says_what_would_make_it_faster_here():
    facts = {
        "torch": "2.13.0+cpu", "torch_cuda": None, "nvidia_driver": None, "gpus": [], "blas": "mkl", "onednn": True,
        "cpu_kernels": "compiled", "cpu_capability": "AVX2",
    }  # fmt: skip
    assert advice_of(facts, Load(0.1, 2, 1)) == []
    busy = " ".join(advice_of(facts, Load(3.1, 2, 2)))
    assert "load 3.1 on 2 cores, 2 threads" in busy
    assert "OMP_NUM_THREADS=1" in busy
    assert "OMP_WAIT_POLICY=PASSIVE" in busy
    assert "this process may use 2 cores: set OMP_NUM_THREADS=2" in " ".join(advice_of(facts, Load(0.1, 2, 64)))
    assert "install g++" in " ".join(advice_of(facts | {"cpu_kernels": "PyTorch's operations"}, Load(0.1, 2, 1)))
    without = " ".join(advice_of(facts | {"nvidia_driver": "570.86"}, Load(0.1, 2, 1)))
    assert "driver (570.86) was found, but torch 2.13.0+cpu, without CUDA, sees no GPU" in without


def test_a_text_ends_at_a_stop_string(heavypath):
    _, whole, _ = heavypath("generate", PROMPT, "--max-new-tokens", 24)
    late, early = whole[-6:-2], whole[8:12]
    _, ended, _ = heavypath("generate", PROMPT, "--max-new-tokens", 24, "--stop", late, "--stop", early)
    assert whole.startswith(ended.rstrip("\n"))
    assert early in ended
    assert len(ended) < len(whole) - 6
    assert late not in ended


def test_generate_streams_the_targets_own_greedy_text_and_passes_min_p_and_the_penalty_on(heavypath, greedy):
    given = ("generate", PROMPT, "--max-new-tokens", 12)
    code, text, errors = heavypath(*given)
    assert (code, text) == (0, greedy(12))
    assert "tokens per second" in errors
    assert heavypath(*given, "--temperature", 1, "--min-p", 1)[1] == greedy(12), "the likeliest token alone is left"
    assert heavypath(*given, "--repetition-penalty", 1.8)[1] == greedy(12, repetition_penalty=1.8) != greedy(12)


def test_models_get_the_precision_asked_for(heavypath, folders):
    pair = support.load(str(folders / "target"), str(folders / "draft"), Precision.bfloat16)
    assert pair.target.dtype == pair.draft.dtype == torch.bfloat16
    code, _, errors = heavypath("generate", PROMPT, "--max-new-tokens", 2, "--dtype", "bfloat16", "--verbose")
    assert (code, "torch.bfloat16 on" in errors) == (0, True)


def test_chat_puts_the_prompt_into_the_tokenizers_template(heavypath, folders, tmp_path):
    shutil.copytree(folders / "target", tmp_path / "target")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "target")
    tokenizer.chat_template = (
        "{% for message in messages %}five {{ message['content'] }} six{% endfor %}"
        "{% if add_generation_prompt %} two{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "target")
    models = ("--target", tmp_path / "target", "--draft", folders / "draft", "--max-new-tokens", 5, "--json")
    by_hand = json.loads(heavypath("generate", "five three six two", *models)[1])["token_ids"]
    assert json.loads(heavypath("generate", "three", *models, "--chat")[1])["token_ids"] == by_hand
    refused = heavypath("generate", "three", "--chat")
    assert_refused(refused, 1, "--chat needs a target whose tokenizer has a chat template")


def test_log_lines_say_what_is_chosen_and_none_comes_with_each_token(heavypath, capsys):
    lines = {}
    for tokens in (4, 64):
        code, _, errors = heavypath("generate", PROMPT, "--max-new-tokens", tokens, "-v")
        assert code == 0
        lines[tokens] = [line for line in errors.splitlines() if " heavypath.speculative." in line]
    for what in ("by LlamaForward", "a tree of 5 nodes", "MiB of caches, 1 sequences of", r"new tokens in \d+ steps"):
        assert any(re.search(what, line) for line in lines[64]), what
    assert len(lines[4]) == len(lines[64])
    assert " heavypath.speculative." not in heavypath("generate", PROMPT, "--max-new-tokens", 4)[2]


@pytest.mark.parametrize(("arguments", "code", "message"), [
    ("generate", 2, "give either a text"),
    ("generate x --file y", 2, "give either a text"),
    ("generate x --max-new-tokens 0", 2, "--max-new-tokens.*, got '?0"),
    ("generate x --tree-size 20000", 2, "--tree-size.*2048, got '20000'"),
    ("generate x --min-p 2", 2, "--min-p"),
    ("generate x --repetition-penalty 0", 2, "--repetition-penalty.*greater than or equal to 0.01"),
    ("generate x --repetition-penalty nan", 2, "--repetition-penalty.*less than or equal to 100"),
    ("generate x --host-memory 1G", 1, "host_memory goes with memory, that of the GPU; got '1G' alone"),
    ("generate x --profile p --tree-size 4", 1, "leave out --tree-size or --profile"),
    ("calibrate --limit 0", 1, "--limit must be a number of seconds above 0, got 0"),
    ("calibrate --batch-sizes 1,two", 1, "--batch-sizes must be numbers of sequences with commas between"),
    ("calibrate --target somewhere", 1, "calibrate needs a --draft with the --target"),
    ("decode x", 2, "No such command 'decode'"),
    ("generate x --method medusa", 1, "--method must be one of autoregressive, .*, got 'medusa'$"),
    ("generate x --method sequioa", 1, "got 'sequioa'; did you mean sequoia?"),
    ("generate x --verifier hold", 1, "--verifier must be one of .*, got 'hold'; did you mean held?"),
    ("batch nowhere --out x", 2, "'nowhere' does not exist"),
    ("generate x --temperature nan", 2, "--temperature"),
    ("generate x --top-p 1.5", 2, "--top-p"),
    ("demo --top-p 0", 1, r"top_p must be .* in \(0, 1\], got 0.0"),
    ("demo --prompts 1000", 1, "--prompts must be at most .*, got 1000"),
])  # fmt: skip
def test_wrong_options_are_refused_in_one_line(heavypath, arguments, code, message):
    assert_refused(heavypath(*arguments.split()), code, message)


@pytest.mark.parametrize(("prompt", "message"), [
    (("",), "the prompt is empty"),
    (("caf\udce9",), "the prompt is not UTF-8"),
    (("--file", "empty.txt"), "the prompt in '.*empty.txt' is empty"),
    (("--file", "missing.txt"), "cannot read the prompt in '.*missing.txt': No such file"),
    (("--file", "target"), "cannot read the prompt in '.*target': Is a directory"),
    (("--file", "latin1.txt"), "the prompt in '.*latin1.txt' is not UTF-8"),
    (("one " * 40,), r"need 167 positions \(40 \+ 128 - 1: the last is not read\), but target has 32"),
])  # fmt: skip
def test_unusable_prompts_are_refused_in_one_line(heavypath, folders, monkeypatch, prompt, message):
    monkeypatch.chdir(folders)
    assert_refused(heavypath("generate", *prompt, "--target", "target", "--draft", "draft"), 1, message)


@pytest.mark.parametrize(("target", "draft", "message"), [
    ("no/folder", "draft", "the target 'no/folder' is no folder here and is not in the Hugging Face cache"),
    ("target", "missing", "the draft 'missing' is no folder here"),
    ("empty", "draft", "the target folder 'empty' has no config.json"),
    ("t5", "draft", "the target in 't5' is of type 't5'; expected a causal language model"),
    ("target", "other words", "must have 5% of the target's tokens at least, got a tokenizer with 0 of the"),
    ("no weights", "draft", "cannot load the target from 'no weights': .* model.safetensors"),
    ("broken weights", "draft", "cannot load the target from 'broken weights'"),
    ("half the layers", "draft", "weights in 'half the layers' lack 9 tensors, first 'model.layers.1"),
    ("no tokenizer", "draft", "the target folder 'no tokenizer' has no tokenizer; save one there"),
    ("nan weights", "draft", "target has NaN or infinite weights in lm_head.weight"),
    ("target", "early-exit:all", "expected early-exit:LAYERS, the number of the first layers to run, or which"),
    ("target", "retrieval:", "expected retrieval:PATH, a file that Retrieval.save wrote, a text or a folder"),
    ("target", "retrieval:none", "expected retrieval:PATH, and there is no file or folder 'none'"),
    ("target", "1*prompt-lookup+lookahead", "or all with their levels, as in 2\\*demo-head"),
    ("target", "prompt-lookup+", "expected drafts as in demo-head\\+prompt-lookup"),
    ("target", "0*prompt-lookup+2*lookahead", "a number of levels, at least 1"),
    ("target", "merge:prompt-lookup", "expected drafts as in merge:demo-head\\+prompt-lookup"),
    ("target", "early-exit:1", "an early exit must leave 1 .. 0 layers, got 1"),
    (None, "draft", r"a draft \('draft'\) needs its target"),
])  # fmt: skip
def test_unusable_models_are_refused_in_one_line(heavypath, folders, monkeypatch, target, draft, message):
    monkeypatch.chdir(folders)
    given = [word for role, name in (("--target", target), ("--draft", draft)) if name for word in (role, name)]
    assert_refused(heavypath("generate", "one", *given), 1, message)


@pytest.mark.integration
def test_ctrl_c_and_a_closed_pipe_end_it_quietly():
    """The text is so long, and its steps without compiled code so slow, that no test's process can miss its end."""
    command = [*MODULE, "generate", PROMPT, "--max-new-tokens", "1000"]
    pipes: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | {"HEAVYPATH_NATIVE": "0"}}
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    with subprocess.Popen(command, **pipes) as interrupted, subprocess.Popen(command, **pipes) as unread:
        unread.stdout.close()
        assert interrupted.stdout.read(1)
        interrupted.send_signal(signal.SIGINT)
        assert (interrupted.wait(60), unread.wait(60)) == (130, 1)
        said = interrupted.stderr.read() + unread.stderr.read()
        assert not re.sub(rb"heavypath: starting PyTorch.*\n", b"", said), "but for what takes long on a busy machine"


def test_settings_are_those_in_force(tmp_path, heavypath):
    """What a command is not told comes from the model's generation_config, and is reported."""
    target, _, tokenizer = load_demo_pair()
    target.generation_config.update(do_sample=True, top_k=20, repetition_penalty=1.1)
    target.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = ("--target", tmp_path, "--method", "autoregressive", "--max-new-tokens", 2, "--json")
    answer = json.loads(heavypath("generate", "import os", *options)[1])
    settings = answer["settings"]
    assert answer["stats"]["tokens_per_step"] == 1
    assert (settings["top_k"], settings["repetition_penalty"], settings["top_p"]) == (20, 1.1, None)
