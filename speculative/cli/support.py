"""What the commands share: their options, loading, progress, and what they say of the machine."""

import importlib.metadata
import json
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console

from heavypath.speculative.loading import Pair, load_pair

KERNELS = ("tree_attention", "heavy_path_order", "gumbel_topk", "verify_tree", "commit", "compact_cache")

MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; > 0 samples.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens; 0 for all.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens that reach this probability.")]
Target = Annotated[str | None, typer.Option(help="Folder, or name in the Hugging Face cache.")]
Draft = Annotated[
    str | None, typer.Option(help="The same for the draft model; or prompt-lookup, or early-exit:LAYERS.")
]
TreeSize = Annotated[int | None, typer.Option(min=2, help="Nodes of the drafted tree; default: 5 on a CPU.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def environment() -> dict:
    """Versions, device, threads and which implementation each kernel runs with here."""
    cuda = torch.cuda.is_available()
    return {
        "heavypath": importlib.metadata.version("heavypath"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "transformers": transformers.__version__,
        "device": f"cuda ({torch.cuda.get_device_name()})" if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "kernels": dict.fromkeys(KERNELS, "Triton" if cuda else "reference"),
    }


def load(target: str | None = None, draft: str | None = None) -> Pair:
    """Load without the libraries' chatter: what matters is raised."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with progress("loading the models"):
        return load_pair(target, draft)


def encode(pair: Pair, text: str) -> torch.Tensor:
    """LongTensor[1, T] on the target's device."""
    ids = pair.tokenizer(text, return_tensors="pt")["input_ids"]
    assert isinstance(ids, torch.Tensor)
    return ids.to(pair.target.device)


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], object]]:
    """A status line on standard error while the block runs, if that is a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text) as status:
            yield status.update
    else:
        yield lambda line: None


def print_json(content: dict) -> None:
    """One object on one line of standard output."""
    typer.echo(json.dumps(content))
