"""A folder of one node of the cluster, had by every node that asks for it (shell).

Its files travel through Ray's object store, a piece at a time, and stay in the cache of the machine: once for all
workers there, and for all jobs that come later. Nothing travels where the folder is: on its own node, or on a disk that
all nodes see.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mars_ray.errors import ModelError
from mars_ray.model.sources.node_cache import RemoteFile, fetched, file_digest


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The folder at `path`, an absolute one, of the node that is named by its id."""

    path: Path
    node_id: str

    def here(self) -> Path:
        """Return the folder on this node. Raises a `ModelError` when it cannot be had."""
        if self.node_id == ray.get_runtime_context().get_node_id():
            return self.path
        files = self._files()
        if all(_is_here(self.path, file) for file in files):
            return self.path
        return self.fetch(files)

    def fetch(self, files: tuple[RemoteFile, ...] | None = None) -> Path:
        """Return a copy in the cache of this node, whatever lies at `path` here."""

        def read(name: str, start: int, end: int) -> bytes:
            content: bytes = self._ask(_read, self.path / name, start, end)
            return content

        return fetched(self.path.name, self._files() if files is None else files, read)

    def _files(self) -> tuple[RemoteFile, ...]:
        files: tuple[RemoteFile, ...] = self._ask(_list, self.path)
        return files

    def _ask(self, task: "ray.remote_function.RemoteFunction", *given: object) -> Any:
        there = NodeAffinitySchedulingStrategy(self.node_id, soft=False)
        try:
            return ray.get(task.options(scheduling_strategy=there).remote(*given))
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ModelError(f"{self.path} cannot be had from the node it lies on: {reason}") from error


def share_folder(folder: Path) -> SharedFolder:
    """Return the folder of this node for others; nothing is read yet."""
    return SharedFolder(folder.absolute(), ray.get_runtime_context().get_node_id())


def _is_here(folder: Path, file: RemoteFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size and file_digest(path) == file.digest


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def _list(folder: Path) -> tuple[RemoteFile, ...]:
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return tuple(RemoteFile(name=path.name, size=path.stat().st_size, digest=file_digest(path)) for path in paths)


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def _read(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)
