"""How many requests are on their way to an endpoint that says only when they are too many."""

import asyncio
from contextlib import AsyncExitStack

from mars_ray.batch.run.adaptive_limit import FIRST, AdaptiveLimit


async def round_of(limit: AdaptiveLimit, room: int) -> int:
    """Send as many as may be sent to an endpoint with `room`; return how many that were."""
    async with AsyncExitStack() as stack:
        turns = [await stack.enter_async_context(limit.turn()) for _ in range(limit.limit)]
        for number, turn in enumerate(turns):
            if number < room:
                limit.answered()
            else:
                limit.refused(turn)
        return len(turns)


def test_it_follows_the_room_there_is_down_and_up() -> None:
    async def sent() -> list[list[int]]:
        limit = AdaptiveLimit(64)
        return [[await round_of(limit, room) for _ in range(80)][40:] for room in (20, 3, 1000)]

    some, few, all_there_is = asyncio.run(sent())
    assert min(some) >= 10 and max(some) <= 21
    assert min(few) >= 1 and max(few) <= 4
    assert max(all_there_is) == 64


def test_refusals_of_one_round_count_once() -> None:
    async def sent() -> int:
        limit = AdaptiveLimit(64)
        await round_of(limit, 0)
        return limit.limit

    assert asyncio.run(sent()) == FIRST // 2


def test_turns_are_given_in_order_and_who_left_gets_none() -> None:
    async def order() -> list[str]:
        limit, came = AdaptiveLimit(1), list[str]()

        async def ask(name: str) -> None:
            async with limit.turn():
                came.append(name)

        async with limit.turn():
            asking = [asyncio.create_task(ask(name)) for name in "abc"]
            await asyncio.sleep(0)
            asking[1].cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        return came

    assert asyncio.run(order()) == ["a", "c"]
