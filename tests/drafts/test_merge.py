"""Several drafts that draft sequences of their own: what they draft, the law of the text, and what takes no merge."""

import pytest
import torch
from composite_cases import law_of, logits_of
from draft_checks import assert_a_batch_is_each_alone
from head_cases import head_of, steps_of
from medusa_cases import heads_of
from mutations import mutated
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts
from tiny_models import exact_law, tiny_llama

from heavypath.kernels.commit import StateField
from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    METHODS,
    Cascade,
    Lookahead,
    Merge,
    Mixture,
    PromptLookup,
    RowCache,
    SpeculativeDecoder,
    TokenTree,
    calibrate,
    read_trace,
)
from heavypath.speculative.decoding import device_tree, step
from heavypath.speculative.loading import load_draft
from heavypath.speculative.profile import describe, draft_parameter_count

TAKING = ("specinfer", "naive", "naive-distinct", "top-k")
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "layers": 1, "max_position_embeddings": 256}
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
TREE = TokenTree(
    [-1, 0, 1, 1, 3, 0, 5, 0, 7, 0], [0, 0, 0, 1, 0, 1, 0, 2, 0, 3]
)  # four children, the first of them wide


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, max_position_embeddings=256).double()


@pytest.fixture(scope="module")
def small():
    return [tiny_llama(seed, **SMALL).double() for seed in (5, 6)]


def merges(target, small):
    return {
        "two models": Merge(small),
        "a model and a lookup": Merge([small[0], PromptLookup(2)]),
        "a head, a model and a cascade": Merge(
            [head_of(target), small[0], Cascade([small[1], PromptLookup(2)], [1, 2])]
        ),
    }


NAMES = ["two models", "a model and a lookup", "a head, a model and a cascade"]


def part_of(draft, path_length):
    """Which of a cascade's drafts speaks after so many drafted tokens."""
    if not isinstance(draft, Cascade):
        return draft
    return draft.drafts[int(path_length >= draft.levels[0])]


@pytest.mark.parametrize("name", NAMES)
def test_each_node_is_drawn_from_what_its_own_draft_says_of_the_whole_text(name, target, small):
    """In ragged batches, over steps that accept nodes of one draft, which the others must know in the next step."""
    merge = merges(target, small)[name]
    prompts = [torch.tensor([3, 1, 4, 1, 5, 2]), torch.tensor([2, 6, 5])]
    padded = torch.stack([prompts[0], torch.cat([torch.zeros(3, dtype=torch.long), prompts[1]])])
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    decoder = SpeculativeDecoder(target, merge, "specinfer", tree=TREE)
    out, steps = steps_of(decoder, padded, attention_mask=mask, max_new_tokens=20, temperature=1.0)
    checked = set()
    for before, drafted in steps:
        if drafted.logits is None:
            continue
        parents, ranks, tokens = drafted.parents.tolist(), drafted.ranks.tolist(), drafted.tokens
        for slot in range(before.shape[1]):
            member, length = (int(before[field, slot]) for field in (StateField.MEMBER, StateField.LENGTHS))
            text = torch.cat([prompts[member], out.sequences[member, 6:]])[: length + 1]
            for node in range(1, len(parents)):
                path, at = [], parents[node]
                top = node
                while at > 0:
                    path.insert(0, int(tokens[slot, at]))
                    top, at = at, parents[at]
                if int(tokens[slot, node]) < 0 or -1 in path or len(path) >= before[StateField.LEFT, slot]:
                    continue
                which = ranks[top] % len(merge.drafts)
                said = law_of(logits_of(part_of(merge.drafts[which], len(path)), target, text, path))
                drew = law_of(drafted.logits[slot, drafted.laws[node]])
                torch.testing.assert_close(drew, said, atol=3e-4, rtol=1e-3)
                assert said[tokens[slot, node]] > 0
                checked.add((which, len(path)))
    assert {which for which, _ in checked} == {*range(len(merge.drafts))}
    assert out.stats.tokens_per_step > 1.05, "nothing is shown of rows behind accepted nodes"


def test_greedy_children_are_the_likeliest_tokens_of_one_draft_after_the_other(target, small):
    _, steps = steps_of(SpeculativeDecoder(target, Merge(small), "specinfer", tree=TREE), PROMPT, max_new_tokens=6)
    drafted = steps[0][1]
    first = [int(drafted.tokens[0, node]) for node in range(len(TREE)) if drafted.parents[node] == 0]
    order = [int(drafted.ranks[node]) for node in range(len(TREE)) if drafted.parents[node] == 0]
    likeliest = [model(PROMPT).logits[0, -1].topk(2).indices.tolist() for model in small]
    assert dict(zip(order, first, strict=True)) == {
        0: likeliest[0][0], 1: likeliest[1][0], 2: likeliest[0][1], 3: likeliest[1][1],
    }  # fmt: skip


