"""Repetition penalty, least lengths and stopping criteria: transformers' own, along every path."""

import pytest
import torch
from texts_with_rules import PROMPTS, left_padded
from tiny_models import tiny_llama
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import (
    ConfidenceCriteria,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from heavypath.kernels.commit import State, commit
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.ordering import heavy_path_order
from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.decoding.device_tree import device_tree
from heavypath.speculative.decoding.drafting import root_alone
from heavypath.speculative.decoding.processing import Processing
from heavypath.speculative.decoding.sequences import Sequences


@pytest.fixture(scope="module")
def tiny_pair():
    return tiny_llama(1), tiny_llama(2, layers=1)


def by_transformers(model, prompt, **settings):
    """transformers' greedy text of a prompt alone, LongTensor[new]."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | settings
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :]


def begun(prompt, lengths, new_tokens, stops, vocab_size):
    """Sequences with these prompts, that count the tokens of their texts."""
    batch = len(prompt)
    state = Sequences.room_for(
        batch, new_tokens=new_tokens, stops=len(stops), vocab_size=vocab_size, count_slots=1, device=prompt.device
    )
    ids = torch.arange(batch)
    state.begin(prompt, lengths, new_tokens=new_tokens, stops=stops, sequence_ids=ids, seed=0)
    return state


def test_a_penalty_counts_the_prompt_and_the_path_and_counts_a_token_once():
    """After the root 2 and its child 0: tokens 1, 2 of the text, at the child also 0; token 3 is another branch's."""
    shape = device_tree(TokenTree([-1, 0, 0]), 1, torch.device("cpu"))
    prompt, length = torch.tensor([[1, 1, 2]]), torch.tensor([3])
    sequences = begun(prompt, length, 4, torch.tensor([4]), 5)
    drafted = root_alone(sequences, torch.zeros(1, 1), shape)._replace(tokens=torch.tensor([[2, 0, 3]]))
    logits = torch.tensor([4.0, 4.0, -4.0, 4.0, 4.0]).expand(1, 3, 5).clone()
    out = Processing(2.0, 1)(logits, drafted, sequences)
    nothing = -torch.inf
    assert out[0].tolist() == [[4, 2, -8, 4, nothing], [2, 2, -8, 4, 4], [4, 2, -8, 2, 4]]


@pytest.mark.parametrize("seed", range(4))
def test_every_node_has_the_logits_that_transformers_processors_make_of_its_text(seed):
    generator = torch.Generator().manual_seed(seed)
    batch, nodes, vocab, least, penalty = 3, 9, 12, 6, (1.4, 0.7)[seed % 2]
    above = (torch.rand(batch, nodes - 1, generator=generator) * torch.arange(1, nodes)).long()  # a node before it
    parents = torch.cat([torch.full((batch, 1), -1), above], 1)
    order = heavy_path_order(parents, torch.arange(nodes).expand_as(parents))
    tokens = torch.randint(0, vocab, (batch, nodes), generator=generator)
    tokens[:, -1] = -1  # absent
    prompt, lengths = torch.randint(0, vocab, (batch, 5), generator=generator), torch.tensor([5, 1, 3])
    stops = torch.tensor([2, 7])
    sequences = begun(prompt, lengths, 10, stops, vocab)
    texts = [prompt[b, : lengths[b]].tolist() for b in range(3)]
    for _ in range(1 + seed % 3):  # commits of up to two tokens of each
        drafts = torch.randint(0, vocab, (batch, 2), generator=generator)
        length = torch.randint(0, 2, (batch,), generator=generator)
        path = torch.stack([torch.zeros_like(length), length.where(length > 0, -1)], 1)
        after = torch.tensor([3, 4, 5])  # no end-of-sequence token
        drafts = drafts.where(drafts != 2, 3).where(drafts != 7, 4)
        tree = Nodes(drafts, torch.tensor([-1, 0]), torch.tensor([0, 0]))
        state = State(sequences.numbers, sequences.output, sequences.stops, sequences.seen, sequences.counts)
        commit(state, tree, torch.tensor([0, 1]), Verified(path, length, after), 1)
        for b in range(3):
            texts[b] += [*drafts[b, 1 : 1 + length[b]].tolist(), int(after[b])]
    assert sequences.produced.tolist() == [len(text) - int(size) for text, size in zip(texts, lengths, strict=True)]
    tokens[:, 0] = sequences.root
    depths = torch.zeros_like(parents)
    for i in range(1, nodes):
        depths[:, i] = depths.gather(1, order.parents[:, i : i + 1])[:, 0] + 1
    alone = root_alone(sequences, torch.zeros(batch, 1), device_tree(TokenTree([-1]), 0, prompt.device))
    drafted = alone._replace(tokens=tokens, parents=order.parents, depths=depths, subtree_end=order.subtree_end)

    logits = torch.randn(batch, nodes, vocab, generator=generator)
    expected = logits.clone()
    for b in range(batch):
        processors = LogitsProcessorList([
            RepetitionPenaltyLogitsProcessor(penalty),
            MinNewTokensLengthLogitsProcessor(int(lengths[b]), least, stops),
        ])  # fmt: skip
        for node in range(nodes - 1):
            path, i = [], node
            while i > 0:
                path, i = [int(tokens[b, i]), *path], int(order.parents[b, i])
            expected[b, node] = processors(torch.tensor([texts[b] + path]), logits[b, node : node + 1])[0]
    out = Processing(penalty, least)(logits, drafted, sequences)
    assert torch.equal(out[:, :-1], expected[:, :-1])
    assert (out == -torch.inf).any()


class Watching(StoppingCriteria):
    """Ends a text that has `sum` in its new tokens; keeps what it was shown."""

    def __init__(self, begin, total):
        self.begin, self.total, self.seen = begin, total, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return input_ids[:, self.begin :].sum(1) >= self.total


@pytest.mark.parametrize("method", ["autoregressive", "sequoia", "spectr", "rsd-s"])
def test_a_criterion_is_asked_once_for_each_new_token_and_no_more(method, tiny_pair):
    target, _ = tiny_pair
    decoder = SpeculativeDecoder(target, target, method)  # accepts whole blocks
    ours, theirs = Watching(2, 40), Watching(2, 40)
    out = decoder.generate(torch.tensor([[1, 2]]), 40, stopping_criteria=[ours])
    expected = by_transformers(target, [1, 2], max_new_tokens=40, stopping_criteria=StoppingCriteriaList([theirs]))
    assert out.sequences[0, 2:].tolist() == expected.tolist()
    assert 5 < len(expected) < 40
    assert ours.seen == theirs.seen
    assert method == "autoregressive" or out.stats.tokens_per_step > 1.5


@pytest.mark.parametrize("method", ["autoregressive", "specinfer", "sequoia", "dyspec"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_cut_by_a_criterion_is_the_beginning_of_the_text(method, temperature, tiny_pair):
    decoder = SpeculativeDecoder(*tiny_pair, method)
    inputs = left_padded(PROMPTS)
    width = inputs["input_ids"].shape[1]
    whole = decoder.generate(**inputs, max_new_tokens=24, temperature=temperature, seed=3).sequences[:, width:]
    out = decoder.generate(
        **inputs, max_new_tokens=24, temperature=temperature, seed=3, pad_token_id=0,
        stopping_criteria=[Watching(width, 25)],
    )  # fmt: skip
    for text, cut in zip(whole, out.sequences[:, width:], strict=True):
        end = int((text.cumsum(0) < 25).sum()) + 1
        assert cut.tolist() == text[:end].tolist() + [0] * (cut.shape[0] - end)


def test_a_streamer_gets_the_cut_text(tiny_pair):
    tokens = []

    class Recorder:
        def put(self, value):
            tokens.extend(value.flatten().tolist())

        def end(self):
            tokens.append("end")

    out = SpeculativeDecoder(*tiny_pair).generate(
        torch.tensor([[1, 2]]), 24, stopping_criteria=[Watching(2, 17)], streamer=Recorder()
    )
    assert tokens == [*out.sequences[0].tolist(), "end"]


def test_what_is_not_asked_for_is_not_done(tiny_pair, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(Processing, "__call__", never)
    decoder = SpeculativeDecoder(*tiny_pair)
    plain = decoder.generate(torch.tensor([[1, 2]]), 12).sequences
    settings = {"repetition_penalty": 1, "min_new_tokens": 5}  # nothing can end it
    assert torch.equal(decoder.generate(torch.tensor([[1, 2]]), 12, **settings).sequences, plain)


@pytest.mark.parametrize(("options", "message"), [
    ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number > 0, got 0.0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty must be a finite number > 0, got inf"),
    ({"repetition_penalty": "1.2"}, "repetition_penalty must be a finite number > 0, got '1.2'"),
    ({"min_new_tokens": 5}, r"min_new_tokens must be in 0 .. max_new_tokens = 4, got 5"),
    ({"min_new_tokens": -1}, "min_new_tokens must be in 0 .. .* got -1"),
    ({"min_new_tokens": 1.5}, "min_new_tokens must be an integer, got 1.5"),
    ({"stop_strings": "x"}, "stop_strings need tokenizer="),
    ({"stop_strings": []}, "stop_strings must be one or more strings that are not empty"),
    ({"stop_strings": ["a", ""]}, "stop_strings must be one or more strings that are not empty"),
    ({"stopping_criteria": 3}, "stopping_criteria must be a StoppingCriteriaList, got 3"),
    ({"stopping_criteria": [ConfidenceCriteria(0.5)]}, "ConfidenceCriteria needs the scores"),
    ({"input_ids": torch.tensor([[1], [2]]), "stopping_criteria": [Watching(0, 1)]}, "pad_token_id or eos_token_id"),
])  # fmt: skip
def test_controls_that_cannot_be_met_are_refused(options, message, tiny_pair):
    with pytest.raises((ValueError, TypeError), match=message):
        SpeculativeDecoder(*tiny_pair).generate(**{"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 4} | options)
