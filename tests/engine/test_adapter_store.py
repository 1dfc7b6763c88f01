"""Adapters that are set while an engine process runs, within a memory limit."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.adapter.card import CONFIG_FILE
from mars_ray.adapter.folder import load_adapter, save_adapter
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.request import DecodeParams, Request
from mars_ray.errors import AdapterError, ConfigError, ReplicaLostError, RequestError
from mars_ray.model.card import CARD_FILE
from mars_ray.model.resolve import resolve_model
from tests.engine.test_adapter import some_adapter
from tests.factories.cards import adapter_card
from tests.factories.engine import MakeEngine, bundled_checkpoint, engine_spec, request, serving, started_engine

FOLDER = resolve_model("bundled")
AHEAD: dict[str, Any] = {"mode": Mode.THRESHOLD, "threshold": 0.0, "block": 5}
"""Keeps every draft, so that answers depend on the adapter."""
"""Answers depend on the adapter, but not on the load."""
PROMPT = tuple(range(20, 40))
COUNT = 5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of adapters of one size that give different answers."""
    checkpoint = bundled_checkpoint()
    folders = []
    for number in range(COUNT):
        folder = tmp_path_factory.mktemp("adapters") / str(number)
        lora = some_adapter(checkpoint, rank=8, std=0.1 * (1 + number)).lora
        save_adapter(lora, adapter_card(FOLDER, block=6), folder)
        folders.append(folder)
    return folders


def asked(id: object, name: str | None, max_tokens: int = 12, **decode: Any) -> Request:
    params = DecodeParams(**(AHEAD | decode), adapter=name)
    return request(id, PROMPT, params, max_tokens=max_tokens, ignore_eos=True)


async def answer(front: AsyncEngine, wanted: Request) -> list[int]:
    return [token async for chunk in front.generate(wanted) for token in chunk.tokens]


def gib_of(engine: Engine, folder: Path, count: float) -> float:
    """Memory of `count` adapters of the size of the one in `folder`."""
    return count * engine.load_adapter(folder).nbytes / 2**30


def test_a_request_that_began_keeps_the_weights_that_had_the_name_then(
    make_engine: MakeEngine, saved: list[Path]
) -> None:
    async def test() -> None:
        async with serving(make_engine()) as front:
            alone = []
            for folder in saved[:2]:
                await front.set_adapters({"a": folder})
                alone.append(await answer(front, asked("alone", "a", 200)))
            await front.set_adapters({"a": saved[0]})
            async with aclosing(front.generate(asked("old", "a", 200))) as stream:
                tokens = [*(await anext(stream)).tokens]
                await front.set_adapters({"a": saved[1], "b": saved[0]})
                new = asyncio.create_task(answer(front, asked("new", "a", 200)))
                tokens += [token async for chunk in stream for token in chunk.tokens]
            assert (tokens, await new) == (alone[0], alone[1])
            assert alone[0] != alone[1]
            assert front.adapters == {"a": saved[1], "b": saved[0]}

    asyncio.run(test())


def test_a_dropped_name_is_refused_and_its_requests_go_on(make_engine: MakeEngine, saved: list[Path]) -> None:
    async def test() -> None:
        async with serving(make_engine()) as front:
            await front.set_adapters({"a": saved[0], "b": saved[1]})
            async with aclosing(front.generate(asked("old", "a", 100))) as stream:
                await anext(stream)
                await front.set_adapters({"b": saved[1]})
                with pytest.raises(RequestError, match="adapter is 'a'; this engine has b"):
                    await answer(front, asked("new", "a"))
                assert [chunk async for chunk in stream][-1].finished
            await front.set_adapters({})
            with pytest.raises(RequestError, match="this engine has no adapters with a name"):
                await answer(front, asked("new", "b"))
            assert await answer(front, asked("base", None))

    asyncio.run(test())


def without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def of_another_model(folder: Path) -> None:
    card = json.loads((folder / CARD_FILE).read_text())
    (folder / CARD_FILE).write_text(json.dumps(card | {"base_vocabulary": "0" * 16}))


