"""Prefill on simulated replicas. Each replica reads its prompts one after another, in whole steps of
`max_prefill_tokens`.

Letters: `N` replicas, `M` a selection of replicas with one prompt each, `L` lines of the step time.
"""

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.scheduling.scheduler import DECODE_TOKENS
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.queues import Floats, Ints


class Prefill:
    """The prompts that each replica reads, and the time that reading them adds to its steps."""

    def __init__(self, machine: Machine, replicas: int) -> None:
        self._budget = float(machine.max_prefill_tokens)
        self._lines = machine.lines
        self.until_N = np.zeros(replicas)
        """Time at which each replica will have read all its prompts."""
        self.extra_N = np.zeros(replicas)
        """Seconds that reading adds to a step."""
        self._step_N = np.zeros(replicas)
        """Time at which the last step that reads prompts starts, by replica."""
        self._room_N = np.zeros(replicas)
        """Prompt tokens that still fit into this last step."""
        self._reading_s_LN = np.zeros((len(self._lines), replicas))
        """Seconds that each line predicts for the steps up to this last one. The steps take the longest of these
        times."""
        self._unpaid_N = np.zeros(replicas)
        """Seconds of reading that were added to a tick after the steps of the tick had been counted."""

    def share_of_tick(self, begin_s: float, end_s: float) -> Floats:
        """Return the share of a tick for which the steps of each replica read prompts."""
        tick_s = end_s - begin_s
        reading_N = (self.until_N - begin_s).clip(0.0, tick_s) + self._unpaid_N
        share_N: Floats = np.minimum(reading_N / tick_s, 1.0)
        self._unpaid_N = reading_N - share_N * tick_s
        return share_N

    def read(
        self,
        replica: Ints,
        arrival: Floats,
        tokens: Floats,
        masks: Ints,
        free_s: Floats,
        busy: NDArray[np.bool_],
        step_s: Floats,
        reading_step_s_LM: Floats,
        end_s: float,
    ) -> Floats:
        """Read one more prompt on each of these replicas, and return the time of each prompt's first token.

        A slot is free from `free_s` on. A step without prompts takes `step_s` seconds. A step with prompts takes the
        longest time over the lines: `reading_step_s_LM` plus the time that the prompt adds to the line.
        """
        # A request that arrives during a step waits for the end of the step, which takes half a step on average. A
        # request that waited for a slot gets it at the end of a step, and does not wait again.
        ready_s = np.where(arrival > free_s, arrival + busy * step_s / 2, free_s)
        until_s = self.until_N[replica]
        last_s = self._step_N[replica]
        room = self._room_N[replica]
        rest = tokens - np.where(ready_s <= last_s, np.minimum(room, tokens), 0.0)
        steps = np.ceil(rest / self._budget)
        own = steps > 0
        at_least_one = np.maximum(steps, 1)
        start_s = np.where(own, np.maximum(until_s, ready_s), until_s)
        long = tokens > DECODE_TOKENS
        before_s_LM = np.where(own, 0.0, self._reading_s_LN[:, replica])
        after_s_LM = before_s_LM + [
            steps * reading_step_s_M + (line.prompt_s * steps + line.prompt_token_s * (tokens + masks)) * long
            for line, reading_step_s_M in zip(self._lines, reading_step_s_LM, strict=True)
        ]
        length_s = after_s_LM.max(axis=0) - before_s_LM.max(axis=0)
        extra_s = length_s - steps * reading_step_s_LM.max(axis=0)
        done_s: Floats = start_s + length_s
        self._reading_s_LN[:, replica] = after_s_LM
        self._room_N[replica] = np.where(own, steps * self._budget - rest, room - tokens)
        self._step_N[replica] = np.where(own, done_s - length_s / at_least_one, last_s)
        self.extra_N[replica] = np.where(own, extra_s / at_least_one, self.extra_N[replica])
        self.until_N[replica] = done_s
        self._unpaid_N[replica] += np.minimum(done_s, end_s) - np.minimum(start_s, end_s)
        return done_s