def p_value(drafts, method="specinfer", tree=TREE, tokens=4, sequences=20_000):
    """Of the joint law of `tokens` tokens over consecutive steps."""
    target, prompt = tiny_llama(1), torch.tensor([3, 1, 4, 3, 1])
    decoder = SpeculativeDecoder(target, Merge(drafts(target)), method, tree=tree)
    out = decoder.generate(prompt.expand(sequences, -1), max_new_tokens=tokens, temperature=0.9, seed=4)
    law = exact_law(target, prompt, Filters(0.9), tokens)
    return chi_square_p_value(joint_counts(out.sequences[:, len(prompt) :], 7), law)


def models(target):
    return [tiny_llama(seed, layers=1) for seed in (2, 5)]


def head_and_lookup(target):
    return [head_of(target), PromptLookup(2)]


@pytest.mark.parametrize(("drafts", "method"), [
    (models, "specinfer"),
    *(pytest.param(drafts, method, marks=pytest.mark.slow)
      for drafts in (models, head_and_lookup) for method in TAKING if (drafts, method) != (models, "specinfer")),
])  # fmt: skip
def test_the_joint_law_of_four_tokens_is_exact(drafts, method):
    assert p_value(drafts, method) > SIGNIFICANCE


TWO = TokenTree([-1, 0, 0])  # two children, of a draft each
BUGS = {
    "both drafts draw with the root's noise": (
        "len(whole) + torch.arange(further)", "0 * torch.arange(further)",
    ),
    "every child is weighed against the first draft's law": (
        "size - 1 + draft)", "0 * draft)",
    ),
    "children are drawn in order of drafts, and verified in order of ranks": (
        "draw % drafts, draw // drafts", "draw // drafts, draw % drafts"
    ),
}  # fmt: skip


class Says:
    """A draft of one law, for the test of a single node."""

    def __init__(self, *weights):
        self.logits = torch.tensor(weights).log()

    def new_cache(self, batch, rows):
        nothing = self.logits.new_empty(batch, 1, rows, 0)
        return RowCache(nothing, nothing)

    def prefill(self, tokens, cache):
        pass

    def __call__(self, feed, cache):
        return self.logits.expand(*feed.tokens.shape, -1)


def two_laws(target):
    return [Says(9.0, 5, 2, 2, 1, 1, 1), Says(1.0, 1, 2, 9, 9, 2, 1)]


def one_law(target):
    return [Says(1.0, 9, 2, 9, 1, 1, 1)] * 2


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_the_drafting_is_found(name, monkeypatch):
    original, replacement = BUGS[name]
    tree, drafts = TokenTree([-1, 0, 0, 0]) if "order" in name else TWO, one_law if "noise" in name else two_laws
    assert p_value(drafts, tree=tree, tokens=2, sequences=10_000) > SIGNIFICANCE
    copy = mutated(device_tree, original, replacement)
    monkeypatch.setattr(step, "device_tree", copy.device_tree)
    assert p_value(drafts, tree=tree, tokens=2, sequences=10_000) < SIGNIFICANCE


@pytest.mark.parametrize("method", TAKING)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_targets_own(name, method, target, small):
    expected = SpeculativeDecoder(target, None, "autoregressive").generate(PROMPT, 40).sequences
    decoder = SpeculativeDecoder(target, merges(target, small)[name], method, tree=TREE)
    assert torch.equal(decoder.generate(PROMPT, 40).sequences, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_decoded_as_each_alone(name, target, small):
    assert_a_batch_is_each_alone(SpeculativeDecoder(target, merges(target, small)[name], "specinfer", tree=TREE))


def test_a_later_turn_drafts_the_same_with_and_without_what_is_cached(target, small):
    decoder = SpeculativeDecoder(target, merges(target, small)[NAMES[2]], "specinfer", tree=TREE)
    first = decoder.generate(PROMPT, max_new_tokens=30, temperature=1.0)
    cache = first.cache
    prompt = torch.cat([first.sequences[:, :20], torch.tensor([[1, 6, 2]])], 1)
    fresh, fresh_steps = steps_of(decoder, prompt, max_new_tokens=20, temperature=1.0)
    again, again_steps = steps_of(decoder, prompt, max_new_tokens=20, temperature=1.0, past=cache)
    assert again.stats.reused_tokens >= 8
    assert torch.equal(fresh.sequences, again.sequences)
    for (_, one), (_, other) in zip(fresh_steps, again_steps, strict=True):
        if one.logits is not None:
            torch.testing.assert_close(one.logits[:, 0], other.logits[:, 0])


def test_lookahead_and_medusa_heads_take_part(target, small, tmp_path):
    """The heads draft one level, and nothing below it."""
    expected = SpeculativeDecoder(target, None, "autoregressive").generate(PROMPT, 30).sequences
    for other in (Lookahead(window=3, ngram=3, pool=8), heads_of(target, tmp_path, heads=1)[0]):
        decoder = SpeculativeDecoder(target, Merge([small[0], other]), "specinfer", tree=TREE)
        assert torch.equal(decoder.generate(PROMPT, 30).sequences, expected)
        assert decoder.generate(PROMPT, 30, temperature=1.0).stats.new_tokens == 30


def test_transformers_generate_takes_a_merge(target, small):
    decoder = SpeculativeDecoder(target, Merge(small), "specinfer")
    out = target.generate(PROMPT, custom_generate=decoder, max_new_tokens=12, do_sample=True, temperature=0.8, seed=3)
    assert torch.equal(out, decoder.generate(PROMPT, 12, temperature=0.8, seed=3).sequences)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["specinfer", "naive"])
