"""The rows of the conformance suite: what is crossed, what does not go together, and arrays that cover all pairs.

A row is a dictionary {axis: value}. A new method, draft, verifier or option is one more value of an axis here, and what
it stands for one more line of conformance_parts.py.
"""

import random
from functools import cache
from itertools import combinations, product

from heavypath.speculative import METHODS
from heavypath.speculative.methods import VERIFIERS

TOYS = ("toy llama", "toy gpt2")  # seven tokens, whose joint law is enumerated
RECURRENT = ("qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2")  # one for each kind of recurrent layer
AXES = {
    "method": (*METHODS,),
    "draft": (
        "model", "the target", "head", "p-eagle", "medusa", "block", "pard", "mtp", "lookup", "retrieval",
        "recall", "lookahead", "early exit", "translated", "mixture", "cascade", "merge", "own", "none",
    ),
    "target": (*TOYS, "llama", "mistral", "qwen3", "mixtral", "gemma3_text", "gpt_oss", *RECURRENT),
    "tree": ("default", "of 6 nodes", "own", "deep", "by options", "threshold", "profile", "replanned", "by batch"),
    "verifier": ("default", *VERIFIERS, "own"),
    "way": ("compiled", "reference", "graph", "served", "streamed", "custom_generate", "streamer", "ranks"),
    "processors": ("none", "class", "function", "allowed tokens", "by sequence"),
    "batch": ("one", "two", "padded", "five padded"),
    "temperature": (0.0, 0.7, 1.0),
    "filter": ("none", "top-k", "top-p", "min-p"),
    "rule": ("none", "penalty", "least length"),
    "stop": ("none", "token", "strings"),
    "drafted at": ("the target's", "other filters", "temperature 0"),
    "past": (False, True),
    "grammar": (False, True),
    "dtype": ("float32", "bfloat16", "float16"),
}  # fmt: skip

GROWING = {name for name, method in METHODS.items() if method.verifiers and "held_traversal" not in method.verifiers}
GROWING |= {"eagle-2"}
LLAMAS = ("toy llama", "llama", "mistral", "qwen3")  # which run on their own modules
BY_PROFILE = ("profile", "replanned", "by batch")


def refused_verifier(method, verifier):
    if verifier == "own":
        return method in ("autoregressive", "typical-lossy")
    return verifier not in ("default", *METHODS[method].verifiers)


# What does not go together: the axes that it is about, and whether values of them do not.
REFUSED = [
    # Plain decoding drafts nothing.
    (("method", "draft"), lambda method, draft: (method == "autoregressive") != (draft == "none")),
    (("method", "tree"), lambda method, tree: method == "autoregressive" and tree not in ("default", "profile")),
    (("method", "drafted at"), lambda method, at: method == "autoregressive" and at != "the target's"),
    # Verifiers and trees that a method does not have.
    (("method", "verifier"), refused_verifier),
    (("method", "tree"), lambda method, tree: tree == "own" and method in GROWING),
    (("method", "tree"), lambda method, tree: tree == "by options" and not METHODS[method].options),
    (("method", "tree"), lambda method, tree: tree == "by options" and method == "chain"),  # has the next one alone
    (("method", "tree"), lambda method, tree: tree == "threshold" and "threshold" not in METHODS[method].options),
    (("verifier", "tree"), lambda verifier, tree: verifier == "held_traversal" and tree == "threshold"),
    # A profile measures what is lossless, by the verifiers that there are.
    (("method", "tree"), lambda method, tree: tree in BY_PROFILE and not METHODS[method].is_lossless),
    (("verifier", "tree"), lambda verifier, tree: verifier == "own" and tree in BY_PROFILE),
    # Drafts of several distributions, likeliest tokens, and heads that have so many levels.
    (("draft", "method"), lambda draft, method: draft == "merge" and method in GROWING),
    (("draft", "tree"), lambda draft, tree: draft == "merge" and tree == "threshold"),
    (("draft", "verifier"), lambda draft, verifier: draft == "merge" and verifier == "own"),
    (
        ("drafted at", "temperature", "method"),
        lambda at, temperature, method: at == "temperature 0" and temperature > 0 and method == "spectr",
    ),
    (
        ("drafted at", "temperature", "verifier"),
        lambda at, temperature, verifier: at == "temperature 0" and temperature > 0 and verifier == "own",
    ),
    (("drafted at", "tree"), lambda at, tree: at == "temperature 0" and tree in BY_PROFILE),
    (("draft", "tree"), lambda draft, tree: draft == "medusa" and tree == "deep"),
    (("draft", "target"), lambda draft, target: draft == "early exit" and target not in LLAMAS),
    # transformers makes no MTP layer where layers differ, and of a target that is split there is none.
    (("draft", "target"), lambda draft, target: draft == "mtp" and target not in ("toy llama", "llama", "mixtral")),
    (("draft", "way"), lambda draft, way: draft == "mtp" and way == "ranks"),
    # Of toys the joint law is looked at, so they are sampled, in float32 and by methods that keep it.
    (("target", "temperature"), lambda target, temperature: target in TOYS and temperature == 0),
    (("target", "dtype"), lambda target, dtype: target in TOYS and dtype != "float32"),
    # A grammar ends a text by a token; processors that bar tokens may leave it none.
    (("grammar", "stop"), lambda grammar, stop: grammar and stop != "token"),
    (("grammar", "rule"), lambda grammar, rule: grammar and rule == "least length"),
    (("grammar", "processors"), lambda grammar, kind: grammar and kind not in ("none", "class")),
    (("rule", "stop"), lambda rule, stop: rule == "least length" and stop != "token"),
    # Ways that lack something: a CUDA graph has no processors, a service no past, ranks have their own shapes.
    (("way", "processors"), lambda way, kind: way == "graph" and kind != "none"),
    (("way", "grammar"), lambda way, grammar: way == "graph" and grammar),
    (("way", "past"), lambda way, past: way in ("served", "custom_generate", "ranks") and past),
    (("way", "processors"), lambda way, kind: way in ("served", "custom_generate") and kind == "by sequence"),
    (("way", "tree"), lambda way, tree: way == "served" and tree == "replanned"),
    (("way", "target"), lambda way, target: way == "ranks" and target not in LLAMAS[1:]),
    (("way", "draft"), lambda way, draft: way in ("ranks", "streamed") and draft == "the target"),
    (  # a made-up profile is of a pass that reads less than a megabyte
        ("way", "tree", "target"),
        lambda way, tree, target: way == "streamed" and tree in BY_PROFILE and target == "granitemoehybrid",
    ),
    (("way", "dtype"), lambda way, dtype: way in ("graph", "ranks") and dtype != "float32"),
]  # fmt: skip


