"""The adapters of an engine follow what is wanted, as far as they can be used."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.errors import AdapterUnavailableError
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.serve.replicas.followed_adapters import RETRY_S, FollowedAdapters
from tests.factories.engine import engine_of, serving
from tests.serve.adapter_samples import saved_adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("adapters")
    return [saved_adapter(place / str(rank), rank) for rank in (3, 8)]


class Followed:
    """An engine that follows `wanted`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.wanted: Mapping[str, str] | None = None
        self.now_s = 100.0
        self.adapters = FollowedAdapters(engine, lambda: self.wanted, clock=lambda: self.now_s)
        self._engine = engine

    async def follow(self, wanted: Mapping[str, str] | None) -> dict[str, str]:
        """Return the folders of the engine's adapters once it follows."""
        self.wanted = wanted
        await self.adapters.refresh()
        return {name: str(folder) for name, folder in self._engine.adapters.items()}


@asynccontextmanager
async def followed(checkpoint: Checkpoint) -> AsyncIterator[Followed]:
    async with serving(engine_of(checkpoint)) as front:
        yield Followed(front)


def test_the_engine_has_exactly_the_wanted_adapters(bundled: Checkpoint, folders: list[str]) -> None:
    async def test() -> None:
        async with followed(bundled) as engine:
            for wanted in ({"a": folders[0]}, {"a": folders[1], "b": folders[0]}, {"b": folders[0]}, {}):
                assert await engine.follow(wanted) == wanted
            assert await engine.follow({"a": folders[0]}) == {"a": folders[0]}
            assert await engine.follow(None) == {"a": folders[0]}, "nobody says what is wanted"
            assert engine.adapters.problems == {}

    asyncio.run(test())


def test_a_request_for_an_adapter_that_was_just_added_finds_it(bundled: Checkpoint, folders: list[str]) -> None:
    async def test() -> None:
        async with followed(bundled) as engine:
            engine.wanted = {"a": folders[0]}
            assert engine._engine.adapters == {}
            await engine.adapters.look_up("a")
            assert set(engine._engine.adapters) == {"a"}

    asyncio.run(test())


def test_an_adapter_that_cannot_be_used_keeps_its_last_version_and_the_others_are_set(
    bundled: Checkpoint, folders: list[str], tmp_path: Path
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folders[0], spoilt)
    (spoilt / "adapter_model.safetensors").unlink()

    async def test() -> None:
        async with followed(bundled) as engine:
            await engine.follow({"a": folders[0]})
            wanted = {"a": str(spoilt), "b": folders[1], "c": str(tmp_path / "missing"), "d": str(spoilt)}
            assert await engine.follow(wanted) == {"a": folders[0], "b": folders[1]}
            problems = engine.adapters.problems
            assert set(problems) == {"a", "c", "d"}
            assert all(f"adapter {name!r}: " in text for name, text in problems.items())
            await engine.follow({"a": folders[0]})
            assert engine.adapters.problems == {}

    asyncio.run(test())


def test_an_adapter_that_could_not_be_used_is_tried_again_and_unavailable_until_then(
    bundled: Checkpoint, folders: list[str], tmp_path: Path
) -> None:
    late = tmp_path / "late"

    async def test() -> None:
        async with followed(bundled) as engine:
            wanted = {"a": str(late)}
            assert await engine.follow(wanted) == {}
            shutil.copytree(folders[0], late)
            with pytest.raises(AdapterUnavailableError, match="the adapter 'a' cannot be used here now"):
                await engine.adapters.look_up("a")
            engine.now_s += RETRY_S
            await engine.adapters.look_up("a")
            assert await engine.follow(wanted) == wanted

    asyncio.run(test())


def test_a_caller_who_leaves_does_not_stop_the_loading_of_an_adapter(bundled: Checkpoint, folders: list[str]) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def read() -> dict[str, str]:
        reading.set()
        go_on.wait()
        return {"a": folders[0]}

    async def test() -> None:
        async with serving(engine_of(bundled)) as engine:
            adapters = FollowedAdapters(engine, read)
            leaving, staying = (asyncio.create_task(adapters.look_up("a")) for _ in range(2))
            await asyncio.to_thread(reading.wait)
            leaving.cancel()
            go_on.set()
            await staying
            assert set(engine.adapters) == {"a"}

    asyncio.run(test())
