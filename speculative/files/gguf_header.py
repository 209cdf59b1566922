"""Read the header of a GGUF file: its metadata, and where each tensor is.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. No
package is needed, and no tensor is read.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_DIMENSIONS = 8  # ggml has four
# struct's formats of the values that have a fixed size, by the number of their type.
_FIXED = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9


class TensorEntry(NamedTuple):
    """A tensor's entry in the header: its name, its number of elements, its type, and where it begins."""

    name: str
    elements: int
    kind: int  # ggml's number of its type
    offset: int  # bytes from the begin of the tensors


class GgufHeader(NamedTuple):
    """The header of a GGUF file: all metadata by key, and the entries of all tensors, but no tensor."""

    metadata: dict[str, Any]  # an array has its number of elements here
    tensors: tuple[TensorEntry, ...]
    data_start: int  # bytes before the first tensor

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's kind, such as "llama"; "" if the file has none."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def elements(self) -> int:
        """The number of elements of all tensors together."""
        return sum(tensor.elements for tensor in self.tensors)


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file. Raises OSError, and ValueError for another format or version and a cut header."""
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            raise ValueError(f"it is no GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).header()
            except (struct.error, UnicodeDecodeError, OverflowError) as error:
                cut = f"damaged, or cut off by the end of the file at byte {len(data)}"
                raise ValueError(f"its header is {cut}; fetch the file again") from error


class _Reader:
    """Reads a header from the bytes of a file, value after value, from after the magic number on."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"it is of version {version} of GGUF; expected 2 or 3, little-endian")
        tensors = self._number("<Q")
        entries = self._number("<Q")
        metadata = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        found = tuple(self._tensor() for _ in range(tensors))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise struct.error(f"alignment {alignment!r}")
        return GgufHeader(metadata, found, -(-self.position // alignment) * alignment)

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.position)
        self.position += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        self._skip(length)
        return self.data[self.position - length : self.position].decode()

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self.data):
            raise struct.error(f"it needs {self.position} bytes, the file has {len(self.data)}")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_format_of(kind))
        element = self._number("<I")
        count = self._number("<Q")
        if element == _STRING:
            for _ in range(count):
                self._skip(self._number("<Q"))
        else:
            self._skip(count * struct.calcsize(_format_of(element)))
        return count

    def _tensor(self) -> TensorEntry:
        name = self._string()
        dimensions = self._number("<I")
        if dimensions > MOST_DIMENSIONS:
            raise struct.error(f"tensor {name!r} of {dimensions} dimensions")
        elements = 1
        for _ in range(dimensions):
            elements *= self._number("<Q")
        return TensorEntry(name, elements, kind=self._number("<I"), offset=self._number("<Q"))


def _format_of(kind: int) -> str:
    if kind not in _FIXED:
        raise struct.error(f"a value of the unknown type {kind}")
    return _FIXED[kind]
