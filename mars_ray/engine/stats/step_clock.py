"""The clock of an engine's steps: it says how long a step took, and lets time pass.

A step lasts as long as it takes here, or, in a rehearsal, as long as it would take on a modelled machine. Nothing else
of an engine knows which.
"""

from collections.abc import Callable

from mars_ray.engine.stats.state import ModelledSteps
from mars_ray.engine.stats.step_time import StepWork
from mars_ray.machines.step_model import StepModel


class StepClock:
    """Measures steps by `clock`. Work between two steps, such as sending chunks, counts as part of the next step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._ended_s: float | None = None
        """End of the last step; None if the engine has been idle since."""

    def begin(self) -> None:
        """Begin a step."""
        self._began_s = self._clock()

    def forwarded(self, work: StepWork) -> None:
        """Let the time of a forward pass before its tokens are committed, so that latencies include it."""

    def end(self) -> float:
        """End the step and return its seconds."""
        since_s = self._began_s if self._ended_s is None else self._ended_s
        self._ended_s = self._clock()
        return self._ended_s - since_s

    def idle(self) -> None:
        """Leave the time until the next step out, because the engine has no work."""
        self._ended_s = None

    def modelled(self) -> ModelledSteps | None:
        """Return the machine whose step times these are; None for the time of this machine."""
        return None


class ModelledClock(StepClock):
    """Makes each step last as long as a model of another machine says, and counts the steps that last longer here."""

    def __init__(self, model: StepModel, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        super().__init__(clock)
        self._model = model
        self._sleep = sleep
        self._slow_steps = 0
        self._forwarded_s: float | None = None
        """End of the last forward on the modelled machine; None if the engine has been idle since."""

    def forwarded(self, work: StepWork) -> None:
        """Wait until a forward that did this work would have ended on the modelled machine.

        The forward counts from the end of the last one, if the engine was not idle in between. So the time in which
        tokens are committed and sent is part of the next step, as on a machine that overlaps the two.
        """
        since_s = self._began_s if self._forwarded_s is None else self._forwarded_s
        ends_s = since_s + self._model.seconds(
            num_seqs=work.num_seqs,
            positions=work.positions,
            kv_tokens=work.kv_tokens,
            prompt_tokens=work.prompt_tokens,
        )
        now_s = self._clock()
        if now_s > ends_s:
            self._slow_steps += 1
            self._forwarded_s = now_s
        else:
            self._sleep(ends_s - now_s)
            self._forwarded_s = ends_s  # not the current time; otherwise late wake-ups would add up

    def idle(self) -> None:
        """Leave the time until the next step out, because the engine has no work."""
        super().idle()
        self._forwarded_s = None

    def modelled(self) -> ModelledSteps:
        """Return the machine and the number of slow steps."""
        return ModelledSteps(name=self._model.name, slow_steps=self._slow_steps)


def step_clock(model: StepModel | None, clock: Callable[[], float], sleep: Callable[[float], None]) -> StepClock:
    """Return the clock of an engine whose steps take the times of `model`, or of this machine without a model."""
    return StepClock(clock) if model is None else ModelledClock(model, clock, sleep)
