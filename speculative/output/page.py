"""Make one self-contained HTML page from a trace: each step's tree, what was accepted, and why the rest was not.

`page.html` draws a step when the reader looks at it. This module prepares the page's data: the trace in a shorter form,
and the position of each node from `trees.drawing.layout`. All text is escaped, and the page's script inserts it only as
text.
"""

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from heavypath.speculative.decoding.rules import OWN
from heavypath.speculative.output.reasons import FATES, WITH_COINS
from heavypath.speculative.trees.drawing import layout

TEMPLATE = Path(__file__).with_name("page.html")
TALL = 24.0  # half the height of a node
LITTLE = 13.0  # half the height of a node that is shown without figures
MANY = 32  # in larger trees, nodes that are not on the path are shown without figures

# For each verification: sentences about an accepted node, about a node whose token the target did not choose ("@" is
# the token that it chose), and about a recovered token.
_SAMPLED = {
    "accepted": "The target's own sample here is this token.",
    "other": "The target's sample here is another token, @.",
    "recovered": "The target's sample is drawn independently of the drafts, and is none of them.",
}
_WEIGHED = {
    "accepted": "",
    "other": "",
    "recovered": "It is drawn from the part of the target's distribution that the rejected drafts have left.",
}
_WORDS = {
    "greedy": {
        "accepted": "It is the target's likeliest token here.",
        "other": "The target's likeliest token here is another, @.",
        "recovered": "The target's likeliest token is none of them.",
    },
    "race": {
        "accepted": "It is what the target samples here with the same noise that drew the drafts.",
        "other": "With the noise that drew this draft, the target samples another token here, @.",
        "recovered": "With the noise that drew the drafts, the target samples this token, which is none of them.",
    },
    "target_sample": _SAMPLED,
    "held": {
        "accepted": "",
        "other": "",
        "recovered": "It is drawn from the part of the target's distribution that the drafts have left.",
    },
    "typical": {
        "accepted": "The target finds it likely enough.",
        "other": "",
        "recovered": "It is drawn from the target's distribution here.",
    },
    OWN: {
        "accepted": "So a verifier decided that gives no reasons.",
        "other": "",
        "recovered": "A verifier that gives no reasons drew this token.",
    },
}

# The legend's labels and styles, for verifications with coins (True) and without.
_LEGEND = {
    True: [
        ("accepted", "accepted"),
        ("rejected", "rejected"),
        ("not tried or not reached", "edge"),
        ("recovered", "recovered"),
        ("bonus", "bonus"),
        ("draft's probability", "draft"),
        ("target's", "target"),
    ],
    False: [
        ("accepted", "accepted"),
        ("not the target's token", "edge"),
        ("not reached", "unreached"),
        ("recovered", "recovered"),
        ("bonus", "bonus"),
        ("draft's probability", "draft"),
        ("target's", "target"),
    ],
}


