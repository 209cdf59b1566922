"""What the scripts of this folder share: options, facts about the machine, the shipped pair and the file of results."""

import argparse
import json
import platform
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
import triton
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heavypath.speculative import METHODS, TokenTree, load_demo_pair
from heavypath.speculative.demo import DemoPair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PICTURE = "draw a picture to this file, a .png or .svg (needs matplotlib)"


def argument_parser(
    description: str | None, *, threads: bool = True, device: bool = False, plot: str | None = None
) -> argparse.ArgumentParser:
    """A parser with --json, which every script has, and those of --threads, --device and --plot that are asked for.

    description: the script's docstring, which --help prints as it is. plot: the help text of --plot.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if threads:
        parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch, on a CPU")
    if device:
        parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--miniature", action="store_true", help="the least that runs every line, to try the script")
    if plot is not None:
        parser.add_argument("--plot", type=Path, metavar="PATH", help=plot)
    return parser


@contextmanager
def until_stopped() -> Iterator[None]:
    """SIGINT and SIGTERM end the block, and no more: what has been measured until then is printed behind it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print("stopped before the end; this is what there is:", flush=True)


def clock_of(device: str) -> Callable[[], float]:
    """A clock in seconds. For a GPU it waits until that has done all it was given: phases can be told apart."""

    def when_done() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return when_done if torch.device(device).type == "cuda" else time.perf_counter


def environment(device: str = DEVICE) -> dict:
    """The device, the threads and the versions that results depend on."""
    return {
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }


def processor() -> str:
    """The name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write_results(path: Path | None, facts: dict, **results: object) -> None:
    """Write a file of results: the environment first, then the results by name. Nothing is written without a path.

    A list or an object that holds no other stands on one line.
    """
    if path is not None:
        text = json.dumps({"environment": facts, **results}, indent=1)
        text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda innermost: _on_one_line(innermost[0]), text)
        made(path).write_text(text + "\n")


def made(path: Path) -> Path:
    """The path of a file to be written, whose folder is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _on_one_line(text: str) -> str:
    return re.sub(r"\n\s*", "", re.sub(r",\n\s*", ", ", text))


def quiet_demo_pair(device: str = "cpu") -> DemoPair:
    """The shipped pair; transformers prints neither warnings nor progress from then on."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return load_demo_pair(device=device)


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], device: str = "cpu") -> list[Tensor]:
    """The tokens of each text, LongTensor[1, T]."""
    return [tokenizer(text, return_tensors="pt").input_ids.to(device) for text in texts]


def random_tree(nodes: int, seed: int = 0) -> TokenTree:
    """A random recursive tree: the parent of each node is uniform over the nodes before it."""
    generator = torch.Generator().manual_seed(seed)
    return TokenTree([-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes))])


def paper_verifier(method: str) -> str | None:
    """The verifier by which a method is what its paper has, for SpeculativeDecoder: None where it has that anyway."""
    return "rejection" if METHODS[method].verifiers else None
