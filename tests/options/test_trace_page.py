"""The page of a trace is HTML of its own that shows each step, whatever is in the tokens; also in a browser."""

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from heavypath.speculative import METHODS, SpeculativeDecoder, TokenTree
from heavypath.speculative.cli.app import main
from heavypath.speculative.output.page import trace_page
from heavypath.speculative.output.trace import read_trace
from heavypath.speculative.trees.drawing import layout

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
HOSTILE = (
    "</script><script>document.title='taken'</script>", "<img src=x onerror=\"document.title='taken'\">", "&amp;",
    "\u202eback\x00\x1b", " \t\n", "日本語🙂", "'\"`${1}\\", "\ud800", "", "\u2028", "x" * 60,
)  # fmt: skip


class Page(HTMLParser):
    """Which elements there are, in which order they are closed, and what the data are."""

    def __init__(self, page):
        super().__init__()
        self.opened, self.elements, self.data = [], [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "input", "link", "img", "br"):
            self.opened.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        if self.opened[-1:] == ["script"] and data.startswith("{"):
            self.data += data


def read(page):
    """The parsed page and its data."""
    parsed = Page(page)
    assert not parsed.opened
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search("@[A-Z]", page[: page.index('id="data"')])
    return parsed, json.loads(parsed.data)


def recorded(pair, file, method="sequoia", prompts=("def read_lines(path):",), temperature=0.8, **options):
    verifier = "rejection" if METHODS[method].verifiers else None  # other reasons are those of test_verifiers
    decoder = SpeculativeDecoder(pair.target, pair.draft, method, **{"verifier": verifier} | options)
    inputs = pair.tokenizer(list(prompts), return_tensors="pt", padding=True)
    decoder.generate(**inputs, max_new_tokens=24, temperature=temperature, seed=3, trace=file, tokenizer=pair.tokenizer)
    return read_trace(file)


@pytest.fixture(scope="module")
def traced(demo_pair, tmp_path_factory):
    return recorded(demo_pair, tmp_path_factory.mktemp("trace") / "one.jsonl", tree_size=8)


@pytest.fixture(scope="module")
def hostile(traced):
    """The same with other texts for its tokens."""

    def hostile(tokens):
        return [HOSTILE[int(token) % len(HOSTILE)] for token in tokens]

    def changed(step):
        texts = dict(zip(step["texts"], hostile(step["texts"]), strict=True))
        return step | {"texts": texts, "pieces": hostile(step["emitted"])}

    return traced[0] | {"method": "<b>&"}, [*map(changed, traced[1])]


def test_the_page_is_html_that_needs_nothing_from_elsewhere_and_holds_the_trace(traced):
    header, steps = traced
    page = trace_page(header, steps)
    parsed, data = read(page)
    for tag, attributes in parsed.elements:
        assert not {"src", "href", "action", "srcset"} & attributes.keys(), tag
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp", page)
    assert "temperature 0.8" in page
    (sequence,) = data["sequences"]
    assert sequence["text"] == "def read_lines(path):"
    for shown, step in zip(sequence["steps"], steps, strict=True):
        shape = data["shapes"][shown["shape"]]
        assert all(shape[name] == step[name] for name in ("parents", "ranks", "depths"))
        assert [data["fates"][fate] for fate in shown["fates"]] == step["fates"]
        for name in ("tokens", "draft", "target", "path", "next", "kind", "emitted", "pieces"):
            assert shown[name] == step[name]
        for name in ("coins", "thresholds"):
            assert {int(node): value for node, value in shown[name].items()} == {
                node: value for node, value in enumerate(step[name]) if value is not None
            }
    assert {str(token) for step in steps for token in step["tokens"] if token >= 0} <= data["texts"].keys()


def test_nodes_of_a_level_stand_apart_with_the_next_token_below_the_paths_end(traced):
    _, data = read(trace_page(*traced))
    for step in data["sequences"][0]["steps"]:
        shape = data["shapes"][step["shape"]]
        depths = [*shape["depths"], shape["depths"][step["path"][-1]] + 1]
        assert len(step["ys"]) == len(depths)
        half = {node: 20.5 if node in step["tall"] else 12 for node in range(len(depths))}
        for level in set(depths):
            column = sorted((y, half[node]) for node, y in enumerate(step["ys"]) if depths[node] == level)
            for (above, reach), (below, other) in pairwise(column):
                assert below - above > reach + other
    assert layout([-1, 0, 0], [0, 0, 1], [1.0] * 3, [1.0] * 3)[1] < 0


def test_whatever_is_in_tokens_stays_text(hostile):
    parsed, data = read(trace_page(*hostile))
    assert [tag for tag, _ in parsed.elements].count("script") == 2
    assert not any(tag == "img" for tag, _ in parsed.elements)
    assert {HOSTILE[0]} <= {*data["texts"].values()} <= {*HOSTILE}


