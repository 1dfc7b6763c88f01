"""A grammar that costs too much is refused before the engine compiles it, once, and holds nobody up."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given

from mars_ray.engine.grammar.matcher import Grammars
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.process import grammar_store
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.process.grammar_checker import GrammarChecker
from mars_ray.engine.process.grammar_store import GrammarStore
from mars_ray.engine.process.messages import Forget, Order, Prepare
from mars_ray.errors import GrammarError, ReplicaLostError
from tests.engine.grammar_samples import GRAMMARS, regex, schema
from tests.engine.hostile_grammars import PAIRS, hostile_schemas
from tests.engine.test_async import read, spec
from tests.factories.engine import request, started_engine
from tests.samples import memory_mib

COSTLY: dict[str, Any] = {
    "patterns": {"type": "string", "allOf": [{"pattern": f".*{pair}.*"} for pair in PAIRS[:20]]},
    "counts": {"type": "string", "allOf": [{"pattern": f"a{{{count}}}"} for count in range(1, 25)]},
    "multiple": {"type": "integer", "multipleOf": 3_000_017},
    "multiples": {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
    "patternProperties": {"type": "object", "patternProperties": {f"^p{n}.*p{n}$": {} for n in range(300)}},
}


@asynccontextmanager
async def checking(grammars: Grammars) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(grammars.load())
    try:
        yield checker
    finally:
        await checker.close()


@pytest.mark.parametrize("name", COSTLY)
def test_a_schema_that_costs_too_much_is_refused_and_the_refusal_remembered(grammars: Grammars, name: str) -> None:
    async def test() -> None:
        async with checking(grammars) as checker:
            for _ in range(2):  # the second time there is no process that could check it
                with pytest.raises(GrammarError, match=r"takes more than .* to compile; simplify it"):
                    await checker.cost(schema(COSTLY[name]))
                await checker.close()
            assert checker._child is None
            assert await checker.cost(schema({"type": "integer"})) < 1 << 20

    asyncio.run(test())


def test_an_object_of_a_thousand_optional_properties_is_served(grammars: Grammars) -> None:
    wide = schema({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}})

    async def test() -> None:
        async with checking(grammars) as checker:
            assert await checker.cost(wide) < 32 << 20

    asyncio.run(test())
    matcher = grammars.matcher(wide, frozenset())
    assert all(matcher.take(int(matcher.allowed().nonzero()[0][-1])) for _ in range(8))


@given(grammar=GRAMMARS)
def test_what_is_checked_and_found_good_compiles_and_what_is_refused_says_why(
    grammars: Grammars, checker_loop: Callable[[GrammarSpec], int], grammar: GrammarSpec
) -> None:
    try:
        assert checker_loop(grammar) >= 0
    except GrammarError as error:
        assert len(str(error)) < 400
    else:
        grammars.matcher(grammar, frozenset())


@pytest.fixture(scope="module")
def checker_loop(grammars: Grammars) -> Any:
    """Return a function that asks one checker, from outside its loop."""
    with asyncio.Runner() as runner:
        checker = GrammarChecker(grammars.load())
        yield lambda grammar: runner.run(checker.cost(grammar))
        runner.run(checker.close())


def test_a_checker_that_died_is_started_again(grammars: Grammars) -> None:
    async def test() -> None:
        async with checking(grammars) as checker:
            await checker.cost(regex("a"))
            assert checker._child is not None and checker._reading is not None
            checker._child.process.kill()
            await checker._reading
            await checker.cost(regex("b"))

    asyncio.run(test())


def test_steps_go_on_while_a_grammar_is_compiled(prompts: list[tuple[int, ...]]) -> None:
    """This one takes 0.2 s of processor time, and a step some milliseconds."""
    slow = schema({"type": "integer", "multipleOf": 49_999})

    async def test() -> None:
        async with started_engine(spec()) as engine:
            assert engine._checker is not None
            await engine._checker.cost(slow)  # what follows is the engine's own work alone
            other = asyncio.create_task(read(engine, request("slow", prompts[1], grammar=slow, max_tokens=4)))
            chunks = 0
            async for _ in engine.generate(request("stream", prompts[0], max_tokens=1500, ignore_eos=True)):
                chunks += 1
                if other.done():
                    break
            assert chunks > 10
            await other

    asyncio.run(test())


@asynccontextmanager
async def storing(grammars: Grammars, room: int, patch: pytest.MonkeyPatch) -> AsyncIterator[tuple[GrammarStore, list]]:
    """A store with room for so many grammars whose engine compiles at once, and what that engine was ordered."""
    orders: list[Order] = []

    def obey(order: Order) -> None:
        orders.append(order)
        if isinstance(order, Prepare):
            asyncio.get_running_loop().call_soon(store.compiled, order.grammar, None)

    patch.setattr(grammar_store, "LEAST_BYTES", 100 << 20)  # more than any of these takes: all count alike
    patch.setattr(grammar_store, "ROOM_BYTES", room * grammar_store.LEAST_BYTES)
    checker = GrammarChecker(grammars.load())
    store = GrammarStore(checker, obey)
    try:
        yield store, orders
    finally:
        await checker.close()


def test_compiled_grammars_are_kept_by_their_bytes_the_longest_unused_go_first(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with storing(grammars, 3, monkeypatch) as (store, orders):
            for text in ("a", "b", "c", "a", "d", "a", "b"):
                async with store.use(regex(text), ""):
                    pass
        assert [(type(order), order.grammar.text) for order in orders] == [  # type: ignore[union-attr]
            *((Prepare, "a"), (Prepare, "b"), (Prepare, "c")),
            *((Forget, "b"), (Prepare, "d"), (Forget, "c"), (Prepare, "b")),
        ]

    asyncio.run(test())


def test_a_grammar_waits_while_those_in_use_fill_the_room(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with storing(grammars, 1, monkeypatch) as (store, orders):

            async def second() -> None:
                async with store.use(regex("b"), ""):
                    assert Forget(regex("a")) in orders

            async with store.use(regex("a"), ""):
                waiting = asyncio.create_task(second())
                await store._checker.cost(regex("b"))
                async with store.use(regex("a"), ""):  # what is compiled already is not held up
                    pass
                assert orders == [Prepare(regex("a"))]
            await waiting

    asyncio.run(test())


def test_a_grammar_that_nobody_wants_any_more_makes_room_once_it_is_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        orders: list[Order] = []
        async with storing(grammars, 1, monkeypatch) as (store, _):
            store._send = orders.append
            for text in ("a", "b"):  # known costs make "a" the first to take the room
                await store._checker.cost(regex(text))

            async def use(text: str) -> None:
                async with store.use(regex(text), ""):
                    pass

            async def ordered(text: str) -> None:
                while Prepare(regex(text)) not in orders:
                    await asyncio.sleep(0)

            left, waiting = asyncio.create_task(use("a")), asyncio.create_task(use("b"))
            await ordered("a")
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            store.compiled(regex("a"), None)
            await ordered("b")
            store.compiled(regex("b"), None)
            await waiting
        assert orders == [Prepare(regex("a")), Forget(regex("a")), Prepare(regex("b"))]

    asyncio.run(test())


def test_who_waits_for_a_grammar_hears_that_the_engine_is_gone(grammars: Grammars) -> None:
    async def test() -> None:
        ordered = asyncio.Event()
        checker = GrammarChecker(grammars.load())
        store = GrammarStore(checker, lambda _: ordered.set())

        async def use() -> None:
            async with store.use(regex("a"), ""):
                raise AssertionError

        waiting = asyncio.create_task(use())
        await ordered.wait()
        store.lose(ReplicaLostError("gone"))
        with pytest.raises(ReplicaLostError):
            await waiting
        await checker.close()

    asyncio.run(test())


def test_grammars_of_one_tenant_do_not_hold_up_those_of_another(grammars: Grammars) -> None:
    async def test() -> None:
        async with checking(grammars) as checker:
            async with checker.turn("flood"), checker.turn("flood"):
                third = asyncio.create_task(_turn(checker, "flood"))
                await _turn(checker, "other")
                assert not third.done()
            await third

    asyncio.run(test())


async def _turn(checker: GrammarChecker, tenant: str) -> None:
    async with checker.turn(tenant):
        pass


def _answered(engine: AsyncEngine, number: int, text: str) -> Awaitable[Any]:
    grammar = GrammarSpec(kind="json_schema", text=text)
    return read(engine, request(f"h{number}", [5, 6, 7], grammar=grammar, max_tokens=8))


@pytest.mark.slow
def test_two_hundred_hostile_schemas_end_in_an_answer_or_a_refusal_and_take_little_memory() -> None:
    async def test() -> None:
        async with started_engine(spec()) as engine:
            assert engine.process is not None
            await _answered(engine, -1, json.dumps({"type": "integer"}))
            before = memory_mib(engine.process.pid)
            for number, text in enumerate(hostile_schemas(200)):
                try:
                    await _answered(engine, number, text)
                except GrammarError as error:
                    assert len(str(error)) < 500
                assert memory_mib(engine.process.pid) - before < 300

    asyncio.run(test())
