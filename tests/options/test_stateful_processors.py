"""Processors and criteria that keep state between their calls, wherever it is: called as transformers calls them."""

import functools
import itertools
import random
from collections import OrderedDict, deque
from functools import partial

import numpy as np
import pytest
import torch
from processed_texts import processed_law
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import tiny_llama
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process as theirs

from heavypath.kernels.filtering import Filters
from heavypath.speculative import Lookahead, PromptLookup, Recall, SpeculativeDecoder
from heavypath.speculative.processors.state import KeptState

IDS = torch.tensor([[1, 2, 1, 2, 1]])
NEW, LATE = 26, 17
USUAL = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}


def forced(scores, count, token=3):
    """Scores under which the token of call number LATE is forced, and every sixth after it is another one."""
    if count == LATE or (count > LATE and count % 6 == 0):
        scores = torch.full_like(scores, -torch.inf)
        scores[:, token] = 0.0
    return scores


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return forced(scores, self.calls)

    def method(self, input_ids, scores):
        return self(input_ids, scores)


class BudgetOfThinking(LogitsProcessor):
    """Begins to count where a token is seen, which a tree may draft long before."""

    def __init__(self, token):
        self.token, self.begin = token, None

    def __call__(self, input_ids, scores):
        if self.begin is None and input_ids[0, -1] == self.token and input_ids.shape[1] > 10:
            self.begin = input_ids.shape[1]
        if self.begin is not None and input_ids.shape[1] - self.begin == 4:
            return forced(scores, LATE)
        return scores


class StartsAnew:
    """Loses what it knows where a text is not longer than the one before."""

    def __init__(self):
        self.longest, self.calls = 0, {}

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] <= self.longest:
            self.calls = {}
        self.longest = input_ids.shape[1]
        self.calls[self.longest] = len(self.calls)
        return forced(scores, len(self.calls))


class OfClass:
    calls = 0

    def __call__(self, input_ids, scores):
        type(self).calls += 1
        return forced(scores, OfClass.calls)


def of_class():
    OfClass.calls = 0
    return OfClass()


class InSlots:
    __slots__ = ("__calls", "parts")

    def __init__(self):
        self.__calls, self.parts = deque(maxlen=50), OrderedDict()

    def __call__(self, input_ids, scores):
        self.__calls.append(len(self.parts))
        self.parts[len(self.parts)] = int(input_ids[0, -1])
        return forced(scores, len(self.__calls))


class Buffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, input_ids, scores):
        self.calls += 1
        return forced(scores, int(self.calls[0]))


class OfList:
    def __init__(self):
        self.others = LogitsProcessorList([theirs.NoRepeatNGramLogitsProcessor(9), Counts()])

    def __call__(self, input_ids, scores):
        return self.others(input_ids, scores)


def of_closure():
    calls, kept = 0, []

    def count(input_ids, scores):
        nonlocal calls
        calls += 1
        kept.append(calls)
        return forced(scores, len(kept))

    return count


CALLS = 0


def of_global():
    global CALLS
    CALLS = 0

    def count(input_ids, scores):
        global CALLS
        CALLS += 1
        return forced(scores, CALLS)

    return count


def of_attribute():
    def count(input_ids, scores):
        count.calls += 1
        return forced(scores, count.calls)

    count.calls = 0
    return count


def of_default():
    def count(input_ids, scores, calls=np.zeros(1)):  # noqa: B008
        calls += 1
        return forced(scores, int(calls[0]))

    return functools.partial(count)


def of_partial():
    def count(calls, input_ids, scores):
        calls.add(len(calls))
        return forced(scores, len(calls))

    return functools.partial(count, set())


def of_iterator():
    counter = itertools.count(1)
    return lambda input_ids, scores: forced(scores, next(counter))


def noisy(draw):
    """Adds random numbers, as `draw` gives them."""
    return lambda input_ids, scores: scores + draw(scores.shape[1])


class OfOwnGenerator:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, input_ids, scores):
        return scores + 3 * torch.randn(scores.shape[1], generator=self.generator)


def of_program():
    torch.manual_seed(4)
    return noisy(lambda count: 3 * torch.randn(count))


def of_python():
    own = random.Random(3)
    return noisy(lambda count: torch.tensor([own.gauss(0, 3) for _ in range(count)]))


