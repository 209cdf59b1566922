"""Documents, rows and text of the target's own: what a draft is trained on, and what is refused."""

import json
from unittest.mock import patch

import pytest
import torch
from head_training_cases import random_rows, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.training import own_text
from heavypath.speculative.training.documents import Document, read_documents, with_answer
from heavypath.speculative.training.rows import RowSettings, batches_of, make_rows

WORDS = ["<end>", "ask", "answer", "zero", "one", "two", "three"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ 'ask ' if message.role == 'user' else 'answer ' }}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}answer {% endif %}"
)
NONE = torch.zeros(0, dtype=torch.int32)


@pytest.fixture
def tokenizer():
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="zero"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", chat_template=TEMPLATE)


def lists(documents):
    return [(document.tokens.tolist(), document.prompt.tolist()) for document in documents]


def test_files_folders_and_each_kind_of_line_become_documents(tokenizer, tmp_path):
    (tmp_path / "folder" / ".hidden").mkdir(parents=True)
    (tmp_path / "folder" / "one.txt").write_text("one two")
    (tmp_path / "folder" / "image.png").write_bytes(b"\x89\xff\xfe")
    (tmp_path / "folder" / ".hidden" / "no.txt").write_text("three")
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]
    lines = ["two", {"text": "three one"}, {"messages": said}, {"messages": said[:1]}, {"prompt": "one one"}, ""]
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps(line) if line else "" for line in lines))
    documents = read_documents([tmp_path / "folder", str(tmp_path / "lines.jsonl")], tokenizer)
    expected = [
        ([4, 5, 0], []),  # after a text comes the token that ends it
        ([5, 0], []),
        ([6, 4, 0], []),
        ([1, 4, 2, 5, 6], [1, 4, 2]),  # ask one answer two three; the target may go on from "answer"
        ([], [1, 4, 2]),
        ([], [4, 4]),
    ]
    assert sorted(lists(documents)) == sorted(expected)
    parts = [part for document in documents for part in (document.tokens, document.prompt)]
    assert {part.dtype for part in parts} == {torch.int32}


