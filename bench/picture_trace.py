"""The picture of a trace: the page that `heavypath trace` makes, in Chromium, cropped to its text and its tree."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from heavypath.speculative.output.trace import read_trace

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROMPT = "def read_lines(path):"
GENERATE = ("--method", "dyspec", "--tree-size", "12", "--temperature", "0.6", "--max-new-tokens", "48", "--seed", "0")
WIDTH, WINDOW, SCALE = (
    836,
    1200,
    1.6,
)  # the picture's width and the window's height; pixels of the picture for one of these
# Everything but the text and the tree is hidden, and these take the room they need.
CROP = """
<style>
header, .time, aside, footer { display: none !important; }
main { padding: 12px !important; gap: 12px !important; max-width: none !important; }
.split { grid-template-columns: minmax(0, 1fr) !important; }
#text, .stage { max-height: none !important; overflow: hidden !important; }
#text { font-size: 15px !important; }
</style>
"""
MEASURE = '<script>document.title = "height " + Math.ceil(document.querySelector("main").offsetHeight);</script>'


def draw(path: Path) -> None:
    """Draw it to this file, a PNG. Raises RuntimeError where there is no Chromium."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RuntimeError(f"the picture of a trace needs Chromium: none of {', '.join(BROWSERS)} is on the path")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, page = folder / "run.jsonl", folder / "run.html"
        heavypath("generate", PROMPT, *GENERATE, "--trace", str(trace))
        heavypath("trace", str(trace))
        step = step_worth_showing(trace)
        cropped = page.read_text(encoding="utf-8").replace("</body>", CROP + MEASURE + "</body>")
        page.write_text(cropped, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--user-data-dir={folder / 'profile'}", f"--window-size={WIDTH},{WINDOW}"]
        address = f"{page.as_uri()}#1.{step + 1}"
        height = re.search(r"<title>height (\d+)</title>", run(browser, *options, "--dump-dom", address))
        if height is None:
            raise RuntimeError("Chromium did not show the page")
        shot = folder / "page.png"
        run(browser, *options, f"--force-device-scale-factor={SCALE}", f"--screenshot={shot}", address)
        save_small(shot, path, round(SCALE * int(height[1])))


def heavypath(*words: str) -> None:
    run(sys.executable, "-m", "heavypath.speculative", *words)


def run(*command: str) -> str:
    """What a command prints. It raises an error with what the command says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def step_worth_showing(trace: Path) -> int:
    """The first step that accepts two nodes, rejects one and writes more than spaces; else the last step."""
    steps = read_trace(trace)[1]
    for number, step in enumerate(steps):
        if len(step["path"]) > 2 and "rejected" in step["fates"] and "".join(step["pieces"]).strip():
            return number
    return len(steps) - 1


def save_small(source: Path, path: Path, height: int) -> None:
    """Save the upper part of a picture with 128 colours, which takes a third of the bytes."""
    from PIL import Image  # comes with matplotlib

    with Image.open(source) as image:
        upper = image.convert("RGB").crop((0, 0, image.width, min(height, image.height)))
        upper.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
