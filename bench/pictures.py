"""The pictures of docs/: a step, what the order of nodes does to attention, and the page of a trace.

    python bench/pictures.py --plot docs/images [--only step]

step   pictures-step.svg: draft, target forward, verification and caches, drawn from a real step of the shipped pair
order  pictures-order.svg: one tree, its ancestor mask and its blocks, in insertion order and in heavy-path order
ranks  pictures-ranks.svg: what trees bring to a target split over 1 to 64 devices, simulated
trace  pictures-trace.png: the page that `heavypath trace` makes, cropped to its text and its tree. It needs Chromium
       (apt-get install chromium), and Pillow, which comes with matplotlib
"""

import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import argument_parser, figure_of, made, quiet_demo_pair, random_tree
from simulation.formulas import Setting, Simulated, simulate
from simulation.hardware import DEVICES
from simulation.shapes import SHAPES

from heavypath.speculative import SpeculativeDecoder, TokenTree
from heavypath.speculative.output.trace import read_trace
from heavypath.speculative.trees.drawing import layout
from heavypath.speculative.trees.tails import of_any_pair

COLOURS = {
    "target": "#2b6cb8",
    "accepted": "#0f7a57",
    "bonus": "#5947c2",
    "recovered": "#a84e06",
    "rejected": "#b0364a",
}
INK, DIM, EDGE, TINT = "#23272d", "#5f6672", "#c0c4ca", "#cfe0f3"
PROMPT, NODES, TEMPERATURE = "def read_lines(path):", 8, 0.6
LONGEST, READABLE = 11, 40  # letters of a token in the picture; of all drafted ones: most of them are whole words
ORDERED, BLOCK = 96, 8  # nodes of the tree that is ordered, of a block
TARGET, DEVICE, RANKS = "llama-2-70b", "a100-40gb", (1, 2, 4, 8, 16, 32, 64)
DRAFTS = {"llama-2-7b": "target", "tinyllama-1.1b": "accepted"}  # and the colours of their lines
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TRACED = ("--method", "dyspec", "--tree-size", "12", "--temperature", "0.6", "--max-new-tokens", "48", "--seed", "0")
WIDTH, WINDOW, SCALE = 836, 1200, 1.6  # of the page; pixels of the picture for one of these
# Everything but the text and the tree is hidden, and these take the room they need.
CROP = """
<style>
header, .time, aside, footer { display: none !important; }
main { padding: 12px !important; gap: 12px !important; max-width: none !important; }
.split { grid-template-columns: minmax(0, 1fr) !important; }
#text, .stage { max-height: none !important; overflow: hidden !important; }
#text { font-size: 15px !important; }
</style>
<script>document.title = "height " + Math.ceil(document.querySelector("main").offsetHeight);</script>
</body>"""


def save(figure: Any, path: Path) -> None:
    """As an SVG whose texts are texts, on a light page, with nothing in it that changes from run to run."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(made(path), metadata={"Date": None}, facecolor="#f7f6f3")


class Step(NamedTuple):
    """A step of decoding: the tree with each node's token, and what the verifier made of it."""

    tree: TokenTree
    tokens: list[str]
    fates: list[str]
    path: list[int]
    next_token: str
    kind: str


def steps_worth_showing() -> Iterator[Step]:
    """Steps that reject the root's first child and accept a later one and its child, with words that one can read."""
    target, draft, tokenizer = quiet_demo_pair()
    decoder = SpeculativeDecoder(target, draft, "sequoia", tree_size=NODES, verifier="rejection")
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    options: dict[str, Any] = {"temperature": TEMPERATURE, "eos_token_id": None, "tokenizer": tokenizer}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(100):
            file, texts = Path(folder, "trace.jsonl"), {}
            decoder.generate(prompt, 64, seed=seed, trace=file, **options)
            for record in read_trace(file)[1]:
                texts |= record["texts"]
                tokens = [texts.get(str(token), "") for token in record["tokens"]]
                tree = TokenTree(record["parents"], record["ranks"])
                step = Step(tree, tokens, record["fates"], record["path"], texts[str(record["next"])], record["kind"])
                readable = all(map(is_word, tokens[1:])) and sum(map(len, tokens[1:])) >= READABLE
                if readable and len(step.path) > 2 and step.fates[1] == "rejected":
                    yield step


