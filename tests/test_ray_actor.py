"""Named actors on a cluster: processes share one, errors keep their types, and one that is lost or unused returns."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import assert_type

import psutil
import pytest
import ray

from mars_ray.errors import ConfigError, UnavailableError
from mars_ray.ray_actor import ActorClient, SharedActor, ask_actors, kill_actors, remote, remove_actor
from mars_ray.ray_private import NAMESPACE

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
WITHIN_S = 60.0


class Counter:
    """A number that calls raise."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, by: int, *, times: int = 1) -> int:
        if by < 1:
            raise ConfigError(f"by is {by}; it must be at least 1.")
        self.value += by * times
        return self.value

    async def add_later(self, by: int) -> int:
        await asyncio.sleep(0)
        return self.add(by)

    async def hang(self) -> None:
        await asyncio.Event().wait()

    def process(self) -> int:
        return os.getpid()


class CounterActor(SharedActor):
    """Serves a counter. Ends once it is unused for `idle_s`, and leaves a file when it is removed."""

    CHECK_S = 0.1

    def __init__(self, idle_s: float, removed: str) -> None:
        self._idle_s = idle_s
        self._removed = Path(removed)
        super().__init__(Counter())

    def unused(self) -> bool:
        return self.silent_s >= self._idle_s

    async def remove(self) -> None:
        self._removed.touch()


class CounterClient(ActorClient):
    WITHIN_S = WITHIN_S
    SILENT = "the counter does not answer."

    add = remote(Counter.add)
    add_later = remote(Counter.add_later)
    hang = remote(Counter.hang, within_s=0.5)
    process = remote(Counter.process)


MakeClient = Callable[..., CounterClient]


@pytest.fixture
def client(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeClient]:
    name = f"counter:{request.node.name}"

    def make(idle_s: float = 1e6) -> CounterClient:
        return CounterClient(CounterActor, name, idle_s, str(tmp_path / "removed"))

    yield make
    kill_actors(name)


def test_clients_share_one_actor_whose_methods_keep_arguments_results_and_errors(client: MakeClient) -> None:
    async def use() -> None:
        one, other = client(), client()
        assert assert_type(await one.add(1, times=2), int) == 2
        assert assert_type(await other.add_later(by=3), int) == 5
        with pytest.raises(ConfigError, match="by is 0; it must be at least 1"):
            await other.add(0)
        assert await one.add(1) == 6

    asyncio.run(use())


def test_a_method_that_does_not_answer_in_time_is_an_error_that_says_who_is_silent(client: MakeClient) -> None:
    async def use() -> None:
        counter = client()
        await counter.add(1)
        with pytest.raises(UnavailableError, match=r"^the counter does not answer\. Try again in a few seconds\.$"):
            await counter.hang()
        assert await counter.add(1) == 2

    asyncio.run(use())


def test_a_call_that_finds_the_actor_ended_starts_another(client: MakeClient) -> None:
    async def use() -> None:
        counter = client()
        process = await counter.process()
        ray.kill(ray.get_actor(counter.name, namespace=NAMESPACE))  # returns before the process has ended
        await asyncio.to_thread(psutil.Process(process).wait, 30)
        assert await counter.process() != process
        assert await counter.add(1) == 1

    asyncio.run(use())


def test_an_unused_actor_removes_its_data_and_ends(client: MakeClient, tmp_path: Path) -> None:
    async def use() -> None:
        counter = client(idle_s=0.3)
        process = await counter.process()
        while not (tmp_path / "removed").exists():
            await asyncio.sleep(0.05)
        assert await counter.process() != process

    asyncio.run(asyncio.wait_for(use(), WITHIN_S))


def test_an_actor_is_removed_with_its_data_by_its_name(client: MakeClient, tmp_path: Path) -> None:
    async def use() -> None:
        counter = client()
        await counter.add(1)
        await asyncio.to_thread(remove_actor, counter.name)
        assert (tmp_path / "removed").exists()
        assert await ask_actors(counter.name, Counter.process, WITHIN_S) == {}

    asyncio.run(use())
    remove_actor("counter:nobody")


def test_actors_are_asked_by_the_beginning_of_their_names(client: MakeClient) -> None:
    async def use() -> None:
        counter = client()
        process = await counter.process()
        answers = await ask_actors("counter:test_actors_are_asked", Counter.process, WITHIN_S)
        assert answers == {counter.name: process}

    asyncio.run(use())
