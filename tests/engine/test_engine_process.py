"""Engine processes forked by a server: what they share with it and with their client, and when they end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.errors import ReplicaLostError
from mars_ray.model.resolve import resolve_model
from tests.factories.engine import engine_processes, engine_spec, started_engine

STARTS_AN_ENGINE = """
import asyncio
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.model.resolve import resolve_model

async def main():
    spec = EngineSpec(folder=resolve_model("bundled"), dtype="float32", threads=1, options=EngineOptions())
    engine, _ = await AsyncEngine.start(spec)
    print("started", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
"""A program without a guard of its main module, which imports no torch."""


@pytest.fixture(scope="module", autouse=True)
def own_server() -> Iterator[None]:
    """Make these tests start a server, because endpoints of other tests share the usual one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_ETAG_TIMEOUT", "8")
        yield


@asynccontextmanager
async def running() -> AsyncIterator[psutil.Process]:
    before = set(engine_processes(os.getpid()))
    async with started_engine(engine_spec(resolve_model("bundled"))):
        [process] = set(engine_processes(os.getpid())) - before
        yield process


def test_engines_come_from_one_server_that_has_a_single_thread() -> None:
    async def test() -> None:
        async with running() as first, running() as second:
            assert first.parent() == second.parent()
            assert first.parent().num_threads() == 1

    asyncio.run(test())


def test_an_engine_is_nicer_than_its_client_and_works_where_the_client_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.chdir(tmp_path)
        async with running() as engine:
            assert (engine.cwd(), engine.nice()) == (str(tmp_path), psutil.Process().nice() + 5)

    asyncio.run(test())


def test_an_engine_has_no_file_of_another_engine() -> None:
    async def test() -> None:
        async with running() as first:
            files = first.num_fds()
            async with running() as second:
                assert second.num_fds() == files

    asyncio.run(test())


def test_closing_ends_an_engine_that_is_stopped() -> None:
    async def test() -> None:
        async with running() as engine:
            engine.send_signal(signal.SIGSTOP)
        assert not engine.is_running()

    asyncio.run(test())


def test_an_engine_starts_after_its_server_was_killed() -> None:
    async def test() -> None:
        async with running() as first:
            first.parent().kill()
            await asyncio.to_thread(first.wait, 30)
        async with running() as second:
            assert second.is_running()

    asyncio.run(test())


def test_a_server_that_cannot_start_is_a_lost_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    for _ in range(5):
        with pytest.raises(ReplicaLostError, match="died while it started"):
            asyncio.run(AsyncEngine.start(engine_spec(resolve_model("bundled"))))


def test_an_engine_that_hangs_and_its_server_end_with_their_program() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS_AN_ENGINE], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "started\n"
        family = psutil.Process(program.pid).children(recursive=True)
        assert len(family) == 2
        engine_processes(program.pid)[0].suspend()
        program.kill()
        ends_s = time.monotonic() + 30
        while alive := [process for process in family if not has_ended(process)]:
            assert time.monotonic() < ends_s, alive
            time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process runs no more; whoever adopted it may not have waited for it yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_a_variable_that_libraries_read_at_import_starts_a_new_server_and_spares_former_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with running() as first:
            monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "9")
            async with running() as second:
                assert second.parent() != first.parent()
                assert second.parent().environ()["HF_HUB_ETAG_TIMEOUT"] == "9"
                assert first.is_running()
            server = first.parent()
        await asyncio.to_thread(server.wait, 30)  # a former server ends with its last engine

    asyncio.run(test())
