"""The replicas of a simulated cluster: their number, as Ray Serve's autoscaling sets it, and their reports.

A replica that still has requests finishes them before it ends. Once a second replicas send the controller reports of
the same type as those of real replicas.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_ray.control.replica_messages import ReplicaReport
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.engine_stats import MAX_VALUES, WINDOW_S
from mars_ray.engine.stats.state import ClassState, EngineState
from mars_ray.errors import ConfigError
from mars_ray.simulate.fleet import Fleet, Floats, Ints
from mars_ray.simulate.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Settings of autoscaling, named as in Ray Serve."""

    min_replicas: int
    max_replicas: int
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    startup_s: float = 25.0
    """Seconds until a new replica takes requests."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; "
                "they must be at least 1 and in this order."
            )


class Replicas:
    """The replicas that exist, up to `max_replicas`. Without `scaling`, their number is fixed."""

    def __init__(self, replicas: int, scaling: Scaling | None) -> None:
        self._scaling = scaling
        most = scaling.max_replicas if scaling else replicas
        self._ready_s: NDArray[np.float64] = np.full(most, np.inf)
        self._ready_s[:replicas] = 0.0
        self._target = replicas
        self._since_s = 0.0
        self._direction = 0
        self.up = np.arange(replicas)
        """Replicas that take requests."""
        self.draining: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def count(self) -> int:
        """Replicas that are starting, up or draining."""
        return int(np.isfinite(self._ready_s).sum()) + len(self.draining)

    def follow(self, desired: int, in_flight: NDArray[np.int64], now_s: float) -> None:
        """Follow the number of replicas desired by the controller. Call this once a second."""
        self.draining = self.draining[in_flight[self.draining] > 0]
        if self._scaling is not None:
            self._decide(self._scaling, desired, now_s)
        self.up = np.flatnonzero(self._ready_s <= now_s)

    def _decide(self, scaling: Scaling, desired: int, now_s: float) -> None:
        desired = min(max(desired, scaling.min_replicas), scaling.max_replicas)
        direction = (desired > self._target) - (desired < self._target)
        if direction != self._direction:
            self._direction = direction
            self._since_s = now_s
        delay_s = scaling.upscale_delay_s if direction > 0 else scaling.downscale_delay_s
        if not direction or now_s - self._since_s < delay_s:
            return
        self._target = desired
        self._direction = 0
        existing = np.flatnonzero(np.isfinite(self._ready_s))
        if direction > 0:
            absent = np.setdiff1d(np.flatnonzero(np.isinf(self._ready_s)), self.draining)
            self._ready_s[absent[: desired - len(existing)]] = now_s + scaling.startup_s
        else:
            leaving = existing[desired:]
            self.draining = np.concatenate([self.draining, leaving[self._ready_s[leaving] <= now_s]])
            self._ready_s[leaving] = np.inf


class Reports:
    """The reports of the first `watched` replicas."""

    def __init__(self, fleet: Fleet, machine: Machine, classes: Sequence[ServiceClass], watched: int) -> None:
        self._fleet = fleet
        self._machine = machine
        self._classes = classes
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
            profile=machine.profile,
            step_time=machine.step_time,
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
    return float(np.quantile(values, 0.95)) if len(values) else None
