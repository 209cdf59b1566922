"""Retrieval: ranges and laws against dictionaries of n-grams, its files, and texts that it drafts."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from devices import DEVICE, PLACES, moved
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import tiny_llama, transformers_greedy

from heavypath.kernels.retrieval.corpus import sort_corpus
from heavypath.kernels.retrieval.followers import follower_logprobs
from heavypath.kernels.retrieval.ranges import Appended, append_tokens, renew_ranges, store_texts
from heavypath.speculative import PromptLookup, Retrieval, SpeculativeDecoder, TokenTree
from heavypath.speculative.drafts.kinds import describe, draft_parameter_count

VOCAB = 4
IMPLS = ["torch", "triton"] if DEVICE == "cpu" else ["triton"]
tokens = st.integers(0, VOCAB - 1)
END = -1  # what follows the last token of a text of the corpus


def followers_in(texts, suffix):
    """What followed each occurrence of some tokens, by looking at every place."""
    found = []
    for text in texts:
        ended = [*text, END]
        found += [ended[i] for i in range(len(suffix), len(ended)) if tuple(text[i - len(suffix) : i]) == suffix]
    return found


def expected_law(corpus, text, context, longest):
    """Q by its formula: a = 256, b = 64, and nothing once less than 1 in 1024 is left."""
    law, left = [0.0] * VOCAB, 1.0
    for k in range(longest, 0, -1):
        suffix = tuple(context[-k:])
        if left < 2**-10:
            break
        if len(suffix) < k:
            continue
        there = Counter(followers_in(corpus, suffix))
        here = Counter(token for token in followers_in([text], suffix) if token != END)
        total = there.total() + 64 * here.total()
        for token in range(VOCAB):
            law[token] += left / (total + 256 / k**2) * (there[token] + 64 * here[token])
        left *= 256 / k**2 / (total + 256 / k**2)
    return law


def sorted_on_device(texts, longest):
    return moved(sort_corpus([np.array(text, np.int64) for text in texts], longest), DEVICE)


def test_a_corpus_by_hand():
    """Two texts, a b a and b: the ring is | a b a | b, and its entries are sorted by the tokens before them."""
    corpus = sort_corpus([np.array([0, 1, 0]), np.array([1])], 2)
    # before, nearest first:  | a..  | b..  a |..  a b..  b |..  b a..      places: 2nd text, 1st, b, | , | , a
    assert corpus.followers.tolist() == [2, 1, 2, 0, 0, 1]
    assert corpus.steps.tolist() == [3, 4, 6 + 1, 6 + 5, 12 + 0, 12 + 2]


@settings(max_examples=7, deadline=None, derandomize=True)
@given(
    corpus=st.lists(st.lists(tokens, max_size=20), min_size=1, max_size=3).filter(any),
    texts=st.lists(st.lists(tokens, min_size=2, max_size=12), min_size=1, max_size=2),
    branch=st.lists(tokens, min_size=1, max_size=3), longest=st.integers(1, 5), commit=st.booleans(),
)  # fmt: skip
@pytest.mark.parametrize("impl", IMPLS)
def test_retrieval_finds_what_dictionaries_find(impl, corpus, texts, branch, longest, commit):
    """Of texts whose last token is the root, and of nodes below; rows that are not written yet are not read."""
    kept, (width, batch) = sorted_on_device(corpus, longest), (max(map(len, texts)), len(texts))
    prompt = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=DEVICE)
    lengths = torch.tensor([len(text) - 1 for text in texts], device=DEVICE)
    keys = torch.full((batch, 2, width + len(branch) + 1, longest), -1, device=DEVICE)
    values = keys.clone()
    store_texts(kept, prompt, keys, values)
    if commit:  # the rows of the last two tokens as drafting left them
        for b, length in enumerate(lengths.tolist()):
            keys[b, :, length - 1 :] = values[b, :, length - 1 :] = 3
    rows = torch.stack([lengths - 1, lengths], 1)
    fed = prompt.gather(1, rows)
    for depth in range(len(branch) + 1):
        append_tokens(kept, Appended(fed, rows, rows - 1), keys, values, impl=impl)
        logits = follower_logprobs(kept, rows, lengths, keys, values, vocab_size=VOCAB, impl=impl)[:, -1]
        for b, text in enumerate(texts):
            context, row = text + branch[:depth], int(rows[b, -1])
            for k in range(1, longest + 1):
                low, high = int(keys[b, 0, row, k - 1]), int(values[b, 0, row, k - 1])
                expected = followers_in(corpus, tuple(context[-k:])) if k <= len(context) else []
                assert sorted(kept.followers[low:high] - 1) == sorted(expected)
            assert logits[b].exp().tolist() == pytest.approx(expected_law(corpus, text, context, longest), abs=1e-6)
            assert (logits[b] == -math.inf).tolist() == [chance == 0 for chance in logits[b].exp().tolist()]
        if depth < len(branch):
            rows, fed = rows[:, -1:] + 1, torch.full((batch, 1), branch[depth], device=DEVICE)


@pytest.mark.parametrize("impl", IMPLS)
def test_of_many_occurrences_some_are_taken_evenly(impl):
    """Token 0 occurs 3,000 times, sorted by what is before it; one in three each is followed by 1, 2 and 3."""
    kept = sorted_on_device([[before, 0, after] for before in range(4) for after in (1, 2, 3)] * 250, 3)
    keys = torch.full((1, 2, 1, 3), -1, device=DEVICE)
    values, root = keys.clone(), torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    append_tokens(kept, Appended(root, root, root - 1), keys, values, impl=impl)
    law = follower_logprobs(kept, root, root[0], keys, values, vocab_size=VOCAB, impl=impl).exp()[0, 0].tolist()
    assert int(values[0, 0, 0, 0] - keys[0, 0, 0, 0]) == 3750
    assert sum(law) == pytest.approx(3750 / 4006, abs=1e-6)
    exact = [count / 4006 for count in (750, 1000, 1000, 1000)]  # 0 follows itself where it was before
    assert law == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("longest", [1, 5, 8])
@pytest.mark.parametrize("impl", IMPLS)
def test_ranges_of_another_corpus_are_those_of_texts_read_by_it(impl, longest):
    """Of the beginning of a text, whose row lacks tokens, and of later rows; other rows stay as they are."""
    torch.manual_seed(longest)
    old, new = (sorted_on_device([torch.randint(0, 3, (200,)).tolist()], longest) for _ in range(2))
    text, rows = torch.randint(0, 3, (3, 20), device=DEVICE), torch.tensor([0, 2, 19], device=DEVICE)
    keys, values = (torch.full((3, 2, 20, longest), -1, device=DEVICE) for _ in range(2))
    store_texts(old, text, keys, values)
    expected = [each.clone() for each in (keys, values)]
    store_texts(new, text, *(fresh := [each.clone() for each in expected]))
    for sequence, row in enumerate(rows.tolist()):
        for whole, field in zip(expected, fresh, strict=True):
            whole[sequence, :, row] = field[sequence, :, row]
    renew_ranges(new, rows, keys, values, impl=impl)
    low, high = keys[:, 0], values[:, 0]
    is_empty = low >= high  # wherever they are
    assert torch.equal(is_empty, expected[0][:, 0] >= expected[1][:, 0])
    for ours, theirs in ((low, expected[0][:, 0]), (high, expected[1][:, 0])):
        assert torch.equal(ours.where(~is_empty, 0), theirs.where(~is_empty, 0))
    assert torch.equal(keys[:, 1], expected[0][:, 1])
    assert torch.equal(values[:, 1], expected[1][:, 1])


@pytest.mark.parametrize(("seed", "length"), [(3, 300)])
def test_both_implementations_give_the_same_numbers(seed, length):
    """Of texts of two lengths, the first of which the kernel reads in two blocks."""
    torch.manual_seed(seed)
    corpus = sort_corpus([torch.randint(0, 3, (3000,)).numpy()], 8)
    texts, results = torch.randint(0, 3, (2, length + 1)), []
    for impl, device in PLACES.items():
        kept, text = moved((corpus, texts), device)
        keys = torch.full((2, 2, length + 20, 8), -1, device=device)
        own = keys, keys.clone()
        store_texts(kept, text[:, : length - 1], *own)
        lengths = torch.tensor([length, 7], device=device)
        rows = lengths[:, None] + torch.tensor([-1, 0], device=device)
        below = lengths[:, None] + torch.arange(1, 6, device=device)
        append_tokens(kept, Appended(text.gather(1, rows), rows, rows - 1), *own, impl=impl)
        root = follower_logprobs(kept, rows, lengths, *own, vocab_size=VOCAB, impl=impl)
        parents = lengths[:, None].expand(-1, 5)
        append_tokens(kept, Appended((below + lengths[:, None]) % 3, below, parents), *own, impl=impl)
        leaves = follower_logprobs(kept, below, lengths, *own, vocab_size=VOCAB, impl=impl)
        results.append(moved((*own, root, leaves), "cpu"))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-6, rtol=1e-6)


def test_the_kernels_refuse_rows_that_do_not_lie_side_by_side():
    kept, nodes = sorted_on_device([[1, 2, 1]], 2), Appended(*torch.zeros(3, 1, 1, dtype=torch.long, device=DEVICE))
    keys = torch.zeros(1, 2, 4, 3, dtype=torch.long, device=DEVICE)[..., :2]
    with pytest.raises(ValueError, match=r"rows side by side, got \(24, 12, 3, 1\)"):
        append_tokens(kept, nodes, keys, keys.clone(), impl="triton")
    with pytest.raises(ValueError, match="equal strides"):
        follower_logprobs(
            kept, nodes.cache_rows, nodes.tokens[0], keys.contiguous(), keys, vocab_size=VOCAB, impl="triton"
        )


def test_followers_are_right_in_any_schedule(adversary):
    test_both_implementations_give_the_same_numbers(adversary.seed, 60)
    test_of_many_occurrences_some_are_taken_evenly("triton")
    test_ranges_of_another_corpus_are_those_of_texts_read_by_it("triton", 5)
    adversary.met("_append_kernel", "_followers_kernel", "_renew_kernel")


def test_a_text_of_the_corpus_is_drafted():
    """The corpus has the target's own text, which no prompt shows: prompt lookup cannot know it."""
    target = tiny_llama(1, 60)
    prompt = torch.tensor([[1, 2, 3, 4]])
    text = transformers_greedy(target, prompt, 40)
    steps = {}
    for name, draft in {"retrieval": Retrieval([text[0]]), "lookup": PromptLookup()}.items():
        out = SpeculativeDecoder(target, draft, tree=TokenTree.chain(5)).generate(prompt, 40)
        assert torch.equal(out.sequences, text)
        steps[name] = out.stats.tokens_per_step
    assert steps["retrieval"] > 5 > 2 > steps["lookup"]


