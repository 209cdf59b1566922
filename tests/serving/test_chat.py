"""`heavypath chat`: what it answers, what it remembers, and its commands."""

import io
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from heavypath.speculative import METHODS, SpeculativeDecoder
from heavypath.speculative.cli.app import main
from heavypath.speculative.cli.conversation import Conversation
from heavypath.speculative.demo import FOLDER

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of random weights with the shipped tokenizer and a chat template, which samples by itself."""
    folder = tmp_path_factory.mktemp("models") / "target"
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"max_position_embeddings": 128, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=1024, eos_token_id=[0, 13]))
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=20)
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chat(monkeypatch, capsys, loaded_once):
    """Run the command in this process on some lines of standard input: (exit code, standard output, error)."""

    def run(*arguments, lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        code = main(["chat", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def prompts(monkeypatch):
    """The prompts of all generations, as lists of tokens."""
    seen, generate = [], SpeculativeDecoder.generate

    def noted(self, input_ids, **options):
        seen.append((self.method, input_ids[0].tolist()))
        return generate(self, input_ids, **options)

    monkeypatch.setattr(SpeculativeDecoder, "generate", noted)
    return seen


def lookup(folder):
    return "--target", folder, "--draft", "prompt-lookup"


def written_alone(folder, questions, **options):
    """The answers to questions one after the other, each computed from the beginning, without a draft."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    plain = SpeculativeDecoder(model, None, "autoregressive")
    messages = [{"role": "system", "content": "Short."}]
    for turn, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        out = plain.generate(torch.tensor([tokens]), 12, seed=4 + turn, **options)
        answer = tokenizer.decode(out.sequences[0, len(tokens) :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        yield answer


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 1.5, "top_k": 3}], ids=str)
def test_a_conversation_has_the_text_of_the_target_alone(options, folder, chat):
    """By races under a seed, sampled as the model's generation_config says where nothing else is said."""
    questions = ["import os", "class Stack:", "x = 3"]
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    code, out, _ = chat(
        *lookup(folder), "--method=ersd", "--seed=4", "--max-new-tokens=12", "--system=Short.", *given, lines=questions
    )
    assert code == 0
    expected = [*written_alone(folder, questions, **options)]
    assert out == "".join(f"{answer}\n" for answer in expected)
    assert len({*expected}) == 3


def test_the_shipped_pair_continues_the_text_says_so_and_computes_a_turns_new_tokens_alone(chat, prompts, tokenizer):
    code, out, err = chat("--max-new-tokens=24", lines=["import os", "/stats", "import re", "/stats"])
    assert code == 0
    assert "was trained only on Python source, and continues code: type `def read_lines(path):`" in err
    assert "sequoia; /help lists the commands" in err
    (_, first), (_, second) = prompts
    text = tokenizer.decode(second)
    assert text == "import os" + out[: len(text) - len("import osimport re\n")] + "\nimport re"
    turns = re.findall(r"prompt tokens +(\d+) computed, (\d+) reused", err)
    assert turns[0] == (str(len(first) - 1), "0")
    assert sum(map(int, turns[1])) == len(second) - 1
    assert int(turns[1][0]) < 12 < int(turns[1][1])


def test_the_shipped_pair_gets_code_as_it_was_typed_samples_and_stops_at_a_blank_line(chat, prompts, tokenizer):
    code, out, err = chat("--seed=3", lines=["class Stack:", "    def pop(self):"])
    assert code == 0
    assert "An answer ends at a blank line." in err
    (_, first), (_, second) = prompts
    assert tokenizer.decode(first) == "class Stack:"
    assert tokenizer.decode(second).endswith("\n    def pop(self):")
    answer = out.partition("\n\n")[0]
    assert answer.startswith("\n    ")
    ended = re.escape(f"class Stack:{answer}\n\n") + r" *\n    def pop\(self\):"  # the last token may have an indent
    assert re.fullmatch(ended, tokenizer.decode(second)), "a blank line ends an answer"
    assert out != chat("--seed=4", lines=["class Stack:", "    def pop(self):"])[1]
    assert chat("--temperature=0", lines=["x = 1"])[1] == chat("--temperature=0", "--seed=9", lines=["x = 1"])[1]