def of_numpy():
    own = np.random.default_rng(3)
    return noisy(lambda count: torch.tensor(own.normal(size=count), dtype=torch.float32) * 3)


KINDS = {
    "attribute": Counts, "method": lambda: Counts().method, "late": lambda: BudgetOfThinking(2),
    "later": lambda: BudgetOfThinking(4), "starts anew": StartsAnew, "class": of_class,
    "slots": InSlots, "buffer": Buffer, "closure": of_closure, "global": of_global,
    "attribute of a function": of_attribute, "default": of_default, "partial": of_partial, "iterator": of_iterator,
    "own generator": OfOwnGenerator, "numbers of torch": of_program, "numbers of Python": of_python,
    "numbers of NumPy": of_numpy, "list": OfList,
}  # fmt: skip
DRAFTS = {
    "lookup": lambda target: PromptLookup(),
    "model": lambda target: tiny_llama(2),
    "the target": lambda target: target,
    "lookahead": lambda target: Lookahead(),
    "recall": lambda target: Recall(),
}
METHODS = ["sequoia", "dyspec", "ersd", "specinfer", "rsd-s", "eagle-2", "autoregressive"]


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_transformers_wherever_state_is_kept(kind, name):
    target, other = tiny_llama(1), theirs.NoRepeatNGramLogitsProcessor(5)
    expected = target.generate(IDS, **USUAL, logits_processor=LogitsProcessorList([KINDS[kind](), other]))
    method = METHODS[([*KINDS].index(kind) + [*DRAFTS].index(name)) % len(METHODS)]
    decoder = SpeculativeDecoder(target, None if method == "autoregressive" else DRAFTS[name](target), method)
    own = [KINDS[kind](), other]
    assert torch.equal(
        decoder.generate(IDS, NEW, temperature=0.0, eos_token_id=None, logits_processor=own).sequences, expected
    )
    own = LogitsProcessorList([KINDS[kind](), other])
    assert torch.equal(target.generate(IDS, **USUAL, logits_processor=own, custom_generate=decoder), expected)


def test_state_goes_on_in_the_next_text_as_it_does_by_transformers():
    target, one, other = tiny_llama(1), Counts(), Counts()
    decoder = SpeculativeDecoder(target, target)
    for begin in (IDS, IDS + 2):
        expected = target.generate(begin, **USUAL | {"max_new_tokens": 10}, logits_processor=LogitsProcessorList([one]))
        found = decoder.generate(begin, 10, temperature=0.0, eos_token_id=None, logits_processor=[other])
        assert torch.equal(found.sequences, expected)
        assert one.calls == other.calls


class Prepared(theirs.NoRepeatNGramLogitsProcessor):
    """A user's class that prepares itself when it is called first."""

    def __init__(self):
        super().__init__(3)
        self.mask = None

    def __call__(self, input_ids, scores):
        if self.mask is None:
            self.mask = torch.arange(scores.shape[1]) == 2
        return super().__call__(input_ids, scores).masked_fill(self.mask, -torch.inf)


class Flagged:
    """Bars 3 once 2 has come; changes once in a text, and then depends on no call."""

    def __init__(self):
        self.has_come = False

    def __call__(self, input_ids, scores):
        self.has_come = self.has_come or int(input_ids[0, -1]) == 2
        return scores.masked_fill(torch.arange(scores.shape[1]) == 3, -torch.inf) if self.has_come else scores


class Flagless:
    def __call__(self, input_ids, scores):
        come = (input_ids[:, 3:] == 2).any(1)[:, None] | (input_ids[:, 2:3] == 2)
        return scores.masked_fill(come & (torch.arange(scores.shape[1]) == 3), -torch.inf)


STATELESS = {
    "function": lambda: lambda input_ids, scores: scores,
    "prepared": Prepared,
    "once": Flagged,
    "nested": lambda: LogitsProcessorList([theirs.NoRepeatNGramLogitsProcessor(9)]),
    "bias": lambda: theirs.SequenceBiasLogitsProcessor({(1, 2): 1.0}),
    "watermark": lambda: theirs.WatermarkLogitsProcessor(7, "cpu"),
    "promised": lambda: promised([]),
}


def promised(notes):
    """A callable that writes down what it is asked, and says so."""

    def noting(input_ids, scores):
        notes.append(input_ids.tolist())
        return scores

    noting.keeps_no_state = True
    return noting


