"""The adapters with a name that an engine process offers, and which of them are in its memory.

Adapters that fit into `adapter_memory_gib` stay loaded. Beyond it, the least recently used ones without requests leave
the memory. A request for one of them waits here until the engine has loaded it again, so no step waits for a file. If
all loaded adapters have requests, new requests for the least recently used ones wait until the next adapter is loaded,
so that no adapter waits for ever.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mars_ray.engine.process.messages import AdapterLoaded, ForgetAdapter, LoadAdapter, Order, UseAdapters
from mars_ray.engine.request import check_adapter
from mars_ray.errors import AdapterError, MarsRayError, ReplicaLostError


@dataclass(slots=True, eq=False)
class _Adapter:
    """An adapter under one name. Another folder under the same name is another adapter."""

    name: str
    folder: Path
    files: tuple[tuple[str, int, int], ...]
    """Name, size and modification time of each file in the folder when the adapter was set."""
    number: int | None = None
    """Number under which the engine has loaded the adapter; None while it is not in memory."""
    nbytes: int = 0
    users: int = 0
    """Number of requests that use the adapter in the engine."""
    dropped: bool = False
    """True once the name is gone or stands for another adapter."""
    loading: "asyncio.Task[None] | None" = None
    waiting: int = 0
    """Number of requests that wait for the adapter to be loaded again."""
    is_new: bool = False
    """Whether the adapter has been loaded again and no waiting request has used it yet."""

    @property
    def needed(self) -> bool:
        """Whether the adapter must stay in memory."""
        return self.users > 0 or (self.is_new and self.waiting > 0)


class AdapterStore:
    """The adapters of one engine; `send` sends orders to the engine. Use the store in one event loop."""

    def __init__(self, send: Callable[[Order], None], memory_gib: float | None = None) -> None:
        self._send = send
        self._room = None if memory_gib is None else int(memory_gib * 2**30)
        self._by_name: dict[str, _Adapter] = {}
        self._loaded: dict[_Adapter, None] = {}
        """Adapters in memory, least recently used first. Dropped ones stay until their requests have ended."""
        self._leaving: set[_Adapter] = set()
        """Loaded adapters that take no new requests, because another adapter waits for their memory."""
        self._answers: dict[int, asyncio.Future[AdapterLoaded]] = {}
        self._numbers = itertools.count()
        self._changing = asyncio.Lock()
        self._turn = asyncio.Lock()
        """Held by the adapter that makes room for itself, so that adapters return in the order of their requests."""
        self._freed = asyncio.Event()
        """Set when an adapter may have become free or unwanted."""
        self.block = 1
        """Largest block of the adapters that were loaded so far."""

    @property
    def folders(self) -> dict[str, Path]:
        """Folders of the adapters, by the names that requests use."""
        return {name: adapter.folder for name, adapter in self._by_name.items()}

    async def set(self, folders: Mapping[str, Path]) -> None:
        """Have exactly the adapters in `folders`, keyed by name. New requests use them from then on.

        Each new adapter is loaded once, to check it. Raises `AdapterError` for the first one that cannot be used, and
        `ReplicaLostError`; then nothing has changed.
        """
        async with self._changing:
            new: dict[str, _Adapter] = {}
            try:
                for name, folder in folders.items():
                    files = await asyncio.to_thread(_files, folder)
                    present = self._by_name.get(name)
                    if present and (present.folder, present.files) == (folder, files):
                        new[name] = present
                    else:
                        new[name] = _Adapter(name, folder, files)
                        await self._check(new[name])
            except BaseException:
                for adapter in new.values():
                    if self._by_name.get(adapter.name) is not adapter:
                        self._drop(adapter)
                raise
            gone = [adapter for name, adapter in self._by_name.items() if new.get(name) is not adapter]
            self._by_name = new
            for adapter in gone:
                self._drop(adapter)
            self._use()

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """Keep the adapter `name` in memory during the block. At its beginning, a request may be sent at once.

        Raises `RequestError` for an unknown name, `AdapterError` if the adapter cannot be loaded again, and
        `ReplicaLostError`.
        """
        adapter = await self._ready(name)
        self._loaded[adapter] = self._loaded.pop(adapter)  # the most recently used one is last
        adapter.users += 1
        adapter.is_new = False
        try:
            yield
        finally:
            adapter.users -= 1
            if adapter.dropped:
                self._drop(adapter)
            self._freed.set()

    def loaded(self, event: AdapterLoaded) -> None:
        """Handle the engine's answer to `LoadAdapter`."""
        answer = self._answers.pop(event.number)
        if not answer.done():
            answer.set_result(event)
        elif event.error is None:  # nothing waits for it any more
            self._send(ForgetAdapter(event.number))

    def lose(self, error: MarsRayError) -> None:
        """Fail everything that waits for an adapter, because the engine process has ended."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()
        self._freed.set()

    async def _ready(self, name: str) -> _Adapter:
        """Return the adapter `name` once it is in memory."""
        while True:
            check_adapter(name, self._by_name)
            adapter = self._by_name[name]
            if adapter.number is not None and adapter not in self._leaving:
                return adapter
            if adapter.loading is None:
                adapter.loading = asyncio.create_task(self._return(adapter))
                adapter.loading.add_done_callback(lambda done: done.cancelled() or done.exception())
            adapter.waiting += 1
            try:
                await asyncio.shield(adapter.loading)
            finally:
                adapter.waiting -= 1
                self._freed.set()
            if adapter.number is not None and not adapter.dropped:  # even if it must leave again for the next one
                return adapter

    async def _return(self, adapter: _Adapter) -> None:
        """Load an adapter again, when it is its turn and there is room."""
        async with self._turn:
            try:
                while not adapter.dropped and adapter.number is None and not self._make_room(adapter.nbytes):
                    self._freed.clear()
                    await self._freed.wait()
                if not adapter.dropped and adapter.number is None:
                    await self._load(adapter)
                    adapter.is_new = True
                    self._use()
            finally:
                self._leaving.clear()
                adapter.loading = None

    async def _check(self, adapter: _Adapter) -> None:
        """Load an adapter for the first time, and keep it in memory if there is room."""
        await self._load(adapter)
        if self._room is not None and adapter.nbytes > self._room:
            raise AdapterError(
                f"adapter {adapter.name!r} takes {adapter.nbytes / 2**30:.3f} GiB, but adapter_memory_gib is "
                f"{self._room / 2**30:.3f}. Raise it, or leave the adapter out.",
                adapter=adapter.name,
            )
        adapter.users += 1  # keeps it while room is made
        has_room = not self._turn.locked() and self._make_room(0)
        adapter.users -= 1
        if not has_room and self._room is not None:
            self._leaving.clear()
            self._unload(adapter)

    async def _load(self, adapter: _Adapter) -> None:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(LoadAdapter(number, adapter.folder))
        except ReplicaLostError:
            del self._answers[number]
            raise
        event = await answer
        if event.error is not None:
            raise AdapterError(f"adapter {adapter.name!r}: {event.error}", adapter=adapter.name)
        adapter.number = number
        adapter.nbytes = event.nbytes
        self.block = max(self.block, event.block)
        self._loaded[adapter] = None

    def _make_room(self, nbytes: int) -> bool:
        """Unload unused adapters until `nbytes` more fit, and return whether they do.

        If they do not, the least recently used adapters are marked to leave once their requests have ended.
        """
        self._leaving.clear()
        if self._room is None:
            return True
        total = nbytes + sum(adapter.nbytes for adapter in self._loaded)
        for adapter in list(self._loaded):
            if total <= self._room:
                break
            if not adapter.needed:
                total -= adapter.nbytes
                self._unload(adapter)
        missing = total - self._room
        for adapter in self._loaded:
            if missing <= 0:
                break
            self._leaving.add(adapter)
            missing -= adapter.nbytes
        return total <= self._room

    def _drop(self, adapter: _Adapter) -> None:
        """Take an adapter out of memory as soon as no request uses it."""
        adapter.dropped = True
        if adapter.number is not None and not adapter.users:
            self._unload(adapter)
        self._freed.set()

    def _unload(self, adapter: _Adapter) -> None:
        assert adapter.number is not None
        number, adapter.number = adapter.number, None
        self._loaded.pop(adapter)
        with suppress(ReplicaLostError):
            self._use()
            self._send(ForgetAdapter(number))

    def _use(self) -> None:
        """Send the names of the adapters in memory to the engine."""
        numbers = {name: adapter.number for name, adapter in self._by_name.items()}
        self._send(UseAdapters({name: number for name, number in numbers.items() if number is not None}))


def _files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and modification time of the files in a folder; nothing if it cannot be read."""
    with suppress(OSError):
        stats = sorted((path.name, path.stat()) for path in folder.iterdir())
        return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return ()
