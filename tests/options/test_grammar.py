"""Grammars: what is written is in the language and is transformers' text. Its law has the conformance suite."""

import json
import re

import pytest
import torch
from conformance_parts import LARK, tokenizer_of
from processed_texts import assert_same_or_tie, odd_behind_even, references
from texts_with_rules import EOS
from tiny_models import tiny_llama
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

from heavypath.speculative import Grammar, SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.processors.grammar import choice_source, masked, words_of
from heavypath.speculative.processors.matching import GrammarText

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["file", "folder"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of the letters a to e, an end, and one token of two letters."""
    return tokenizer_of(7)


def allowed_after(following, paths):
    """Scores [R, 7] after nodes: 0 for what may follow, else -inf."""
    return masked(torch.zeros(len(paths), 7), torch.stack([following.words_after(path) for path in paths]))


def is_of_schema(text):
    content = json.loads(text)
    assert [*content] == ["name", "size", "kind", "tags"]
    assert len(content["name"]) <= 12
    assert 0 <= content["size"] <= 999
    assert content["kind"] in ("file", "folder")
    assert len(content["tags"]) <= 3
    return all(re.fullmatch("[a-z]{1,8}", tag) for tag in content["tags"])


@pytest.mark.parametrize("text", ["a\x7f", "\x01\n", 'say "a\\b"', "é😀"])
def test_a_choice_may_have_any_characters(text):
    assert llguidance.LLMatcher.validate_grammar(choice_source([text, "b"])) == ""


def test_json_of_a_schema_is_transformers_text_and_parses(demo_pair):
    target, draft, tokenizer = demo_pair
    grammar = Grammar.json_schema(SCHEMA, tokenizer, whitespace=False)
    inputs = tokenizer(demo_prompts()[0], return_tensors="pt")
    width = inputs.input_ids.shape[1]
    expected = target.generate(
        **inputs, max_new_tokens=64, do_sample=False, eos_token_id=0, pad_token_id=0,
        logits_processor=LogitsProcessorList([grammar.as_processor(width)]),
    )  # fmt: skip
    decoder = SpeculativeDecoder(target, draft, "dyspec")
    out = decoder.generate(**inputs, max_new_tokens=64, eos_token_id=0, logits_processor=[grammar])
    assert_same_or_tie(target, out.sequences, expected)
    assert out.sequences[0, -1] == 0
    assert is_of_schema(tokenizer.decode(out.sequences[0, width:-1]))
    plain = decoder.generate(**inputs, max_new_tokens=len(expected[0]) - width, eos_token_id=None)
    assert out.stats.tokens_per_step > 0.9 * plain.stats.tokens_per_step, "drafts know the grammar"


def test_sampled_json_parses_in_a_batch(demo_pair):
    """Prompts of different lengths, one without a grammar; whitespace may stand between the tokens of JSON."""
    target, draft, tokenizer = demo_pair
    inputs = tokenizer(demo_prompts()[:4], return_tensors="pt", padding=True)
    width = inputs.input_ids.shape[1]
    object_ = Grammar.json_schema(SCHEMA, tokenizer, whitespace=False)
    date = Grammar.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}", tokenizer)
    lists = [[object_], [date], None, [object_]]
    decoder = SpeculativeDecoder(target, draft, "dyspec", tree_size=5)  # the same tree in any batch
    out = decoder.generate(**inputs, max_new_tokens=72, temperature=0.8, seed=3, logits_processor=lists, eos_token_id=0)
    texts = [tokenizer.decode(row[width:], skip_special_tokens=True) for row in out.sequences]
    assert is_of_schema(texts[0])
    assert is_of_schema(texts[3])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", texts[1])
    free = decoder.generate(
        **{name: each[2:3] for name, each in inputs.items()}, max_new_tokens=72, temperature=0.8, seed=3,
        eos_token_id=0, sequence_ids=torch.tensor([2]),
    )  # fmt: skip
    assert texts[2] == tokenizer.decode(free.sequences[0, width:], skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_matcher_that_goes_from_node_to_node_masks_as_one_that_reads_each_text_anew(seed, letters):
    """Random walks over trees, with commits of several tokens, dead ends and ended texts among them."""
    generator = torch.Generator().manual_seed(seed)
    grammar = Grammar.lark(LARK, letters)
    reference, text, kinds = grammar.as_processor(0), [], set()
    following = GrammarText(grammar)
    for _ in range(12):
        paths = [()]
        for _ in range(14):
            above = paths[int(torch.randint(len(paths), (1,), generator=generator))]
            allowed = (allowed_after(following, [above])[0] == 0).nonzero()[:, 0].tolist()
            if allowed:
                token = allowed[int(torch.randint(len(allowed), (1,), generator=generator))]
                paths.append((*above, token))
        order = torch.randperm(len(paths), generator=generator).tolist()
        scores = allowed_after(following, [paths[place] for place in order])
        for row, place in zip(scores, order, strict=True):
            expected = reference(torch.tensor([[*text, *paths[place]]]), torch.zeros(1, 7))
            assert torch.equal(row, expected[0])
            kinds |= {"end" for _ in [0] if row[EOS] == 0} | {"only one" for _ in [0] if (row == 0).sum() == 1}
        impossible = (*paths[-1], 4, 4, 4)
        assert EOS in impossible or (allowed_after(following, [impossible]) == -torch.inf).all()
        new = paths[int(torch.randint(len(paths), (1,), generator=generator))]
        following.advance(new)
        text += new
    assert kinds == {"end", "only one"}


def test_a_text_is_not_read_again(letters, monkeypatch):
    """However long it is: per step the matcher takes no more tokens than the nodes' paths have."""
    taken = []

    class Counted:
        def __init__(self, matcher):
            self.matcher = matcher

        def try_consume_tokens(self, tokens):
            taken.append(len(tokens))
            return self.matcher.try_consume_tokens(tokens)

        def __getattr__(self, name):
            return getattr(self.matcher, name)

    grammar = Grammar.regex("(ab|c)*", letters)
    matcher = Counted(grammar.matcher())
    monkeypatch.setattr(grammar, "matcher", lambda: matcher)
    following = GrammarText(grammar)
    for _ in range(200):
        allowed_after(following, [(), (2,), (2, 6)])
        allowed_after(following, [(2, 6), (2,), ()])
        following.advance([2, 6, 2])
    assert sum(taken) <= 200 * 6


def test_a_grammar_whose_end_ends_no_text_leaves_the_end_alone(tiny_pair, letters):
    grammar = Grammar.regex("(ab){2}c?", letters)
    out = SpeculativeDecoder(*tiny_pair, "sequoia").generate(
        torch.tensor([[2, 2]]), 12, eos_token_id=None, logits_processor=[grammar]
    )
    text = out.sequences[0, 2:].tolist()
    assert re.fullmatch("(ab){2}c?(<end>)+", letters.decode(text).replace(" ", ""))


@pytest.mark.parametrize("method", ["sequoia", "dyspec"])
def test_an_end_token_that_is_a_letter_ends_complete_texts_alone(method, tiny_pair, letters):
    """As a token of a chat template that the tokenizer does not call special, and whose characters a text may have."""
    letter = letters.convert_tokens_to_ids("b")
    ends = [letter, EOS]
    grammar = Grammar.regex("[abc]{6}", letters, eos_token_id=ends)
    decoder = SpeculativeDecoder(*tiny_pair, method)
    prompts = torch.full((32, 1), 2)
    out = decoder.generate(prompts, 7, temperature=3.0, eos_token_id=ends, logits_processor=[grammar])
    for text in out.sequences[:, 1:].tolist():
        assert re.fullmatch("[abc]{6}", letters.decode([token for token in text if token not in ends]).replace(" ", ""))
    usual = {"max_new_tokens": 7, "eos_token_id": ends, "pad_token_id": EOS, "attention_mask": torch.ones(1, 1)}
    expected = tiny_pair[0].generate(prompts[:1], **usual, logits_processor=[grammar.as_processor(1)])
    greedy = decoder.generate(prompts[:1], 7, temperature=0, eos_token_id=ends, logits_processor=[grammar])
    assert torch.equal(greedy.sequences, expected)


def test_a_grammar_may_mask_more_tokens_than_its_tokenizer_has(letters):
    wide = tiny_llama(1, vocab_size=70)
    grammar = Grammar.regex("(ab)*", letters)
    out = SpeculativeDecoder(wide, tiny_llama(2, vocab_size=70)).generate(
        torch.tensor([[1, 2]]), 16, temperature=2.0, eos_token_id=None, logits_processor=[grammar]
    )
    assert out.sequences[0, 2:].max() < 7


@pytest.mark.parametrize(("make", "message"), [
    (lambda each: Grammar.json_schema({"type": "strin"}, each), "JSON schema cannot be followed: Invalid type: strin"),
    (lambda each: Grammar.json_schema("{'a': 1}", each), "the JSON schema is no JSON: Expecting property name"),
    (lambda each: Grammar.json_schema([1], each), "a JSON schema must be an object, got list"),
    (lambda each: Grammar.json_schema({"not": {"type": "null"}}, each), 'Unimplemented keys: ."not"'),
    (lambda each: Grammar.json_schema({"$ref": "#/$defs/x"}, each), "Pointer '/.defs/x' does not exist"),
    (lambda each: Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 1}, each), "minimum .3. is greater"),
    (lambda each: Grammar.regex("(ab", each), r"regular expression '\(ab' cannot be followed: (?s:.*)unclosed group"),
    (lambda each: Grammar.regex("(?=a)b", each), "look-around"),
    (lambda each: Grammar.regex("a\\", each), "a backslash at its end escapes nothing"),
    (lambda each: Grammar.regex("a\\\\\\", each), "a backslash at its end escapes nothing"),
    (lambda each: Grammar.lark("start: x y", each), 'Lark grammar cannot be followed: .*unknown name: "x"'),
    (lambda each: Grammar.regex("a", object()), "a grammar needs a fast tokenizer of transformers, got object"),
])  # fmt: skip
def test_what_is_wrong_with_a_grammar_is_said(make, message, letters):
    with pytest.raises((TypeError, ValueError), match=message):
        make(letters)


