"""The checkpoint of a trained draft: config.json, weights in one file or several, and other files with them.

Every kind of draft reads its checkpoints in these steps:

    Checkpoint        finds the files, in a folder or in the Hugging Face cache, and reads them
    renamed           gives the tensors our names, by a table of prefixes
    check_config      refuses a config.json that describes other weights than there are
    check_tensors     refuses every tensor that is missing, not known, or of another shape, by its name

So nothing is loaded in part: a draft of which some tensors are missing drafts noise, and nothing else would show it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.hub import cached_file

from heavypath.speculative.files.hub import PART, WEIGHTS
from heavypath.speculative.files.typed_json import read_json, weight_map

# Tensors that no draft needs: copies of the target's, and tables of angles, which are computed.
IGNORED = re.compile(r"(verifier_lm_head\.weight|verifier_norm\.weight|(.*\.)?rotary_emb\.inv_freq)$")
_INTEGERS = ("d2t", "t2d")  # tables of tokens; all other tensors are of floating point


class Checkpoint:
    """A config.json, and the files in its folder.

    name: the folder or name as it was requested, for messages
    config: the path of config.json

    Raises FileNotFoundError if there is no config.json, or it cannot be fetched.
    """

    def __init__(self, path_or_name: str | Path, *, revision: str | None = None, local_files_only: bool = False):
        """path_or_name: a folder, or a name on the Hugging Face hub.

        revision, local_files_only: for a name, as in transformers' `from_pretrained`
        """
        self.name = str(path_or_name)
        folder = Path(self.name).expanduser()
        self._where = str(folder) if folder.is_dir() else self.name
        self._options = {"revision": revision, "local_files_only": local_files_only}
        self._found: dict[str, Path | None] = {}
        self._error: Exception | None = None  # the last one of the hub's client, as the cause of our own error
        config = self.find("config.json")
        if config is None:
            raise FileNotFoundError(
                f"the head {self.name!r} is neither a folder with a config.json nor a model in the Hugging Face cache"
                f"{'' if local_files_only else ' or on the hub'}; give such a folder, or fetch it first with "
                "`hf download`"
            ) from self._error
        self.config = config

    def find(self, file: str) -> Path | None:
        """The path of a file, which is looked for once and fetched if it is not in the cache; None if there is none."""
        if file not in self._found:
            try:
                found = cached_file(self._where, file, **self._options)
            except (OSError, ValueError) as error:
                found = None
                self._error = error
            self._found[file] = None if found is None else Path(found)
        return self._found[file]

    def settings(self, kind: Any = dict[str, Any]) -> Any:
        """The content of config.json, checked to be of type `kind`: a dictionary, or a TypedDict of the fields read.

        Raises ValueError, with the field, for a value of another type.
        """
        return read_json(self.config, kind)

    def weights(self, names: Sequence[str] = WEIGHTS["head"]) -> list[Path]:
        """The files of the weights: several if the weights have an index.

        names: file names to look for, of which the first that exists is used

        Raises FileNotFoundError if none exists, or an index names a missing file, and ValueError for an invalid index.
        """
        first = next((path for path in map(self.find, names) if path is not None), None)
        if first is None:
            raise FileNotFoundError(
                f"no weights of the head {self.name!r} were found; expected one of {', '.join(names)}"
            ) from self._error
        if first.suffix != ".json":
            return [first]
        shards = {file: self.find(file) for file in sorted({*weight_map(first).values()})}
        for file, shard in shards.items():
            if shard is None:
                raise FileNotFoundError(
                    f"the head {self.name!r} lacks {file!r}, which {first.name} names; fetch it again"
                )
        return [shard for shard in shards.values() if shard is not None]

    def tensors(self, names: Sequence[str] = WEIGHTS["head"], flags: Sequence[str] = ()) -> dict[str, Tensor]:
        """All tensors by name, on the CPU.

        names: as in `weights`; flags: names of tensors of one bool, which must be true, and are left out

        Raises ValueError for a false flag, for pickles of anything but tensors, and for empty, sparse or 0-dimensional
        tensors.
        """
        tensors: dict[str, Tensor] = {}
        for path in self.weights(names):
            found = _reading(path, load_file) if path.suffix == ".safetensors" else read_pickle(path)
            if not isinstance(found, Mapping):
                raise ValueError(f"{str(path)!r} has a {type(found).__name__}; expected tensors by name")
            tensors |= found
        for name in flags:
            if name in tensors and not bool(tensors.pop(name).all()):
                raise ValueError(f"{name!r} in {self.name!r} is false: it was saved before it was ready for use")
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or not isinstance(name, str):
                raise ValueError(f"{name!r} in {self.name!r} is a {type(tensor).__name__}; expected tensors by name")
            if not tensor.ndim:
                raise ValueError(
                    f"{name!r} in {self.name!r} is a single number; no tensor of a draft that is understood is one, "
                    "so that it is of another kind"
                )
            if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
                raise ValueError(
                    f"{name!r} in {self.name!r} is {tensor.layout} of shape {[*tensor.shape]} on {tensor.device}; "
                    "expected tensors that are not empty, and have all their numbers in the file"
                )
        return tensors

    def shapes(self) -> dict[str, list[int]]:
        """The shapes of all tensors by name. Tensors are not read, except from pickles."""
        paths = self.weights()
        if any(path.suffix != ".safetensors" for path in paths):
            return shapes_of(self.tensors())
        return {name: shape for path in paths for name, shape in _reading(path, _shapes_in).items()}

    def check_all_is_read(self, also: str = "") -> None:
        """Raise ValueError if the folder has files with tensors besides the weights, which would be left out.

        also: name of a file that is read besides the weights
        """
        beside = {path.name for path in self.config.parent.iterdir() if PART.fullmatch(path.name)}
        if unread := sorted(beside - {path.name for path in self.weights()} - {also}):
            raise ValueError(
                f"beside the weights there is {', '.join(unread)}, which is not read; put its tensors into the weights "
                "by their names, or move it away if the draft is whole without it"
            )

    @contextmanager
    def drafting(self, kind: str) -> Iterator[None]:
        """A context in which a ValueError gets the prefix that this checkpoint does not fit the target.

        kind: the kind of draft in words, such as "Medusa heads"
        """
        try:
            yield
        except ValueError as error:
            raise ValueError(f"the {kind} {self.name!r} cannot draft for this target: {error}") from error


def opened(given: str | Path | Checkpoint) -> Checkpoint:
    """The `Checkpoint` of a folder or of a name on the Hugging Face hub; a `Checkpoint` is returned as it is."""
    return given if isinstance(given, Checkpoint) else Checkpoint(given)


def read_pickle(path: Path) -> Any:
    """The content of a pickle of tensors and plain values. Raises ValueError for any other content."""
    return _reading(path, lambda path: torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)))


def our_name(name: str, prefixes: Mapping[str, str]) -> str:
    """A tensor's name with its prefix replaced: each key of `prefixes` with which it begins, in the table's order."""
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return name


def renamed(
    tensors: Mapping[str, Tensor], prefixes: Mapping[str, str], ignored: re.Pattern[str] = IGNORED
) -> dict[str, Tensor]:
    """The tensors by our names, without tensors whose names match `ignored`. prefixes: as in `our_name`.

    Raises ValueError if two get one name, and for tensors of whole numbers, because quantised weights are not read.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        ours = our_name(name, prefixes)
        if ours in found:
            raise ValueError(f"the checkpoint has {ours!r} twice, once as {name!r}; expected one of them")
        if ignored.match(ours):
            continue
        if not tensor.is_floating_point() and (ours not in _INTEGERS or tensor.is_complex()):
            raise ValueError(f"{ours} is {tensor.dtype}; expected floating point: quantised heads are not supported")
        found[ours] = tensor
    return found