@pytest.mark.parametrize("kind", STATELESS)
def test_what_depends_on_no_call_keeps_its_trees(kind, monkeypatch):
    target, looked = tiny_llama(1), []
    made = KeptState.__init__
    monkeypatch.setattr(KeptState, "__init__", lambda *given: looked.append(given) or made(*given))
    decoder = SpeculativeDecoder(target, target, "chain", tree_size=5)
    out = decoder.generate(IDS, NEW, temperature=0.0, eos_token_id=None, logits_processor=[STATELESS[kind]()])
    assert out.stats.steps < NEW / 2
    assert bool(looked) == (kind in ("function", "prepared", "once"))


@pytest.mark.parametrize("method", ["sequoia", "specinfer", "dyspec", "rsd-s", "spectr", "ersd"])
def test_sampled_text_has_the_law_of_the_processed_target(method):
    """Each sequence of the batch has a state of its own, though the object is one."""
    target, count = tiny_llama(1), 1200
    law = processed_law(target, torch.tensor([3, 1, 4]), [Flagless()], Filters(1.0), 3)
    decoder = SpeculativeDecoder(target, tiny_llama(2), method, tree_size=5)
    prompts = torch.tensor([[3, 1, 4]]).expand(count, -1)
    out = decoder.generate(prompts, 3, temperature=1.0, eos_token_id=None, logits_processor=[Flagged()])
    assert chi_square_p_value(joint_counts(out.sequences[:, 3:], 7), law) > SIGNIFICANCE


@pytest.mark.parametrize("kind", ["attribute", "late", "closure", "buffer", "slots"])
def test_sequences_of_a_batch_have_each_their_own_state(kind):
    """As if each had an object of its own; the same for requests of a service that share one."""
    target, prompts = tiny_llama(1), torch.tensor([[1, 2, 1, 2, 1], [3, 4, 5, 6, 2], [6, 1, 1, 2, 5]])
    decoder = SpeculativeDecoder(target, PromptLookup())
    usual = {"temperature": 0.0, "eos_token_id": None}
    expected = [
        decoder.generate(each[None], NEW - 4 * row, **usual, logits_processor=[KINDS[kind]()]).sequences[0, 5:].tolist()
        for row, each in enumerate(prompts)
    ]
    out = decoder.generate(prompts, NEW - 8, **usual, logits_processor=[KINDS[kind]()]).sequences[:, 5:]
    assert [row[: NEW - 8] for row in expected] == out.tolist()
    shared = KINDS[kind]()
    with decoder.serve(slots=3) as service:
        every = [
            service.submit(each, NEW - 4 * row, **usual, logits_processor=[shared]) for row, each in enumerate(prompts)
        ]
        assert [each.result(60).tokens for each in every] == expected


@pytest.mark.parametrize("kind", ["iterator", "numbers of NumPy"])
def test_what_cannot_be_seen_is_refused_for_several_texts_at_a_time(kind):
    target = tiny_llama(1)
    with pytest.raises(ValueError, match=r"given for several seq.* cannot be read.*Give each sequence an object"):
        SpeculativeDecoder(target, target).generate(IDS.expand(2, -1), 4, logits_processor=[KINDS[kind]()])
    own = [[KINDS[kind]()], [KINDS[kind]()]]
    both = SpeculativeDecoder(target, target).generate(IDS.expand(2, -1), NEW, temperature=0.0, logits_processor=own)
    assert torch.equal(both.sequences[0], both.sequences[1])


def test_allowed_tokens_may_keep_state_too():
    target = tiny_llama(1)

    def counting():
        calls = []

        def allowed(batch_id, text):
            calls.append(len(text))
            return [4] if len(calls) == LATE else range(7)

        return allowed

    expected = target.generate(IDS, **USUAL, prefix_allowed_tokens_fn=counting())
    for draft in (PromptLookup(), target):
        decoder = SpeculativeDecoder(target, draft)
        out = decoder.generate(IDS, NEW, temperature=0.0, eos_token_id=None, prefix_allowed_tokens_fn=counting())
        assert torch.equal(out.sequences, expected)


