"""What chains yield along the target's text: against all drafts there are, the verifiers, and decoding."""

from itertools import product

import pytest
import torch
from bench_scripts import script
from profile_cases import constant_llama

from heavypath.speculative import SpeculativeDecoder, TokenTree

chains = script("chains")
chain_tokens, length_laws, step_starts = chains.chain_tokens, chains.length_laws, chains.step_starts
VERIFIERS = {"rejection": "rejection", "block": "traversal"}
P, Q = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.2, 0.3, 0.5]).double()


def test_laws_by_hand():
    rejection, block = length_laws(torch.tensor([2.0, 0.5, 4.0]).log())  # R is 2, 1, 4
    assert rejection.tolist() == pytest.approx([1 / 2, 1 / 2, 1 / 8])
    assert block.tolist() == pytest.approx([1 / 2, 1 / 2, 1 / 4])
    assert length_laws(torch.tensor([0.0, torch.inf, -3.0])).block.tolist() == [1, 0, 0]


def test_texts_promise_what_drafts_do():
    """The mean over all texts is that over all drafts, of the chance to accept what was drafted."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        target, draft = torch.rand(2, 4, 3, generator=generator, dtype=torch.float64).pow(3)  # by depth
        target, draft = (each / each.sum(1, keepdim=True) for each in (target, draft))
        expected, found = torch.zeros(2, 2, 4, dtype=torch.float64)
        for tokens in product(range(3), repeat=4):
            p, q = (torch.tensor([law[depth, token] for depth, token in enumerate(tokens)]) for law in (target, draft))
            weight, accepted = [1.0], [1.0]
            for ratio in (p / q).tolist():
                weight.append(min(1.0, weight[-1] * ratio))
                accepted.append(accepted[-1] * min(1.0, ratio))
            expected += q.prod() * torch.tensor([accepted[1:], weight[1:]])
            found += p.prod() * torch.stack([*length_laws((p / q).log())])
        assert torch.allclose(found, expected, atol=1e-12)


def test_steps_begin_where_others_end():
    starts = step_starts(torch.tensor([[[0.3]] * 4]))  # one token more with probability 0.3
    assert starts[0].tolist() == pytest.approx([1, 0.7, 0.7**2 + 0.3, 0.7**3 + 2 * 0.7 * 0.3])
    assert step_starts(torch.ones(1, 6, 2))[0].tolist() == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("name", VERIFIERS)
def test_tokens_are_those_of_decoding(name):
    target, draft, length, texts = constant_llama(P.log().tolist()), constant_llama(Q.log().tolist()), 4, 150
    prompt = torch.tensor([[1, 2]]).expand(texts, -1)
    options = {"max_new_tokens": 40, "temperature": 1.0, "eos_token_id": None}
    text = SpeculativeDecoder(target, None, "autoregressive").generate(prompt, seed=1, **options).sequences[:, 2:]
    tokens, steps = chain_tokens((P / Q).log()[text], length)[name].sum(1)
    tree = TokenTree.chain(length)
    decoder = SpeculativeDecoder(target, draft, "chain", tree=tree, verifier=VERIFIERS[name])
    stats = decoder.generate(prompt, seed=2, **options).stats
    each = 1 + stats.accepted.sum() / stats.steps
    assert float(each) == pytest.approx(float(tokens / steps), abs=0.02 + 5 * 1.5 / stats.steps**0.5)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: length_laws(torch.zeros(3, 0)), r"got shape \[3, 0\]"),
    (lambda: length_laws(torch.tensor([-torch.inf])), "got NaN or -inf"),
    (lambda: chain_tokens(torch.zeros(3), 1), r"log_ratios \[S, T\]"),
    (lambda: chain_tokens(torch.zeros(3, 4), 5), "length in 1 .. T, got .* and 5"),
])  # fmt: skip
def test_texts_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