def trace_page(header: Mapping[str, Any], steps: list[dict[str, Any]]) -> str:
    """The text of an HTML page about a trace. header, steps: from `read_trace`. Raises ValueError without steps."""
    if not steps:
        raise ValueError("the trace has no steps: its generation stopped before the first")
    sequences = [
        {"id": one["id"], "text": one.get("text"), "prompt": [] if "text" in one else one["prompt"], "steps": []}
        for one in header["sequences"]
    ]
    texts: dict[str, str] = {}
    shapes: dict[str, int] = {}
    for step in steps:
        texts |= step.get("texts", {})
        shape = json.dumps({name: step[name] for name in ("parents", "ranks", "depths")}, separators=(",", ":"))
        sequences[step["sequence"]]["steps"].append(_compact(step, shapes.setdefault(shape, len(shapes))))
    data = {
        "verify": header["verify"],
        "coins": header["verify"] in WITH_COINS,
        "masses": header["draft_filters"]["temperature"] == 0,
        "fates": FATES,
        "words": {"method": _WORDS.get(header["verify"], _WEIGHED)},
        "legend": _legend(header["verify"]),
        "texts": texts,
        "shapes": [json.loads(shape) for shape in shapes],
        "sequences": [one for one in sequences if one["steps"]],
    }
    title = f"{header['method']}, step by step"
    contents = {
        "TITLE": escape(f"{title} - Heavypath"),
        "HEADING": escape(title),
        "FACTS": _facts(header),
        "NOTES": _notes(header),
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub("@([A-Z]+)@", lambda name: contents[name[1]], TEMPLATE.read_text(encoding="utf-8"))


def _legend(verify: str) -> list[tuple[str, str]]:
    """The legend of a page: labels, each with its style. verify: the header's name of the verification."""
    legend = _LEGEND[verify in WITH_COINS]
    edge = {OWN: "not accepted", "typical": "not accepted", "held": "not taken or not reached"}
    return [(edge.get(verify, words) if style == "edge" else words, style) for words, style in legend]


def _compact(step: Mapping[str, Any], shape: int) -> dict[str, Any]:
    """A step of the trace in the form that the page's script takes.

    shape: the index of the tree's shape (parents, ranks, depths) in the page's list of shapes
    """
    tall = _tall(step)
    small = {
        "step": step["step"],
        "shape": shape,
        "ys": _heights(step, tall),
        "tall": tall,
        "fates": [FATES.index(fate) for fate in step["fates"]],
        "coins": {node: coin for node, coin in enumerate(step["coins"]) if coin is not None},
        "thresholds": {node: bound for node, bound in enumerate(step["thresholds"]) if bound is not None},
        "nextTarget": step["next_target"],
    }
    for name in ("tokens", "draft", "target", "path", "chosen", "next", "kind", "emitted", "pieces"):
        if name in step:
            small[name] = step[name]
    return small


def _tall(step: Mapping[str, Any]) -> list[int]:
    """The indices of the nodes that are drawn with figures, and last the number of nodes, for the next token."""
    all_nodes = len(step["fates"]) <= MANY
    reached = (node for node, fate in enumerate(step["fates"]) if fate not in ("parent", "absent"))
    return [node for node in reached if all_nodes or node in step["path"]] + [len(step["fates"])]


def _heights(step: Mapping[str, Any], tall: list[int]) -> list[int]:
    """The vertical position of each node and of the next token, which is drawn as the last child of the path's end."""
    halves = [TALL if node in tall else LITTLE for node in range(len(step["fates"]) + 1)]
    parents = [*step["parents"], step["path"][-1]]
    ranks = [*step["ranks"], len(step["ranks"])]
    return [round(height) for height in layout(parents, ranks, halves, halves)]


def _facts(header: Mapping[str, Any]) -> str:
    """The HTML below the heading: models, sampling and seed."""
    facts = {"target": _model(header["target"])}
    if header["draft"] is not None:
        facts["draft"] = _model(header["draft"])
    facts["target sampled at"] = sampling_in_words(header["filters"])
    if header["draft"] is not None and header["draft_filters"] != header["filters"]:
        facts["draft sampled at"] = sampling_in_words(header["draft_filters"])
    if header.get("law_changed_by"):
        facts["output distribution"] = f"changed by {header['law_changed_by']}"
    facts["seed"] = str(header["seed"])
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items())


def _model(model: Mapping[str, Any]) -> str:
    """A model of the trace's header in words: its name, type, layers and parameters, as far as known."""
    if not {"type", "layers", "parameters"} <= model.keys():
        return model["name"]
    millions = model["parameters"] / 1e6
    size = f"{millions / 1000:.3g}B" if millions >= 1000 else f"{millions:.3g}M"
    named = f"{model['name']}: " if model["name"] not in ("", "target", "draft") else ""
    return f"{named}{model['type']}, {model['layers']} layer{'s' * (model['layers'] != 1)}, {size}"


def sampling_in_words(filters: Mapping[str, Any]) -> str:
    """Filters, {name: value or None}, as text: "temperature 0.8, top-k 50"."""
    given = [f"{name.replace('_', '-')} {value}" for name, value in filters.items() if value is not None]
    return ", ".join(given)


def _notes(header: Mapping[str, Any]) -> str:
    """The HTML at the foot of the page: how to read and use it."""
    notes = [
        "The draft proposes the tree, the target scores all of it at once, and the path in green is kept. One more "
        "token, sampled from the target, follows it: <em>recovered</em> if drafts were refused, a <em>bonus</em> below "
        "a leaf. The two bars of a node are its token's probabilities after the token above it."
    ]
    if header["shown"] != header["filters"]:
        notes.append("At temperature 0 there is no distribution: probabilities are shown for temperature 1.")
    elif header["draft_shown"] != header["draft_filters"]:
        notes.append("The draft proposes its most probable tokens: its probabilities are shown for temperature 1.")
    notes.append(
        "<kbd>←</kbd> <kbd>→</kbd> <kbd>Home</kbd> <kbd>End</kbd> go through the steps, <kbd>Tab</kbd> through the "
        "nodes; a click on the text or on a bar goes to its step."
    )
    return "".join(f"<p>{note}</p>" for note in notes)
