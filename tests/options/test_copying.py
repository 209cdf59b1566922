"""A draft without weights gets a larger tree while it copies: fewer steps, and the same text."""

import pytest
import torch
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters
from heavypath.speculative import PromptLookup, Recall, SpeculativeDecoder, TokenTree, tree_choice, tree_policy
from heavypath.speculative.adapting import Adapting
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.decoding.run import SlotNumbers
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.tree_policy import TreeByCosts
from heavypath.speculative.trees.tree import ROOT

USUAL, COPYING = TokenTree.independent(2, 3), TokenTree.chain(6)  # of as many nodes
LINE = "import os\n"


@pytest.fixture(scope="module")
def copied(demo_pair):
    """The shipped target, and a prompt of equal lines, which it goes on with."""
    target, draft, tokenizer = demo_pair
    return target, draft, tokenizer(6 * LINE, return_tensors="pt").input_ids


@pytest.mark.parametrize(("method", "temperature"), [("sequoia", 0.0), ("ersd", 0.3), ("dyspec", 0.0)])
def test_a_copy_takes_fewer_steps_and_the_text_stays(method, temperature, copied, monkeypatch):
    target, _, prompt = copied
    asked = {"max_new_tokens": 80, "temperature": temperature, "eos_token_id": None, "seed": 2}
    plain = SpeculativeDecoder(target, None, "autoregressive").generate(prompt, **asked)
    out = SpeculativeDecoder(target, PromptLookup(), method).generate(prompt, **asked)
    monkeypatch.setattr(TreeByCosts, "_copying", lambda *_: None)
    before = SpeculativeDecoder(target, PromptLookup(), method).generate(prompt, **asked)
    for each in (out, before):
        assert torch.equal(each.sequences, plain.sequences)
    assert out.stats.tokens_per_step > 1.3 * before.stats.tokens_per_step


@pytest.mark.parametrize(("draft", "method", "temperature", "batch"), [
    (PromptLookup(), "sequoia", 0.7, 1),  # a sampled text would be another one
    (PromptLookup(), "sequoia", 0.0, 2),
    ("model", "sequoia", 0.0, 1),  # its levels cost time, and it does not copy
])  # fmt: skip
def test_others_keep_their_trees(draft, method, temperature, batch, copied):
    target, model, _ = copied
    decoder = SpeculativeDecoder(target, model if draft == "model" else draft, method)
    filters = Filters(temperature)
    usual = decoder.trees.by_batch(filters, batch).trees
    assert {*decoder.trees.candidates(filters, batch)} - {ROOT} == {*usual} - {ROOT}


def test_the_tree_is_larger_than_the_usual_one(copied):
    target, _, _ = copied
    for draft in (PromptLookup(), Recall()):
        trees = SpeculativeDecoder(target, draft).trees
        usual, larger, root = trees.candidates(Filters(0.0), 1)
        assert (usual, root) == (trees.tree(Filters(0.0), 1), ROOT)
        assert larger.depth > 1.5 * usual.depth


class Noted:
    """Stands for a `Rest`; notes what it is asked."""

    def __init__(self):
        self.asked = []

    def after(self, tree, running, tokens, drafted):
        self.asked.append((tree, tokens, drafted))
        return tree


class Seen:
    """Reports steps to an `Adapting`: their tokens, and that they drafted."""

    def __init__(self, adapting):
        self.adapting = adapting
        self.produced = self.steps = self.nodes = 0

    def __call__(self, tokens):
        self.steps += 1
        self.produced += tokens
        self.nodes += 2
        row = SlotNumbers(0, 0, 0, self.produced, 9, self.steps, self.nodes, 0, 0)
        self.adapting.see(None, None, [row], None)


def plan_of(tree):
    return StepPlan(None, None, tree, None, (USUAL, COPYING, ROOT))


def test_the_next_tree_is_larger_after_a_step_in_which_all_levels_were_accepted():
    rest = Noted()
    adapting = Adapting(lambda *_: USUAL, USUAL, rest, copying=COPYING)
    see = Seen(adapting)
    plan = plan_of(USUAL)
    found = []
    for tokens in (2, 4, 7, 6, 4, 1):
        adapting.before(None)
        see(tokens)
        plan = adapting.replanned(plan, see.steps, 1, None)
        found.append(plan.tree)
    assert found == [USUAL, COPYING, COPYING, USUAL, COPYING, USUAL]
    drafted = [USUAL, USUAL, COPYING, COPYING, USUAL, COPYING]
    assert rest.asked == [*zip(found, (2, 4, 7, 6, 4, 1), drafted, strict=True)]


def test_it_is_the_same_where_the_host_sees_a_step_while_the_next_one_runs():
    """As on a GPU: the plan is of a step whose tokens are not known yet."""
    rest = Noted()
    adapting = Adapting(lambda *_: USUAL, USUAL, rest, copying=COPYING)
    see = Seen(adapting)
    launched = [plan_of(USUAL), plan_of(USUAL)]
    adapting.before(None)
    for all_levels in (True, True, True, True, False, False, True):
        adapting.before(None)
        seen = launched[see.steps].tree
        see(seen.depth + 1 if all_levels else 1)
        launched.append(adapting.replanned(launched[-1], see.steps, 1, None))
        assert rest.asked[-1][2] == seen
    assert [each.tree for each in launched[2:]] == [COPYING] * 4 + [USUAL] * 2 + [COPYING]


@pytest.mark.slow
def test_a_copy_takes_fewer_steps_where_steps_are_graphs(as_on_a_gpu, monkeypatch):
    target = tiny_llama(10, layers=1, hidden_size=32)
    prompt = torch.full((1, 8), 4)  # its greedy text goes on so
    monkeypatch.setattr(tree_choice, "TOY_BYTES", 0)
    costs = Costs({nodes: 1 + nodes / 16 for nodes in range(1, 17)}, level=0.01)  # as if it were larger
    for each in (tree_choice, tree_policy):
        monkeypatch.setattr(each, "estimates", lambda *_, **__: costs)
    as_on_a_gpu()
    asked = {"max_new_tokens": 40, "temperature": 0.0, "eos_token_id": None}
    out = SpeculativeDecoder(target, PromptLookup(), cuda_graphs=True).generate(prompt, **asked)
    monkeypatch.setattr(TreeByCosts, "_copying", lambda *_: None)
    before = SpeculativeDecoder(target, PromptLookup(), cuda_graphs=True).generate(prompt, **asked)
    assert torch.equal(out.sequences, before.sequences)
    assert out.stats.tokens_per_step > 1.3 * before.stats.tokens_per_step