def of_another_rank(folder: Path) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"r": 7}))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (shutil.rmtree, "has no valid mars.json"),
        (without_weights, "is not a complete adapter"),
        (of_another_model, "is an adapter for bundled"),
        (of_another_rank, "it needs \\(7, "),
    ],
)
def test_an_adapter_that_cannot_be_used_is_named_and_changes_nothing(
    make_engine: MakeEngine, saved: list[Path], tmp_path: Path, spoil: Callable[[Path], None], problem: str
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(saved[1], folder)
    spoil(folder)

    async def test() -> None:
        engine = make_engine()
        async with serving(engine) as front:
            await front.set_adapters({"a": saved[0]})
            before = await answer(front, asked("x", "a"))
            with pytest.raises(AdapterError, match=f"(?s)adapter 'bad': .*{problem}") as raised:
                await front.set_adapters({"a": saved[2], "c": saved[3], "bad": folder})
            assert raised.value.adapter == "bad"
            assert front.adapters == {"a": saved[0]}
            assert await answer(front, asked("x", "a")) == before
            assert len(front._connected.adapters._loaded) == 1
            with pytest.raises(RequestError, match="this engine has a"):
                await answer(front, asked("x", "c"))

    asyncio.run(test())


def test_an_adapter_larger_than_the_memory_is_refused(make_engine: MakeEngine, saved: list[Path]) -> None:
    async def test() -> None:
        engine = make_engine()
        async with serving(engine, adapter_memory_gib=gib_of(engine, saved[0], 0.9)) as front:
            with pytest.raises(AdapterError, match=r"adapter 'a' takes .* GiB, but adapter_memory_gib is") as raised:
                await front.set_adapters({"a": saved[0]})
            assert (raised.value.adapter, front.adapters, len(front._connected.adapters._loaded)) == ("a", {}, 0)

    asyncio.run(test())


def test_a_memory_of_nothing_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="adapter_memory_gib is 0, must be above 0"):
        make_engine(adapter_memory_gib=0)


NAMES = st.integers(0, COUNT - 1)


@settings(max_examples=5)
@given(
    st.lists(st.lists(st.none() | NAMES, max_size=8) | st.dictionaries(NAMES, NAMES), min_size=1, max_size=6),
    st.sampled_from([1.5, 2.5]),
)
def test_many_adapters_in_little_memory_give_the_answers_of_much_memory(
    make_engine: MakeEngine, saved: list[Path], actions: list[Any], room: float
) -> None:
    """Adapters change while the requests of the last change may still run."""

    async def outcome(front: AsyncEngine, wanted: Request) -> list[int] | str:
        try:
            return await answer(front, wanted)
        except RequestError as error:
            return str(error)

    async def outcomes(memory_gib: float | None) -> list[list[int] | str]:
        engine = make_engine(max_num_seqs=3)
        async with serving(engine, adapter_memory_gib=memory_gib) as front:
            await front.set_adapters({str(number): folder for number, folder in enumerate(saved)})
            running: list[asyncio.Task[list[int] | str]] = []
            for action in actions:
                if isinstance(action, dict):
                    # Requests that wait for their adapter would find the new one.
                    while any(adapter.waiting for adapter in front._connected.adapters._by_name.values()):
                        await asyncio.wait(running, timeout=0.01)
                    await front.set_adapters({str(name): saved[number] for name, number in action.items()})
                    continue
                for number in action:
                    wanted = asked(len(running), None if number is None else str(number), 3 + len(running) % 7)
                    running.append(asyncio.create_task(outcome(front, wanted)))
                await asyncio.sleep(0)
            said = await asyncio.gather(*running)
            loaded = front._connected.adapters._loaded
            assert memory_gib is None or sum(adapter.nbytes for adapter in loaded) <= memory_gib * 2**30
            assert engine._adapters._numbers.keys() == {decoder.adapter for decoder in engine._adapters._named.values()}
            return said

    async def test() -> None:
        limited = await outcomes(gib_of(make_engine(), saved[0], room))
        assert limited == await outcomes(None)

    asyncio.run(test())


def test_a_request_for_an_adapter_in_use_by_nobody_comes_through_a_stream_of_others(
    make_engine: MakeEngine, saved: list[Path]
) -> None:
    async def test() -> None:
        engine = make_engine()
        async with serving(engine, adapter_memory_gib=gib_of(engine, saved[0], 1.5)) as front:
            await front.set_adapters({"a": saved[0], "b": saved[1]})
            waits = asyncio.Event()

            async def ask_again(number: int) -> None:
                count = 0
                while not waits.is_set() or not done.done():
                    await answer(front, asked(f"{number}-{count}", "a", 6))
                    count += 1

            others = [asyncio.create_task(ask_again(number)) for number in range(3)]
            done = asyncio.create_task(answer(front, asked("rare", "b")))
            waits.set()
            assert await done
            await asyncio.gather(*others)

    asyncio.run(test())


