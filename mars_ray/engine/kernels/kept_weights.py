"""Keep the rounded weights of a large model in the user's cache, and map them at later starts.

In:    the layers of a network that has the weights of a folder, in a fixed order.
Out:   packed layers, mapped from a file that earlier starts wrote, so that processes share their memory.
Never: uses a file that is damaged, writable by other accounts, or of other weights; fails because of the cache.
"""

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mars_ray.engine.kernels import packed
from mars_ray.engine.kernels.build import WeightLayout
from mars_ray.engine.kernels.packed import Format, Matrix, PackedLinear, pack
from mars_ray.errors import OutputError
from mars_ray.model.digest import folder_state
from mars_ray.model.sources.cache import cache_folder, made_once, remove_abandoned
from mars_ray.storage.private import is_private

LEAST_BYTES = 64 << 20
"""Minimum size of packed weights that are kept. Smaller models are packed in less than a second."""
ALIGNMENT = 64
"""Alignment of tensors in a file, as torch aligns tensors in memory."""
DIGEST_BYTES = 16
LENGTH_BYTES = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """Header entry of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    """Offset from the end of the header in bytes."""
    checksum: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        size: int = math.prod(self.shape) * getattr(torch, self.dtype).itemsize
        return size


@dataclass(frozen=True, slots=True)
class KeptMatrix:
    """Header entry of a packed layer."""

    columns: int
    depth: int
    alternating: bool
    tensors: tuple[KeptTensor | None, ...]


class LayerPacker:
    """Packs the layers of a network for the kernels' `layout`, or takes them from the cache.

    `folder` holds the weights of the network; None keeps nothing. `variant` identifies quantization, mask token and
    architecture. Call `pack` for all layers in a fixed order, then `keep`.
    """

    def __init__(self, layout: WeightLayout, folder: Path | None, variant: str) -> None:
        self._layout = layout
        self._name = None if folder is None else _name(folder, layout, variant)
        self._folder = folder
        self._packed: list[PackedLinear] = []
        self._kept = None if self._name is None else read_kept(cache_folder() / self._name)
        self._remaining: Iterator[tuple[KeptMatrix, tuple[Tensor | None, ...]]] = iter(self._kept or ())

    def pack(self, layers: Sequence[nn.Linear], kind: Format, *, alternating: bool = False) -> PackedLinear:
        """Return layers that read the same input as one layer; see `packed.pack`."""
        linear = self._mapped(layers, kind, alternating) or pack(layers, kind, self._layout, alternating=alternating)
        self._packed.append(linear)
        return linear

    def keep(self) -> None:
        """Write the packed layers to the cache, if they are new and large. Log the reason if the cache cannot be
        used."""
        size = sum(tensor.nbytes for linear in self._packed for tensor in linear.tensors if tensor is not None)
        if self._name is None or self._folder is None or self._kept is not None or size < LEAST_BYTES:
            return
        try:
            path = made_once(self._name, lambda path: write_kept(path, self._packed))
            remove_abandoned(path, self._folder)
        except (OSError, OutputError) as error:
            log.info("rounded weights of %s are not kept for the next start: %s", self._folder, error)

    def _mapped(self, layers: Sequence[nn.Linear], kind: Format, alternating: bool) -> PackedLinear | None:
        matrix, tensors = next(self._remaining, (None, ()))
        if matrix is None:
            return None
        outputs = sum(layer.out_features for layer in layers)
        columns = outputs + -outputs % self._layout.columns
        if (matrix.columns, matrix.depth, matrix.alternating) != (columns, layers[0].in_features, alternating):
            return None
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        return PackedLinear(tensors, Matrix(*addresses, matrix.columns, matrix.depth, kind, alternating))


def _name(folder: Path, layout: WeightLayout, variant: str) -> str:
    """Return the path of a file within the cache: a folder for each model, and in it a file for each state of the
    model, format and layout. A change of the code that packs is another layout."""
    code = Path(packed.__file__).read_bytes()
    sizes = [getattr(layout, field[0]) for field in layout._fields_]
    form = hashlib.blake2b(f"{sizes}{variant}".encode() + code, digest_size=8).hexdigest()
    path = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=6).hexdigest()
    return f"{folder.name}-{path}.packed/{folder_state(folder)}-{form}"


def write_kept(path: Path, linears: Sequence[PackedLinear]) -> None:
    """Write `path` atomically. Raises `OSError`, before anything is written, if the disk is too full."""
    position = 0
    matrices, content = [], []
    for linear in linears:
        entries: list[KeptTensor | None] = []
        for tensor in linear.tensors:
            if tensor is None:
                entries.append(None)
                continue
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(KeptTensor(tuple(tensor.shape), dtype, position, _checksum(tensor)))
            content.append((position, tensor))
            position += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        matrix = linear.matrix
        matrices.append(KeptMatrix(matrix.columns, matrix.depth, bool(matrix.alternating), tuple(entries)))
    header = json.dumps([asdict(matrix) for matrix in matrices]).encode()
    header += b" " * (-(len(header) + LENGTH_BYTES + DIGEST_BYTES) % ALIGNMENT)
    partial = path.with_name(f".{path.name}.scratch.partial")
    try:
        with partial.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)  # regardless of the umask, because `read_kept` takes private files only
            if sys.platform != "darwin":  # has no such function
                os.posix_fallocate(file.fileno(), 0, LENGTH_BYTES + DIGEST_BYTES + len(header) + position)
            file.write(len(header).to_bytes(LENGTH_BYTES, "little") + _digest(header) + header)
            begin = file.tell()
            for start, tensor in content:
                file.seek(begin + start)
                file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_kept(path: Path) -> list[tuple[KeptMatrix, tuple[Tensor | None, ...]]] | None:
    """Return the packed layers in `path`, mapped; None for a file that is missing, damaged or not private.

    All bytes are read for their checksums: the first step needs them, and a crash of the machine can leave holes.
    """
    if not is_private(path):
        return None
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            digest = file.read(DIGEST_BYTES)
            header = file.read(min(length, path.stat().st_size))
        if digest != _digest(header):
            raise ValueError("its header is damaged")
        matrices = [_matrix(entry) for entry in json.loads(header)]
        size = path.stat().st_size
        storage = cast(torch.UntypedStorage, torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size))
        content = torch.empty(0, dtype=torch.uint8).set_(storage)[LENGTH_BYTES + DIGEST_BYTES + length :]
        return [(matrix, tuple(_view(content, entry) for entry in matrix.tensors)) for matrix in matrices]
    except (OSError, RuntimeError, ValueError) as error:
        log.warning("%s is written again: %s", path, error)
        with suppress(OSError):
            path.unlink()
        return None


def _matrix(entry: dict[str, Any]) -> KeptMatrix:
    tensors = tuple(None if tensor is None else KeptTensor(**tensor) for tensor in entry.pop("tensors"))
    return KeptMatrix(**entry, tensors=tensors)


def _view(content: Tensor, entry: KeptTensor | None) -> Tensor | None:
    if entry is None:
        return None
    tensor = content[entry.start : entry.start + entry.nbytes].view(getattr(torch, entry.dtype)).view(*entry.shape)
    if _checksum(tensor) != entry.checksum:
        raise ValueError("its weights are damaged")
    return tensor


def _checksum(tensor: Tensor) -> int:
    """Return the sum of the bytes of a tensor as 64-bit integers, at the speed of memory."""
    flat = tensor.contiguous().view(torch.uint8).flatten()
    whole = len(flat) // 8 * 8
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())


def _digest(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=DIGEST_BYTES).digest()
