"""Traces say what verify_tree decided, and reasons that are true: coins, thresholds, probabilities, the text."""

import json
import re
from itertools import pairwise, product
from typing import NamedTuple, get_type_hints

import numpy as np
import pytest
import torch
from tiny_models import tiny_llama
from tree_cases import trees
from verification_cases import Problem

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.kernels.nodes import WHOLE_TREE
from heavypath.kernels.noise import Stream, coins, gumbel_noise
from heavypath.kernels.verification import verify_tree
from heavypath.speculative import METHODS, SpeculativeDecoder, TokenTree
from heavypath.speculative.decoding.rules import Rules
from heavypath.speculative.output import trace
from heavypath.speculative.output.page import trace_page
from heavypath.speculative.output.reasons import FATES, WITH_COINS, Reasons, VerifiedTree, explain
from heavypath.speculative.output.trace import read_trace, token_text

SAMPLING = {"temperature": 0.8, "top_k": 5, "seed": 3}


def seed_of_coins(row, wanted):
    """A seed whose coins for children 0, 1, ... of a node satisfy the wanted conditions."""
    for seed in range(1000):
        tossed = coins(seed, np.full(len(wanted), row), np.arange(len(wanted)))
        if all(condition(coin) for condition, coin in zip(wanted, tossed, strict=True)):
            return seed, tossed
    raise AssertionError


@pytest.mark.parametrize(("wanted", "fates", "path"), [
    ([lambda coin: coin < 0.6, lambda coin: True], ["root", "accepted", "elder"], [0, 1]),
    ([lambda coin: coin >= 0.6, lambda coin: True], ["root", "rejected", "accepted"], [0, 2]),
])  # fmt: skip
def test_two_children_without_replacement_by_hand(wanted, fates, path):
    """P = .5 .3 .2 and Q = .2 .5 .3: token 1 is accepted below .3 / .5. Then max(P - Q, 0) is all token 0's, which has
    .2 of the half of Q that is left: its threshold is 1."""
    target, draft = (torch.tensor([law] * 3).log() for law in ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]))
    seed, tossed = seed_of_coins(7, wanted)
    tokens, parents, ranks = torch.tensor([2, 1, 0]), torch.tensor([-1, 0, 0]), torch.tensor([0, 0, 1])
    rows = torch.tensor([7, 8, 9])
    given = {"method": "without_replacement", "seed": seed}
    verified = verify_tree(tokens[None], parents, target[None], draft[None], ranks=ranks, rows=rows[None], **given)
    assert verified.path[0, : len(path)].tolist() == path
    fields = VerifiedTree(tokens, parents, ranks, rows, target, draft)
    rules = rules_of("without_replacement", False, Filters(), Filters())
    reasons = explain(fields, rules, seed, verified.path[0], int(verified.next_token[0]))
    tried = fates.index("accepted")
    assert (reasons.fates, reasons.chosen, reasons.kind) == (fates, path, "bonus")
    assert reasons.coins == [None, *tossed[:tried], *[None] * (2 - tried)]
    assert reasons.thresholds[1:] == pytest.approx([0.6, 1.0 if tried == 2 else None])
    assert reasons.draft == [None, pytest.approx(0.5), pytest.approx(0.2)]
    assert reasons.target == [None, pytest.approx(0.3), pytest.approx(0.5)]


def rules_of(method, replacement, target_filters, draft_filters):
    draw = "with_replacement" if replacement else "without_replacement"
    return Rules(draw, method, target_filters, draft_filters)