def test_a_trace_weighs_each_node_against_the_law_of_its_own_draft(method, temperature, target, small, tmp_path):
    decoder = SpeculativeDecoder(target, Merge(small), method, tree=TREE)
    path = tmp_path / "trace.jsonl"
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 2}
    _, noted = steps_of(decoder, PROMPT.expand(3, -1), trace=path, **options)
    header, steps = read_trace(path)
    assert header["draft"]["name"] == "model and model"
    fates, own = set(), 0
    filters = Filters(temperature or 1.0)
    for line in steps:
        before, drafted = noted[line["step"]]
        slot = before[StateField.MEMBER].tolist().index(line["sequence"])
        for node, (fate, coin, threshold) in enumerate(
            zip(line["fates"], line["coins"], line["thresholds"], strict=True)
        ):
            fates.add(fate)
            if coin is not None:
                assert (coin < threshold) == (node in line["chosen"]), (fate, coin, threshold)
            if line["draft"][node] is not None:
                logits = drafted.logits[slot, drafted.laws[node]] / filters.temperature
                assert line["draft"][node] == pytest.approx(float(logits.softmax(-1)[line["tokens"][node]]), rel=1e-3)
                own += int(drafted.laws[node]) >= len(TREE)
    assert own > 10
    assert ({"rejected", "elder"} if (method, temperature) == ("specinfer", 0.9) else {"other"}) <= fates


def test_what_a_merge_is_in_words_and_numbers(target, small):
    merge = Merge([small[0], PromptLookup(2)])
    assert describe(merge).startswith("Merge of llama, 1 layers")
    assert draft_parameter_count(merge, target) == small[0].num_parameters()


def test_names_on_the_command_line(target):
    assert load_draft("merge:prompt-lookup+early-exit:1", target).drafts[0] == PromptLookup()
    assert isinstance(load_draft("merge:prompt-lookup+early-exit:1", target), Merge)
    for wrong in ("merge:prompt-lookup", "merge:2*prompt-lookup+1*early-exit:1", "merge:prompt-lookup+"):
        with pytest.raises(ValueError, match=r"expected drafts as in merge:demo-head\+prompt-lookup, got"):
            load_draft(wrong, target)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in (*TAKING, "autoregressive")])
def test_methods_of_one_law_refuse_a_merge_by_name(method, target, small):
    message = f"{method!r} draws all children of a node from one distribution, and a Merge has 2 .* one of specinfer, "
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(target, Merge(small), method)


def test_what_takes_no_merge_says_so(target, small):
    with pytest.raises(ValueError, match="Merge needs a list of at least two drafts"):
        Merge([PromptLookup()])
    for outer in (
        Mixture([small[0], Merge(small)]),
        Merge([Merge(small), small[0]]),
        Cascade([Merge(small), small[0]], [1, 1]),
    ):
        with pytest.raises(ValueError, match="a Merge has paths of its own, and is no part of a "):
            SpeculativeDecoder(target, outer, "specinfer")
    with pytest.raises(ValueError, match="a verifier of your own is told one distribution after each node"):
        SpeculativeDecoder(target, Merge(small), "specinfer", verifier=lambda *given, **options: None)
    with pytest.raises(
        ValueError, match=r"a Merge of 3 drafts needs a tree whose root has a child .* got 2; give .*width=3"
    ):
        SpeculativeDecoder(target, Merge([*small, PromptLookup()]), "specinfer", width=2)
    with pytest.raises(ValueError, match="verifier 'held' weighs all children of a node by one distribution"):
        SpeculativeDecoder(target, Merge(small), "specinfer", verifier="held")
    with pytest.raises(ValueError, match="needs draft_temperature > 0 where it samples, got 0"):
        SpeculativeDecoder(target, Merge(small), "specinfer", draft_temperature=0).generate(PROMPT, 4, temperature=1.0)
    with pytest.raises(ValueError, match="of a Merge each of the root's first 2 children has an acceptance of its own"):
        calibrate(target, Merge(small))
    plain = SpeculativeDecoder(target, Merge(small), "autoregressive").generate(PROMPT, 4)
    assert plain.stats.tokens_per_step == 1
