"""Lookahead decoding: windows and pools against plain lists, and texts that are drafted from them."""

from itertools import pairwise

import pytest
import torch
from families import tiny
from rope_cases import DYNAMIC, LIMIT, LONGROPE
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import exact_law, tiny_llama, transformers_greedy

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    Lookahead,
    PromptLookup,
    SpeculativeDecoder,
    TokenTree,
    calibrate,
    load_draft,
)
from heavypath.speculative.decoding.runner import StepRunner
from heavypath.speculative.drafts import LookaheadDraft
from heavypath.speculative.profile import describe, draft_parameter_count

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


def check_law(oracle, drafted, slot):
    """Of all nodes of a static tree that have children, and are there."""
    parents = drafted.parents.tolist()
    for node in {*parents} - {-1}:
        path, at = [], node
        while at > 0:
            path.insert(0, int(drafted.tokens[slot, at]))
            at = parents[at]
        if all(token >= 0 for token in path):
            assert drafted.logits[slot, node].exp().tolist() == pytest.approx(oracle.law(path), abs=1e-6)


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
            first, last = int(before[3, slot]), int(state.produced[slot])
            if int(before[4, slot]) <= 0 or levels == 0:
                continue
            assert len(oracle.text) == int(before[2, slot]) + 1
            if stepped.drafted.parents.dim() == 1:
                check_law(oracle, stepped.drafted, slot)
            accepted = int(stepped.verified.length[slot])
            oracle.step(accepted, state.output[member, first:last].tolist())
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


def test_a_window_by_hand():
    """W = 3 columns of N - 1 = 2 levels: the root 1 has the chain 2, 3 and below each of the three one more guess."""
    draft = LookaheadDraft(Lookahead(3, 3, 4), 10, torch.device("cpu"))
    cache = draft.new_cache(1, 20)
    cache.window[0] = torch.tensor([[0, 4], [2, 5], [3, 6]])
    extra = draft.extra_nodes(cache, torch.tensor([1]), torch.tensor([7]))
    #                                           1 - 4,  1 - 2 - 5,  1 - 2 - 3 - 6
    assert extra.tokens.tolist() == [[4, 2, 5, 3, 6]]
    assert extra.depths.tolist() == [1, 1, 2, 2, 3]
    assert extra.subtree_end.tolist() == [1, 5, 3, 5, 5]
    after = torch.zeros(1, 5, 10)
    after[0, [0, 2, 4], [7, 8, 9]] = 1.0
    extra.read(after, torch.tensor([1]))  # 4 was accepted, say, and the token after it is the new root
    assert cache.pool.tolist() == [[[-1, -1, -1], [3, 6, 9], [2, 5, 8], [1, 4, 7]]]
    #   columns:        1 4 7       2 5 8       3 6 9       the first one leaves, and each one's first token
    assert cache.window.tolist() == [[[5, 8], [6, 9], [-1, -1]]]


def test_a_window_is_left_behind_where_more_is_accepted_than_it_has_columns():
    draft = LookaheadDraft(Lookahead(2, 3, 4), 10, torch.device("cpu"))
    cache = draft.new_cache(3, 20)
    cache.window.copy_(torch.tensor([[0, 4], [2, 5]]))
    extra = draft.extra_nodes(cache, torch.tensor([1, 1, 1]), torch.tensor([7, 7, 7]))
    extra.read(torch.zeros(3, 3, 10), torch.tensor([2, 1, 9]))
    assert cache.window.tolist() == [[[-1, -1], [-1, -1]], [[5, 0], [-1, -1]], [[-1, -1], [-1, -1]]]


def test_a_cache_forgets_former_texts():
    cache = LookaheadDraft(Lookahead(2, 3, 4), 10, torch.device("cpu")).new_cache(3, 20)
    new = cache.window.clone(), cache.pool.clone()
    cache.window.fill_(7)
    cache.pool.fill_(7)
    cache.first(2).begin(torch.tensor([3, 5]))
    assert all(torch.equal(kept[:2], was[:2]) for kept, was in zip((cache.window, cache.pool), new, strict=True))


