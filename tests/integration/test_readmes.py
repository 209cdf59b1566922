"""What the READMEs show runs: every Python block, every command, and every link leads somewhere."""

import inspect
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from heavypath.kernels.typical import acceptance
from heavypath.kernels.verifying import traversal
from heavypath.speculative import METHODS, DistilSettings, methods
from heavypath.speculative.cli import distil, planning
from heavypath.speculative.cli.app import main
from heavypath.speculative.methods import LOSSLESS_FOR, REJECTION, VERIFIERS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
RESEARCH = ROOT / "docs" / "research.md"
READMES = [*(ROOT / folder / "README.md" for folder in (".", "speculative", "kernels")), RESEARCH]
MOST_LINES = 130  # of the first one, and of that for researchers


def blocks(language: str) -> list:
    """Every fenced block of a language, known by its file and place."""
    found = []
    for readme in READMES:
        pattern = rf"^```{language}\n(.*?)^```$"
        for number, match in enumerate(re.finditer(pattern, readme.read_text(encoding="utf-8"), re.S | re.M)):
            place = readme.parent.name if readme.parent != ROOT else "root"
            name = f"{'research' if readme == RESEARCH else place} {number}"
            found.append(pytest.param(match[1], id=name))
    return found


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<README>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("sh"))
def test_a_shell_block_is_made_of_commands_that_run(block, tmp_path, monkeypatch, capsys, any_noise):
    """Targets of the Makefile exist; the heavypath command runs here, one line after the other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_prompts.txt").write_text("def read(self, size=-1):\n    return self\n" * 20)
    # A calibration of a few seconds instead of a minute.
    brief = {"sizes": (1, 2, 6), "tokens": 6, "sequences": 3, "batch_sizes": [1, 2], "limit": 5.0}
    measure = planning.measure
    monkeypatch.setattr(planning, "measure", lambda *models, **given: measure(*models, **given | brief))
    # A training of a few steps, on a few of the files.
    (tmp_path / "kernels").symlink_to(ROOT / "kernels" / "trees")
    few = {"length": 64, "tokens_per_step": 256, "epochs": 0.1, "written": 0.02}
    monkeypatch.setattr(distil, "DistilSettings", lambda **given: DistilSettings(**given | few))
    for line in block.splitlines():
        command, *arguments = shlex.split(line, comments=True) or [""]
        match Path(command).name:
            case "":
                continue
            case "make":
                done = subprocess.run(["make", "-n", "-C", ROOT, *arguments], capture_output=True, check=False)
                assert done.returncode == 0, line
            case "heavypath":
                assert main(arguments) == 0, line
            case _:
                pytest.fail(f"neither a target of the Makefile nor the heavypath command: {line}")


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(readme):
    text = readme.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        assert "://" in link or (readme.parent / link).exists(), link
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", text):
        page = (readme.parent / link).read_text(encoding="utf-8") if link else text
        headings = re.findall(r"^#+ (.*)$", page, re.M)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{link}#{anchor}"


def test_files_named_in_readmes_exist_and_the_first_one_is_short_and_begins_with_a_picture_and_the_state_of_things():
    lines = READMES[0].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    assert "![" in "\n".join(lines[:10])
    assert "GPU" in "\n".join(lines[:10])
    for readme in READMES:
        pattern = r"`((?:\.\./)?(?:[a-z_]+/)+[a-z_0-9]+\.(?:py|sh|json|png|svg))`"
        for name in re.findall(pattern, readme.read_text("utf-8")):
            assert (readme.parent / name).exists() or (ROOT / name).exists(), f"{readme}: {name}"


def test_the_page_for_researchers_has_all_methods_verifiers_and_papers_and_the_tests_that_it_names():
    text = RESEARCH.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    rows = {
        words[1] for words in (line.split("`") for line in text.splitlines()) if words[0] == "| " and len(words) > 2
    }
    assert {*METHODS, *LOSSLESS_FOR, *VERIFIERS, "typical"} - {"without_replacement", "with_replacement"} <= rows
    assert all(f"`rejection` (`{draw}`)" in text for draw in REJECTION)
    sources = [inspect.getsource(module) for module in (methods, traversal, acceptance)]
    papers = {paper for source in sources for paper in re.findall(r"arXiv[ \n#]+(\d{4}\.\d{5})", source)}
    assert len(papers) >= 11
    assert papers <= {*re.findall(r"arXiv (\d{4}\.\d{5})", text)}
    for name in re.findall(r"`(?:tests/)?(test_\w+\.py)`", text):
        assert [*(ROOT / "tests").rglob(name)], name