def test_no_step_and_no_other_request_waits_for_an_adapter_that_is_loaded(
    make_engine: MakeEngine, saved: list[Path]
) -> None:
    async def test() -> None:
        engine = make_engine()
        room = gib_of(engine, saved[0], 1.5)
        load, may_load = engine.load_adapter, threading.Event()

        def load_late(folder: Path) -> Any:
            may_load.wait()
            return load(folder)

        may_load.set()
        async with serving(engine, adapter_memory_gib=room) as front:
            await front.set_adapters({"a": saved[0], "b": saved[1]})
            may_load.clear()
            engine.load_adapter = load_late  # type: ignore[method-assign]
            waiting = asyncio.create_task(answer(front, asked("waits", "a")))
            setting = asyncio.create_task(front.set_adapters({"a": saved[0], "b": saved[1], "c": saved[2]}))
            assert await answer(front, asked("base", None, 40))
            assert not waiting.done()
            assert not setting.done()
            may_load.set()
            assert await waiting
            await setting
            assert await answer(front, asked("c", "c"))

    asyncio.run(test())


def test_an_adapter_that_vanished_fails_its_requests_alone(
    make_engine: MakeEngine, saved: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    shutil.copytree(saved[0], folder)

    async def test() -> None:
        engine = make_engine()
        async with serving(engine, adapter_memory_gib=gib_of(engine, saved[0], 1.5)) as front:
            await front.set_adapters({"a": folder, "b": saved[1]})
            shutil.rmtree(folder)
            for _ in range(2):
                with pytest.raises(AdapterError, match=r"adapter 'a': .* has no valid mars.json"):
                    await answer(front, asked("x", "a"))
                assert await answer(front, asked("x", "b"))

    asyncio.run(test())


def test_an_engine_process_has_the_adapters_of_its_spec_and_then_those_that_are_set(
    saved: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "trained"
    shutil.copytree(saved[0], folder)

    async def test() -> None:
        spec = replace(engine_spec(FOLDER), adapters={None: saved[4], "a": saved[1]})
        engine, facts = await AsyncEngine.start(spec)
        try:
            assert (engine.adapters, facts.block) == ({"a": saved[1]}, 6)
            first = await answer(engine, asked("x", "a"))
            await engine.set_adapters({"a": folder})
            second = await answer(engine, asked("x", "a"))
            trained_on = load_adapter(saved[1], FOLDER)
            save_adapter(trained_on.lora, trained_on.card, folder, replace=True)
            await engine.set_adapters({"a": folder})
            assert await answer(engine, asked("x", "a")) == first != second
        finally:
            await engine.close()

    asyncio.run(test())


@pytest.mark.slow  # the process starts for nothing else
def test_an_engine_process_does_not_start_with_an_adapter_that_is_missing(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(AdapterError, match=r"adapter 'a': .*missing"):
            await AsyncEngine.start(replace(engine_spec(FOLDER), adapters={"a": tmp_path / "missing"}))

    asyncio.run(test())


def test_the_next_process_has_the_adapters_of_one_that_was_killed_but_those_that_vanished(
    saved: list[Path], tmp_path: Path
) -> None:
    vanished = tmp_path / "vanished"
    shutil.copytree(saved[2], vanished)

    async def test() -> None:
        async with started_engine(replace(engine_spec(FOLDER), adapters={"a": saved[0]}), restarts=1) as engine:
            await engine.set_adapters({"a": saved[0], "c": vanished, "b": saved[1]})
            before = [await answer(engine, asked(name, name)) for name in ("a", "b")]
            shutil.rmtree(vanished)
            async with aclosing(engine.generate(asked("old", "a", 1000))) as stream:
                await anext(stream)
                assert engine.process is not None
                engine.process.kill()
                with pytest.raises(ReplicaLostError):
                    async for _ in stream:
                        pass
            assert [await answer(engine, asked(name, name)) for name in ("a", "b")] == before
            assert engine.adapters == {"a": saved[0], "b": saved[1]}

    asyncio.run(test())
