"""Turns of suspects and others."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.run.isolation import Isolation


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2**32), st.sets(st.integers(0, 11)))
def test_a_suspect_works_alone_and_everybody_gets_a_turn(alone: list[bool], seed: int, cancelled: set[int]) -> None:
    source = random.Random(seed)
    naps = [[source.randrange(4) for _ in range(2)] for _ in alone]

    async def run() -> None:
        isolation, working, worked = Isolation(), set[int](), set[int]()

        async def work(number: int) -> None:
            for _ in range(naps[number][0]):
                await asyncio.sleep(0)
            async with isolation.turn(alone=alone[number]):
                working.add(number)
                for _ in range(naps[number][1] + 1):
                    assert len(working) == 1 or not any(alone[each] for each in working)
                    await asyncio.sleep(0)
                working.discard(number)
                worked.add(number)

        tasks = [asyncio.create_task(work(number)) for number in range(len(alone))]
        await asyncio.sleep(0)
        for number in cancelled & set(range(len(alone))):
            if number not in working:
                tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert worked >= set(range(len(alone))) - cancelled

    asyncio.run(asyncio.wait_for(run(), 60))
