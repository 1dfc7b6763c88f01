"""A cluster of queues whose number of replicas follows the goal. A minute takes milliseconds.

Requests wait for a row, and rows serve one at a time, as fast as the controller expects.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapreplace
from itertools import pairwise
from random import Random

import numpy as np

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.replica_goal import GoalState, desired_replicas
from mars_ray.control.demand import JUMP_S, JUMP_SIGMAS, RATE_S
from mars_ray.serve.replicas.prefix_routing import SLACK
from mars_ray.simulate.replicas import Replicas, Scaling
from tests.control.control_samples import SPEED, load_of, requests_at, wanted

FULL = requests_at(1.0)
"""Requests per second that take all the time of one replica."""
SCALING = Scaling(min_replicas=1, max_replicas=12, upscale_delay_s=10, downscale_delay_s=300)
"""The delays are those of `serve_configs/autoscaled.yaml`."""
PEAK = 3.0
"""Highest load, in replicas."""

Load = Callable[[float], float]
"""Load in replicas at a second."""


def step(second: float) -> float:
    """0.8 replicas, from the tenth minute on 2.6."""
    return 0.8 if second < 600 else 2.6


def bursts(period_s: float) -> Load:
    """2.6 replicas for half of each period, else 1."""
    return lambda second: 2.6 if second % period_s < period_s / 2 else 1.0


def sine(period_s: float) -> Load:
    """0.8 to 2.8 replicas."""
    return lambda second: 1.8 + math.sin(2 * math.pi * second / period_s)


@dataclass(slots=True)
class Outcome:
    """What came of a load, from the second `warm_s` on."""

    warm_s: int
    waits: list[float] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)

    def within(self, promise_s: float) -> float:
        return sum(wait_s <= promise_s for wait_s in self.waits) / len(self.waits)

    @property
    def mean(self) -> float:
        return sum(self.replicas) / len(self.replicas)

    @property
    def changes_per_hour(self) -> float:
        return 3600 * sum(before != after for before, after in pairwise(self.replicas)) / len(self.replicas)


class QueueCluster:
    """Replicas that begin as `replicas`, and stay so without `scaling`."""

    def __init__(self, load: Load, plan: ControlPlan, replicas: int, scaling: Scaling | None, seed: int = 0) -> None:
        self._load = load
        self._plan = plan
        self._replicas = Replicas(replicas, scaling)
        self._random = Random(seed)
        most = scaling.max_replicas if scaling else replicas
        self._free_s = [[0.0] * SPEED.rows for _ in range(most)]
        """Times at which the rows of each replica are free, as heaps."""
        self._recent = [deque[tuple[float, float]]() for _ in range(most)]
        """Starts of requests, and the seconds for which they had waited."""
        self._arrived = deque[float]()
        self._goal = GoalState()

    def run(self, seconds: int, warm_s: int) -> Outcome:
        outcome = Outcome(warm_s)
        arrives_s = 0.0
        for second in range(seconds):
            while arrives_s < second + 1:
                if self._random.random() * PEAK < self._load(arrives_s):
                    wait_s = self._serve(arrives_s)
                    if arrives_s >= warm_s:
                        outcome.waits.append(wait_s)
                arrives_s += self._random.expovariate(PEAK * FULL)
            self._decide(second + 1.0)
            if second >= warm_s:
                outcome.replicas.append(len(self._replicas.up))
        return outcome

    def _serve(self, now_s: float) -> float:
        """Queue a request where the router of the endpoint would, and return the seconds for which it waits."""
        up = self._replicas.up.tolist()
        queued = {
            replica: sum(free_s > now_s for free_s in self._free_s[replica])
            + max(0.0, self._free_s[replica][0] - now_s) * FULL
            for replica in up
        }
        chosen = self._random.choice(up)
        least = min(up, key=queued.__getitem__)
        rows = self._free_s[least if queued[chosen] > queued[least] + SLACK else chosen]
        start_s = max(now_s, rows[0])
        heapreplace(rows, start_s + self._random.expovariate(FULL / SPEED.rows))
        replica = least if rows is self._free_s[least] else chosen
        self._recent[replica].append((start_s, start_s - now_s))
        self._arrived.append(now_s)
        return start_s - now_s

    def _decide(self, now_s: float) -> None:
        p95s = [p95 for replica in self._replicas.up if (p95 := self._p95_s(self._recent[replica], now_s)) is not None]
        while self._arrived and self._arrived[0] < now_s - RATE_S:
            self._arrived.popleft()
        jump = sum(at_s >= now_s - JUMP_S for at_s in self._arrived)
        requests_s = max(len(self._arrived) / RATE_S, (jump - JUMP_SIGMAS * math.sqrt(jump)) / JUMP_S)
        latency_s = sum(p95s) / len(p95s) if p95s else None
        load = load_of(wanted(requests_s=requests_s), replicas=len(self._replicas.up), ttft_p95_s=latency_s)
        desired, self._goal = desired_replicas(self._plan, load, self._goal, 1.0, lowered=False)
        in_flight = np.array([sum(free_s > now_s for free_s in rows) for rows in self._free_s])
        self._replicas.follow(desired, in_flight, now_s)

    def _p95_s(self, starts: deque[tuple[float, float]], now_s: float) -> float | None:
        while starts and starts[0][0] < now_s - RATE_S:
            starts.popleft()
        waits_s = [wait_s for start_s, wait_s in starts if start_s <= now_s]
        return float(np.percentile(waits_s, 95)) if waits_s else None
