"""What simulated replicas tell the controller, once a second: the very reports that real ones send."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np

from mars_ray.control.report import ReplicaReport
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.latency_window import MAX_VALUES, WINDOW_S
from mars_ray.engine.stats.state import ClassState, EngineState
from mars_ray.simulate.fleet import Fleet
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.queues import Floats


class Reports:
    """The reports of the first `watched` replicas."""

    def __init__(self, fleet: Fleet, machine: Machine, classes: Sequence[ServiceClass], watched: int) -> None:
        self._fleet, self._machine, self._classes = fleet, machine, classes
        self._points, self._times = machine.points, machine.times()
        self._firsts: list[deque[Floats]] = [deque(maxlen=int(WINDOW_S)) for _ in range(watched)]
        self._steps: deque[Floats] = deque([np.zeros((watched, 2, 2))], maxlen=int(WINDOW_S) + 1)
        self._kv_tokens_N = fleet.kv_tokens_N
        self._tokens_share = cache(self._tokens_share_of)

    def second(self) -> None:
        """End a second."""
        replicas, times = zip(*self._fleet.firsts, strict=True) if self._fleet.firsts else ([], [])
        self._fleet.firsts = []
        replica = np.concatenate(replicas) if replicas else np.zeros(0, int)
        seconds = np.concatenate(times) if times else np.zeros(0)
        for number, kept in enumerate(self._firsts):
            kept.append(seconds[replica == number])
        self._steps.append(self._fleet.step_sums_W22.copy())
        self._kv_tokens_N = self._fleet.kv_tokens_N

    def of(self, replica: int, number: int) -> ReplicaReport:
        """Return the report of one replica at the end of second `number`."""
        fleet, machine = self._fleet, self._machine
        kv_tokens = max(0, round(float(self._kv_tokens_N[replica])))
        state = EngineState(
            max_num_seqs=machine.max_num_seqs,
            classes=tuple(self._class(replica, place, each) for place, each in enumerate(self._classes)),
            tokens_running=0,  # for people who watch; nobody decides by it
            kv_cache_usage=min(1.0, kv_tokens / (machine.max_num_seqs * machine.max_model_len)),
            kv_tokens=kv_tokens,
            steps=number,
            preemptions=0,
            threshold_changes=int(fleet.threshold_changes_N[replica]),
            block=int(fleet.block_N[replica]),
            profile=self._points,
            step_time=self._times,
            ttft_p95_s=self._ttft_p95_s(replica),
            itl_p95_s=self._itl_p95_s(replica),
        )
        return ReplicaReport(replica=f"replica-{replica}", number=number, seconds=float(number), state=state)

    def _class(self, replica: int, place: int, each: ServiceClass) -> ClassState:
        fleet = self._fleet
        return ClassState(
            name=each.name,
            threshold=float(fleet.thresholds_NC[replica, place]),
            running=int(fleet.held_NC[replica, place]),
            waiting=int(fleet.queues.waiting[replica, place]),
            arrived=int(fleet.arrived_NC[replica, place]),
            prompt_tokens=round(float(fleet.prompt_tokens_NC[replica, place])),
            ended=int(fleet.ended_NC[replica, place]),
            tokens=round(float(fleet.ended_tokens_NC[replica, place])),
        )

    def _ttft_p95_s(self, replica: int) -> float | None:
        values = np.concatenate(self._firsts[replica])[-MAX_VALUES:] if self._firsts[replica] else np.zeros(0)
        if not len(values):
            return None
        place = 0.95 * (len(values) - 1)
        values.sort()
        low, high = values[[int(place), math.ceil(place)]].tolist()
        return float(low + (place - int(place)) * (high - low))

    def _itl_p95_s(self, replica: int) -> float | None:
        """Return the 95th percentile of a step's time over its tokens, from steps with and without prompts."""
        kinds = (self._steps[-1][replica] - self._steps[0][replica]).tolist()
        all_steps = sum(steps for steps, _ in kinds)
        if all_steps < 1e-9:
            return None
        # Classes differ in threshold; the one with most rows speaks for all.
        main = int(self._fleet.held_NC[replica].argmax())
        shares = self._tokens_share(float(self._fleet.thresholds_NC[replica, main]), int(self._fleet.block_N[replica]))
        paces, weights = zip(
            *sorted(
                (seconds / max(steps, 1e-9) / tokens, steps * share)
                for steps, seconds in kinds
                for tokens, share in enumerate(shares, 1)
            ),
            strict=True,
        )
        return float(paces[min(bisect_left(list(accumulate(weights)), 0.95 * all_steps), len(paces) - 1)])

    def _tokens_share_of(self, threshold: float, block: int) -> list[float]:
        """Return the share of steps that give a sequence 1, 2, ... `block` tokens."""
        tokens_B, _ = self._machine.lookahead(threshold)
        survival_K = np.minimum.accumulate(np.diff(tokens_B[:block]).clip(0.0, 1.0))
        shares: list[float] = (-np.diff(np.concatenate([[1.0], survival_K, [0.0]]))).tolist()
        return shares
