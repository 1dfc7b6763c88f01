"""What simulated replicas tell the controller, once a second: the very reports that real ones send."""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from mars_ray.control.report import ReplicaReport
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.latency_window import MAX_VALUES, WINDOW_S
from mars_ray.engine.stats.state import ClassState, EngineState
from mars_ray.simulate.fleet import Fleet
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.queues import Floats, Ints


class Reports:
    """The reports of the first `watched` replicas."""

    def __init__(self, fleet: Fleet, machine: Machine, classes: Sequence[ServiceClass], watched: int) -> None:
        self._fleet, self._machine, self._classes = fleet, machine, classes
        self._points, self._times = machine.points, machine.times()
        self._firsts, self._paces = ([deque[Floats](maxlen=int(WINDOW_S)) for _ in range(watched)] for _ in range(2))
        """Times to the first token and times per token of each second of the window, by replica."""
        self._kv_tokens_N = fleet.kv_tokens_N

    def second(self) -> None:
        """End a second."""
        _keep(self._firsts, self._fleet.firsts)
        _keep(self._paces, self._fleet.paces)
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
            ttft_p95_s=_p95(self._firsts[replica]),
            tpot_p95_s=_p95(self._paces[replica]),
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


def _keep(kept: Sequence[deque[Floats]], found: list[tuple[Ints, Floats]]) -> None:
    """Hand what the fleet found in a second to the window of each replica."""
    replicas, times = zip(*found, strict=True) if found else ([], [])
    found.clear()
    replica = np.concatenate(replicas) if replicas else np.zeros(0, int)
    seconds = np.concatenate(times) if times else np.zeros(0)
    for number, window in enumerate(kept):
        window.append(seconds[replica == number])


def _p95(window: deque[Floats]) -> float | None:
    """Return the 95th percentile of what an engine's `LatencyWindow` would hold."""
    values = np.concatenate(window)[-MAX_VALUES:] if window else np.zeros(0)
    if not len(values):
        return None
    place = 0.95 * (len(values) - 1)
    values.sort()
    low, high = values[[int(place), math.ceil(place)]].tolist()
    return float(low + (place - int(place)) * (high - low))
