"""Sources of a model's layers: which file has their bytes, from which byte on, of which type and shape.

Files are read as they are. safetensors (https://github.com/huggingface/safetensors) have a header of JSON after its
length in 8 bytes, then the tensors one after another. The .dat files of accelerate have one tensor and nothing else.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from heavypath.speculative.files.typed_json import parsed, weight_map

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


class Place(NamedTuple):
    """The place of a tensor: `nbytes` bytes of a file from `begin` on."""

    path: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte after the tensor."""
        return self.begin + self.nbytes


LayerSource = Mapping[str, Place]  # the tensors of a layer by their names in it


def places_in(path: str | Path) -> dict[str, Place]:
    """The tensors of a safetensors file by their names.

    Raises FileNotFoundError, and ValueError for a file that is no such file, is shorter than its header says, or has
    tensors that lie elsewhere than one after another.
    """
    path = Path(path)
    try:
        with safe_open(path, "np"), path.open("rb") as file:  # which checks all that the header says
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
    """The tensors of a folder as `save_pretrained` writes it: of its one safetensors file, or of those of its index.

    Raises FileNotFoundError for a file that is missing, and as `places_in` does.
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