def test_texts_are_files_folders_strings_and_tokens(demo_pair, tmp_path):
    tokenizer, end = demo_pair.tokenizer, demo_pair.tokenizer.eos_token_id
    (tmp_path / ".git").mkdir()
    for name, content in {"b.py": b"import os\n", ".git/c.py": b"import sys\n", "d.bin": b"\xff\xfe\x00"}.items():
        (tmp_path / name).write_bytes(content)
    ids = tokenizer("import os\n").input_ids
    expected = sort_corpus([np.array([*ids, end])], 8)
    for text in (tmp_path, tmp_path / "b.py", "import os\n", [*ids, end], torch.tensor([*ids, end])):
        retrieval = Retrieval([text], tokenizer)
        assert all(torch.equal(*pair) for pair in zip(retrieval.on(torch.device("cpu")).corpus, expected, strict=True))
        assert retrieval.tokens == len(ids) + 1


def test_a_file_is_what_was_saved(demo_pair, tmp_path):
    target, _, tokenizer = demo_pair
    made = Retrieval(["import os\nimport re\nimport sys\n"], tokenizer, max_ngram=5)
    made.save(tmp_path / "mine.safetensors")
    loaded = Retrieval.load(tmp_path / "mine.safetensors", tokenizer)
    assert describe(loaded) == f"Retrieval({made.tokens} tokens, max_ngram=5)"
    assert (loaded.largest, loaded.vocabulary) == (made.largest, made.vocabulary)
    copies = [one.on(torch.device("cpu")) for one in (loaded, made)]
    assert all(torch.equal(*pair) for pair in zip(*(copy.corpus for copy in copies), strict=True))
    assert loaded.on(torch.device("cpu")) is copies[0]
    assert draft_parameter_count(loaded, target) == 0