def check_config(settings: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise ValueError if config.json gives another value of a setting than was found in the tensors.

    settings: of config.json; found: values by key. A key that config.json lacks is not checked
    """
    for key, have in found.items():
        given = settings.get(key)
        if given is not None and given != have:
            raise ValueError(
                f"config.json gives {key} {given!r}, and the tensors are of {have!r}: one of the two is of another "
                "draft; fetch both again"
            )


def check_tensors(
    found: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    of: str,
    why: Callable[[str], str] = lambda name: "",
) -> None:
    """Raise ValueError unless the shapes that were found are exactly the expected ones.

    found, expected: shapes by the tensors' names
    of: what has the expected tensors, in words, for messages
    why: makes the end of a message from a tensor's name: from what its shape follows, and what to do
    """
    for problem, names in (("not known", found.keys() - expected), ("missing", expected.keys() - found)):
        if names:
            some = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(
                f"{len(names)} tensors are {problem}: {some}; expected those of {of}: fetch the checkpoint again, or "
                "it is another kind of draft"
            )
    for name, shape in found.items():
        if [*shape] != [*expected[name]]:
            raise ValueError(f"{name} has shape {[*shape]}, expected {[*expected[name]]}{why(name)}")


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The shape of each tensor, as a list, by the tensors' names."""
    return {name: [*tensor.shape] for name, tensor in tensors.items()}


def _reading(path: Path, read: Callable[[Path], Any]) -> Any:
    """The result of `read`, a library's function, for a file; its errors become a ValueError with the file's name."""
    try:
        return read(path)
    except Exception as error:
        raise ValueError(f"cannot read the weights in {str(path)!r}: {error}") from error


def _shapes_in(path: Path) -> dict[str, list[int]]:
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return {name: file.get_slice(name).get_shape() for name in names}