REFUSED_OF = {axis: [(axes, refuses) for axes, refuses in REFUSED if axis in axes] for axis in AXES}


def fits(row, new=None):
    """Whether the values of a row, or of a part of one, go together; those without the axis `new` are known to."""
    refused = REFUSED if new is None else REFUSED_OF[new]
    return not any(row.keys() >= {*axes} and refuses(*map(row.get, axes)) for axes, refuses in refused)


SHARE = 8  # of the rows, one of so many runs by default; they hold half of the pairs, and every value


@cache
def covering(strength=2, seed=0):
    """Rows that hold each pair of values (or each triple) that some row can hold.

    Each row begins with a combination that is in none yet, and takes for one axis after the other, in random order, the
    value that brings most new ones (Cohen, Dalal, Fredman and Patton 1997, "The AETG System"). Libraries were tried:
    allpairspy leaves 494 of these pairs out, since it does not look ahead under constraints; covertable holds all in as
    many rows, but takes half a minute for pairs.
    """
    generator = random.Random(seed)
    left = {
        (*zip(axes, values, strict=True),)
        for axes in combinations(AXES, strength)
        for values in product(*(AXES[axis] for axis in axes))
        if fits(dict(zip(axes, values, strict=True)))
    } | {
        tuple(part.items())
        for part in (
            {"method": method, "target": TOYS[0], "verifier": verifier}
            for method in AXES["method"]
            for verifier in AXES["verifier"]
        )
        if fits(part)
    }  # so that the law is looked at for each way in which the trees of a method are verified
    rows = []
    for first in generator.sample(sorted(left, key=repr), len(left)):
        if first in left:
            row = completed(dict(first), left, strength, generator)
            left.discard(first)  # where no row can hold it
            if row is not None:
                rows.append(row)
                left.difference_update(combinations(row.items(), strength), combinations(row.items(), 3))
    return rows


def completed(begun, left, strength, generator, tries=100):
    """A row that has the values of a part, and many combinations of `left`; None where none was found."""
    for attempt in range(tries):
        row = dict(begun)
        for axis in ["method", *generator.sample([*AXES], len(AXES))]:  # the method is in most of what does not fit
            if axis not in row:
                values = [value for value in AXES[axis] if fits(row | {axis: value}, axis)]
                if not values:
                    break
                generator.shuffle(values)
                if attempt < tries // 4:  # what brings most may lead nowhere
                    values.sort(key=lambda value: -brings(row, axis, value, left, strength))
                row[axis] = values[0]
        if len(row) == len(AXES):
            return {axis: row[axis] for axis in AXES}
    return None


def brings(row, axis, value, left, strength):
    """How many combinations of `left` a part of a row would hold by one more value."""
    there = [(name, row[name]) if name in row else (axis, value) for name in AXES if name in row or name == axis]
    place = there.index((axis, value))
    ahead, behind = there[:place], there[place + 1 :]
    return sum((*others[:k], (axis, value), *others[k:]) in left
               for others in combinations(ahead + behind, strength - 1)
               for k in [sum(other in ahead for other in others)])  # fmt: skip


def at_random(count, seed):
    """So many rows of random values that go together."""
    generator, rows = random.Random(seed), []
    while len(rows) < count:
        row = completed({}, (), 1, generator)
        rows += [row] if row is not None else []
    return rows


def name_of(row):
    """A row in words, without what is usual."""
    usual = {
        axis: values[0] for axis, values in AXES.items() if axis not in ("method", "draft", "target", "temperature")
    }
    return ", ".join(
        f"{axis} {value}" if axis in ("draft", "tree", "verifier", "drafted at") else f"{axis}" if value is True
        else f"T {value}" if axis == "temperature" else str(value)
        for axis, value in row.items() if value != usual.get(axis)
    )  # fmt: skip
