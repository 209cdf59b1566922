"""What each further kind of block draft is tested by, given its checkpoint and an oracle of its own.

A kind is a `Kind`: `tensors` makes its tensors, the backbone's by z-lab's names, `write` config.json and the tensors by
their published names, and `oracle` is a subclass of `Oracle`, which computes its laws of the formulas alone.
"""

import json
from typing import Any, NamedTuple

import pytest
import torch
from block_checkpoints import SAID, TEXT, Oracle, driven, said_of, variant
from drafted_cases import PROMPTS, assert_drafts_as_said
from head_checkpoints import write
from rounding import SMALL_MODEL
from tiny_models import tiny_llama

from heavypath.speculative import SpeculativeDecoder, goodness_of_fit, joint_law, load_draft

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
WAYS = [("sequoia", "rejection"), ("sequoia", "traversal"), ("sequoia", "held"), ("dyspec", "rejection"),
        ("ersd", None), ("eagle-2", None)]  # fmt: skip
EXACT = [
    *((*way, 2_000) for way in WAYS[:2]),
    *(pytest.param(*way, 20_000, marks=pytest.mark.slow) for way in WAYS),
]


class Kind(NamedTuple):
    """See above; options: those of `variant`."""

    tensors: Any
    write: Any
    oracle: type[Oracle]
    options: dict[str, Any]


def target_of(vocab=40):
    """Four layers, three of which can be read."""
    return tiny_llama(0, vocab, 4, num_key_value_heads=2)


def drafted(kind: Kind, folder, target, write=None, scale=1.0, **options):
    """A random draft of a kind, loaded of its checkpoint."""
    text = target.config
    sizes = {"ids": (0, 1, 2), "vocab": text.vocab_size, "drafted": text.vocab_size, "mask": text.vocab_size - 1}
    shape = variant(**(sizes | kind.options | options))
    tensors = kind.tensors(shape, scale)
    config, published = (write or kind.write)(shape, tensors)
    if config.get("num_target_layers") == 8:  # of the target that `zlab` is for
        config["num_target_layers"] = text.num_hidden_layers
    head = load_draft(write_json(folder, config, published), target)
    SAID[head] = shape, tensors, kind.oracle
    return head


def write_json(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    return write(folder, json.loads(json.dumps(config)), tensors)


def assert_laws(head, target):
    """The laws below paths of all depths, after texts of several lengths, one token's among them, are the oracle's."""
    path = (8, 9, 2, 7)[: head.config.depths - 1]
    for text in (TEXT, TEXT[:3], TEXT[:1]):
        oracle = said_of(head, target, text)
        expected = torch.stack([oracle.after(path[:depth]) for depth in range(len(path) + 1)])
        torch.testing.assert_close(driven(head, target, text, path), expected.float(), rtol=0, atol=SMALL_MODEL)
    assert len(oracle.base) == head.config.depths


def assert_nodes_have_their_laws(kind, folder, method):
    """Those of a batch's trees, over steps that accept some nodes; none is deeper than the block."""
    target = target_of(7)
    head = drafted(kind, folder, target, scale=2.0, block=4)
    decoder = SpeculativeDecoder(target, head, method, tree_size=8, max_depth=3)
    nodes = assert_drafts_as_said(decoder, head, 12, [*PROMPTS, torch.tensor([4])], atol=SMALL_MODEL)
    assert max(len(node.path) for node in nodes) > 1, "no node was deep"


def assert_text_is_exact(kind, folder, method, verifier, sequences, **options):
    """The joint law of four tokens is the target's, by enumeration."""
    target = target_of(7)
    head = drafted(kind, folder, target, scale=0.6, **options)
    given = {} if verifier is None else {"verifier": verifier}
    decoder = SpeculativeDecoder(target, head, method, tree_size=6, **given)
    out = decoder.generate(PROMPT.expand(sequences, -1), max_new_tokens=4, temperature=1.5, seed=5)
    assert out.stats.tokens_per_step > 1.2
    fit = goodness_of_fit(out.sequences[:, PROMPT.shape[1] :], joint_law(target, PROMPT[0], 4, temperature=1.5))
    assert fit.is_lossless(), str(fit)
