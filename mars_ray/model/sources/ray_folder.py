"""Ray shell: share a folder of one node with all nodes of the cluster.

Files are sent through Ray's object store in pieces, and stay in the cache of each machine for all workers and later
jobs. Nothing is sent to a node that already has the folder: its own node, or a node with a shared disk. Tasks
bound to the folder's node read the files, so no actor has to stay alive.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mars_ray.errors import ModelError
from mars_ray.model.sources.node_cache import NODE_URL, RemoteFile, fetched, file_digest

ANSWER_S = 28.0
"""A node that gives no answer for this many seconds is considered unreachable."""
READ_BYTES_PER_S = 50e6
"""Assumed minimum speed of a disk, in bytes per second."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The folder at the absolute path `path` on one node."""

    path: Path
    node_id: str

    def __str__(self) -> str:
        """Return a name that `resolve_model` accepts on every node: `ray://NODE/path`."""
        return f"{NODE_URL}{self.node_id}{self.path}"

    def here(self) -> Path:
        """Return the folder on this node; fetch it first if needed. Raises `ModelError` if it cannot be fetched."""
        if self.node_id == ray.get_runtime_context().get_node_id():
            return self.path
        files = self._files()
        if all(_is_here(self.path, file) for file in files):
            return self.path
        return self.fetch(files)

    def fetch(self, files: tuple[RemoteFile, ...] | None = None) -> Path:
        """Return a copy of the folder in the cache of this node, even if `path` exists here."""

        def read(name: str, start: int, end: int) -> bytes:
            content: bytes = self._ask(ANSWER_S, _read, self.path / name, start, end)
            return content

        return fetched(self.path.name, self._files() if files is None else files, read)

    def _files(self) -> tuple[RemoteFile, ...]:
        sizes: dict[str, int] = self._ask(ANSWER_S, _sizes, self.path)
        read_s = ANSWER_S + sum(sizes.values()) / READ_BYTES_PER_S
        digests: list[str] = self._ask(read_s, _digests, [self.path / name for name in sizes])
        pairs = zip(sizes.items(), digests, strict=True)
        return tuple(RemoteFile(name=name, size=size, digest=digest) for (name, size), digest in pairs)

    def _ask(self, seconds: float, task: "ray.remote_function.RemoteFunction", *arguments: object) -> Any:
        node = NodeAffinitySchedulingStrategy(self.node_id, soft=False)
        try:
            return ray.get(task.options(scheduling_strategy=node).remote(*arguments), timeout=seconds)
        except GetTimeoutError as error:
            raise ModelError(
                f"{self.path} cannot be fetched from its node, which did not answer within {seconds:.0f} s."
            ) from error
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ModelError(f"{self.path} cannot be fetched from its node: {reason}") from error


def share_folder(folder: Path) -> SharedFolder:
    """Return a `SharedFolder` for a folder of this node, without reading it."""
    return SharedFolder(folder.absolute(), ray.get_runtime_context().get_node_id())


def parse_shared_folder(name: str) -> SharedFolder:
    """Parse a name made by `str(SharedFolder)`."""
    node_id, _, path = name.removeprefix(NODE_URL).partition("/")
    return SharedFolder(Path("/", path), node_id)


def _is_here(folder: Path, file: RemoteFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size and file_digest(path) == file.digest


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def _digests(paths: list[Path]) -> list[str]:
    return [file_digest(path) for path in paths]


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def _read(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)
