"""The picture of a step: draft, one target forward, verification, caches. It is a real step of the shipped pair."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import quiet_demo_pair
from svg import Drawing

from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.output.trace import read_trace
from heavypath.speculative.trees.drawing import layout

PROMPT, NODES, TEMPERATURE = "def read_lines(path):", 8, 0.6
WIDTH, MARGIN, CARD_WIDTH, CARD_HEIGHT = 880.0, 16.0, 416.0, 268.0
LETTER, BOX = 7.9, 26.0  # the width of a letter and the height of a token's box
LONGEST = 11  # letters of a token in the picture
READABLE = 40  # letters of all drafted tokens together: most of them are whole words
FATES = {  # of a node: the colours of its box, and the word below it
    "root": ("panel", "ink", ""),
    "accepted": ("accepted-tint", "accepted", "accepted"),
    "rejected": ("rejected-tint", "rejected", "rejected"),
    "elder": ("panel", "edge", ""),
    "parent": ("panel", "edge", ""),
    "recovered": ("recovered-tint", "recovered", "recovered"),
    "bonus": ("bonus-tint", "bonus", "bonus"),
}


class Step(NamedTuple):
    """A step of decoding: the text before it, the tree with each node's token, and what the verifier made of it."""

    text: str
    tree: TokenTree
    tokens: list[str]
    fates: list[str]
    path: list[int]
    next_token: str
    kind: str


def draw(path: Path) -> None:
    """Draw it to this file."""
    step = next(steps_worth_showing())
    drawing = Drawing(WIDTH, 3 * MARGIN + 2 * CARD_HEIGHT, "One step of tree speculative decoding")
    below, right = 2 * MARGIN + CARD_HEIGHT, 2 * MARGIN + CARD_WIDTH
    draw_draft(Card(drawing, MARGIN, MARGIN, 1, "The draft proposes a tree"), step)
    draw_forward(Card(drawing, right, MARGIN, 2, "The target scores it in one forward pass"), step)
    draw_verification(Card(drawing, MARGIN, below, 3, "The verifier keeps a path + one token"), step)
    draw_caches(Card(drawing, right, below, 4, "Both caches keep the rows of that path"), step)
    drawing.save(path)


def steps_worth_showing() -> Iterator[Step]:
    """Steps that reject the root's first child and accept a later one and its child, with words that one can read."""
    target, draft, tokenizer = quiet_demo_pair()
    decoder = SpeculativeDecoder(target, draft, "sequoia", tree_size=NODES, verifier="rejection")
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(100):
            file = Path(folder, "trace.jsonl")
            decoder.generate(
                prompt, 64, temperature=TEMPERATURE, seed=seed, eos_token_id=None, trace=file, tokenizer=tokenizer
            )
            text, texts = PROMPT, {}
            for record in read_trace(file)[1]:
                texts |= record["texts"]
                step = as_step(record, texts, text)
                readable = all(map(is_word, step.tokens[1:])) and sum(map(len, step.tokens[1:])) >= READABLE
                if readable and len(step.path) > 2 and step.fates[1] == "rejected":
                    yield step
                text += "".join(record["pieces"])


def as_step(record: dict[str, Any], texts: dict[str, str], text: str) -> Step:
    return Step(
        text=text,
        tree=TokenTree(record["parents"], record["ranks"]),
        tokens=[texts.get(str(token), "") for token in record["tokens"]],
        fates=record["fates"],
        path=record["path"],
        next_token=texts[str(record["next"])],
        kind=record["kind"],
    )


def is_word(token: str) -> bool:
    return token.isprintable() and token.strip() != "" and len(token) <= LONGEST


def shown(token: str) -> str:
    """A token as it is written in the picture: its spaces and line ends are visible."""
    visible = token.replace("\n", "⏎").replace(" ", "·")
    return visible if len(visible) <= LONGEST else visible[:4] + "…"


