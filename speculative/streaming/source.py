"""Where the tensors of a model's layers are on disk: file, offset, dtype and shape.

Files are read as they are. A safetensors file (https://github.com/huggingface/safetensors) has the length of its header
in 8 bytes, a JSON header, then the tensors one after another. A .dat file of accelerate has one tensor and nothing
else.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from heavypath.speculative.files.typed_json import parsed, weight_map

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INDEX = "model.safetensors.index.json"


class Place(NamedTuple):
    """Where a tensor is on disk: `nbytes` bytes of the file `path`, from offset `begin` on."""

    path: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The offset after the tensor's last byte."""
        return self.begin + self.nbytes


LayerSource = Mapping[str, Place]  # the tensors of a layer by their names in it


def places_in(path: str | Path) -> dict[str, Place]:
    """The places of the tensors in a safetensors file, by name.

    Raises FileNotFoundError, and ValueError for a file that is not a safetensors file, is truncated, or has tensors
    that do not lie directly one after another.
    """
    path = Path(path)
    try:
        with safe_open(path, "np"), path.open("rb") as file:  # safe_open checks the header
            length = int.from_bytes(file.read(8), "little")
            header = parsed(file.read(length).decode())
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is no safetensors file, or is truncated: {error}") from error
    found = {}
    for name, what in header.items():
        if name == "__metadata__":
            continue
        if what["dtype"] not in TYPES:
            raise ValueError(f"{name} in {str(path)!r} is of type {what['dtype']}, expected one of {', '.join(TYPES)}")
        found[name] = Place(str(path), 8 + length + what["data_offsets"][0], TYPES[what["dtype"]], (*what["shape"],))
    return found


def places_of_folder(folder: str | Path) -> dict[str, Place]:
    """The places of the tensors in a folder of `save_pretrained`, by name: in its one file, or all files of its index.

    Raises FileNotFoundError for a missing file, and ValueError for one that is no safetensors file, is truncated, or
    lacks a tensor of the index.
    """
    folder = Path(folder)
    index = folder / INDEX
    if not index.is_file():
        return places_in(folder / "model.safetensors")
    names = weight_map(index)
    files = {name: places_in(folder / name) for name in sorted({*names.values()})}
    absent = [tensor for tensor, name in names.items() if tensor not in files[name]]
    if absent:
        raise ValueError(f"{str(folder / names[absent[0]])!r} lacks {absent[0]}, which {INDEX} says is there")
    return {tensor: files[name][tensor] for tensor, name in names.items()}