def test_large_traces_make_small_pages(demo_pair, tmp_path):
    header, steps = recorded(demo_pair, tmp_path / "trace", tree_size=64, temperature=1.0)
    step = max(steps, key=lambda step: len(step["tokens"]))
    assert len(step["tokens"]) == 64
    assert len(json.dumps(step)) < 5000
    assert len(trace_page(header, [step | {"step": number} for number in range(200)])) < 1_000_000


@pytest.mark.parametrize(("method", "temperature"), [("dyspec", 0.8), ("eagle-2", 0.0), ("autoregressive", 0.8)])
def test_every_kind_of_method_has_a_page_with_all_of_its_sequences(method, temperature, demo_pair, tmp_path):
    prompts = ("def read_lines(path):", "class Queue:\n    def __init__(self):")
    trace = recorded(demo_pair, tmp_path / "trace", method, prompts, temperature)
    _, data = read(trace_page(*trace))
    assert [one["text"] for one in data["sequences"]] == list(prompts)
    assert "temperature 1." in trace_page(*trace) or temperature > 0


@pytest.mark.usefixtures("loaded_once")
def test_the_command_line_writes_a_trace_and_its_page(tmp_path, capsys):
    file, out = tmp_path / "run.jsonl", tmp_path / "page.html"
    options = ("--max-new-tokens", "9", "--temperature", "0.8", "--seed", "3")
    assert main(["generate", "def read(self):", *options]) == 0
    text = capsys.readouterr().out
    assert main(["generate", "def read(self):", *options, "--trace", str(file)]) == 0
    assert capsys.readouterr().out == text
    _, steps = read_trace(file)
    assert "".join(piece for step in steps for piece in step["pieces"]) + "\n" == text
    assert main(["trace", str(file), "--out", str(out)]) == 0
    assert main(["trace", str(file)]) == 0
    assert out.read_text() == (tmp_path / "run.html").read_text() == trace_page(*read_trace(file))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(out) in captured.err


