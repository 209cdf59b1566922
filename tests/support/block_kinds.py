"""Random drafts of further kinds of block drafts, each by its checkpoint and an oracle of its own.

A kind is a `Kind`: `tensors` makes its tensors, the backbone's by z-lab's names, `write` config.json and the tensors by
their published names, and `oracle` is a subclass of `Oracle`, which computes its laws of the formulas alone.
"""

from typing import Any, NamedTuple

from block_checkpoints import SAID, Oracle, variant
from head_checkpoints import write
from tiny_models import tiny_llama

from heavypath.speculative import load_draft


class Kind(NamedTuple):
    """See above; options: those of `variant`."""

    tensors: Any
    write: Any
    oracle: type[Oracle]
    options: dict[str, Any]


def target_of(vocab=40):
    """Four layers, three of which can be read."""
    return tiny_llama(0, vocab, 4, num_key_value_heads=2)


def drafted(kind: Kind, folder, target, scale=1.0, **options):
    """A random draft of a kind, loaded of its checkpoint."""
    text = target.config
    sizes = {"ids": (0, 1, 2), "vocab": text.vocab_size, "drafted": text.vocab_size, "mask": text.vocab_size - 1}
    shape = variant(**(sizes | kind.options | options))
    tensors = kind.tensors(shape, scale)
    config, published = kind.write(shape, tensors)
    if config.get("num_target_layers") == 8:  # of the target that `zlab` is for
        config["num_target_layers"] = text.num_hidden_layers
    folder.mkdir(exist_ok=True)
    head = load_draft(write(folder, config, published), target)
    SAID[head] = shape, tensors, kind.oracle
    return head
