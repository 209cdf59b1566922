"""The loop that bench_verification.py holds verify_tree against follows the target's law."""

import pytest
import torch
from bench_scripts import script
from statistical import SIGNIFICANCE, chi_square_p_value, joint_counts

from heavypath.kernels.noise import Stream, gumbel_noise
from heavypath.kernels.sampling import gumbel_topk

VOCABULARY, TEMPERATURE, TEXTS = 5, 0.6, 1000
CHILDREN = [[1, 4, 2], [5, 3], [6], [], [], [], []]  # of each node, in draw order


@pytest.mark.parametrize(("method", "lazy"), [
    ("without_replacement", True), ("with_replacement", False), ("kseq", True), ("race", True),
    ("target_sample", False), ("traversal", True),
])  # fmt: skip
def test_two_tokens_of_the_loop_follow_the_targets_law(method, lazy):
    bench = script("bench_verification")
    # Row 0 of each table is the distribution after the root, row 1 + v the one after token v.
    target = torch.randn(1 + VOCABULARY, VOCABULARY)
    draft = target + 2 * torch.randn(1 + VOCABULARY, VOCABULARY)
    law = (target / TEMPERATURE).softmax(-1)
    rows = torch.arange(TEXTS * len(CHILDREN)).view(TEXTS, -1)
    tokens = torch.full((TEXTS, len(CHILDREN)), -1)
    for node, children in enumerate(CHILDREN):
        if children:
            logits, replacement = draft[tokens[:, node] + 1], method in bench.INDEPENDENT
            options = {"temperature": TEMPERATURE, "rows": rows[:, node], "replacement": replacement}
            tokens[:, children] = gumbel_topk(logits, len(children), **options).tokens
    noise = gumbel_noise(0, Stream.DRAFT, rows.flatten(), VOCABULARY).view(*rows.shape, -1)

    texts, depths = [], [0, 0, 0, 0]
    for drawn, noise_here in zip(tokens, noise if method == "race" else [None] * TEXTS, strict=True):
        logits = target[drawn + 1], draft[drawn + 1]
        options = {"method": method, "temperature": TEMPERATURE, "noise": noise_here, "lazy": lazy}
        path, last = bench.loop_verify(CHILDREN, drawn, *logits, **options)
        depths[len(path)] += 1
        text = [*drawn[path].tolist(), last]
        texts.append(text[:2] if len(text) > 1 else [last, int(law[1 + last].multinomial(1))])
    assert min(depths[:3]) > TEXTS // 50  # recovered and bonus tokens at every depth
    joint = law[0][:, None] * law[1:]
    assert chi_square_p_value(joint_counts(torch.tensor(texts), VOCABULARY), joint.flatten()) > SIGNIFICANCE