def test_a_grammar_needs_a_token_that_ends_its_texts(tiny_pair, letters):
    nameless = PreTrainedTokenizerFast(tokenizer_object=letters.backend_tokenizer)
    with pytest.raises(ValueError, match="the tokenizer has none: give eos_token_id"):
        Grammar.regex("a", nameless)
    grammar = Grammar.regex("a+", nameless, eos_token_id=[3, EOS])
    assert grammar.eos_token_ids == (3, EOS)
    matcher = grammar.matcher()
    assert matcher.consume_tokens([0])
    assert int(words_of(matcher, grammar.eos_token_ids)[0]) == 1 << 0 | 1 << 3 | 1 << EOS
    decoder = SpeculativeDecoder(*tiny_pair)
    with pytest.raises(
        ValueError, match=r"tokens are \[3, 5\], and this sequence ends by one of \[5\]; give Grammar eos_token_id"
    ):
        decoder.generate(torch.tensor([[1]]), 4, eos_token_id=EOS, logits_processor=[grammar])


def test_other_processors_that_contradict_a_grammar_end_in_an_error(tiny_pair, letters):
    def anything(input_ids, scores):
        return torch.where(scores == -torch.inf, 0.0, scores - 100)

    for pattern, other, message in (
        ("(ab)+", anything, "are not of the sequence's grammar: another processor has allowed them"),
        ("d(b|d)+", odd_behind_even, "Grammar, odd_behind_even leave no token after the 1 new tokens"),
    ):
        own = [Grammar.regex(pattern, letters), other]
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(*tiny_pair).generate(torch.tensor([[1, 2]]), 8, eos_token_id=EOS, logits_processor=own)


