"""Find and read the files of a head's checkpoint, in a folder or in the Hugging Face cache.

From the hub, only config.json and the first available kind of weight files are fetched.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.hub import cached_file

from heavypath.speculative.files.hub import PART
from heavypath.speculative.files.typed_json import weight_map

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class CheckpointFiles(NamedTuple):
    """The files of a checkpoint. folder: the folder or name as it was requested, for messages"""

    folder: str
    config: Path
    weights: tuple[Path, ...]


def find_files(
    path_or_name: str | Path,
    revision: str | None = None,
    local_files_only: bool = False,
    weights: Sequence[str] = WEIGHTS,
) -> CheckpointFiles:
    """Find the files of a checkpoint by its folder or its name on the hub.

    revision, local_files_only: for a name, as in transformers' `from_pretrained`
    weights: file names to look for; the first that exists is used

    Raises FileNotFoundError for files that are missing or cannot be fetched, and ValueError for an invalid index.
    """
    name = str(path_or_name)
    folder = Path(name).expanduser()
    where = str(folder) if folder.is_dir() else name

    errors: list[Exception] = []

    def find(file: str) -> Path | None:
        try:
            found = cached_file(where, file, revision=revision, local_files_only=local_files_only)
        except (OSError, ValueError) as error:
            errors.append(error)
            return None
        return None if found is None else Path(found)

    config = find("config.json")
    if config is None:
        raise FileNotFoundError(
            f"the head {name!r} is neither a folder with a config.json nor a model in the Hugging Face cache"
            f"{'' if local_files_only else ' or on the hub'}; give such a folder, or fetch it first with `hf download`"
        ) from (errors or [None])[-1]
    first = next((path for path in map(find, weights) if path is not None), None)
    if first is None:
        raise FileNotFoundError(
            f"no weights of the head {name!r} were found; expected one of {', '.join(weights)}"
        ) from (errors or [None])[-1]
    if first.suffix != ".json":
        return CheckpointFiles(name, config, (first,))
    shards: dict[str, Path] = {}
    for file in sorted({*weight_map(first).values()}):
        shard = find(file)
        if shard is None:
            raise FileNotFoundError(f"the head {name!r} lacks {file!r}, which {first.name} names; fetch it again")
        shards[file] = shard
    return CheckpointFiles(name, config, tuple(shards.values()))


def find_beside(files: CheckpointFiles, name: str) -> Path | None:
    """The path of another file of a checkpoint; None if there is none."""
    if (path := files.config.with_name(name)).is_file():
        return path
    if Path(files.folder).expanduser().is_dir():
        return None
    try:
        found = cached_file(files.folder, name)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def check_all_is_read(files: CheckpointFiles, but: str = "") -> None:
    """Raise ValueError for further files that hold tensors and are not read, except the one named `but`."""
    beside = {path.name for path in files.config.parent.iterdir() if PART.fullmatch(path.name)}
    unread = sorted(beside - {path.name for path in files.weights} - {but})
    if unread:
        raise ValueError(
            f"beside the weights there is {', '.join(unread)}, which is not read; put its tensors into the weights by "
            "their names, or move it away if the draft is whole without it"
        )


def read_pickle(path: Path) -> Any:
    """The content of a pickle of tensors and plain values. Raises ValueError for any other content."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:
        raise ValueError(f"cannot read the weights in {str(path)!r}: {error}") from error


def read_tensors(files: CheckpointFiles) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, on the CPU. Pickles may contain only tensors."""
    tensors: dict[str, Tensor] = {}
    for path in files.weights:
        if path.suffix != ".safetensors":
            tensors |= read_pickle(path)
            continue
        try:
            tensors |= load_file(path)
        except Exception as error:
            raise ValueError(f"cannot read the weights in {str(path)!r}: {error}") from error
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not isinstance(name, str):
            raise ValueError(f"{name!r} in {files.folder!r} is a {type(tensor).__name__}; expected tensors by name")
        if not tensor.ndim:
            raise ValueError(
                f"{name!r} in {files.folder!r} is a single number; no tensor of a draft that is understood is one, so "
                "that it is of another kind"
            )
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            raise ValueError(
                f"{name!r} in {files.folder!r} is {tensor.layout} of shape {[*tensor.shape]} on {tensor.device}; "
                "expected tensors that are not empty, and have all their numbers in the file"
            )
    return tensors


def tensor_names(files: CheckpointFiles) -> set[str]:
    """The names of all tensors. Tensors are not read, except from pickles."""
    if any(path.suffix != ".safetensors" for path in files.weights):
        return {*read_tensors(files)}
    names: set[str] = set()
    for path in files.weights:
        try:
            with safe_open(path, framework="pt") as opened:
                names |= {*opened.keys()}
        except SafetensorError as error:
            raise ValueError(f"cannot read the weights in {str(path)!r}: {error}") from error
    return names