class Pair:
    """Two processors and a stopping criterion that share an object: what one of them changes, the others read."""

    def __init__(self, *changed_by):
        self.changed_by = changed_by
        self.last = torch.zeros(1, dtype=torch.long)

    def change(self, name, text):
        if name in self.changed_by and text[0, -1] % 2:
            self.last += 1

    def first(self, input_ids, scores):
        self.change("first", input_ids)
        return scores.index_fill(1, self.last % 7, -torch.inf)

    def second(self, input_ids, scores):
        self.change("second", input_ids)
        return scores.index_fill(1, 3 * self.last % 7, -torch.inf)

    def criterion(self, input_ids, scores, **kwargs):
        self.change("criterion", input_ids)
        return torch.full((len(input_ids),), int(self.last) > 9)

    def options(self):
        found = {"logits_processor": LogitsProcessorList([self.first, theirs.TopKLogitsWarper(4), self.second])}
        criterion = self.criterion
        return found | (
            {"stopping_criteria": StoppingCriteriaList([criterion])} if "criterion" in self.changed_by else {}
        )


@pytest.mark.parametrize("name", ["lookup", "the target"])
@pytest.mark.parametrize("changed_by", [("first",), ("second",), ("first", "second"), ("criterion",),
                                        ("first", "criterion")])  # fmt: skip
def test_what_one_processor_or_criterion_changes_another_one_finds_changed(changed_by, name):
    target, prompts = tiny_llama(1), torch.cat([IDS, IDS + 1, IDS + 2])
    decoder = SpeculativeDecoder(target, DRAFTS[name](target), tree_size=6)
    expected = []
    for each in prompts:
        text = target.generate(each[None], **USUAL, **Pair(*changed_by).options())
        expected.append(text[0])
        own = {"temperature": 0.0, "eos_token_id": None, **Pair(*changed_by).options()}
        assert torch.equal(decoder.generate(each[None], NEW, **own).sequences, text)
    if "criterion" not in changed_by:
        out = decoder.generate(prompts, NEW, temperature=0.0, eos_token_id=None, **Pair(*changed_by).options())
        assert torch.equal(out.sequences, torch.stack(expected)), "each sequence has a state of its own"
        shared = Pair(*changed_by)
        first, second = shared.first, shared.second
        lists = [[second], [], [first, second]]
        out = decoder.generate(prompts, NEW, temperature=0.0, eos_token_id=None, logits_processor=lists)
        for row, own in enumerate(([Pair.second], [], [Pair.first, Pair.second])):
            pair = Pair(*changed_by)
            alone = [partial(each, pair) for each in own]
            text = target.generate(prompts[row : row + 1], **USUAL, logits_processor=LogitsProcessorList(alone))
            assert torch.equal(out.sequences[row], text[0])


def test_a_processor_and_a_criterion_that_share_nothing_keep_their_trees(demo_pair):
    target, tokenizer = tiny_llama(1), demo_pair.tokenizer
    decoder = SpeculativeDecoder(target, target, "chain", tree_size=5)

    class Long:
        def __init__(self):
            self.tokenizer, self.calls = tokenizer, 0

        def __call__(self, input_ids, scores, **kwargs):
            self.calls += self.tokenizer is None
            return torch.full((len(input_ids),), self.calls > 0)

    def processor(input_ids, scores):
        return scores + (tokenizer is None)

    own = {"logits_processor": [processor], "stopping_criteria": [Long()]}
    assert decoder.generate(IDS, NEW, temperature=0.0, eos_token_id=None, **own).stats.steps < NEW / 2


class StopsAt(StoppingCriteria):
    """Ends a text at one of its calls, however long that is."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.calls -= 1
        return torch.full((len(input_ids),), self.calls <= 0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("calls", [3, 8, 12])
def test_criteria_that_count_their_calls_end_each_text_where_transformers_does(calls, batch):
    target, ids = tiny_llama(1), IDS.expand(batch, -1)
    usual = USUAL | {"attention_mask": torch.ones_like(ids)}
    expected = target.generate(ids, **usual, stopping_criteria=StoppingCriteriaList([StopsAt(calls)]))
    for draft in (PromptLookup(), target):
        own = [StopsAt(calls)]
        out = SpeculativeDecoder(target, draft).generate(
            ids, NEW, temperature=0.0, eos_token_id=None, pad_token_id=0, stopping_criteria=own
        )
        assert torch.equal(out.sequences, expected)
