"""Lookahead decoding: windows and pools against plain lists, and texts that are drafted from them."""

from itertools import pairwise

import pytest
import torch
from drafted_cases import nodes_of
from families import tiny
from rope_cases import DYNAMIC, LIMIT, LONGROPE
from tiny_models import tiny_llama, transformers_greedy

from heavypath.speculative import Lookahead, SpeculativeDecoder, TokenTree, calibrate, load_draft
from heavypath.speculative.decoding.run import StepRunner
from heavypath.speculative.drafts.kinds import describe, draft_parameter_count
from heavypath.speculative.drafts.lookahead import LookaheadDraft

PROMPTS = torch.tensor([[3, 17, 4, 17, 4, 9], [0, 0, 0, 0, 5, 8], [0, 0, 0, 0, 0, 11]])
PADDING = torch.tensor([[1] * 6, [0] * 4 + [1] * 2, [0] * 5 + [1]])


class OfLists:
    """Lookahead decoding of one text in plain lists, each token by a forward pass of its own.

    levels[l] are the guesses of level l from left to right, those of level 0 without the root; None if there is none.
    """

    def __init__(self, model, text, options):
        self.model, self.text, self.options = model, text, options
        columns = options.window
        self.levels = [[None] * (columns - 1)] + [[None] * columns for _ in range(options.ngram - 2)]
        self.pool = []

    def guess(self, place):
        """Where a guess is missing for a place of the text, the text's token a whole window before is taken."""
        back = self.options.window + self.options.ngram - 2
        return self.text[max(0, place - back)]

    def fill(self):
        root = len(self.text) - 1
        for level, tokens in enumerate(self.levels):
            first = root + 1 if level == 0 else root + level  # level 0 begins behind the root
            self.levels[level] = [self.guess(first + i) if token is None else token for i, token in enumerate(tokens)]

    @torch.inference_mode()
    def step(self, accepted, new_tokens):
        """The target's pass, n-grams into the pool, and on by the accepted tokens and the one behind them."""
        self.fill()
        newest = []
        for column in range(self.options.window):
            chain = [level[column] for level in self.levels[1:]]
            path = [*self.text, *self.levels[0][:column], *chain]
            newest.append(int(self.model(torch.tensor([path])).logits[0, -1].argmax()))
        columns = [*zip([self.text[-1], *self.levels[0]], *self.levels[1:], newest, strict=True)]
        self.pool = [*self.pool, *columns[::-1]][-self.options.pool :]
        later = [*self.levels[1:], newest]
        self.levels = [later[0][1 + accepted :], *(level[accepted:] for level in later[1:])]
        widths = [self.options.window - 1] + [self.options.window] * (len(self.levels) - 1)
        for level, width in zip(self.levels, widths, strict=True):
            level += [None] * (width - len(level))
        self.text = [*self.text, *new_tokens]

    def law(self, path):
        """What may follow the text and a path below it: the latest of the longest matches gets half, and so on."""
        longest, context = self.options.ngram - 1, [*self.text, *path]
        places = [(ngram[:place], ngram[place]) for ngram in self.pool for place in range(1, self.options.ngram)]
        places += [(self.text[:place], self.text[place]) for place in range(1, len(self.text))]

        def match(before):
            length = 0
            while length < min(longest, len(before), len(context)) and before[-1 - length] == context[-1 - length]:
                length += 1
            return length

        lengths = [match(before) for before, _ in places]
        best = [token for length, (_, token) in zip(lengths, places, strict=True) if length == max(lengths) > 0]
        law = [0.0] * self.model.config.vocab_size
        for rank, token in enumerate(reversed(best)):
            law[token] += 2.0 ** -(rank + 1)
        return law


