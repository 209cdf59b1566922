"""A draft of one's own: the text is the target's whatever it proposes, and what it lacks or returns is checked."""

import pytest
import torch
from drafted_cases import drafted_nodes
from own_drafts import Bigrams
from tiny_models import tiny_llama, transformers_greedy
from torch import nn

from heavypath.speculative import (
    Draft,
    Profile,
    RowCache,
    SpeculativeDecoder,
    TokenTree,
    calibrate,
    goodness_of_fit,
    joint_law,
    read_trace,
)

VOCAB = 7
PROMPT = torch.tensor([3, 1, 4])


class Trigrams(Bigrams):
    """Logits [V, V, V] by the last two tokens, of which the cache keeps the tokens, and the draft its own output."""

    def new_cache(self, batch, rows):
        return RowCache(*torch.zeros(2, batch, 1, rows, 1, dtype=torch.long))

    def prefill(self, tokens, cache):
        cache.keys[:, 0, : tokens.shape[1], 0] = tokens

    def __call__(self, feed, cache):
        cache.keys[:, 0, :, 0].scatter_(1, feed.cache_rows, feed.tokens)
        before = cache.keys[:, 0, :, 0].gather(1, feed.parent_rows.clamp(min=0)).where(feed.parent_rows >= 0, 0)
        return self.logits[before, feed.tokens]


class Moody(Bigrams):
    """Another law in each row of its cache and each call, written into one memory, with none of the likely tokens."""

    def __init__(self, target):
        super().__init__(torch.zeros(VOCAB, VOCAB))
        self.likely = target.lm_head.weight.sum(1).argsort()[-2:]
        self.generator, self.memory = torch.Generator().manual_seed(1), torch.empty(0)

    def __call__(self, feed, cache):
        shape = (*feed.tokens.shape, VOCAB)
        if self.memory.shape != shape:
            self.memory = torch.empty(shape)
        torch.randn(shape, generator=self.generator, out=self.memory).mul_(2)
        self.memory[..., self.likely] = -torch.inf
        self.memory[feed.cache_rows % 3 == 0] = -torch.inf  # nothing at all
        return self.memory


def random_table(*shape):
    return 1.5 * torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(5))


def is_lossless(decoder, sequences):
    """By the joint law of three tokens."""
    out = decoder.generate(PROMPT.expand(sequences, -1), max_new_tokens=3, temperature=0.9, seed=4)
    law = joint_law(decoder.target, PROMPT, 3, temperature=0.9)
    return goodness_of_fit(out.sequences[:, 3:], law).is_lossless()


class Scribbler(Trigrams):
    """Writes to every tensor that it is given."""

    def __call__(self, feed, cache):
        logits = super().__call__(feed, cache)
        for tensor in (feed.tokens, feed.positions, feed.cache_rows, feed.parent_rows, feed.prefix_lengths):
            tensor.zero_()
        feed.ancestor_mask.fill_(True)
        return logits


@pytest.mark.parametrize("tree", [TokenTree.chain(3), TokenTree.from_branching([2, 2])])
def test_a_draft_may_write_to_what_it_is_given(tree):
    target, table = tiny_llama(1, vocab_size=VOCAB), random_table(VOCAB, VOCAB)
    texts = [
        SpeculativeDecoder(target, kind(table), tree=tree)
        .generate(PROMPT[None].expand(2, -1), 9, 0.8, seed=3)
        .sequences
        for kind in (Trigrams, Scribbler)
    ]
    assert torch.equal(*texts)


class Counting(Bigrams):
    """Computes with operations that a recording replays, and counts its calls in Python, which it does not."""

    def __init__(self, logits):
        super().__init__(logits)
        self.calls = 0

    def __call__(self, feed, cache):
        self.calls += 1
        return self.logits.index_select(0, feed.tokens.flatten()).view(*feed.tokens.shape, VOCAB)


def test_a_draft_is_called_in_each_step():
    draft = Counting(random_table(VOCAB))
    out = SpeculativeDecoder(tiny_llama(1), draft, "chain", tree=TokenTree.chain(1)).generate(PROMPT[None], 30)
    assert draft.calls >= out.stats.steps - 1 > 10, "a text's last token has no draft"