def test_files_of_something_else_are_refused(demo_pair, tmp_path):
    other = tmp_path / "other.safetensors"

    def refused(message, *tokenizer):
        with pytest.raises(ValueError, match=message):
            Retrieval.load(other, *tokenizer)

    save_file({"weight": torch.zeros(2)}, other, {"format": "heavypath retrieval 0"})
    refused(r"'heavypath retrieval 1', .* got 'heavypath retrieval 0'; make it again")
    save_file({"weight": torch.zeros(2)}, other)
    refused("got 'one of something else'")
    other.write_text("no safetensors")
    refused(r"must be a file that Retrieval.save wrote")
    with pytest.raises(FileNotFoundError):
        Retrieval.load(tmp_path / "none")
    retrieval = Retrieval(["import os\n"], demo_pair.tokenizer)
    retrieval.vocabulary = "another"
    retrieval.save(other)
    refused("tokens of another vocabulary than the target's; make it again", demo_pair.tokenizer)


@pytest.mark.parametrize(("build", "error", "message"), [
    (lambda t: Retrieval([[]]), ValueError, "got 0 in 1 texts"),
    (lambda t: Retrieval([]), ValueError, r"needs texts of 1 .. 2147483647 tokens in all, got 0 in 0 texts"),
    (lambda t: Retrieval("import os"), TypeError, "texts must be several: .* got one str; put it into a list"),
    (lambda t: Retrieval(["import os"]), ValueError, "need the target's tokenizer"),
    (lambda t: Retrieval([[1, -2]]), ValueError, r"tokens must be in 0 .. 2147483645, got -2 .. 1"),
    (lambda t: Retrieval([[0.5]]), TypeError, r"integers \[any\]; got list of float64 \[1\]"),
    (lambda t: Retrieval([torch.zeros(2, 2).long()]), TypeError, r"got Tensor of int64 \[2, 2\]"),
    (lambda t: Retrieval([Path("none")], t), FileNotFoundError, "none"),
    (lambda t: Retrieval([Path(__file__).parents[2] / "speculative/demo/head/model.safetensors"], t), ValueError,
     r"must be text in UTF-8"),
    (lambda t: Retrieval([[1]], max_ngram=0), ValueError, r"max_ngram must be in 1 .. 64, got 0"),
    (lambda t: Retrieval([[1]], max_ngram=2.5), TypeError, r"max_ngram must be an integer, got 2.5"),
    (lambda t: SpeculativeDecoder(tiny_llama(1), Retrieval([[1, 7]])), ValueError,
     r"Retrieval\(2 tokens, max_ngram=8\) must have tokens in 0 .. 6, the target's vocabulary, got 7"),
])  # fmt: skip
def test_what_is_no_corpus_is_refused(build, error, message, demo_pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        build(demo_pair.tokenizer)