def test_commands_do_what_help_says(folder, chat, prompts):
    lines = ["/stats", "/help", "one", "/method dyspec", "two", "/method", "/reset", "", "  ", "three", "/quit", "four"]
    code, out, err = chat(*lookup(folder), "--max-new-tokens=4", lines=lines)
    assert code == 0
    assert [method for method, _ in prompts] == ["sequoia", "dyspec", "dyspec"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [tokenizer.decode(tokens) for _, tokens in prompts]
    assert texts[0] == "user: one\n"
    assert texts[1].startswith("user: one\nassistant: ")
    assert texts[1].endswith("\nuser: two\n")
    assert texts[2] == "user: three\n"
    assert "no answer yet" in err
    assert f"dyspec; others are {', '.join(METHODS)}" in err
    assert "a new conversation" in err
    for command in ("/stats", "/method NAME", "/reset", "/help", "/quit"):
        assert re.search(rf"^{command} ", err, re.M)
    assert "/" not in out


def test_what_is_no_command_is_said_and_the_chat_goes_on(folder, chat, prompts):
    lines = ["/stat", "/method fast", "/method", "/method a b", "one", "/method ersd"]
    code, _, err = chat("--target", folder, "--method=autoregressive", "--max-new-tokens=4", lines=lines)
    assert (code, len(prompts)) == (0, 1)
    for said in (
        "there is no command '/stat'; /help lists", "there is no command '/method a b'; /help lists",
        "method must be one of autoregressive, chain", "method 'ersd' needs a draft, got None",
    ):  # fmt: skip
        assert said in err


def test_ctrl_c_ends_an_answer_and_not_the_chat(folder, chat, prompts, monkeypatch):
    generate = SpeculativeDecoder.generate

    def broken_off(self, input_ids, *, streamer, **options):
        if len(prompts) == 0:
            put, heard = streamer.put, []

            def put_three(value):
                if len(heard) == 4:
                    raise KeyboardInterrupt
                heard.append(value)
                put(value)

            streamer.put = put_three
        return generate(self, input_ids, streamer=streamer, **options)

    monkeypatch.setattr(SpeculativeDecoder, "generate", broken_off)
    code, out, _ = chat("--target", folder, "--method=autoregressive", "--temperature=1", lines=["one", "two"])
    assert code == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    partial = tokenizer.decode(prompts[1][1]).removeprefix("user: one\nassistant: ").removesuffix("\nuser: two\n")
    assert out.startswith(f"{partial}\n")
    assert len(prompts[1][1]) < 60  # the answer may have had 256


def test_a_conversation_that_is_too_long_is_said_and_can_begin_anew(folder, chat, prompts):
    lines = ["x " * 80, "y " * 80, "/reset", "z"]
    code, out, err = chat(*lookup(folder), lines=lines)
    assert (code, len(prompts)) == (0, 2)
    assert re.search(r"the conversation has \d+ tokens, the model 128 positions; /reset it", err)
    assert len(out.splitlines()) >= 2


def test_a_template_is_read_from_a_file(folder, chat, prompts, tmp_path):
    own = tmp_path / "template.jinja"
    own.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    assert chat(*lookup(folder), "--template", own, "--max-new-tokens=4", lines=["one"])[0] == 0
    assert PreTrainedTokenizerFast.from_pretrained(folder).decode(prompts[0][1]) == "<one>"
    own.write_text("{{ raise_exception('no user here') }}")
    code, out, err = chat(*lookup(folder), "--template", own, lines=["one"])
    assert (code, out) == (0, "")
    assert "the chat template cannot write this conversation: no user here" in err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--template", "missing.jinja"], "cannot read the template in 'missing.jinja': No such file"),
    (["--method", "fast"], "--method must be one of autoregressive, .* got 'fast'"),
    (["--top-p", "0"], r"top_p must be None or in \(0, 1\], got 0.0"),
    (["--target", "missing"], "the target 'missing' is no folder here"),
])  # fmt: skip
def test_wrong_options_are_one_line_and_an_exit_code(arguments, message, chat):
    code, out, err = chat(*arguments, lines=["one"])
    assert (code, out) == (1, "")
    assert re.fullmatch(f"heavypath: {message}.*\n", err)


def test_what_is_no_text_is_one_line_and_an_exit_code(folder, monkeypatch, capsys):
    for line in (io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"), io.StringIO("\udcff\n")):
        monkeypatch.setattr(sys, "stdin", line)
        assert main(["chat", *map(str, lookup(folder))]) == 1
        assert re.search("^heavypath: standard input is not UTF-8 text: .*\n$", capsys.readouterr().err, re.M)


@pytest.mark.parametrize(("opens", "answer", "expected"), [
    ("", "<think>a</think>\n\nb", {"content": "b", "reasoning_content": "a"}),
    ("<think>\n", "a</think>b", {"content": "b", "reasoning_content": "a"}),
    ("<think></think>", "b <think>", {"content": "b <think>"}),
])  # fmt: skip
def test_a_template_gets_earlier_thinking_apart(demo_pair, capsys, opens, answer, expected):
    class Played:
        def generate(self, input_ids, *, streamer, **options):
            streamer.put(input_ids)
            streamer.put(torch.tensor(demo_pair.tokenizer(answer).input_ids))
            streamer.end()
            return SimpleNamespace(cache=None)

    template = TEMPLATE + "{% if add_generation_prompt %}assistant: " + opens + "{% endif %}{# </think> #}"
    pair = SimpleNamespace(
        target=demo_pair.target, draft=demo_pair.draft, tokenizer=demo_pair.tokenizer, eos_token_ids=[0]
    )
    conversation = Conversation(pair, template, None, Played(), {"seed": 0, "max_new_tokens": 8})
    conversation.answer("x")
    assert conversation._messages[-1] == {"role": "assistant"} | expected
    assert capsys.readouterr().out == answer + "\n"