class Case(NamedTuple):
    """A drawn and verified tree of one sequence, and what is said of it; contexts: the tokens down to each node."""

    fields: VerifiedTree
    path: list[int]
    next_token: int
    reasons: Reasons
    seed: int
    contexts: list[tuple[int, ...]]

    def nodes(self):
        """Each present node but the root, with what is said of it: node, fate, coin, threshold."""
        said = zip(self.reasons.fates, self.reasons.coins, self.reasons.thresholds, strict=True)
        return [(node, *one) for node, one in enumerate(said) if node and self.fields.tokens[node] >= 0]

    def check(self, seen):
        """What holds for every verifier; adds the fates to `seen`."""
        contexts, reasons, tokens, parents = self.contexts, self.reasons, *map(torch.Tensor.tolist, self.fields[:2])
        seen |= {*reasons.fates}
        assert [contexts[node] for node in reasons.chosen] == [contexts[node] for node in self.path]
        for node in range(1, len(tokens)):
            assert (reasons.fates[node] == "absent") == (tokens[node] < 0)
            assert (reasons.fates[node] == "accepted") == (node in self.path)
        ends = contexts[self.path[-1]]
        below = any(tokens[node] >= 0 and contexts[parents[node]] == ends for node in range(1, len(tokens)))
        assert reasons.kind == ("recovered" if below else "bonus")

    def tossed(self, node, parent):
        """The coin of a child, drawn anew."""
        return coins(self.seed, self.fields.noise_rows[[parent]].numpy(), self.fields.ranks[[node]].numpy())[0]


def verified_cases(method, replacement, draft_temperature=0.9, top_k=None):
    target_filters = Filters(0.0 if method == "greedy" else 0.7)
    draft_filters = Filters(draft_temperature, top_k)
    rules = rules_of(method, replacement, target_filters, draft_filters)
    shapes = {"k-ary": TokenTree.k_ary(3, 3), "heavy": TokenTree.k_ary(2, 4).reordered("heavy_path")[0]}
    shapes = [tree for tree in (trees(14) | shapes).values() if len(tree) > 1 and tree.branching <= 6]
    for tree, seed in product(shapes, (0, 2)):
        problem = Problem(
            tree, method, target_filters, draft_filters, vocab_size=6, absent=0.1, seed=seed, replacement=replacement
        )
        verified = problem.verified("torch")
        for one in range(2):
            logits = problem.target[one], problem.draft[one]
            fields = VerifiedTree(problem.tokens[one], tree.parents, tree.ranks, problem.rows[one], *logits)
            path, next_token = verified.path[one], int(verified.next_token[one])
            reasons = explain(fields, rules, seed, path, next_token)
            contexts = [()]
            for parent, token in zip(tree.parents.tolist()[1:], fields.tokens.tolist()[1:], strict=True):
                contexts.append((*contexts[parent], token))
            path = [node for node in path.tolist() if node >= 0]
            yield Case(fields, path, next_token, reasons, seed, contexts)


INDEPENDENT = ("with_replacement", "kseq")  # take children that were drawn with replacement
NODE_BY_NODE = [name for name in (*WITH_COINS, "race", "target_sample", "greedy") if name not in WHOLE_TREE]
CASES = [(method, method in INDEPENDENT, 0.9, None) for method in NODE_BY_NODE]
CASES += [("without_replacement", False, 0.9, 2), ("without_replacement", False, 0.0, None)]
CASES += [("held", True, 0.9, None), ("held", False, 0.9, 2), ("held", False, 0.0, None)]
CASES += [("with_replacement", True, 0.9, 2), ("target_sample", True, 0.9, None)]


