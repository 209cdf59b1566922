"""Several drafts that draft sequences of their own: what they draft, the law of the text, and what takes no merge."""

import pytest
import torch
from drafted_cases import assert_drafts_as_said, assert_later_turns_agree, small_draft, steps_of
from head_cases import head_of
from medusa_checkpoints import heads_of
from own_drafts import Bigrams
from tiny_models import tiny_llama, transformers_greedy

from heavypath.kernels.commit import StateField
from heavypath.speculative import (
    METHODS,
    Cascade,
    Lookahead,
    Merge,
    Mixture,
    PromptLookup,
    SpeculativeDecoder,
    TokenTree,
    calibrate,
    goodness_of_fit,
    joint_law,
    read_trace,
)
from heavypath.speculative.drafts.kinds import describe, draft_parameter_count
from heavypath.speculative.loading import load_draft

TAKING = ("specinfer", "naive", "naive-distinct", "top-k")
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
# Four children, the first of them wide.
TREE = TokenTree([-1, 0, 1, 1, 3, 0, 5, 0, 7, 0], [0, 0, 0, 1, 0, 1, 0, 2, 0, 3])


@pytest.fixture(scope="module")
def small():
    return [small_draft(5), small_draft(6)]


@pytest.fixture(scope="module")
def three(target, small):
    """A head, a model and a cascade."""
    return Merge([head_of(target), small[0], Cascade([small[1], PromptLookup(2)], [1, 2])])


@pytest.mark.parametrize("count", [2, 3])
def test_each_node_is_drawn_from_what_its_own_draft_says_of_the_whole_text(count, target, small, three):
    """In ragged batches, over steps that accept nodes of one draft, which the others must know in the next step."""
    merge = three if count == 3 else Merge([small[0], PromptLookup(2)])
    decoder = SpeculativeDecoder(target, merge, "specinfer", tree=TREE)
    nodes = assert_drafts_as_said(decoder, merge, 20)
    assert {node.first % count for node in nodes} == {*range(count)}


def test_greedy_children_are_the_likeliest_tokens_of_one_draft_after_the_other(target, small):
    _, steps = steps_of(SpeculativeDecoder(target, Merge(small), "specinfer", tree=TREE), PROMPT, max_new_tokens=6)
    drafted = steps[0][1]
    first = [int(drafted.tokens[0, node]) for node in range(len(TREE)) if drafted.parents[node] == 0]
    order = [int(drafted.ranks[node]) for node in range(len(TREE)) if drafted.parents[node] == 0]
    likeliest = [model(PROMPT).logits[0, -1].topk(2).indices.tolist() for model in small]
    assert dict(zip(order, first, strict=True)) == {
        0: likeliest[0][0], 1: likeliest[1][0], 2: likeliest[0][1], 3: likeliest[1][1],
    }  # fmt: skip


LIKELY = [9.0, 5, 2, 2, 1, 1, 1], [1.0, 1, 2, 9, 9, 2, 1], [1.0, 9, 2, 9, 1, 1, 1]


@pytest.mark.parametrize(("children", "laws"), [(3, (0, 1)), (2, (2, 2))])
def test_the_law_of_two_tokens_below_children_of_two_drafts_is_exact(children, laws):
    """Drafts of another law each, and of the same law, but with noise of their own."""
    target, prompt = tiny_llama(1), torch.tensor([3, 1, 4, 3, 1])
    merge = Merge([Bigrams(torch.tensor(LIKELY[law]).log().expand(7, 7)) for law in laws])
    decoder = SpeculativeDecoder(target, merge, "specinfer", tree=TokenTree.k_ary(children, 1))
    out = decoder.generate(prompt.expand(10_000, -1), max_new_tokens=2, temperature=0.9, seed=4)
    assert goodness_of_fit(out.sequences[:, 5:], joint_law(target, prompt, 2, temperature=0.9)).is_lossless()


def test_a_later_turn_drafts_the_same_with_and_without_what_is_cached(target, three):
    assert_later_turns_agree(SpeculativeDecoder(target, three, "specinfer", tree=TREE))