def is_word(token: str) -> bool:
    return token.isprintable() and token.strip() != "" and len(token) <= LONGEST


def shown(token: str) -> str:
    """A token as it is written in the picture: its spaces and line ends are visible."""
    visible = token.replace("\n", "⏎").replace(" ", "·")
    return visible if len(visible) <= LONGEST else visible[:4] + "…"


def draw_step(path: Path) -> None:
    step = next(steps_worth_showing())
    figure = figure_of(11, 7)
    draft, forward, verified, caches = figure.subplots(2, 2).flatten()
    titles = {
        draft: ("1  The draft proposes a tree", "The root is the last token of the text."),
        forward: ("2  The target scores it in one forward pass", "Every node sees the text, its ancestors and itself."),
        verified: ("3  The verifier keeps a path + one token", "The text keeps exactly the target's distribution."),
        caches: ("4  Both caches keep the rows of that path",
                 f"{len(step.path)} tokens from one forward pass. The last is the next root."),
    }  # fmt: skip
    for axes, (title, note) in titles.items():
        axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
        axes.set_xlabel(note, loc="left", color=DIM)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color(EDGE)
    parents, ranks = step.tree.parents.tolist(), step.tree.ranks.tolist()
    boxes(draft, parents, ranks, step.tokens, {}, {node: str(node) for node in range(1, NODES)})
    end = step.path[-1]
    fates = {node: fate for node, fate in enumerate([*step.fates, step.kind]) if fate in COLOURS}
    boxes(verified, [*parents, end], [*ranks, NODES], [*step.tokens, step.next_token], fates, fates)
    draw_forward(forward, step)
    draw_caches(caches, step)
    save(figure, path)


def boxes(
    axes: Any, parents: Sequence[int], ranks: Sequence[int], tokens: Sequence[str], fates: Mapping[int, str],
    words: Mapping[int, str],
) -> None:  # fmt: skip
    """A tree from left to right: each node's token in a box of its fate's colour, with a word below it."""
    ys = layout(parents, ranks, [0.5] * len(parents), [0.5] * len(parents))
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    for node, parent in enumerate(parents):
        colour = COLOURS.get(fates.get(node, ""), DIM)
        if node:
            kept = fates.get(node, "rejected") != "rejected"
            line = [depths[parent], depths[node]], [ys[parent], ys[node]]
            axes.plot(*line, color=colour if kept else EDGE, linewidth=2.4 if kept else 1.2, zorder=1)
        look = {"boxstyle": "round", "facecolor": "white", "edgecolor": colour, "linewidth": 1.6}
        axes.text(depths[node], ys[node], shown(tokens[node]), ha="center", va="center", family="monospace", bbox=look)
        beside = {"textcoords": "offset points", "ha": "center", "va": "center", "size": 8, "color": colour}
        axes.annotate(words.get(node, ""), (depths[node], ys[node]), (0, -18), **beside)
    axes.set(xlim=(-0.5, max(depths) + 0.6), ylim=(max(ys) + 1.3, min(ys) - 0.9))


def draw_forward(axes: Any, step: Step) -> None:
    """The mask: a row for each node, and what it sees."""
    mask, end = step.tree.mask(), step.tree.subtree_end.tolist()
    assert all(bool(mask[row, node]) == (node <= row < end[node]) for row in range(NODES) for node in range(NODES))
    axes.imshow(mask.numpy(), cmap="Blues", vmin=0, vmax=1.4, extent=(0, NODES, NODES, 0), aspect="auto")
    axes.axvspan(-4, 0, color=TINT)
    axes.text(-2, NODES / 2, "text so far", ha="center", va="center")
    axes.set(xlim=(-4, NODES), yticks=[node + 0.5 for node in range(NODES)], xticks=[])
    axes.set_yticklabels([f"{shown(token)}  {node}" for node, token in enumerate(step.tokens)], family="monospace")
    axes.hlines(range(NODES), 0, NODES, EDGE, linewidth=0.6)
    axes.vlines(range(NODES), 0, NODES, EDGE, linewidth=0.6)