@pytest.mark.parametrize(("method", "replacement", "draft_temperature", "top_k"), CASES)
def test_reasons_agree_with_what_verify_tree_decided(method, replacement, draft_temperature, top_k):
    """Every fate is checked for what it claims, with coins and winners tossed and drawn anew."""
    seen, shared = set(), method == "held" and draft_temperature > 0
    for case in verified_cases(method, replacement, draft_temperature, top_k):
        case.check(seen)
        contexts, path, reasons = case.contexts, case.path, case.reasons
        parent, rank = case.fields.parents.tolist(), case.fields.ranks.tolist()
        reached = {contexts[node] for node in path}
        for node, fate, coin, threshold in case.nodes():
            above, order = contexts[parent[node]], (rank[node], node)
            siblings = [one for one, *_ in case.nodes() if contexts[parent[one]] == above]
            assert (fate == "parent") == (above not in reached)
            if coin is not None and threshold is not None:
                before = sorted((rank[one], one) for one in siblings if (rank[one], one) < order)
                tosser = before[0][1] if shared and before else node
                begin = max((reasons.thresholds[one] or 0 for _, one in before), default=0) if shared else 0
                assert coin == case.tossed(tosser, parent[tosser])
                assert (begin <= coin < threshold) == (node in reasons.chosen), (node, coin, threshold)
            rivals = [one for one in reasons.chosen[1:] if one in siblings]
            if fate in ("elder", "beyond", "rejected") or (fate == "skipped" and not shared):
                assert method in WITH_COINS
                assert fate != ("elder" if shared else "beyond")
                assert all((fate in ("elder", "beyond")) == ((rank[one], one) < order) for one in rivals)
                assert rivals or fate in ("rejected", "skipped")
            assert fate != "rejected" or coin is not None
            assert fate != "equal" or contexts[node] in reached
            if fate == "other":
                at = path[len(above)]
                winner = contexts[path[len(above) + 1]][-1] if len(above) + 1 < len(path) else case.next_token
                assert contexts[node][-1] != winner
                law, row = case.fields.target_logits[at], case.fields.noise_rows[at]
                assert winner == chosen_token(method, law, row, case.seed)
    expected = {"accepted", "parent", "absent"} | ({"rejected", "elder"} if method in WITH_COINS else {"other"})
    if shared:
        expected = expected - {"elder"} | {"beyond"}
    assert expected <= seen
    assert ("equal" in seen) == replacement


@pytest.mark.parametrize("method", WHOLE_TREE)
@pytest.mark.parametrize(
    ("replacement", "draft_temperature", "top_k"),
    [(False, 0.9, None), (True, 0.9, None), (False, 0.9, 2), (False, 0.0, None)],
)
def test_reasons_of_traversal_agree_with_what_verify_tree_decided(method, replacement, draft_temperature, top_k):
    """Nodes before the accepted one in post-order were met and have coins; those after it were not tried."""
    seen = set()
    for case in verified_cases(method, replacement, draft_temperature, top_k):
        case.check(seen)
        parent, rank, last = case.fields.parents.tolist(), case.fields.ranks.tolist(), case.reasons.chosen[-1]
        places = [()]
        for node in range(1, len(parent)):
            places.append((*places[parent[node]], (rank[node], node)))
        after = [(*place, (len(parent), 0)) for place in places]  # in post-order a node comes after all that it begins
        for node, fate, coin, threshold in case.nodes():
            assert (coin is None) == (threshold is None)
            if coin is not None:
                assert coin == case.tossed(node, parent[node])
                assert (coin < threshold) == (fate in ("accepted", "equal")) == (node == last)
            if fate == "rejected":
                assert coin is not None
                assert replacement or after[node] < after[last]
            if fate == "elder":
                above = case.contexts[parent[node]]
                assert above == case.contexts[case.path[-1]][: len(above)]
                assert replacement or after[node] > after[last]
    assert {"accepted", "parent", "absent", "rejected", "elder"} <= seen
    assert ("equal" in seen) == replacement


def chosen_token(method, logits, row, seed):
    """The token that the other methods choose first."""
    if method == "greedy":
        return int(logits.argmax())
    logprobs = filtered_logprobs(logits, Filters(0.7))
    stream = Stream.DRAFT if method == "race" else Stream.TARGET
    return int((logprobs + gumbel_noise(seed, stream, row[None], len(logits))[0]).argmax())


@pytest.fixture(scope="module")
def tiny_pair():
    """Two models that are of one mind at times."""
    target, draft = tiny_llama(1, vocab_size=11), tiny_llama(1, vocab_size=11)
    for weight in draft.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return target, draft