def said_by(*contents):
    """A conversation of user and assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def read_lines(lines, tokenizer, folder):
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return read_documents([folder / "lines.jsonl"], tokenizer)


def test_the_answers_of_a_conversation_are_all_that_the_assistant_said(tokenizer, tmp_path):
    lines = [{"messages": said_by("one", "two three", "three", "one")}, {"messages": said_by("one", "two")[1:]}, "one"]
    *several, text = sorted(read_lines(lines, tokenizer, tmp_path), key=lambda document: -len(document.tokens))
    conversation, alone = several  # ask one answer two three ask three answer one; answer two
    assert conversation.tokens.tolist() == [1, 4, 2, 5, 6, 1, 6, 2, 4]
    assert conversation.answered().tolist() == [5, 6, 4]
    assert conversation.prompt.tolist() == [1, 4, 2, 5, 6, 1, 6, 2]
    predicts = conversation.predicts()
    assert conversation.tokens[1:][predicts[:-1]].tolist() == [5, 6, 4]
    assert not predicts[-1]
    assert alone.answered().tolist() == alone.tokens.tolist() == [2, 5]
    assert text.predicts().tolist() == [True, True]
    assert text.answered().tolist() == [4, 0]


def test_what_a_template_writes_in_another_way_later_is_no_answer(tokenizer, tmp_path):
    """As templates of models that think, which leave the thoughts out of earlier messages."""
    last = "{% if loop.last and message.role == 'assistant' %}zero {% endif %}{{ message.content }}"
    tokenizer.chat_template = TEMPLATE.replace("{{ message.content }}", last)
    (document,) = read_lines([{"messages": said_by("one", "two", "three", "one")}], tokenizer, tmp_path)
    assert document.tokens.tolist() == [1, 4, 2, 5, 1, 6, 2, 3, 4]
    assert document.answered().tolist() == [3, 4]


def test_a_line_ends_where_json_lines_do_and_the_first_may_have_a_mark_of_its_encoding(tokenizer, tmp_path):
    lines = ["one\u2028two", "two\x85three"]
    written = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "lines.jsonl").write_text(written, encoding="utf-8-sig", newline="")  # as on Windows
    documents = read_documents([tmp_path / "lines.jsonl"], tokenizer)
    assert lists(documents) == [([4, 5, 0], []), ([5, 6, 0], [])]


@pytest.mark.parametrize(("line", "said"), [
    ("{", "line 2: expected JSON, got '{'"),
    ("[1]", 'line 2: expected a string, or an object with "text", "messages"'),
    ('{"text": 5}', "line 2: expected a string, or an object"),
    ('{"messages": []}', "line 2: expected a string, or an object"),
    ('{"messages": [5]}', "line 2: the chat template does not take these messages"),
])  # fmt: skip
def test_lines_that_are_no_documents_are_refused_by_their_place(line, said, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(f'"one"\n{line}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl") as error:
        read_documents([tmp_path / "a.jsonl"], tokenizer)
    assert said in str(error.value)


def test_other_data_that_cannot_be_read_are_refused(tokenizer, tmp_path):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must be text in UTF-8"):
        read_documents([tmp_path / "latin1.txt"], tokenizer)
    with pytest.raises(ValueError, match="the data have no text"):
        read_documents([tmp_path / "empty"], tokenizer)
    with pytest.raises(FileNotFoundError):
        read_documents([tmp_path / "nothing"], tokenizer)
    tokenizer.chat_template = None
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "one"}]}')
    with pytest.raises(ValueError, match="line 1: messages need a target whose tokenizer has a chat template"):
        read_documents([tmp_path / "chat.jsonl"], tokenizer)


def numbered(count: int, length: int) -> list[Document]:
    """Texts of which each token names its text."""
    return [Document(torch.full((length,), index, dtype=torch.int32), NONE) for index in range(count)]


def test_what_is_held_out_is_never_trained_on_and_each_text_is_somewhere():
    rows = make_rows(numbered(40, 30), RowSettings(length=20, held_out=0.2, written=0, prompt_tokens=4, seed=1), list)
    train, held_out = ({*side.tokens.flatten().tolist()} for side in rows)
    assert train.isdisjoint(held_out)
    assert train | held_out == {*range(40)}
    assert len(held_out) == 8
    assert rows.train.tokens.shape == rows.train.predicts.shape == (32 * 30 // 20, 20)
    assert rows.train.predicts.all()
    assert rows.held_out.predicts.all()


def test_one_long_text_is_held_out_in_part_and_too_little_is_refused():
    with pytest.raises(ValueError, match="30 tokens in 1 documents, give 0 rows of 20 to train on and 1 to hold out"):
        make_rows(numbered(1, 30), RowSettings(20, 0.1, 0, 4, 1), list)
    document = [Document(torch.arange(100000, dtype=torch.int32), NONE)]
    rows = make_rows(document, RowSettings(length=50, held_out=0.1, written=0, prompt_tokens=4, seed=1), list)
    train, held_out = rows.train.tokens, rows.held_out.tokens
    assert held_out.numel() == pytest.approx(128 * 50, abs=400)
    assert {*train.flatten().tolist()}.isdisjoint(held_out.flatten().tolist())
    assert train.numel() >= 100000 - 128 * 50 - 1000


def test_the_share_that_is_written_anew_is_written_after_the_beginnings():
    prompts = []

    def write(given):
        prompts.extend(given)
        return [with_answer(prompt, torch.cat([prompt, torch.full((16,), -1)]).int()) for prompt in given]

    conversation = Document(torch.arange(100, 130, dtype=torch.int32), torch.arange(100, 107, dtype=torch.int32))
    alone = Document(NONE, torch.tensor([7, 7], dtype=torch.int32))
    settings = RowSettings(length=20, held_out=0.1, written=1.0, prompt_tokens=4, seed=1)
    rows = make_rows([*numbered(20, 40), conversation, alone], settings, write)
    assert sorted(map(len, prompts)) == [2, *[4] * 40, 7]  # two pieces of each text; whole prompts
    kept = torch.cat([side.tokens.flatten() for side in rows])
    for tokens, predicts in rows:  # what the target wrote, and nothing before it
        assert predicts.flatten()[:-1].equal(tokens.flatten()[1:] == -1)
    assert (kept == -1).float().mean() == pytest.approx(0.8, abs=0.05)
    half = make_rows(numbered(200, 40), settings._replace(written=0.5), write)
    written = torch.cat([side.tokens.flatten() for side in half]) == -1
    assert written.float().mean() == pytest.approx(0.4, abs=0.1)


def test_batches_go_through_all_rows_once_an_epoch():
    batches = batches_of(torch.arange(7)[:, None], 3, seed=1)
    epochs = [[*next(batches).flatten().tolist(), *next(batches).flatten().tolist()] for _ in range(3)]
    assert all(len({*epoch}) == 6 for epoch in epochs)
    assert len({*map(tuple, epochs)}) == 3


def written(target, prompts, new_tokens, seed, say=lambda line: None):
    generate = SpeculativeDecoder(target, method="autoregressive").generate
    return own_text.write_texts(target, generate, prompts, new_tokens, seed, say)


def test_a_target_writes_after_each_prompt_what_it_would_write_alone(monkeypatch):
    monkeypatch.setattr(own_text, "ROWS_AT_ONCE", 2)
    target = tiny_target()
    target.generation_config.eos_token_id = None
    prompts = [tokens[:size].int() for tokens, size in zip(random_rows(1, 3).tokens, (3, 7, 5), strict=True)]
    decoder = SpeculativeDecoder(target, method="autoregressive")

    def alone(prompt: torch.Tensor, number: int) -> list[int]:
        ids = torch.tensor([number])
        return decoder.generate(prompt[None].long(), 6, 1.0, seed=5, sequence_ids=ids).sequences[0].tolist()

    documents = written(target, prompts, 6, 5)
    found = [document.tokens.tolist() for document in documents]
    in_order = sorted(prompts, key=len)
    for document, prompt in zip(documents, in_order, strict=True):
        assert document.prompt.equal(prompt)
        assert document.answers == ((len(prompt), len(prompt) + 6),)
    assert found == [alone(prompt, number) for number, prompt in enumerate(in_order)]
    end = found[1][7]
    target.generation_config.eos_token_id = [end, 23]
    ended = [document.tokens.tolist() for document in written(target, prompts, 6, 5)]
    ends = [next((at for at in range(len(prompt), len(text)) if text[at] in (end, 23)), 99)
            for text, prompt in zip(found, in_order, strict=True)]  # fmt: skip
    assert ended == [text[: at + 1] for text, at in zip(found, ends, strict=True)]
    assert len(ended[1]) < len(found[1])


def test_a_quarter_of_the_texts_is_sampled_at_a_lower_temperature(monkeypatch):
    monkeypatch.setattr(own_text, "ROWS_AT_ONCE", 2)
    with patch.object(SpeculativeDecoder, "generate", autospec=True, side_effect=SpeculativeDecoder.generate) as noted:
        written(tiny_target(), [torch.ones(3, dtype=torch.int32)] * 16, 2, 0)
    assert [temperature for (_, _, _, temperature), _ in noted.call_args_list] == [1.0, 1.0, 1.0, 0.6] * 2


def test_prompts_that_leave_no_room_are_left_out_and_counted():
    target, said = tiny_target(), []
    target.config.max_position_embeddings, target.generation_config.eos_token_id = 12, None
    prompts = [torch.ones(size, dtype=torch.int32) for size in (4, 9, 8)]
    texts = written(target, prompts, 4, 0, said.append)
    assert sorted(len(text.tokens) for text in texts) == [8, 12]
    assert said[0] == "left out 1 of 3 prompts of more than 12 positions with 4 new tokens"