@pytest.mark.parametrize("method", ["sequoia", "dyspec", "specinfer"])
def test_the_joint_law_and_the_greedy_text_are_the_targets_with_an_adversarial_draft(method):
    target = tiny_llama(1)
    decoder = SpeculativeDecoder(target, Moody(target), method, tree_size=7)
    assert is_lossless(decoder, 4_000)
    assert torch.equal(decoder.generate(PROMPT[None], 20).sequences, transformers_greedy(target, PROMPT[None], 20))


@pytest.mark.parametrize("method", ["specinfer", "spectr"])
def test_nodes_of_one_text_draft_from_one_law_whatever_the_draft_returns(method):
    """Of two sequences that begin with equal tokens, the second tokens are compared with one distribution."""
    target = tiny_llama(1)
    with torch.no_grad():
        first = int(target(PROMPT[None]).logits[0, -1].argmax())
        one, another = target(torch.tensor([[*PROMPT, first]])).logits[0, -1].topk(2).indices.tolist()

    class BySlot(Bigrams):
        """The root's children are likely equal; the nodes below them, in slots 1, 3 and 5, have different laws."""

        def __call__(self, feed, cache):
            return self.logits[(feed.cache_rows - feed.prefix_lengths[:, None]).clamp(min=0)]

    laws = torch.full((7, VOCAB), -1.0)
    laws[0, first] = 6.0
    laws[1::4, one] = laws[3, another] = 3.0
    assert is_lossless(SpeculativeDecoder(target, BySlot(laws), method, tree=TokenTree.independent(3, 2)), 12_000)


def test_rows_of_accepted_nodes_follow_the_text_in_the_drafts_own_cache():
    """Trigrams remember the token before the last one."""
    table = random_table(VOCAB, VOCAB)
    out, nodes = drafted_nodes(SpeculativeDecoder(tiny_llama(1), Trigrams(table), "sequoia", tree_size=7), 30)
    for node in nodes:
        before, last = [*node.text.tolist(), *node.path][-2:]
        assert torch.equal(node.logits, table[before, last])
    assert out.stats.tokens_per_step > 1.05, "nothing is shown of rows behind accepted nodes"


class CachingModule(nn.Module):
    new_cache, prefill, forward = Bigrams.new_cache, Bigrams.prefill, Bigrams.__call__


class StatelessModule(nn.Module, Draft):
    forward = Bigrams.__call__


@pytest.mark.parametrize(("kind", "method"), [(CachingModule, "dyspec"), (StatelessModule, "sequoia")])
def test_a_module_may_be_a_draft_and_without_state_if_it_inherits_draft(kind, method):
    draft = kind()
    draft.logits = nn.Parameter(random_table(VOCAB))
    decoder = SpeculativeDecoder(tiny_llama(1), draft, method)
    expected = transformers_greedy(decoder.target, PROMPT[None], 20)
    assert torch.equal(decoder.generate(PROMPT[None], 20).sequences, expected)