PROMPTS = torch.tensor([[0, 0, 3, 1], [2, 5, 7, 4], [0, 6, 1, 8]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


@pytest.mark.parametrize(("method", "temperature"), [*((method, 0.8) for method in METHODS), ("dyspec", 0.0)])
def test_a_trace_holds_the_batchs_text_and_the_statistics_counts(method, temperature, tiny_pair, tmp_path):
    decoder = SpeculativeDecoder(*tiny_pair, method)
    options = SAMPLING | {"temperature": temperature, "max_new_tokens": 12, "eos_token_id": [9], "attention_mask": MASK}
    plain = decoder.generate(PROMPTS, **options)
    out = decoder.generate(PROMPTS, trace=tmp_path / "trace", **options)
    assert torch.equal(plain.sequences, out.sequences)
    header, steps = read_trace(tmp_path / "trace")
    assert header["method"] == method
    prompts = [row[mask.bool()].tolist() for row, mask in zip(PROMPTS, MASK, strict=True)]
    assert [one["prompt"] for one in header["sequences"]] == prompts
    assert len(steps) == out.stats.steps
    offered, accepted = (torch.zeros_like(out.stats.offered.sum(1)) for _ in range(2))
    for sequence in range(3):
        own = [step for step in steps if step["sequence"] == sequence]
        assert [step["step"] for step in own] == list(range(len(own)))
        text = [token for step in own for token in step["emitted"]]
        assert out.sequences[sequence, 4:].tolist() == text + [9] * (out.sequences.shape[1] - 4 - len(text))
        for step, following in pairwise(own):
            assert step["emitted"] == [*(step["tokens"][node] for node in step["path"][1:]), step["next"]]
            assert following["tokens"][0] == step["next"]
            assert following["position"] == step["position"] + step["length"] + 1
        for step in own:
            present = [node for node, token in enumerate(step["tokens"]) if node and token >= 0]
            with_children = {step["parents"][node] for node in present}
            for depth, node in enumerate(step["path"]):
                if node in with_children:
                    offered[depth] += 1
                    accepted[depth] += depth < step["length"]
            grows = method in ("rsd-s", "dyspec", "eagle-2") and step["step"]
            assert not (grows and -1 in step["tokens"]), "a grown tree's absent nodes are nowhere"
    assert torch.equal(accepted, out.stats.accepted.sum(1))
    if len(offered):
        assert torch.equal(offered, out.stats.offered[:, 0])


def test_probabilities_are_the_models_own_after_their_filters(tiny_pair, tmp_path):
    """Against transformers' forward pass on the text down to each node, and a softmax written out."""
    target, draft = tiny_pair
    SpeculativeDecoder(target, draft, "rsd-c", tree_size=7, draft_top_k=4).generate(
        PROMPTS[1:2], 12, trace=tmp_path / "trace", **SAMPLING
    )
    header, steps = read_trace(tmp_path / "trace")
    text = list(header["sequences"][0]["prompt"])
    for step in steps:
        for node in range(1, len(step["tokens"])):
            if step["tokens"][node] < 0:
                continue
            walk, above = [], step["parents"][node]
            while above > 0:
                walk.insert(0, step["tokens"][above])
                above = step["parents"][above]
            for model, name, top_k in ((target, "target", 5), (draft, "draft", 4)):
                with torch.no_grad():
                    logits = model(torch.tensor([text + walk])).logits[0, -1].double() / 0.8
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
                chance = float(logits.softmax(-1)[step["tokens"][node]])
                assert step[name][node] == pytest.approx(chance, rel=1e-3, abs=1e-6)
        text += step["emitted"]
    assert any(step["length"] for step in steps)


def test_pieces_are_the_text_and_texts_those_of_every_token(demo_pair, tmp_path):
    target, draft, tokenizer = demo_pair
    prompt = tokenizer('x = "日本語 🙂", Ω', return_tensors="pt").input_ids
    decoder = SpeculativeDecoder(target, draft)
    out = decoder.generate(prompt, 30, temperature=1.5, seed=1, trace=str(tmp_path / "trace"), tokenizer=tokenizer)
    header, steps = read_trace(tmp_path / "trace")
    assert header["sequences"][0]["text"] == 'x = "日本語 🙂", Ω'
    assert header["target"]["parameters"] == sum(weight.numel() for weight in target.parameters())
    new = tokenizer.decode(out.sequences[0, prompt.shape[1] :])
    assert "".join(piece for step in steps for piece in step["pieces"]) == new
    texts = {}
    for step in steps:
        texts |= step["texts"]
        assert {str(token) for token in (*step["tokens"], step["next"]) if token >= 0} <= texts.keys()
    assert all(texts[token] == tokenizer.decode([int(token)]) for token in texts)
    assert token_text(tokenizer, tokenizer(" the").input_ids[0]) == " the"


def test_without_a_trace_nothing_of_it_runs(tiny_pair, monkeypatch):
    monkeypatch.setattr(trace, "explain", None)
    monkeypatch.setattr(trace.Recorder, "__init__", None)
    out = SpeculativeDecoder(*tiny_pair).generate(PROMPTS[1:2], 8)
    assert "trace" not in out.stats.seconds


def test_numbers_have_four_digits_or_as_many_as_tell_a_coin_from_its_threshold():
    coins, thresholds = [0.41234, 0.41234, 0.5], [0.41231, 0.9, 0.5]
    reasons = Reasons(["root"] * 3, coins, thresholds, [0], [1 / 3, None, 0.0], [None] * 3, "bonus", 1.0)
    short = trace._rounded(reasons)
    assert short["coins"] == [0.41234, 0.4123, 0.5]
    assert short["thresholds"] == [0.41231, 0.9, 0.5]
    assert short["draft"] == [0.3333, None, 0.0]


def test_a_line_that_was_cut_off_is_left_out_and_no_other_file_is_taken(tiny_pair, tmp_path):
    file = tmp_path / "trace"
    SpeculativeDecoder(*tiny_pair).generate(PROMPTS[1:2], 8, trace=file)
    whole = file.read_text()
    _, steps = read_trace(file)
    file.write_text(whole[:-9])
    assert read_trace(file)[1] == steps[:-1]
    header = json.loads(whole.split("\n")[0])
    other, no_trace = json.dumps(header | {"trace": 99}), "is no trace that `generate` writes"
    for content, message in {"": no_trace, '{"a": 1}': no_trace, other: "is a trace of format 99, expected 1"}.items():
        file.write_text(f"{content}\n")
        with pytest.raises(ValueError, match=message):
            read_trace(file)
    decoder = SpeculativeDecoder(*tiny_pair)
    with pytest.raises(TypeError, match="trace must be the path of a file, got int"):
        decoder.generate(PROMPTS[1:2], 8, trace=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError):
        decoder.generate(PROMPTS[1:2], 8, trace=tmp_path / "missing" / "trace")


def test_the_format_is_described_field_by_field_with_a_line_that_is_one(tiny_pair, tmp_path):
    SpeculativeDecoder(*tiny_pair).generate(PROMPTS[1:2], 8, trace=tmp_path / "trace", **SAMPLING)
    header, steps = read_trace(tmp_path / "trace")
    assert get_type_hints(trace._Header).keys() == header.keys()
    assert get_type_hints(trace._Step).keys() == steps[0].keys() | {"pieces", "texts"}  # these need a tokenizer
    example = re.search(r"^    (\{.*\})$", trace.__doc__, re.M | re.S)[1]
    (tmp_path / "example").write_text(json.dumps(header) + "\n" + "".join(map(str.strip, example.splitlines())) + "\n")
    header, (step,) = read_trace(tmp_path / "example")
    assert step.keys() == steps[0].keys()
    for name, value in step.items():
        assert type(value) is type(steps[0][name])
    assert set(step["fates"]) <= set(FATES)
    assert trace_page(header, [step])
