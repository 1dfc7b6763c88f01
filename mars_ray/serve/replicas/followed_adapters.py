"""The adapters of an engine as they are wanted elsewhere, which is where operators change them.

In:    a function that reads the names and folders of the wanted adapters.
Out:   the adapters that can be used, set in the engine.
Never: stops an engine because of an adapter that cannot be used, or refuses an adapter that was wanted a moment ago.

An adapter may be unusable only for now, such as while a store is away, so it is tried again every `RETRY_S`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mars_ray.adapter.card import resolve_adapters
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.errors import AdapterError, AdapterUnavailableError, MarsRayError, ReplicaLostError

log = logging.getLogger(__name__)

EVERY_S = 1.0
RETRY_S = 30.0


class FollowedAdapters:
    """Follows the adapters that `read` returns. None means that no adapters have been stored yet."""

    def __init__(
        self,
        engine: AsyncEngine,
        read: Callable[[], Mapping[str, str] | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._read = read
        self._clock = clock
        self._last: Mapping[str, str] | None = None
        self._tried_s = 0.0
        self._refreshing = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self.problems: dict[str, str] = {}
        """Reason for each adapter that could not be set; the key "" is for all of them."""

    async def run(self) -> None:
        """Follow the wanted adapters until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("the wanted adapters cannot be read")
            await asyncio.sleep(EVERY_S)

    async def look_up(self, name: str) -> None:
        """Read the wanted adapters now if the engine has no adapter of this name.

        Raises `AdapterUnavailableError` for one that is wanted but cannot be used now.
        """
        begun = False
        while name not in self._engine.adapters and not begun:
            begun = self._looking is None or self._looking.done()
            if begun:
                self._looking = asyncio.create_task(self.refresh())
            assert self._looking
            # A caller who leaves does not stop the others. One that was begun before may have read too early.
            await asyncio.shield(self._looking)
        if name in self.problems and name not in self._engine.adapters:
            raise AdapterUnavailableError(f"the adapter {name!r} cannot be used here now. Try again later.")

    async def refresh(self) -> None:
        """Set the wanted adapters. One that cannot be used keeps the folder that it had, or is left out."""
        async with self._refreshing:
            wanted = await asyncio.to_thread(self._read)
            if wanted is None:
                return
            again = self.problems and self._clock() - self._tried_s >= RETRY_S
            # A process that takes the place of another one leaves out what it cannot load.
            lost = wanted.keys() - self._engine.adapters.keys() - self.problems.keys()
            if wanted == self._last and not again and not lost:
                return
            self._tried_s = self._clock()
            self._last = None  # so that it is tried again if it ends without an outcome
            known = set(self.problems.values())
            self.problems = {}
            try:
                await self._set(wanted)
            except ReplicaLostError:  # the next process gets them
                raise
            except MarsRayError as error:
                self.problems[""] = str(error)
            self._last = wanted
            for problem in set(self.problems.values()) - known:
                log.error("%s", problem)

    async def _set(self, adapters: Mapping[str, str]) -> None:
        folders: dict[str, Path] = {}
        for name, value in adapters.items():
            try:
                resolved = await asyncio.to_thread(resolve_adapters, None, {name: value})
                folders[name] = resolved[name]
            except AdapterError as error:
                self._keep(name, error, folders)
        while True:
            try:
                await self._engine.set_adapters(folders)
            except AdapterError as error:
                if error.adapter is None:
                    raise
                self._keep(error.adapter, error, folders)
            else:
                return

    def _keep(self, name: str, problem: AdapterError, folders: dict[str, Path]) -> None:
        """Give an adapter that cannot be used the folder that it had, unless that one cannot be used either."""
        folders.pop(name, None)
        before = self._engine.adapters.get(name)
        if before is not None and name not in self.problems:
            folders[name] = before
        self.problems[name] = str(problem)