class Card:
    """One of the four parts, with its number and title."""

    def __init__(self, drawing: Drawing, left: float, top: float, number: int, title: str):
        self.drawing, self.left, self.top = drawing, left, top
        drawing.rect(left, top, CARD_WIDTH, CARD_HEIGHT, fill="panel", stroke="line", radius=10)
        drawing.circle(left + 26, top + 26, 12, fill="target")
        drawing.text(left + 26, top + 31, str(number), colour="panel", size=14, anchor="middle", style="bold")
        drawing.text(left + 46, top + 31.5, title, size=15, style="bold")

    def note(self, content: str) -> None:
        """A line at the bottom."""
        self.drawing.text(self.left + 16, self.top + CARD_HEIGHT - 15, content, colour="dim", size=13)


def token_box(drawing: Drawing, x: float, y: float, token: str, fate: str, width: float) -> None:
    """A token in its box, whose middle is at x, y."""
    fill, stroke, _ = FATES[fate]
    thickness = 1.2 if stroke == "edge" else 2
    drawing.rect(x - width / 2, y - BOX / 2, width, BOX, fill=fill, stroke=stroke, thickness=thickness, radius=6)
    drawing.text(x, y + 4.5, shown(token), size=13, anchor="middle", style="mono")


def box_width(token: str) -> float:
    return max(30.0, LETTER * len(shown(token)) + 12)


def places(step: Step, with_next: bool) -> list[tuple[float, float, float]]:
    """x, y and the width of each node's box within a card; the next token, last, is a child of the path's end."""
    parents, ranks = step.tree.parents.tolist(), step.tree.ranks.tolist()
    depths, tokens = step.tree.depths.tolist(), list(step.tokens)
    if with_next:
        parents, ranks = [*parents, step.path[-1]], [*ranks, NODES]
        depths, tokens = [*depths, depths[step.path[-1]] + 1], [*tokens, step.next_token]
    half = BOX / 2 + 8
    ys = layout(parents, ranks, [half] * len(parents), [half] * len(parents))
    middle = (min(ys) + max(ys)) / 2
    widths = [box_width(token) for token in tokens]
    levels = [
        max(width for width, depth in zip(widths, depths, strict=True) if depth == level)
        for level in range(max(depths) + 1)
    ]
    gap = (CARD_WIDTH - 32 - sum(levels)) / max(1, len(levels) - 1)
    lefts = [16 + sum(levels[:level]) + min(gap, 40) * level for level in range(len(levels))]
    return [
        (lefts[depth] + width / 2, CARD_HEIGHT / 2 + 10 + y - middle, width)
        for depth, y, width in zip(depths, ys, widths, strict=True)
    ]


def draw_edges(card: Card, parents: list[int], at: list[tuple[float, float, float]], kept: dict[int, str]) -> None:
    """Edges from each node's parent; kept: nodes whose edge is drawn in a colour of its own."""
    for node in sorted(range(1, len(parents)), key=kept.__contains__):
        (x, y, width), (from_x, from_y, from_width) = at[node], at[parents[node]]
        begin, end = card.left + from_x + from_width / 2, card.left + x - width / 2
        y, from_y, middle = card.top + y, card.top + from_y, (begin + end) / 2
        card.drawing.path(
            f"M{begin:g} {from_y:g}C{middle:g} {from_y:g} {middle:g} {y:g} {end:g} {y:g}",
            stroke=kept.get(node, "edge"),
            thickness=2.6 if node in kept else 1.3,
        )


def draw_draft(card: Card, step: Step) -> None:
    at, parents = places(step, with_next=False), step.tree.parents.tolist()
    draw_edges(card, parents, at, {})
    for node, (x, y, width) in enumerate(at):
        token_box(card.drawing, card.left + x, card.top + y, step.tokens[node], "root" if node == 0 else "elder", width)
        if node:
            card.drawing.text(
                card.left + x - width / 2 + 1, card.top + y - BOX / 2 - 3, str(node), size=11, colour="dim"
            )
    card.note("The root is the last token of the text.")


