"""An engine stalls after a time without progress that its steps do not explain, by the time that its client runs."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.process.progress import CHECK_SECONDS, Progress
from mars_ray.engine.stats.state import EngineState
from tests.control.control_samples import class_state, engine_state
from tests.factories.engine import MakeEngine, request

STALL_SECONDS, STEP_SECONDS = 10.0, 30.0


def state_of(progress: int, *, running: int = 1, longest_step_s: float | None = 0.5) -> EngineState:
    return engine_state(class_state(running=running), progress=progress, longest_step_s=longest_step_s)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    now_s = 0.0

    def __init__(self) -> None:
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now_s += timeout or 0.0
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now_s


Ask = Callable[[JumpingLoop], Awaitable[EngineState]]


def stalled_after(ask: Ask, within_s: float = 1000.0) -> tuple[float, str] | None:
    """Return the time and the reason of a stall; None if there is none in time."""
    progress = Progress(stall_seconds=STALL_SECONDS, step_seconds=STEP_SECONDS)
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        loop: Any = runner.get_loop()

        async def watch() -> tuple[float, str]:
            reason = await progress.until_stalled(lambda: ask(loop))
            return loop.time(), reason

        try:
            return runner.run(asyncio.wait_for(watch(), within_s))
        except TimeoutError:
            return None


def answering(*states: EngineState, then: Ask) -> Ask:
    """Answer with `states`, one a check, and go on as `then`."""
    left = list(states)

    async def ask(loop: JumpingLoop) -> EngineState:
        return left.pop(0) if left else await then(loop)

    return ask


async def silent(_: JumpingLoop) -> EngineState:
    return await asyncio.get_running_loop().create_future()


def test_an_engine_that_sends_no_state_stalls_after_the_time_of_a_step_and_the_limit() -> None:
    stall = stalled_after(answering(state_of(1, longest_step_s=20.0), then=silent))
    assert stall is not None
    assert 30 < stall[0] <= 30 + 2 * CHECK_SECONDS
    assert "a step has not ended for 31 s, more than the 30.0 s" in stall[1]


def test_an_engine_that_answers_without_progress_stalls() -> None:
    async def unchanged(_: JumpingLoop) -> EngineState:
        return state_of(7, running=3)

    stall = stalled_after(unchanged)
    assert stall is not None
    assert 10.5 < stall[0] <= 10.5 + 2 * CHECK_SECONDS
    assert "3 sequences got no token and read no prompt for 11 s" in stall[1]


def test_before_the_first_step_has_ended_its_own_limit_holds() -> None:
    stall = stalled_after(answering(state_of(0, running=0, longest_step_s=None), then=silent))
    assert stall is not None
    assert STEP_SECONDS < stall[0] <= STEP_SECONDS + 2 * CHECK_SECONDS


def test_an_engine_that_is_idle_or_slow_but_progresses_never_stalls() -> None:
    count = 0

    async def idle(_: JumpingLoop) -> EngineState:
        return state_of(0, running=0)

    async def slow(_: JumpingLoop) -> EngineState:
        nonlocal count
        count += 1
        await asyncio.sleep(9)  # in the time of the loop
        return state_of(count)

    assert stalled_after(idle) is None
    assert stalled_after(slow) is None


def test_time_in_which_the_client_is_stopped_does_not_count() -> None:
    async def suspended(loop: JumpingLoop) -> EngineState:
        loop.now_s += 3600
        await asyncio.sleep(2)
        return state_of(1)

    assert stalled_after(answering(state_of(1), *[state_of(1)] * 3, then=suspended), 3600.5) is None


@given(
    st.lists(st.one_of(st.builds(state_of, st.integers(0, 2), running=st.integers(0, 1)), st.integers(1, 4))),
)
def test_a_stall_is_a_sum_of_waits_since_the_last_progress(events: list[EngineState | int]) -> None:
    progress = Progress(stall_seconds=STALL_SECONDS, step_seconds=STEP_SECONDS)
    waited, last = 0, None
    for event in events:
        if isinstance(event, EngineState):
            if not event.running or last is None or event.progress != last.progress:
                waited = 0
            last = event
            progress.observe(event)
        else:
            waited += event
            assert progress.wait(event) == (waited > (STEP_SECONDS if last is None else STALL_SECONDS + 0.5))


def test_each_part_of_a_prompt_and_each_token_is_progress(make_engine: MakeEngine) -> None:
    engine = make_engine(max_prefill_tokens=16)
    engine.add(request("a", range(5, 105), max_tokens=8, ignore_eos=True))
    before = engine.state().progress
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        assert engine.state().progress > before
        before = engine.state().progress
    assert steps > 100 // 16