@pytest.mark.parametrize(("arguments", "message"), [
    (["trace", "{folder}/header.jsonl"], "the trace has no steps"),
    (["trace", "{folder}/page.html"], "is no trace that `generate` writes"),
    (["trace", "{folder}/trace.html"], "--out must be another file than the trace itself"),
    (["generate", "x", "--trace", "{folder}/missing/trace"], "--trace must be in a folder that exists"),
])  # fmt: skip
def test_mistakes_are_said_in_one_line(arguments, message, traced, tmp_path, capsys):
    (tmp_path / "page.html").write_text(trace_page(*traced))
    (tmp_path / "trace.html").write_text("".join(json.dumps(line) + "\n" for line in (traced[0], *traced[1])))
    (tmp_path / "header.jsonl").write_text(json.dumps(traced[0]) + "\n")
    assert main([argument.format(folder=tmp_path) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# What a person does, one thing after the other, and what the page then says.
VISIT = """
<script>
const said = () => at("said").textContent;
const key = name => document.dispatchEvent(new KeyboardEvent("keydown", {key: name}));
const canvas = at("stage"), tree = canvas.firstElementChild;
const seen = {title: document.title, opened: at("number").textContent + " " + at("of").textContent,
  address: location.hash, canvas: [canvas.clientWidth, canvas.clientHeight],
  tree: [tree.getBoundingClientRect().width, tree.getBoundingClientRect().height],
  ready: Number(document.documentElement.dataset.ready), steps: []};
addEventListener("error", event => { seen.error = event.message; });
key("Home");
for (const one of data.sequences[0].steps) {
  const groups = [...document.querySelectorAll(".node")], sentences = [], places = new Set();
  for (const group of groups) {
    group.dispatchEvent(new FocusEvent("focus"));
    sentences.push(said());
    places.add(JSON.stringify(groups[0].getBoundingClientRect()));
  }
  seen.steps.push({
    number: at("number").textContent,
    figures: at("figures").textContent,
    classes: groups.map(group => group.getAttribute("class")),
    labels: groups.map(group => group.querySelector("text").textContent),
    now: [...document.querySelectorAll("#text .now")].map(piece => piece.textContent),
    places: places.size,
    sentences,
  });
  key("ArrowRight");
}
at("slider").value = 1;
at("slider").dispatchEvent(new Event("input"));
seen.slid = at("number").textContent;
document.querySelectorAll(".node")[1].dispatchEvent(new MouseEvent("click"));
seen.held = document.querySelectorAll(".node.held").length;
seen.wide = document.documentElement.scrollWidth - innerWidth;
const answer = document.createElement("pre");
answer.id = "answer";
answer.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(seen).toWellFormed())));
document.body.append(answer);
</script>
"""


def visited(page, folder):
    """What a browser saw of it."""
    file = folder / "visited.html"
    file.write_text(page.replace("</body>", f"{VISIT}</body>"), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1280,900"]
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, timeout=60, check=True)
    answer = re.search('<pre id="answer">([^<]*)</pre>', done.stdout.decode())
    assert answer, done.stderr.decode()[-2000:]
    return json.loads(base64.b64decode(answer[1]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")
def test_a_browser_shows_each_step_and_says_why(traced, tmp_path):
    header, steps = traced
    seen = visited(trace_page(header, steps), tmp_path)
    assert "error" not in seen
    assert seen["title"] == "sequoia, step by step - Heavypath"
    assert (seen["slid"], seen["held"]) == ("step 2", 1)
    assert seen["wide"] <= 0
    tokens = 0
    for index, (step, shown) in enumerate(zip(steps, seen["steps"], strict=True)):
        assert shown["number"] == f"step {index + 1}"
        assert shown["places"] == 1  # nothing moves away from under the pointer
        nodes = len(step["tokens"])
        assert len(shown["sentences"]) == nodes + 1
        visible = "".join(step["pieces"]).replace("\n", "⏎\n").replace("\t", "⇥\t")
        assert "".join(shown["now"]) == visible
        tokens += len(step["emitted"])
        assert shown["figures"].startswith(
            f"So far{tokens / (index + 1):.2f}tokens per forward pass of the target{tokens}"
        )
        for node, fate in enumerate(step["fates"]):
            assert fate in shown["classes"][node].split()
            begin = {
                "root": "Root.", "accepted": "Accepted.", "rejected": "Rejected.", "elder": "Not tried.",
                "parent": "Not reached.", "absent": "Absent.",
            }[fate]  # fmt: skip
            assert begin in shown["sentences"][node]
            if step["coins"][node] is not None:
                than = "is below" if fate == "accepted" else "is not below"
                assert f"Its coin, {step['coins'][node]:g}, {than} its threshold" in shown["sentences"][node]
        assert step["kind"] in shown["classes"][nodes]
        expected = {"recovered": "Recovered.", "bonus": "Bonus.", "plain": "No draft."}[step["kind"]]
        assert expected in shown["sentences"][nodes]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")
def test_a_browser_says_in_whose_share_the_coin_of_held_siblings_lies(demo_pair, tmp_path):
    shape = {"tree": TokenTree.from_branching([3, 2]), "verifier": "held"}
    header, steps = recorded(demo_pair, tmp_path / "trace", "rsd-c", temperature=1.0, **shape)
    seen = visited(trace_page(header, steps), tmp_path)
    assert "error" not in seen
    told = set()
    for step, shown in zip(steps, seen["steps"], strict=True):
        for node, fate in enumerate(step["fates"]):
            if step["coins"][node] is None:
                continue
            family = [one for one, parent in enumerate(step["parents"]) if parent == step["parents"][node]]
            ends = [step["thresholds"][one] for one in sorted(family, key=step["ranks"].__getitem__)]
            begin = max([0, *ends[: step["ranks"][node]]])
            told.add(fate)
            expected = {
                "accepted": "lies in its share",
                "rejected": "lies behind its share",
                "beyond": "Its own share is",
            }
            assert expected[fate] in shown["sentences"][node]
            assert f"from {begin:g} to {step['thresholds'][node]:g}." in shown["sentences"][node]
    assert told == {"accepted", "rejected", "beyond"}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")
def test_the_page_opens_on_the_first_step_with_a_canvas_that_fits_a_small_tree(demo_pair, tmp_path):
    header, steps = recorded(demo_pair, tmp_path / "trace", tree_size=4)
    steps = [step for step in steps if step["tokens"] and -1 not in step["tokens"]]  # trees of one shape
    seen = visited(trace_page(header, steps), tmp_path)
    assert seen["opened"] == f"step 1 of {len(steps)}"
    assert seen["address"] == "#1.1"
    (width, height), (tree_width, tree_height) = seen["canvas"], seen["tree"]
    assert tree_height > height - 16
    assert tree_width > width / 2


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path")
def test_a_browser_runs_nothing_that_is_in_tokens(hostile, tmp_path):
    seen = visited(trace_page(*hostile), tmp_path)
    assert "error" not in seen
    assert seen["title"] == "<b>&, step by step - Heavypath"
    labels = {label for step in seen["steps"] for label in step["labels"]}
    assert {"</script><scrip…", r"\u202eback\x00\…", "·⇥⏎", "日本語🙂", "&amp;", r"\ud800", "∅", r"\u2028"} <= labels
