"""llama.cpp from a package that pip gets: how it is built, what of it is missing, and how long it takes for a text."""

import importlib.util
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gguf_export import spelled, tokens_spelled

PACKAGE = "llama-cpp-python==0.3.36"  # options of its programs have changed between versions
FOLDER = Path.home() / ".cache/heavypath/llama.cpp"
COMPLETION, SPECULATIVE, SIMPLE = "llama-completion", "llama-speculative", "llama-speculative-simple"
PROGRAMS = (COMPLETION, SPECULATIVE, SIMPLE)
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_EXAMPLES=ON",
)
TRIES = 3  # the speculative programs end, now and then, before their figures are printed
MILLISECONDS = re.compile(r" eval time =\s+([\d.]+) ms /\s+(\d+) runs")
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")


class Asked(NamedTuple):
    """What a way to decode is asked for. No text ends early."""

    new_tokens: int
    temperature: float
    threads: int
    seed: int


class Timed(NamedTuple):
    """How many tokens the seconds were spent on, and the tokens of the text, of which there may be a few more."""

    tokens: int
    seconds: float
    text: list[int]


class Drafting(NamedTuple):
    """The most tokens that llama.cpp drafts at a time; it stops before one that is less likely than `least`."""

    depth: int
    least: float = 0.0

    def __str__(self) -> str:
        return f"{self.depth}" if self.least == 0 else f"{self.depth}, {self.least}"


Runner = Callable[[list[int], Asked], Timed]


def missing(folder: Path) -> list[str]:
    """The names of what is missing: of the programs in a folder, and of the package that writes weights for them."""
    programs = [name for name in PROGRAMS if not (folder / name).is_file()]
    return programs + ["gguf"] * (importlib.util.find_spec("gguf") is None)


def how_to_get(lacking: list[str], folder: Path) -> str:
    """What is left out for want of these, and how to get them."""
    lines = [f"without {', '.join(lacking)}; the others are measured all the same"] if lacking else []
    if {*lacking} & {*PROGRAMS}:
        lines += [
            f"llama.cpp: expected its programs in {folder}. Give --llama-cpp the folder where they are, or --build, "
            "which needs cmake and a C++ compiler, takes 6 minutes on two cores, and runs",
            *(f"    {command}" for command in build_commands()),
        ]
    if "gguf" in lacking:
        lines.append("gguf writes the weights for llama.cpp: pip install '.[peers]', or pip install 'gguf>=0.17'")
    return "\n".join(lines)


def build_commands() -> list[str]:
    """The shell commands that build llama.cpp in FOLDER."""
    return [" ".join(command) for command in (_download(), ("tar", "-xzf", _archive(), "-C", f"{FOLDER}"), *_cmake())]


def build() -> Path:
    """Download and build llama.cpp. Returns the folder of its programs. Raises CalledProcessError if that fails."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(_download(), check=True)
    with tarfile.open(_archive()) as archive:
        archive.extractall(FOLDER, filter="data")
    for command in _cmake():
        subprocess.run(command, check=True)
    return FOLDER / "bin"


def _download() -> tuple[str, ...]:
    return (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
        "--dest",
        f"{FOLDER}",
        PACKAGE,
    )


def _archive() -> str:
    return f"{FOLDER}/{PACKAGE.replace('-', '_').replace('==', '-')}.tar.gz"


def _cmake() -> tuple[tuple[str, ...], ...]:
    source = f"{_archive().removesuffix('.tar.gz')}/vendor/llama.cpp"
    return (
        ("cmake", "-S", source, "-B", f"{FOLDER}", *CMAKE_OPTIONS),
        ("cmake", "--build", f"{FOLDER}", "--parallel", "2", "--target", *PROGRAMS),
    )


def plain_runner(folder: Path, target: Path) -> Runner:
    """llama-completion: "eval time", which is that of its forward passes of one token; the prompt yields the first."""

    def run(prompt: list[int], asked: Asked) -> Timed:
        options = ("-no-cnv", "--no-display-prompt", "--simple-io", "--perf")
        text, found = _output([f"{folder / COMPLETION}", "-m", f"{target}", *options], prompt, asked, MILLISECONDS)
        return Timed(int(found[2]), float(found[1]) / 1e3, text)

    return run


def speculative_runner(folder: Path, program: str, models: tuple[Path, Path], drafting: Drafting) -> Runner:
    """llama-speculative or llama-speculative-simple: "decoded", all that they do after the prompt's forward passes.

    models: target and draft. Flash attention is off: several tokens a forward pass take a fifth less time so.
    """
    target, draft = models
    kind = ("--spec-type", "draft-simple") if program == SIMPLE else ()
    limits = ("--spec-draft-n-max", f"{drafting.depth}", "--spec-draft-p-min", f"{drafting.least}")
    options = ("-m", f"{target}", "-md", f"{draft}", *kind, *limits, "-fa", "off")

    def run(prompt: list[int], asked: Asked) -> Timed:
        text, found = _output([f"{folder / program}", *options], prompt, asked, DECODED)
        return Timed(int(found[1]), int(found[1]) / float(found[2]), text[len(prompt) :])

    return run


def _output(
    command: Sequence[str], prompt: list[int], asked: Asked, figures: re.Pattern[str]
) -> tuple[list[int], re.Match[str]]:
    """The tokens that a program prints, and its figures. Raises RuntimeError if it prints none several times."""
    room = len(prompt) + asked.new_tokens + 64
    whole = [
        *command,
        *("-p", spelled(prompt), "-n", f"{asked.new_tokens}", "-c", f"{max(512, room)}", "--ignore-eos"),
        *("-t", f"{asked.threads}", "-s", f"{asked.seed}"),
        *("--samplers", "temperature", "--temp", f"{asked.temperature}"),
    ]
    for _ in range(TRIES):
        done = subprocess.run(whole, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        found = figures.search(done.stderr) or figures.search(done.stdout)
        if done.returncode == 0 and found is not None:
            return tokens_spelled(done.stdout), found
    raise RuntimeError(
        f"expected figures like {figures.pattern!r} from {command[0]}, got none in {TRIES} runs, the last with status "
        f"{done.returncode}; run it by hand:\n{' '.join(whole)}\n{done.stderr[-1000:]}"
    )
