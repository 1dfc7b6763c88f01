"""Reports that simulated replicas send to the controller once a second, of the same type as those of real replicas."""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from mars_ray.control.replica_messages import ReplicaReport
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.engine_stats import MAX_VALUES, WINDOW_S
from mars_ray.engine.stats.state import ClassState, EngineState
from mars_ray.simulate.fleet import Fleet
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.queues import Floats, Ints


class Reports:
    """The reports of the first `watched` replicas."""

    def __init__(self, fleet: Fleet, machine: Machine, classes: Sequence[ServiceClass], watched: int) -> None:
        self._fleet = fleet
        self._machine = machine
        self._classes = classes
        self._points = machine.profile
        self._times = machine.step_time
        self._firsts, self._paces = ([deque[Floats](maxlen=int(WINDOW_S)) for _ in range(watched)] for _ in range(2))
        """Times to first token and times per token, by replica and by second of the window."""
        self._kv_tokens_N = fleet.kv_tokens_N

    def second(self) -> None:
        """Close a second: take its measurements from the fleet."""
        _keep(self._firsts, self._fleet.firsts)
        _keep(self._paces, self._fleet.paces)
        self._kv_tokens_N = self._fleet.kv_tokens_N

    def of(self, replica: int, number: int) -> ReplicaReport:
        """Return the report of one replica at the end of second `number`."""
        fleet = self._fleet
        machine = self._machine
        kv_tokens = max(0, round(float(self._kv_tokens_N[replica])))
        state = EngineState(
            max_num_seqs=machine.max_num_seqs,
            classes=tuple(self._class(replica, index) for index in range(len(self._classes))),
            tokens_running=0,  # the controller does not use it
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

    def _class(self, replica: int, index: int) -> ClassState:
        fleet = self._fleet
        return ClassState(
            name=self._classes[index].name,
            threshold=float(fleet.thresholds_NC[replica, index]),
            running=int(fleet.held_NC[replica, index]),
            waiting=int(fleet.queues.waiting[replica, index]),
            arrived=int(fleet.arrived_NC[replica, index]),
            prompt_tokens=round(float(fleet.prompt_tokens_NC[replica, index])),
            ended=int(fleet.ended_NC[replica, index]),
            tokens=round(float(fleet.ended_tokens_NC[replica, index])),
        )


def _keep(windows: Sequence[deque[Floats]], measured: list[tuple[Ints, Floats]]) -> None:
    """Move the measurements of a second to the windows of their replicas."""
    replicas, times = zip(*measured, strict=True) if measured else ([], [])
    measured.clear()
    replica = np.concatenate(replicas) if replicas else np.zeros(0, int)
    seconds = np.concatenate(times) if times else np.zeros(0)
    for index, window in enumerate(windows):
        window.append(seconds[replica == index])


def _p95(window: deque[Floats]) -> float | None:
    """Return the 95th percentile, computed as in the `LatencyWindow` of an engine."""
    values = np.concatenate(window)[-MAX_VALUES:] if window else np.zeros(0)
    if not len(values):
        return None
    rank = 0.95 * (len(values) - 1)
    values.sort()
    low, high = values[[int(rank), math.ceil(rank)]].tolist()
    return float(low + (rank - int(rank)) * (high - low))