def test_greedy_text_takes_fewer_steps_than_with_prompt_lookup():
    target = tiny_llama(1, 50, initializer_range=0.2)
    prompts = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))
    expected = transformers_greedy(target, prompts, 40)
    steps = []
    for draft in (Lookahead(6, 4, 200), PromptLookup()):
        out = SpeculativeDecoder(target, draft, "sequoia", tree_size=6).generate(prompts, 40)
        assert torch.equal(out.sequences, expected)
        steps.append(int(out.stats.steps_of.sum()))
    assert steps[0] < 0.9 * steps[1]


def test_the_joint_law_of_tokens_drafted_from_the_n_grams_of_steps_before_is_the_targets():
    target, prompt = tiny_llama(1), torch.tensor([3, 1, 4, 3, 1])
    decoder = SpeculativeDecoder(target, Lookahead(2, 3, 8), "sequoia", tree_size=3)
    out = decoder.generate(prompt.expand(5_000, -1), max_new_tokens=4, temperature=0.9, seed=4)
    assert out.stats.acceptance_by_depth[0] > 0
    law = exact_law(target, prompt, Filters(0.9), 4).view(49, 49).sum(0)  # of the last two
    assert chi_square_p_value(joint_counts(out.sequences[:, 7:], 7), law) > SIGNIFICANCE


@pytest.mark.parametrize(("kind", "ropes", "length", "new"), [
    ("gemma2", {}, 30, 24), ("gpt_oss", {}, 30, 24),  # windows of 32 tokens hold for guesses, too
    ("gpt2", {}, 52, 12),  # guesses lie after the last position, 63
    ("llama", LONGROPE, 6, LIMIT - 6), ("phi3", LONGROPE, 6, LIMIT - 6), ("llama", DYNAMIC, 6, 26),  # no longer a text
])  # fmt: skip
def test_guesses_after_the_text_do_not_change_it(kind, ropes, length, new):
    target = tiny(kind, **ropes)
    prompt = torch.randint(1, 60, (1, length), generator=torch.Generator().manual_seed(1))
    out = SpeculativeDecoder(target, Lookahead(9, 4), "sequoia", tree_size=6).generate(prompt, new, eos_token_id=None)
    assert torch.equal(out.sequences, transformers_greedy(target, prompt, new))


def test_a_text_of_one_token_may_get_one_more():
    target, prompt = tiny_llama(1), torch.tensor([[5]])
    decoder = SpeculativeDecoder(target, Lookahead(), "sequoia", tree_size=4)
    for new in (1, 2, 9):
        assert torch.equal(decoder.generate(prompt, new).sequences, transformers_greedy(target, prompt, new))


def test_it_is_known_by_its_name_and_its_settings():
    target = tiny_llama(1)
    assert load_draft("lookahead", target) == Lookahead()
    assert describe(Lookahead(5, 4, 9)) == "Lookahead(window=5, ngram=4, pool=9)"
    assert draft_parameter_count(Lookahead(), target) == 0


def test_its_acceptance_is_not_counted_token_by_token():
    with pytest.raises(
        ValueError, match="the n-grams of a lookahead come of a decoder's steps; give the decoder a tree"
    ):
        calibrate(tiny_llama(1), Lookahead(2))


@pytest.mark.parametrize("wrong", [{"window": 0}, {"ngram": 2}, {"pool": 0}])
def test_other_sizes_are_refused(wrong):
    given = {"window": 5, "ngram": 4, "pool": 3} | wrong
    message = f"window >= 1, ngram >= 3 and pool >= 1, got {given['window']}, {given['ngram']} and {given['pool']}"
    with pytest.raises(ValueError, match=message):
        Lookahead(**given)
