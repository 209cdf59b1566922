"""The training of block drafts: what it computes of whole texts is what decoding computes of each block."""

import pytest
import torch
from block_checkpoints import block_of, driven

from heavypath.speculative.drafts.blocks.checkpoint import load_block
from heavypath.speculative.drafts.blocks.saving import save_block
from heavypath.speculative.training import blocks, learning
from heavypath.speculative.training.learning import learn, measure_agreement
from heavypath.speculative.training.losses import tv_kl
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.student import student_of_block
from heavypath.speculative.training.teacher import Teacher

SIZE = 4
VARIANTS = {
    "gated": {"term": "gated"},
    "vanilla, causal, an own embedding": {"term": "vanilla", "causal": (True, True), "own_embedding": True},
    "rnn, few tokens": {"term": "rnn", "drafted": 4, "own_lm_head": True, "term_bias": False},
    "by depth, biases, multiplied and capped": {"cap": 2.0, "multiplier": 1.5, "biases": True},
}


@pytest.fixture(params=VARIANTS)
def head(request, target, tmp_path):
    return block_of(target, tmp_path, shift=1, block=SIZE, **VARIANTS[request.param])


@pytest.fixture
def texts(target):
    """Three blocks each, and two tokens that fill none."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(target.config.vocab_size, (2, 3 * SIZE + 2), generator=generator)


@torch.no_grad()
def of_decoding(head, target, texts):
    """Logits [R, 3, B, V] of the draft at work, each block drafted on its own; and the target's after those tokens."""
    rows, at = [], range(0, 3 * SIZE, SIZE)
    for text in texts.tolist():
        rows.append(torch.stack([driven(head, target, text[: a + 1], text[a + 1 : a + SIZE]) for a in at]))
    return torch.stack(rows), target(texts).logits[:, : 3 * SIZE].unflatten(1, (3, SIZE))


@torch.no_grad()
def test_training_sees_the_laws_that_are_drafted(head, target, texts):
    student, expected = student_of_block(head, target), of_decoding(head, target, texts)[0]
    for depth, outputs in enumerate(student.outputs(Teacher(target, head.config.taps)(texts), SIZE)):
        found = student.logits(outputs, depth)
        own = expected[:, :, depth] if student.tokens is None else expected[:, :, depth, student.tokens]
        torch.testing.assert_close(found.double(), own.double(), rtol=0, atol=1e-5)


def test_sdpa_is_asked_for_nothing_that_a_gpu_has_no_kernel_for(target, texts, tmp_path, monkeypatch):
    """A mask and groups of heads, which transformers does not give it together either."""
    head, seen, attend = block_of(target, tmp_path, block=SIZE), [], blocks.scaled_dot_product_attention

    def noted(query, key, value, mask, **options):
        seen.append((query.shape[1], key.shape[1], value.shape[1], options))
        return attend(query, key, value, mask, **options)

    monkeypatch.setattr(blocks, "scaled_dot_product_attention", noted)
    student_of_block(head, target).outputs(Teacher(target, head.config.taps)(texts), SIZE)
    heads = head.config.num_attention_heads
    assert heads > head.config.num_key_value_heads
    assert seen == [(heads, heads, heads, {})] * head.config.layers


@pytest.mark.parametrize("positions", [3, 100], ids=["in pieces", "at once"])
def test_it_learns_what_the_target_says_at_the_tokens_drafted(positions, head, target, texts, monkeypatch):
    """Overlaps and the loss are those of decoding; so are gradients, in pieces that begin and end within a block."""
    monkeypatch.setattr(learning, "POSITIONS_AT_ONCE", positions * len(texts))
    draft_logits, target_logits = of_decoding(head, target, texts)
    overlaps = torch.minimum(draft_logits.softmax(-1), target_logits.softmax(-1)).sum(-1).mean((0, 1))
    student, teacher = student_of_block(head.requires_grad_(True), target), Teacher(target, head.config.taps)
    parts = RowsAtATime(1, "lower it", print)
    for depths in (2, SIZE, SIZE + 1):  # as deep as the block, whatever is asked for
        measured, same = measure_agreement(student, teacher, texts, depths, parts)
        torch.testing.assert_close(measured.double(), overlaps[:depths], rtol=0, atol=1e-6)
    is_likeliest = (draft_logits.argmax(-1) == target_logits.argmax(-1)).double()
    torch.testing.assert_close(same.double(), is_likeliest.mean((0, 1)), rtol=0, atol=1e-6)
    predicts = torch.rand(texts.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    _, same = measure_agreement(student, teacher, texts, SIZE, parts, predicts)
    in_blocks = predicts[:, : SIZE * is_likeliest.shape[1]].unflatten(1, (-1, SIZE))  # [R, blocks, depth]
    some = (is_likeliest * in_blocks).sum((0, 1)) / in_blocks.sum((0, 1))
    torch.testing.assert_close(same.double(), some, rtol=0, atol=1e-6)

    weights, rows, tokens = [1.0, 0.7, 0.5, 0.2], teacher(texts), student.tokens
    learnt = learn(student, rows, teacher.logits, tv_kl, weights)
    logprobs = target_logits.log_softmax(-1) if tokens is None else target_logits.log_softmax(-1)[..., tokens]
    outputs = student.outputs(rows, SIZE)
    losses = [tv_kl(logprobs[:, :, k], student.logits(outputs[k], k))[0].mean() for k in range(SIZE)]
    loss = sum(weight * each for weight, each in zip(weights, losses, strict=True))
    torch.testing.assert_close(learnt.loss.double(), loss.double(), rtol=0, atol=1e-6)
    learning_now = [weight for weight in head.parameters() if weight.grad is not None]
    for weight, expected in zip(learning_now, torch.autograd.grad(loss, learning_now), strict=True):
        torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-6)


def test_what_was_saved_loads_as_the_same_draft(head, target, tmp_path):
    save_block(head, tmp_path / "saved", target.config.num_hidden_layers)
    again = load_block(tmp_path / "saved", target)
    assert {**vars(again.config), "kind": ""} == {**vars(head.config), "kind": ""}
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