def test_a_draft_without_state_needs_no_cache_and_writes_the_same_text():
    """In a batch whose sequences end at different times, so that rows and whole sequences are moved."""
    target, table = tiny_llama(1), random_table(VOCAB)
    prompts = torch.tensor([[3, 1, 4], [1, 5, 2], [6, 5, 3]])
    options = {"max_new_tokens": 24, "temperature": 0.9, "eos_token_id": 2, "pad_token_id": 0}
    found = [
        SpeculativeDecoder(target, draft, tree_size=7).generate(prompts, **options)
        for draft in (Bigrams(table), without("new_cache", "prefill")(table))
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert found[0].stats.tokens_per_step == found[1].stats.tokens_per_step > 1


def without(*names, **added):
    members = {name: vars(Bigrams)[name] for name in ("__init__", "new_cache", "prefill", "__call__")}
    return type("Mine", (), {name: value for name, value in members.items() if name not in names} | added)


@pytest.mark.parametrize(("make", "message"), [
    (without("prefill"), r"got 'Mine', which lacks prefill\(tokens, cache\); a Draft has __call__\(feed, cache\), and "
                         r"new_cache\(batch, rows\) and prefill\(tokens, cache\) if it remembers sequences"),
    (without("new_cache"), r"lacks new_cache\(batch, rows\);"),
    (without("new_cache", "prefill", newcache=Bigrams.new_cache),
     r"lacks new_cache\(batch, rows\) \(it has newcache\) and prefill\(tokens, cache\);"),
    (without("new_cache", "prefill", "__call__"), r"got 'Mine', which lacks __call__\(feed, cache\);"),
    (lambda logits: type("Mine", (Draft,), {"new_cache": Bigrams.new_cache})(),
     r"which lacks prefill\(tokens, cache\) and __call__\(feed, cache\);"),
    (without("prefill", pre_fill=Bigrams.prefill), r"lacks prefill\(tokens, cache\) \(it has pre_fill\)"),
    (without(prefill=lambda self, tokens: None), r"must be callable as prefill\(tokens, cache\): too many"),
    (lambda logits: "prompt-lookup", r"draft must be an object, got the name 'prompt-lookup'; .*load_draft"),
    (lambda logits: Bigrams, r"draft must be an object, got the class Bigrams; give Bigrams\(...\)"),
    (lambda logits: 5, "must be a causal language model of transformers, .* got 'int', which lacks __call__"),
    (lambda logits: nn.Linear(2, 2), "draft must be a transformers causal language model, got 'Linear'; a module that "
                                     "drafts without a cache inherits heavypath.Draft, too"),
])  # fmt: skip
def test_what_a_draft_lacks_is_named_when_a_decoder_is_made(make, message):
    with pytest.raises(TypeError, match=message):
        SpeculativeDecoder(tiny_llama(1), make(random_table(VOCAB)))


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"__call__": lambda self, feed, cache: self.logits[feed.tokens][..., :5]}, ValueError,
     r"Mine must return logits after each node of feed.tokens \[1, 2\] for each of the target's 7 tokens: "
     r"torch.float32 \[1, 2, 7\] on cpu, got torch.float32 \[1, 2, 5\]"),
    ({"__call__": lambda self, feed, cache: self.logits[feed.tokens][:, -1:]}, ValueError, r"got .* \[1, 1, 7\]"),
    ({"__call__": lambda self, feed, cache: self.logits[feed.tokens].double()}, ValueError, "got torch.float64"),
    ({"__call__": lambda self, feed, cache: None}, TypeError, "Mine must return logits, a tensor, got NoneType"),
    ({"__call__": lambda self, feed, cache: self.logits[feed.tokens] * torch.nan}, ValueError, "draft's logits after"),
    ({"new_cache": lambda self, batch, rows: {}}, TypeError, "Mine.new_cache must return a RowCache, got dict"),
    ({"new_cache": lambda self, batch, rows: RowCache(*torch.zeros(2, batch, 1, rows - 1, 1))}, ValueError,
     r"Mine.new_cache\(1, (\d+)\) must return keys and values of one shape \[1, heads, \1, D\]"),
])  # fmt: skip
def test_what_a_draft_returns_is_checked_when_it_is_asked(change, error, message):
    decoder = SpeculativeDecoder(tiny_llama(1), without(**change)(random_table(VOCAB)))
    with pytest.raises(error, match=message):
        decoder.generate(PROMPT[None], 8, temperature=1.0)


@pytest.mark.usefixtures("any_noise")
def test_a_trace_and_a_profile_know_a_draft_by_its_class(tmp_path):
    target, draft = tiny_llama(1), Bigrams(random_table(VOCAB))
    profile = calibrate(
        target, draft, temperatures=[1.0], sizes=(1, 2), batch_sizes=[1], tokens=4, sequences=2, limit=60
    )
    assert (profile.draft, profile.draft_parameters) == ("own draft Bigrams", 0)
    profile.save(tmp_path / "profile.json")
    decoder = SpeculativeDecoder(target, draft, profile=Profile.load(tmp_path / "profile.json"))
    decoder.generate(PROMPT[None], 6, temperature=1.0, trace=tmp_path / "trace")
    assert read_trace(tmp_path / "trace")[0]["draft"] == {"name": "Bigrams"}
    with pytest.raises(ValueError, match="measured with a draft of own draft Bigrams, got own draft Trigrams"):
        SpeculativeDecoder(target, Trigrams(random_table(VOCAB, VOCAB)), profile=profile)
