"""Workers of a training run in processes of their own, joined by gloo as Ray Train joins them."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from mars_ray.errors import MarsRayError
from mars_ray.training.config import TrainConfig
from mars_ray.training.loop import TrainingRun, new_accelerator

# The server imports once for all workers of all tests.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def on_workers(count: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Call `work(*arguments)` on `count` workers that can reach each other, and return what they return.

    Raises the error of a worker, or `RuntimeError` once a worker has died. Either ends the other workers, as in Ray
    Train.
    """
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(count)]
    workers = [
        PROCESSES.Process(target=_worker, args=(rank, count, meeting, pipes[rank][1], work, arguments), daemon=True)
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    for _, sender in pipes:
        sender.close()
    try:
        return _results({reader: rank for rank, (reader, _) in enumerate(pipes)})
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _results(readers: dict[Any, int]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        waiting: list[Any] = [reader for reader, rank in readers.items() if rank not in results]
        reader: Any
        for reader in wait(waiting):
            try:
                result = reader.recv()
            except EOFError:
                raise RuntimeError(f"worker {readers[reader]} died") from None
            if isinstance(result, BaseException):
                raise result
            results[readers[reader]] = result
    return [results[rank] for rank in sorted(results)]


def _worker(rank: int, count: int, meeting: Path, sender: Any, work: Callable[..., Any], arguments: Any) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}.items():
        os.environ[name] = str(value)
    torch.set_num_threads(1)
    limit = timedelta(minutes=4)
    distributed.init_process_group("gloo", f"file://{meeting}", limit, world_size=count, rank=rank)
    try:
        sender.send(work(*arguments))
    except MarsRayError as error:
        sender.send(error)
    distributed.destroy_process_group()


class SharedStore:
    """Keeps states in numbered folders that all workers write. The second worker dies after `lives` states."""

    def __init__(self, folder: Path, lives: int) -> None:
        self._folder = folder
        self._lives = lives
        folder.mkdir(exist_ok=True)
        self._count = len(list(folder.iterdir()))
        distributed.barrier()

    @contextmanager
    def latest(self) -> Iterator[Path | None]:
        """Give the folder of the newest state."""
        yield self._folder / str(self._count) if self._count else None

    def save(self, write: Callable[[Path], None]) -> None:
        """Write a state with the other workers."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir(exist_ok=True)
        write(folder)
        distributed.barrier()
        if self._count == self._lives and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: TrainConfig, states: Path, lives: int = 1000) -> None:
    """Train on this worker."""
    torch.manual_seed(0)
    TrainingRun(config, Path(config.model), new_accelerator(config.compute), SharedStore(states, lives)).run()
