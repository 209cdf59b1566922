"""A trace as one HTML page that needs nothing else: each step's tree, what was accepted, and why the rest was not.

The page is `page.html`, which draws the steps as they are looked at; here its data are put together: the trace in
fewer letters, and where each node stands, by the layout of `tree_drawing`. All text is escaped, and the page only ever
sets it as text.
"""

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from heavypath.speculative.output.reasons import FATES, WITH_COINS
from heavypath.speculative.trees.drawing import layout

TEMPLATE = Path(__file__).with_name("page.html")
TALL, LITTLE = 24.0, 13.0  # half of what a node takes on its level, and of one that is shown in brief
MANY = 32  # nodes, above which those beside the path are shown in brief

# How a method says that the target's token was the node's, was another ("@"), or came after refused drafts.
_SAMPLED = {
    "accepted": "The target's own sample here is this token.",
    "other": "The target's sample here is another token, @.",
    "recovered": "The target's sample was drawn without regard to the drafts, and was none of them.",
}
_WEIGHED = {
    "accepted": "",
    "other": "",
    "recovered": "It is drawn from what the rejected drafts left of the target's distribution.",
}
_WORDS = {
    "greedy": {
        "accepted": "It is the target's likeliest token here.",
        "other": "The target's likeliest token here is another, @.",
        "recovered": "The target's likeliest token was none of them.",
    },
    "race": {
        "accepted": "It is what the target samples here with the same noise that drew the drafts.",
        "other": "With the noise that drew this draft, the target samples another token here, @.",
        "recovered": "With the noise that drew them, the target samples this token, which was none of them.",
    },
    "target_sample": _SAMPLED,
}

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
    """The page of a trace, as `read_trace` gives it; ValueError for one without steps."""
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
        "legend": _LEGEND[header["verify"] in WITH_COINS],
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


def _compact(step: Mapping[str, Any], shape: int) -> dict[str, Any]:
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
    """The nodes that are shown with their probabilities in figures, the next token last."""
    beside = len(step["fates"]) <= MANY
    reached = (node for node, fate in enumerate(step["fates"]) if fate not in ("parent", "absent"))
    return [node for node in reached if beside or node in step["path"]] + [len(step["fates"])]


def _heights(step: Mapping[str, Any], tall: list[int]) -> list[int]:
    """Where each node, and the next token as the last child of the path's end, stands across the levels."""
    halves = [TALL if node in tall else LITTLE for node in range(len(step["fates"]) + 1)]
    parents, ranks = [*step["parents"], step["path"][-1]], [*step["ranks"], len(step["ranks"])]
    return [round(height) for height in layout(parents, ranks, halves, halves)]


def _facts(header: Mapping[str, Any]) -> str:
    facts = {"target": _model(header["target"])}
    if header["draft"] is not None:
        facts["draft"] = _model(header["draft"])
    facts["target sampled at"] = _sampling(header["filters"])
    if header["draft"] is not None and header["draft_filters"] != header["filters"]:
        facts["draft at"] = _sampling(header["draft_filters"])
    facts["seed"] = str(header["seed"])
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items())


def _model(model: Mapping[str, Any]) -> str:
    if "parameters" not in model:
        return model["name"]
    millions = model["parameters"] / 1e6
    size = f"{millions / 1000:.3g}B" if millions >= 1000 else f"{millions:.3g}M"
    named = f"{model['name']}: " if model["name"] not in ("", "target", "draft") else ""
    return f"{named}{model['type']}, {model['layers']} layer{'s' * (model['layers'] != 1)}, {size}"


def _sampling(filters: Mapping[str, Any]) -> str:
    given = [f"{name.replace('_', '-')} {value}" for name, value in filters.items() if value is not None]
    return ", ".join(given)


def _notes(header: Mapping[str, Any]) -> str:
    notes = [
        "The draft proposes the tree, the target scores all of it at once, and the path in green is kept, with one "
        "more token of the target's own: <em>recovered</em> where drafts were refused, a <em>bonus</em> below a leaf. "
        "The two bars of a node are the probabilities of its token after the one before it."
    ]
    if header["shown"] != header["filters"]:
        notes.append("At temperature 0 there is no distribution: the probabilities are those of temperature 1.")
    elif header["draft_shown"] != header["draft_filters"]:
        notes.append("The draft takes its likeliest tokens: its probabilities are those of temperature 1.")
    notes.append(
        "<kbd>←</kbd> <kbd>→</kbd> <kbd>Home</kbd> <kbd>End</kbd> go through the steps, <kbd>Tab</kbd> through the "
        "nodes; a click on the text or on a bar goes to its step."
    )
    return "".join(f"<p>{note}</p>" for note in notes)
