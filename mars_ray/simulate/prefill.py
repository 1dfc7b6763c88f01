"""The reading of prompts on simulated replicas: in whole steps of `prefill_tokens`, one after another.

Letters: `N` replicas, `M` some replicas, one prompt on each of them.
"""

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.scheduling.scheduler import DECODE_TOKENS
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.queues import Floats, Ints


class Prefill:
    """Until when each replica reads prompts, and by how much that slows down those that decode beside them."""

    def __init__(self, machine: Machine, replicas: int) -> None:
        self._budget, self._times = float(machine.max_prefill_tokens), machine.times()
        self.until_N = np.zeros(replicas)
        """The moment at which each replica will have read all prompts."""
        self.extra_N = np.zeros(replicas)
        """Seconds by which a step is longer in which prompts are read."""
        self._step_N = np.zeros(replicas)
        """The moment at which the last step began in which prompts are read."""
        self._room_N = np.zeros(replicas)
        """Prompt tokens that step has room for."""
        self._unpaid_N = np.zeros(replicas)
        """Reading that began within a tick, after its steps were counted."""

    def share_of_tick(self, begin_s: float, end_s: float) -> Floats:
        """Return for each replica which part of a tick its steps read prompts."""
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
        reading_step_s: Floats,
        end_s: float,
    ) -> Floats:
        """Read a prompt on each of these replicas, behind those being read; return when each has its first tokens.

        A row is free from `free_s` on; a step takes `step_s`, or `reading_step_s` beside prompts.
        """
        # Who finds a step under way waits for its end, half a step on average; who waited for a row got it at one.
        ready_s = np.where(arrival > free_s, arrival + busy * step_s / 2, free_s)
        until_s, last_s, room = self.until_N[replica], self._step_N[replica], self._room_N[replica]
        rest = tokens - np.where(ready_s <= last_s, np.minimum(room, tokens), 0.0)
        steps = np.ceil(rest / self._budget)
        own, at_least_one = steps > 0, np.maximum(steps, 1)
        start_s = np.where(own, np.maximum(until_s, ready_s), until_s)
        long = tokens > DECODE_TOKENS
        extra_s = (self._times.prompt_s * steps + self._times.prompt_token_s * (tokens + masks)) * long
        length_s = steps * reading_step_s + extra_s
        done_s: Floats = start_s + length_s
        self._room_N[replica] = np.where(own, steps * self._budget - rest, room - tokens)
        self._step_N[replica] = np.where(own, done_s - length_s / at_least_one, last_s)
        self.extra_N[replica] = np.where(own, extra_s / at_least_one, self.extra_N[replica])
        self.until_N[replica] = done_s
        self._unpaid_N[replica] += np.minimum(done_s, end_s) - np.minimum(start_s, end_s)
        return done_s