def draw_caches(axes: Any, step: Step) -> None:
    """Rows of a cache before, and the same behind compaction."""
    for y in (0, 2):
        axes.barh(y, 3, left=-3, height=0.7, color=TINT)
        axes.text(-1.5, y, "text so far", ha="center", va="center")
    for node in range(NODES):
        place = step.path.index(node) if node in step.path else None
        colour = EDGE if place is None else COLOURS["accepted"]
        axes.barh(0, 1, left=node, height=0.7, facecolor="white", edgecolor=colour, linewidth=1.4)
        axes.text(node + 0.5, 0, str(node), ha="center", va="center", color=INK if place is not None else DIM)
        kept = node < len(step.path)
        look = {"edgecolor": COLOURS["accepted"] if kept else EDGE, "linestyle": "-" if kept else ":"}
        axes.barh(2, 1, left=node, height=0.7, facecolor="white", linewidth=1.4, **look)
        if place is not None:
            axes.text(place + 0.5, 2, str(node), ha="center", va="center")
            arrow = {"arrowstyle": "->", "color": COLOURS["accepted"]}
            axes.annotate("", (place + 0.5, 1.6), (node + 0.5, 0.4), arrowprops=arrow)
    emitted = [step.tokens[node] for node in step.path[1:]] + [step.next_token]
    axes.text(-3, 3.1, "text + " + "  ".join(map(shown, emitted)), va="center", family="monospace")
    axes.set(ylim=(3.6, -0.8), xlim=(-3.2, NODES + 0.2))


def draw_order(path: Path) -> None:
    """The tree, each node over its column of the mask; the mask, and its blocks that are not empty."""
    from matplotlib.colors import ListedColormap

    inserted = random_tree(ORDERED)
    orders = {"Insertion order": inserted, "Heavy-path order": inserted.reordered("heavy_path")[0]}
    figure = figure_of(10, 7)
    panels = figure.subplots(2, 2, height_ratios=(1, 3), sharex="col")
    blocks, whole = ORDERED // BLOCK, (0, ORDERED, ORDERED, 0)
    said = {
        "Insertion order": "A column is a node. The rows that see it are its subtree, scattered over later rows.",
        "Heavy-path order": "In depth-first order a subtree is one interval: its end, an integer, is the whole mask.",
    }
    for (above, below), (name, tree) in zip(panels.T, orders.items(), strict=True):
        heavy, parents, depths = set(heavy_path(tree)), tree.parents.tolist(), tree.depths.tolist()
        for colour, width, kept in ((EDGE, 0.7, False), (COLOURS["recovered"], 1.8, True)):
            own = [node for node in range(1, ORDERED) if (node in heavy) == kept]
            xs = [x for node in own for x in (parents[node] + 0.5, node + 0.5, math.nan)]
            ys = [y for node in own for y in (depths[parents[node]], depths[node], math.nan)]
            above.plot(xs, ys, color=colour, marker=".", markersize=4, linewidth=width)
        count = f"{tree.occupied_blocks(BLOCK)} of {blocks * (blocks + 1) // 2} blocks"
        above.set_title(name, loc="left", fontweight="bold")
        above.set_title(count, loc="right", color=COLOURS["target"], fontweight="bold")
        above.invert_yaxis()
        above.set_axis_off()
        mask = tree.mask()
        occupied = mask.view(blocks, BLOCK, blocks, BLOCK).any(3).any(1)
        below.imshow(occupied.numpy(), cmap=ListedColormap(["white", TINT]), extent=whole, aspect="auto")
        seen = mask.float()
        seen[:, sorted(heavy)] *= 2
        look = ListedColormap([(1, 1, 1, 0), COLOURS["target"], COLOURS["recovered"]])
        below.imshow(seen.numpy(), cmap=look, extent=whole, aspect="auto", interpolation="none")
        below.set_xlabel(said[name], color=DIM, fontsize=8, loc="left")
        below.set(xticks=[], yticks=[])
    figure.supxlabel(
        f"tinted: {BLOCK} x {BLOCK} blocks that attention reads; orange: heavy path, to the child with the largest "
        "subtree", fontsize=9, color=DIM,
    )  # fmt: skip
    save(figure, path)


def heavy_path(tree: TokenTree) -> list[int]:
    """The nodes from the root down, always to the child with the largest subtree."""
    sizes, path = tree.subtree_size, [0]
    while len(children := (tree.parents == path[-1]).nonzero().flatten()):
        path.append(int(children[sizes[children].argmax()]))
    return path


def simulated(draft: str, ranks: int) -> Simulated:
    """The steps of so many ranks."""
    return simulate(Setting(DEVICES[DEVICE], SHAPES[TARGET], SHAPES[draft], ranks=ranks), of_any_pair())


