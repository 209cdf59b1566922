"""The training of an EAGLE head: its loss and what it measures, against entries run one by one."""

import pytest
import torch
import torch.nn.functional as F
from head_training_cases import DEPTHS, WIDTH, agreement, random_rows, tiny_head, tiny_target

from heavypath.speculative.training import learning
from heavypath.speculative.training.learning import learn, measure_agreement
from heavypath.speculative.training.losses import KL_WEIGHT, tv_kl
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.student import student_of_head
from heavypath.speculative.training.teacher import Taught, Teacher


def one_entry(head, feature, embedded, position, seen):
    """An entry's output [1, 1, H]; it sees each layer's keys and values in `seen`, and itself, which is put there."""
    layers = iter(seen)

    def attend(query, key, value):
        layer = next(layers)
        layer.append((key, value))
        keys, values = (torch.cat(each, 2) for each in zip(*layer, strict=True))
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return head(feature, embedded, head.rotary_emb(feature, torch.tensor([[position]])), attend)


def losses_one_by_one(head, rows, target, depths):
    """The loss and the overlap at every node of every chain: [depths, 2, chains]."""
    found = []
    embedding, target_head = target.model.embed_tokens.weight, target.lm_head.weight
    for tokens, taps, hidden in zip(rows.tokens.long(), rows.taps.float(), rows.hidden, strict=True):
        features = head.features([*taps.unbind(1)])[:, None, None]  # [length, 1, 1, H]
        target_probs = (hidden @ target_head.T).softmax(-1)  # [length, V]; row i is the law of token i + 1
        entries_seen = [[] for _ in head.layers]
        for entry in range(len(tokens) - depths):
            output = one_entry(head, features[entry], embedding[tokens[entry + 1]][None, None], entry, entries_seen)
            chain, seen = [], [list(layer) for layer in entries_seen]
            for depth in range(depths):
                if depth:
                    embedded = embedding[tokens[entry + 1 + depth]][None, None]
                    output = one_entry(head, head.fed_back(output), embedded, entry + depth, seen)
                draft_probs = (head.before_lm_head(output)[0, 0] @ target_head.T).softmax(-1)
                wanted = target_probs[entry + 1 + depth]
                overlap = torch.minimum(wanted, draft_probs).sum()
                divergence = (wanted * (wanted / draft_probs).log()).sum()
                chain.append(torch.stack([1 - overlap + KL_WEIGHT * divergence, overlap]))
            found.append(torch.stack(chain))
    return torch.stack(found, -1)


@pytest.mark.parametrize(("variant", "depths", "positions"), [
    ({}, 1, learning.POSITIONS_AT_ONCE),
    ({}, DEPTHS, 3 * 2),  # in several pieces
    ({"feeds_back_normed": True, "layers": 2}, DEPTHS, learning.POSITIONS_AT_ONCE),
    ({"generation": 1, "taps": (3,), "tap_norms": False}, DEPTHS, learning.POSITIONS_AT_ONCE),
])  # fmt: skip
def test_the_loss_and_its_gradients_are_those_of_entries_run_one_by_one(variant, depths, positions, monkeypatch):
    monkeypatch.setattr(learning, "POSITIONS_AT_ONCE", positions)
    head, target, rows = tiny_head(1, **variant), tiny_target(), random_rows(2)
    taps = rows.taps[:, :, : len(head.config.taps)]
    taught = Taught(rows.tokens, taps, torch.randn(*rows.tokens.shape, WIDTH))
    decay = 0.7 ** torch.arange(depths)
    loss, overlaps = learn(student_of_head(head, target), taught, target.lm_head, tv_kl, decay.tolist())
    losses = losses_one_by_one(head, taught, target, depths).mean(-1)
    expected = (losses[:, 0] * decay).sum()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(overlaps, losses[:, 1].detach(), atol=1e-5, rtol=1e-5)
    parameters = list(head.parameters())
    gradients = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close([each.grad for each in parameters], [*gradients], atol=1e-5, rtol=1e-4)


def test_what_is_measured_is_the_overlap_of_every_node_of_every_chain():
    head, target, tokens = tiny_head(3), tiny_target(), random_rows(4, 3, 12).tokens.long()
    rows = Teacher(target, head.config.taps)(tokens)
    with torch.no_grad():
        expected = losses_one_by_one(head, rows, target, 5)[:, 1].mean(-1)
    overlaps, top_1 = agreement(head, target, tokens, 5)
    torch.testing.assert_close(overlaps, expected, atol=1e-5, rtol=1e-5)
    assert ((top_1 >= 0) & (top_1 <= 1)).all()


@pytest.mark.parametrize("positions", [3, 100], ids=["in pieces", "at once"])
def test_a_head_learns_and_is_measured_at_the_nodes_that_it_predicts(positions, monkeypatch):
    """A node at depth k of entry i predicts what follows token i + k + 1."""
    monkeypatch.setattr(learning, "POSITIONS_AT_ONCE", positions)
    head, target, tokens = tiny_head(3), tiny_target(), random_rows(4, 3, 12).tokens.long()
    teacher, student = Teacher(target, head.config.taps), student_of_head(head, target)
    predicts = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    taught = teacher(tokens)._replace(predicts=predicts)
    depths, entries = DEPTHS, 12 - DEPTHS
    nodes = torch.stack([predicts[:, 1 + depth : 1 + depth + entries].flatten() for depth in range(depths)])
    chosen = nodes / nodes.sum(1, keepdim=True)  # [depths, chains]: weights of a mean
    losses = losses_one_by_one(head, taught, target, depths)
    by_depth = (losses * chosen[:, None]).sum(-1)
    weights = [1.0, 0.7, 0.0, 0.3]
    expected = (by_depth[:, 0] * torch.tensor(weights)).sum()
    loss, overlaps = learn(student, taught, teacher.logits, tv_kl, weights)
    torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
    measured = by_depth[:, 1].detach()
    torch.testing.assert_close(overlaps[:2], measured[:2], atol=1e-5, rtol=1e-5)
    assert overlaps[2].isnan()
    gradients = torch.autograd.grad(expected, [*head.parameters()])
    torch.testing.assert_close([each.grad for each in head.parameters()], [*gradients], atol=1e-5, rtol=1e-4)
    found, _ = measure_agreement(student, teacher, tokens, depths, RowsAtATime(2, "lower it", print), predicts)
    torch.testing.assert_close(found, measured, atol=1e-5, rtol=1e-5)