def test_lookahead_and_medusa_heads_take_part(target, small, tmp_path):
    """The heads draft one level, and nothing below it."""
    expected = transformers_greedy(target, PROMPT, 30)
    for other in (Lookahead(window=3, ngram=3, pool=8), heads_of(target, tmp_path, heads=1)[0]):
        decoder = SpeculativeDecoder(target, Merge([small[0], other]), "specinfer", tree=TREE)
        assert torch.equal(decoder.generate(PROMPT, 30).sequences, expected)
        assert decoder.generate(PROMPT, 30, temperature=1.0).stats.new_tokens == 30


@pytest.mark.parametrize(("method", "temperature"), [("specinfer", 0.0), ("specinfer", 0.9), ("naive", 0.9)])
@pytest.mark.few(2)
def test_a_trace_weighs_each_node_against_the_law_of_its_own_draft(method, temperature, target, small, tmp_path):
    decoder = SpeculativeDecoder(target, Merge(small), method, tree=TREE)
    path, options = tmp_path / "trace.jsonl", {"max_new_tokens": 40, "temperature": temperature, "seed": 2}
    _, noted = steps_of(decoder, PROMPT.expand(3, -1), trace=path, **options)
    header, steps = read_trace(path)
    assert header["draft"]["name"] == "model and model"
    fates, own = set(), 0
    for line in steps:
        before, drafted = noted[line["step"]]
        slot = before[StateField.MEMBER].tolist().index(line["sequence"])
        of_nodes = zip(line["fates"], line["coins"], line["thresholds"], line["draft"], line["tokens"], strict=True)
        for node, (fate, coin, threshold, prob, token) in enumerate(of_nodes):
            fates.add(fate)
            if coin is not None:
                assert (coin < threshold) == (node in line["chosen"]), (fate, coin, threshold)
            if prob is not None:
                law = (drafted.logits[slot, drafted.laws[node]] / (temperature or 1.0)).softmax(-1)
                assert prob == pytest.approx(float(law[token]), rel=1e-3)
                own += int(drafted.laws[node]) >= len(TREE)
    assert own > 10
    assert ({"rejected", "elder"} if (method, temperature) == ("specinfer", 0.9) else {"other"}) <= fates


def test_a_merge_in_words_and_numbers_and_by_its_name_on_the_command_line(target, small):
    merge = Merge([small[0], PromptLookup(2)])
    assert describe(merge).startswith("Merge of llama, 1 layers")
    assert draft_parameter_count(merge, target) == small[0].num_parameters()
    named = load_draft("merge:prompt-lookup+early-exit:1", target)
    assert isinstance(named, Merge)
    assert named.drafts[0] == PromptLookup()
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
    merge = Merge(small)
    for outer in (Mixture([small[0], merge]), Merge([merge, small[0]]), Cascade([merge, small[0]], [1, 1])):
        with pytest.raises(ValueError, match="a Merge has paths of its own, and is no part of a "):
            SpeculativeDecoder(target, outer, "specinfer")
    with pytest.raises(ValueError, match="a verifier of your own is told one distribution after each node"):
        SpeculativeDecoder(target, merge, "specinfer", verifier=lambda *given, **options: None)
    message = r"a Merge of 3 drafts needs a tree whose root has a child .* got 2; give .*width=3"
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(target, Merge([*small, PromptLookup()]), "specinfer", width=2)
    with pytest.raises(ValueError, match="verifier 'held' weighs all children of a node by one distribution"):
        SpeculativeDecoder(target, merge, "specinfer", verifier="held")
    with pytest.raises(ValueError, match="needs draft_temperature > 0 where it samples, got 0"):
        SpeculativeDecoder(target, merge, "specinfer", draft_temperature=0).generate(PROMPT, 4, temperature=1.0)
    with pytest.raises(ValueError, match="of a Merge each of the root's first 2 children has an acceptance of its own"):
        calibrate(target, merge)
    assert SpeculativeDecoder(target, merge, "autoregressive").generate(PROMPT, 4).stats.tokens_per_step == 1
