"""What the documentation shows runs: every Python block, every command; links lead somewhere, and the site builds."""

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from heavypath.kernels.verifying import traversal
from heavypath.speculative import METHODS, DistilSettings, calibration, methods
from heavypath.speculative.cli import distil
from heavypath.speculative.cli.app import main
from heavypath.speculative.decoding import typical
from heavypath.speculative.methods import LOSSLESS_FOR, REJECTION, VERIFIERS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(*languages: str) -> list:
    """Every fenced block of these languages, known by its page and place."""
    found = []
    for page in PAGES:
        pattern = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
        for number, match in enumerate(re.finditer(pattern, page.read_text(encoding="utf-8"), re.S | re.M)):
            found.append(pytest.param(match[1], id=f"{page.relative_to(ROOT)} {number}"))
    return found


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<page>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("sh", "console"))
def test_a_shell_block_is_made_of_commands_that_run(block, tmp_path, monkeypatch, capsys, any_noise):
    """Targets of the Makefile exist; the heavypath command runs here, scripts of a clone in processes of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_prompts.txt").write_text("def read(self, size=-1):\n    return self\n" * 20)
    # A calibration of a few seconds instead of a minute.
    brief = {"sizes": (1, 2, 6), "tokens": 6, "sequences": 3, "batch_sizes": [1, 2], "limit": 600.0}
    measure = calibration.calibrate
    monkeypatch.setattr(calibration, "calibrate", lambda *models, **given: measure(*models, **given | brief))
    # A training of a few steps, on a few of the files.
    (tmp_path / "kernels").symlink_to(ROOT / "kernels" / "trees")
    few = {"length": 64, "tokens_per_step": 256, "epochs": 0.1, "written": 0.02}
    monkeypatch.setattr(distil, "DistilSettings", lambda **given: DistilSettings(**given | few))
    prompts = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    for line in prompts or block.splitlines():  # of a console what stands after its prompts
        command, *arguments = shlex.split(line, comments=True) or [""]
        match Path(command).name:
            case "":
                continue
            case "make":
                done = subprocess.run(["make", "-n", "-C", ROOT, *arguments], capture_output=True, check=False)
                assert done.returncode == 0, line
            case "heavypath":
                assert main(arguments) == 0, line
            case "python":
                script = [sys.executable, ROOT / arguments[0], *arguments[1:]]
                done = subprocess.run(script, capture_output=True, text=True, check=False)
                assert done.returncode == 0, f"{line}: {done.stderr}"
            case _:
                pytest.fail(f"no target of the Makefile, heavypath command or script of a clone: {line}")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """As GitHub shows pages; the site's own links are checked where it is built."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        assert "://" in link or (page.parent / link).exists(), link
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", text):
        if "://" in link:
            continue
        linked = (page.parent / link).read_text(encoding="utf-8") if link else text
        headings = re.findall(r"^#+ (.*)$", linked, re.M)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{link}#{anchor}"


def test_files_named_on_pages_exist_and_the_readme_begins_with_a_picture_and_the_state_of_things():
    lines = PAGES[0].read_text(encoding="utf-8").splitlines()
    assert "![" in "\n".join(lines[:10])
    assert "GPU" in "\n".join(lines[:12])
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        pattern = r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|sh|json|png|svg|md|cpp|h))`"
        for name in re.findall(pattern, page.read_text("utf-8")):
            assert (ROOT / name).exists(), f"{page}: {name}"


def test_the_site_builds_without_a_warning_and_loads_its_styles_and_scripts_from_itself(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.rglob("*.html")}
    assert {path.relative_to(DOCS) for path in PAGES[1:]} <= made
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<(?:link rel=\"stylesheet\" href|script src)=\"https?:", front)
    reference = (tmp_path / "reference" / "kernels.html").read_text(encoding="utf-8")
    assert "<li><p><code>query</code>:" in reference or "<li><code>query</code>:" in reference, "fields are lists"


def test_the_tables_are_those_of_the_results():
    check = [sys.executable, "-m", "cogapp", "-I", "bench", "--check", *PAGES]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"`make docs-tables` writes them anew: {done.stdout}{done.stderr}"


def test_the_page_for_researchers_has_all_methods_verifiers_and_papers_and_the_tests_that_it_names():
    text = (DOCS / "research.md").read_text(encoding="utf-8")
    named = [line.split("`") for line in text.splitlines()]
    rows = {words[1] for words in named if words[0] == "| " and len(words) > 2}
    assert {*METHODS, *LOSSLESS_FOR, *VERIFIERS, "typical"} - {"without_replacement", "with_replacement"} <= rows
    assert all(f"`rejection` (`{draw}`)" in text for draw in REJECTION)
    sources = [inspect.getsource(module) for module in (methods, traversal, typical)]
    papers = {paper for source in sources for paper in re.findall(r"arXiv[ \n#]+(\d{4}\.\d{5})", source)}
    assert len(papers) >= 11
    assert papers <= {*re.findall(r"arXiv (\d{4}\.\d{5})", text)}
    for name in re.findall(r"`(?:tests/)?(test_\w+\.py)`", text):
        assert [*(ROOT / "tests").rglob(name)], name