def nested(depth):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def items(name):
    return {"type": "array", "items": {"$ref": name}}


def all_of(*numbers, kind="number"):
    return {"allOf": [{"type": kind, "multipleOf": number} for number in numbers]}


@pytest.mark.parametrize(("schema", "message"), [
    (references(65), "more than 64 references lead to nothing but another reference"),
    (references(10, last={"$ref": "#/$defs/a3"}), "more than 64 references"),  # in a circle
    (references(500, items), "may be nested .* deep, and may be 800"),
    (references(500, items, {"items": {"$ref": "#/$defs/a0"}}), "may be nested"),
    (references(300, lambda name: {"anyOf": [{"$ref": name}]}), "may be nested"),
    (references(300, lambda name: items("http://a/b" + name)) | {"$id": "http://a/b"}, "may be nested"),
    (references(500, lambda name: items(name.replace("$", "%24"))), "may be nested"),
    (nested(150), "nested 151 deep"),
    ({"enum": [*range(10_000)]}, "more than 10000 values"),
    ({"const": "a" * 70_000}, "expected at most 65536 bytes"),
    (json.dumps({"const": "a" * 70_000}), "expected at most 65536 bytes"),
    ("[" * 60_000, "nested too deep"),
    ({"multipleOf": 10_007}, "multipleOf, without its factors of ten, may be at most 10000"),
    ({"multipleOf": 12345.678}, "multipleOf"),
    ({"multipleOf": 10**30 + 1}, "multipleOf, without its factors of ten"),  # more digits than Decimal keeps
    (all_of(97, 89, 83), "the least common multiple of all multipleOf"),
    (all_of(0.97, 1.03, 7), "the least common multiple"),
    ({"type": "integer", "minimum": 10**4000}, "out of range"),
])  # fmt: skip
def test_a_schema_that_is_too_much_for_llguidance_is_refused_before_it(schema, message, letters):
    with pytest.raises(ValueError, match=message):
        Grammar.json_schema(schema, letters)


@pytest.mark.parametrize("schema", [
    references(64),
    references(200, items),
    references(60, items, {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/a0"}}]}),
    {"properties": {"a": {"$ref": "#"}, "$ref": {"type": "string"}, "multipleOf": {"type": "integer"}}},
    {"$id": "http://a/b", "$ref": "http://a/b#/$defs/x", "$defs": {"x": {"type": "null"}}},
    {"enum": [f"e{number}" for number in range(5_000)]},
    {"type": "integer", "multipleOf": 1_000_000},
    all_of(0.01, 5, 60, kind="integer"),
    {"multipleOf": 9973},
])  # fmt: skip
def test_schemas_up_to_there_are_followed(schema, letters):
    assert Grammar.json_schema(schema, letters).matcher().compute_bitmask()


def test_a_lark_grammar_of_too_many_rules_is_refused(letters):
    rules = [f"r{number}: r{number + 1}" for number in range(5_000)]
    with pytest.raises(ValueError, match="at most 1000 colons"):
        Grammar.lark("\n".join(["start: r0", *rules, 'r5000: "a"']), letters)