@pytest.mark.parametrize(("options", "method", "shape", "temperature"), [
    (Lookahead(4, 3, 9), "chain", {"tree_size": 4}, 0.0),
    (Lookahead(3, 4, 100), "sequoia", {"tree": TokenTree.from_branching([2, 2, 1])}, 0.7),
    (Lookahead(2, 5, 5), "dyspec", {"tree_size": 6}, 0.4),
    (Lookahead(1, 3, 2), "ersd", {"tree_size": 4}, 0.9),
], ids=lambda case: str(case) if isinstance(case, Lookahead) else "")  # fmt: skip
def test_windows_and_pools_are_those_of_lists(options, method, shape, temperature, monkeypatch):
    """Step by step over whole texts, of 6, 2 and 1 tokens; some end sooner, and then others take their slots."""
    target = tiny_llama(2, 20, initializer_range=0.3)
    oracles = [OfLists(target, row[mask > 0].tolist(), options) for row, mask in zip(PROMPTS, PADDING, strict=True)]
    run, moves, steps = StepRunner.run, set(), []

    def looked_at(self, plan, workspace, *, slots, levels, **others):
        before = workspace.state.numbers[:, :slots].clone()
        stepped = run(self, plan, workspace, slots=slots, levels=levels, **others)
        state = workspace.state
        for slot, member in enumerate(state.member[:slots].tolist()):
            oracle = oracles[member]
            length, first, left = before[2:5, slot].tolist()
            if left <= 0 or levels == 0:
                continue
            assert len(oracle.text) == length + 1
            for node in nodes_of(oracle.text, stepped.drafted, slot, left):
                assert node.logits.exp().tolist() == pytest.approx(oracle.law(node.path), abs=1e-6)
            accepted = int(stepped.verified.length[slot])
            oracle.step(accepted, state.output[member, first : state.produced[slot]].tolist())
            moves.add(accepted)
            window, pool = workspace.draft_cache.window[slot], workspace.draft_cache.pool[slot]
            kept = [[token if token >= 0 else None for token in level] for level in window.T.tolist()]
            assert [kept[0][1:], *kept[1:]] == oracle.levels
            assert [tuple(ngram) for ngram in pool.tolist() if ngram[0] >= 0] == oracle.pool
        steps.append(slots)
        return stepped

    monkeypatch.setattr(StepRunner, "run", looked_at)
    decoder = SpeculativeDecoder(target, options, method, **shape)
    decoder.generate(
        PROMPTS, 24, attention_mask=PADDING, temperature=temperature, seed=5, eos_token_id=[6, 12], pad_token_id=0,
    )  # fmt: skip
    assert len(steps) > 3
    assert len(moves) > 1 or options.window == 1
    assert any(one > other for one, other in pairwise(steps)), "no slot was taken over"


def test_a_text_begins_without_what_was_guessed_in_another():
    cache = LookaheadDraft(Lookahead(2, 3, 4), 10, torch.device("cpu")).new_cache(3, 20)
    new = cache.window.clone(), cache.pool.clone()
    for guessed in (cache.window, cache.pool):
        guessed.fill_(7)
    cache.first(2).begin(torch.tensor([3, 5]))
    assert all(torch.equal(kept[:2], was[:2]) for kept, was in zip((cache.window, cache.pool), new, strict=True))


@pytest.mark.parametrize(("kind", "ropes", "length", "new"), [
    ("gemma2", {}, 30, 24), ("gpt_oss", {}, 30, 24),  # windows of 32 tokens hold for guesses, too
    ("gpt2", {}, 52, 12),  # guesses lie after the last position, 63
    ("gpt2", {}, 1, 1), ("gpt2", {}, 1, 2),  # a text of one token may get one more
    ("llama", LONGROPE, 6, LIMIT - 6), ("phi3", LONGROPE, 6, LIMIT - 6), ("llama", DYNAMIC, 6, 26),  # no longer a text
])  # fmt: skip
def test_guesses_after_the_text_do_not_change_it(kind, ropes, length, new):
    target = tiny(kind, **ropes)
    prompt = torch.randint(1, 60, (1, length), generator=torch.Generator().manual_seed(1))
    out = SpeculativeDecoder(target, Lookahead(9, 4), "sequoia", tree_size=6).generate(prompt, new, eos_token_id=None)
    assert torch.equal(out.sequences, transformers_greedy(target, prompt, new))


def test_it_is_known_by_its_name_and_its_settings_and_has_no_acceptance_token_by_token():
    target = tiny_llama(1)
    assert load_draft("lookahead", target) == Lookahead()
    assert describe(Lookahead(5, 4, 9)) == "Lookahead(window=5, ngram=4, pool=9)"
    assert draft_parameter_count(Lookahead(), target) == 0
    with pytest.raises(ValueError, match="the n-grams of a lookahead come of a decoder's steps; give the decoder a tr"):
        calibrate(target, Lookahead(2))
    for wrong in ((0, 4, 3), (5, 2, 3), (5, 4, 0)):
        message = "window >= 1, ngram >= 3 and pool >= 1, got {}, {} and {}".format(*wrong)
        with pytest.raises(ValueError, match=message):
            Lookahead(*wrong)