def draw_forward(card: Card, step: Step) -> None:
    """The mask: a row for each node, and what it sees."""
    cell, left, top, text = 21.0, card.left + 138, card.top + 64, 92.0
    drawing, mask, end = card.drawing, step.tree.mask(), step.tree.subtree_end.tolist()
    drawing.rect(left, top, text, NODES * cell, fill="target-tint", stroke="target")
    drawing.text(left + text / 2, top + NODES * cell / 2 + 5, "text so far", size=13.5, anchor="middle")
    for node in range(NODES):
        y = top + (node + 0.5) * cell
        drawing.text(left - 30, y + 4.5, shown(step.tokens[node]), size=13, anchor="end", style="mono")
        drawing.text(left - 14, y + 4.5, str(node), size=11, anchor="middle", colour="dim")
        drawing.text(left + text + (node + 0.5) * cell, top - 6, str(node), size=11, anchor="middle", colour="dim")
        for other in range(NODES):
            seen = bool(mask[node, other])
            drawing.rect(
                left + text + other * cell + 1, top + node * cell + 1, cell - 2, cell - 2, radius=3,
                fill="target" if seen else "page", stroke="none" if seen else "line",
            )  # fmt: skip
    card.note("Every node sees the text, its ancestors and itself.")
    assert all(bool(mask[row, node]) == (node <= row < end[node]) for row in range(NODES) for node in range(NODES))


def draw_verification(card: Card, step: Step) -> None:
    at, parents = places(step, with_next=True), [*step.tree.parents.tolist(), step.path[-1]]
    colour = FATES[step.kind][1]
    draw_edges(card, parents, at, dict.fromkeys(step.path[1:], "accepted") | {NODES: colour})
    for node, (x, y, width) in enumerate(at):
        token, fate = (step.tokens[node], step.fates[node]) if node < NODES else (step.next_token, step.kind)
        token_box(card.drawing, card.left + x, card.top + y, token, fate, width)
        word = FATES[fate][2]
        if word:
            y += BOX / 2 + 13
            card.drawing.text(card.left + x, card.top + y, word, size=12, anchor="middle", colour=FATES[fate][1])
    card.note("The text keeps exactly the target's distribution.")


def draw_caches(card: Card, step: Step) -> None:
    drawing, left, text, cell = card.drawing, card.left + 16, 100.0, 35.5
    before, after = card.top + 62, card.top + 146
    columns = {node: left + text + node * cell for node in range(NODES)}
    for top in (before, after):
        drawing.rect(left, top, text, 32, fill="target-tint", stroke="target")
        drawing.text(left + text / 2, top + 21, "text so far", size=13.5, anchor="middle")
    for node, x in columns.items():
        kept = node in step.path
        drawing.rect(
            x, before, cell, 32, fill="accepted-tint" if kept else "panel", stroke="accepted" if kept else "edge",
        )  # fmt: skip
        drawing.text(x + cell / 2, before + 21, str(node), size=13.5, anchor="middle", colour="ink" if kept else "dim")
    for place in range(NODES):
        x, kept = columns[place], place < len(step.path)
        drawing.rect(
            x, after, cell, 32, fill="accepted-tint" if kept else "none", stroke="accepted" if kept else "edge",
            dashes="" if kept else "3 3",
        )  # fmt: skip
        if kept:
            node = step.path[place]
            drawing.text(x + cell / 2, after + 21, str(node), size=13.5, anchor="middle")
            begin, end = columns[node] + cell / 2, x + cell / 2
            drawing.arrow(
                f"M{begin:g} {before + 34:g}C{begin:g} {before + 60:g} {end:g} {after - 28:g} {end:g} {after - 4:g}",
                stroke="accepted",
            )
    y = after + 62
    drawing.text(left, y, "text +", size=13.5, colour="dim")
    x = left + 48
    emitted = [*((step.tokens[node], "accepted") for node in step.path[1:]), (step.next_token, step.kind)]
    for token, fate in emitted:
        width = box_width(token)
        token_box(drawing, x + width / 2, y - 4.5, token, fate, width)
        x += width + 5
    card.note(f"{len(emitted)} tokens from one forward pass. The last is the next root.")
