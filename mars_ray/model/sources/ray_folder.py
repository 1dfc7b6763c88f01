"""A folder of one node of the cluster, had by every node that asks for it (shell).

Its files travel through Ray's object store, a piece at a time, and stay in the cache of the machine: once for all
workers there, and for all jobs that come later. Nothing travels where the folder is: on its own node, or on a disk that
all nodes see.
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
"""A node that gives no answer in so long is said to be out of reach."""
READ_BYTES_PER_S = 50e6
"""No disk that holds models is slower."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The folder at `path`, an absolute one, of the node that is named by its id."""

    path: Path
    node_id: str

    def __str__(self) -> str:
        """Return it as a name that `resolve_model` takes on every node: `ray://NODE/path`."""
        return f"{NODE_URL}{self.node_id}{self.path}"

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
            content: bytes = self._ask(ANSWER_S, _read, self.path / name, start, end)
            return content

        return fetched(self.path.name, self._files() if files is None else files, read)

    def _files(self) -> tuple[RemoteFile, ...]:
        sizes: dict[str, int] = self._ask(ANSWER_S, _sizes, self.path)
        read_s = ANSWER_S + sum(sizes.values()) / READ_BYTES_PER_S
        digests: list[str] = self._ask(read_s, _digests, [self.path / name for name in sizes])
        pairs = zip(sizes.items(), digests, strict=True)
        return tuple(RemoteFile(name=name, size=size, digest=digest) for (name, size), digest in pairs)

    def _ask(self, seconds: float, task: "ray.remote_function.RemoteFunction", *given: object) -> Any:
        there = NodeAffinitySchedulingStrategy(self.node_id, soft=False)
        try:
            return ray.get(task.options(scheduling_strategy=there).remote(*given), timeout=seconds)
        except GetTimeoutError as error:
            raise ModelError(
                f"{self.path} cannot be had from the node it lies on, which gave no answer in {seconds:.0f} s."
            ) from error
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ModelError(f"{self.path} cannot be had from the node it lies on: {reason}") from error


def share_folder(folder: Path) -> SharedFolder:
    """Return the folder of this node for others; nothing is read yet."""
    return SharedFolder(folder.absolute(), ray.get_runtime_context().get_node_id())


def parse_shared_folder(name: str) -> SharedFolder:
    """Undo `str` of one."""
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
