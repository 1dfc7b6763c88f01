"""Read the header of a .gguf file, and unpack its tensors in tiles on all threads.

In:    a file.
Out:   the metadata and the tensors in the form of `gguf.GGUFReader`, and the values of `gguf.dequantize`, bit for bit.
Never: allocates memory because the header announces it; a number beyond the end of the file is an error.

`gguf` reads each string of a vocabulary through several NumPy arrays, and unpacks 16 rows at a time in one thread.
"""

import mmap
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mars_ray.errors import ModelError

_NUMBERS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}
"""Formats of `struct` by the type of a number."""
_PLAIN = {
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
    gguf.GGMLQuantizationType.F64: np.float64,
    gguf.GGMLQuantizationType.I8: np.int8,
    gguf.GGMLQuantizationType.I16: np.int16,
    gguf.GGMLQuantizationType.I32: np.int32,
    gguf.GGMLQuantizationType.I64: np.int64,
}
"""Types of tensors that are stored as plain numbers; other tensors are arrays of bytes."""
_VERSIONS = (2, 3)
_TOKENIZER = "tokenizer."
_VOCABULARY = "tokenizer.ggml.tokens"
_TILE_BYTES = 1 << 17
"""Packed bytes of a tile, whose unpacked values stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Field:
    """A value of the metadata, with the attributes of `gguf.ReaderField`."""

    types: list[gguf.GGUFValueType]
    """The type; for an array, followed by the type of its values."""
    parts: list[Any]
    """Bytes of a string, or a tuple of one number, for each index in `data`."""
    data: list[int]

    def contents(self) -> Any:
        """Return a number, a text, or the list of an array of numbers."""
        values = [part.decode() if isinstance(part, bytes) else part[0] for part in self.parts]
        return values if self.types[0] is gguf.GGUFValueType.ARRAY else values[0]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, with the attributes of `gguf.ReaderTensor`."""

    name: str
    tensor_type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    """Sizes in the order of the file: the innermost first."""
    data: np.ndarray[Any, Any]
    """Packed values in the memory map of the file, outermost size first."""


class GGUFFile:
    """The header of a file. A file that is damaged or of an old version may raise any error.

    Arrays of texts, and arrays of the tokenizer, have no values, because transformers reads them in another way. The
    vocabulary has its length, but empty texts.
    """

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 4  # after the magic number
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise ModelError(f"its GGUF version is {version}, must be 2 or 3 in little-endian order.")
        num_tensors, num_fields = self._unpack("QQ")
        self.fields: dict[str, Field] = {}
        for _ in range(num_fields):
            name = self._string().decode()
            if name in self.fields:
                raise ModelError(f"it holds {name!r} twice.")
            self.fields[name] = self._field(name)
        self.tensors = self._tensors(num_tensors)

    @property
    def architecture(self) -> str:
        """The architecture, such as "llama"."""
        return str(self.value("general.architecture"))

    def value(self, name: str) -> Any:
        """Return a number, a text or a list of the metadata; None if the file does not have it."""
        return self.fields[name].contents() if name in self.fields else None

    def of_architecture(self, name: str) -> Any:
        """Return what `value` returns for a name that follows the architecture, such as "block_count"."""
        return self.value(f"{self.architecture}.{name}")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        values = struct.unpack_from(form, self._map, self._position)
        self._position += struct.calcsize(form)
        return values

    def _string(self) -> bytes:
        (length,) = self._unpack("Q")
        if length > len(self._map) - self._position:
            raise ModelError(f"it ends within a text of {length:,} bytes.")
        self._position += length
        return self._map[self._position - length : self._position]

    def _field(self, name: str) -> Field:
        (number,) = self._unpack("I")
        kind = gguf.GGUFValueType(number)
        if kind is gguf.GGUFValueType.STRING:
            return Field([kind], [self._string()], [0])
        if kind is gguf.GGUFValueType.ARRAY:
            return self._array(name)
        return Field([kind], [self._unpack(_NUMBERS[kind])], [0])

    def _array(self, name: str) -> Field:
        number, count = self._unpack("IQ")
        kind = gguf.GGUFValueType(number)
        if kind is gguf.GGUFValueType.STRING:
            self._skip_strings(count)
            return Field([kind], [b""], [0] * count if name == _VOCABULARY else [])
        values = self._unpack(f"{count}{_NUMBERS[kind]}")
        if name.startswith(_TOKENIZER):
            return Field([kind], [], [])
        return Field([gguf.GGUFValueType.ARRAY, kind], [(value,) for value in values], list(range(count)))

    def _skip_strings(self, count: int) -> None:
        position, content, read = self._position, self._map, struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + read(content, position)[0]
        self._position = position

    def _tensors(self, count: int) -> list[Tensor]:
        entries = []
        for _ in range(count):
            name = self._string().decode()
            (dimensions,) = self._unpack("I")
            entries.append((name, self._unpack(f"{dimensions}Q"), *self._unpack("IQ")))
        if len({name for name, *_ in entries}) < count:
            raise ModelError("it holds two tensors of one name.")
        alignment = self._alignment()
        start = -(-self._position // alignment) * alignment
        return [self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in entries]

    def _alignment(self) -> int:
        field = self.fields.get("general.alignment")
        alignment = field.contents() if field else gguf.GGUF_DEFAULT_ALIGNMENT
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ModelError(f"general.alignment is {alignment}, must be a power of two.")
        return alignment

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> Tensor:
        kind = gguf.GGMLQuantizationType(number)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = prod(shape) * block_bytes // block
        if start + size > len(self._map):
            raise ModelError(f"it ends before tensor {name!r}.")
        outermost_first = tuple(reversed(shape))
        if kind in _PLAIN:
            values = np.frombuffer(self._map, _PLAIN[kind], prod(shape), start)
            return Tensor(name, kind, shape, values.reshape(outermost_first))
        packed = np.frombuffer(self._map, np.uint8, size, start)
        return Tensor(name, kind, shape, packed.reshape(gguf.quant_shape_to_byte_shape(outermost_first, kind)))


class Unpacker:
    """Unpacks tensors as `gguf.dequantize` does, in tiles on `threads` threads.

    `report` is called with the packed bytes of each tile that is done, in the thread of the caller.
    """

    def __init__(self, threads: int, report: Callable[[int], None]) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._report = report

    def dequantize(self, data: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
        """Return the float32 values of a packed tensor."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = data.shape if kind in _PLAIN else gguf.quant_shape_from_byte_shape(data.shape, kind)
        packed = data.reshape(-1).view(np.uint8)
        values = np.empty(prod(shape), np.float32)
        blocks = max(1, _TILE_BYTES // block_bytes)

        def unpack(first: int) -> int:
            tile = packed[first * block_bytes : (first + blocks) * block_bytes]
            # As one row, because gguf splits tiles of more rows into smaller ones.
            values[first * block : (first + blocks) * block] = gguf.quants.dequantize(tile[None], kind)[0]
            return tile.nbytes

        for done in self._pool.map(unpack, range(0, len(packed) // block_bytes, blocks)):
            self._report(done)
        return values.reshape(shape)