def draw_ranks(path: Path) -> None:
    figure = figure_of(8, 4.4)
    axes = figure.subplots()
    for number, (draft, colour) in enumerate(DRAFTS.items()):
        best = [simulated(draft, count).best for count in RANKS]
        gains = [one.gain for one in best]
        axes.plot(range(len(RANKS)), gains, color=COLOURS[colour], marker="o", label=f"drafted for by {draft}")
        for place, one in enumerate(best):
            beside = (0, 8 if number else -16)
            axes.annotate(
                str(len(one.tree)), (place, one.gain), beside, textcoords="offset points", ha="center", size=8
            )
    axes.axvline(1.5, color=EDGE, linestyle="--")
    axes.text(1.45, 5.5, "read through PCIe", ha="right", color=DIM)
    axes.text(1.55, 5.5, "all in memory, beside a small draft", color=DIM)
    axes.set(xlabel="devices", ylabel="times as fast", ylim=(0.6, 5.8))
    axes.set_xticks(range(len(RANKS)), [str(count) for count in RANKS])
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="center right", frameon=False)
    title = "Llama-2-70B on A100s of 40 GB, simulated: over plain decoding on as many devices\nby the best tree, "
    axes.set_title(title + "of which the dots have the nodes", loc="left", fontsize=9)
    figure.supxlabel(
        "Both drafts are taken to be accepted as often as that of the shipped pair, and are whole on each device.\n"
        "NVLink with 300 GB/s; a small collective of two takes 10 us, and as much for each doubling of the devices.",
        fontsize=8, color=DIM,
    )  # fmt: skip
    save(figure, path)


def draw_trace(path: Path) -> None:
    """In Chromium. Raises RuntimeError where there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RuntimeError(f"the picture of a trace needs Chromium: none of {', '.join(BROWSERS)} is on the path")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, page, shot = folder / "run.jsonl", folder / "run.html", folder / "page.png"
        heavypath = (sys.executable, "-m", "heavypath.speculative")
        run(*heavypath, "generate", PROMPT, *TRACED, "--trace", str(trace))
        run(*heavypath, "trace", str(trace))
        steps = read_trace(trace)[1]
        worth = [number for number, step in enumerate(steps) if len(step["path"]) > 2 and "rejected" in step["fates"]
                 and "".join(step["pieces"]).strip()]  # fmt: skip
        page.write_text(page.read_text(encoding="utf-8").replace("</body>", CROP), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--user-data-dir={folder / 'profile'}", f"--window-size={WIDTH},{WINDOW}"]
        address = f"{page.as_uri()}#1.{[*worth, len(steps) - 1][0] + 1}"
        height = re.search(r"<title>height (\d+)</title>", run(browser, *options, "--dump-dom", address))
        if height is None:
            raise RuntimeError("Chromium did not show the page")
        run(browser, *options, f"--force-device-scale-factor={SCALE}", f"--screenshot={shot}", address)
        save_small(shot, path, round(SCALE * int(height[1])))


def run(*command: str) -> str:
    """What a command prints. It raises an error with what the command says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def save_small(source: Path, path: Path, height: int) -> None:
    """Save the upper part of a picture with 128 colours, which takes a third of the bytes."""
    from PIL import Image  # comes with matplotlib

    with Image.open(source) as image:
        upper = image.convert("RGB").crop((0, 0, image.width, min(height, image.height)))
        upper.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


PICTURES = {
    "ranks": (draw_ranks, "pictures-ranks.svg"),
    "step": (draw_step, "pictures-step.svg"),
    "order": (draw_order, "pictures-order.svg"),
    "trace": (draw_trace, "pictures-trace.png"),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, threads=False, plot="the folder that the pictures go to")
    parser.add_argument("--only", choices=PICTURES, help="one of the pictures")
    arguments = parser.parse_args(argv)
    if arguments.plot is None or arguments.plot.is_file():
        parser.error(f"--plot must be a folder, got {arguments.plot}")
    for name, (draw, file) in PICTURES.items():
        if arguments.only in (None, name):
            try:
                draw(made(arguments.plot / file))
            except RuntimeError as error:
                sys.exit(f"{name}: {error}")
            print(arguments.plot / file)


if __name__ == "__main__":
    main()
