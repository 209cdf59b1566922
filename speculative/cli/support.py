"""What the commands share: options, loading, a status line, and the facts about this installation."""

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

MaxNewTokens = Annotated[int, typer.Option(min=1, help="The largest number of tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; > 0 samples.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens; 0 for all.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens that reach this probability.")]
Target = Annotated[str | None, typer.Option(help="The target model: a folder, or a name in the Hugging Face cache.")]
Draft = Annotated[
    str | None, typer.Option(help="The draft model, given alike; or prompt-lookup, or early-exit:LAYERS.")
]
TreeSize = Annotated[
    int | None, typer.Option(min=2, help="Nodes of the drafted tree; default: 5 on a CPU, 32 on a GPU.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def installation() -> dict:
    """The versions that are installed, the device, the threads, and the implementation that each kernel has here."""
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
    """Load the models without the libraries' warnings and progress bars; what matters is raised as an error."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with progress("loading the models"):
        return load_pair(target, draft)


def encode(pair: Pair, text: str) -> torch.Tensor:
    """The tokens of a text, LongTensor[1, T] on the target's device."""
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
    """Write one JSON object, in one line, to standard output."""
    typer.echo(json.dumps(content))
