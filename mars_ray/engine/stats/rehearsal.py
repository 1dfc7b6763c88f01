"""Rehearse another machine: make each step on this machine last as long as it would on the other."""

from collections.abc import Callable

from mars_ray.engine.stats.state import RehearsalState
from mars_ray.engine.stats.step_time import StepWork
from mars_ray.machines.registry import step_model
from mars_ray.machines.step_model import StepModel


class Rehearsal:
    """Waits in each step until the modelled machine would have finished the step. Counts the steps that take longer
    here."""

    def __init__(self, model: StepModel, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self._slow_steps = 0
        self._ended_s: float | None = None
        """End of the last step; None if the engine has been idle since."""

    def wait(self, work: StepWork, began_s: float) -> None:
        """Wait until a step that did this work would have ended on the modelled machine.

        The step counts from `began_s`, or from the end of the last step if the engine was not idle in between. So the
        time in which tokens are committed and sent is part of the next step, as on a machine that overlaps the two.
        """
        since_s = began_s if self._ended_s is None else self._ended_s
        ends_s = since_s + self._model.seconds(
            num_seqs=work.num_seqs,
            positions=work.positions,
            kv_tokens=work.kv_tokens,
            prompt_tokens=work.prompt_tokens,
        )
        now_s = self._clock()
        if now_s > ends_s:
            self._slow_steps += 1
            self._ended_s = now_s
        else:
            self._sleep(ends_s - now_s)
            self._ended_s = ends_s  # not the current time; otherwise late wake-ups would add up

    def idle(self) -> None:
        """Record that the engine has no work, so that the time until the next step does not count."""
        self._ended_s = None

    def state(self) -> RehearsalState:
        """Return the machine and the number of slow steps."""
        return RehearsalState(name=self._model.name, slow_steps=self._slow_steps)


def rehearsal_of(machine: str | None, clock: Callable[[], float], sleep: Callable[[float], None]) -> Rehearsal | None:
    """Return the rehearsal of a machine, given its name or file, or None if `machine` is None. Raises `ConfigError`."""
    return None if machine is None else Rehearsal(step_model(machine), clock, sleep)
