"""Reports, loads and replicas to decide on: a replica here counts what the step-time model says, and runs nothing."""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan, ControlSettings
from mars_ray.control.demand import ClassDemand
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.control.replica_speed import ReplicaSpeed
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.grid import GRID
from mars_ray.engine.stats.lookahead import look_ahead
from mars_ray.engine.stats.profile import ProfilePoint
from mars_ray.engine.stats.state import ClassState, EngineState
from mars_ray.engine.stats.step_time import StepTime

STEP_TIME = StepTime(fixed_s=0.02, seq_s=0.0005, position_s=0.0002, prompt_s=0.002, prompt_token_s=0.0001)


def profile(masks: int = 3, audited: Mapping[float, tuple[float, float]] | None = None) -> tuple[ProfilePoint, ...]:
    """A curve that gains as the threshold falls; `audited` gives agreement and audited tokens by threshold."""
    points = []
    for threshold in GRID:
        rising = 0.3 + 2 * (1 - threshold)
        share = 0.0 if threshold >= 1 else min(rising, 0.95 + (rising - 0.95) / 20)  # every step gains something
        agreement, tokens = (audited or {}).get(threshold, (None, 0.0))
        points.append(point(threshold, [share ** (k + 1) for k in range(masks)], agreement, tokens))
    return tuple(points)


def point(
    threshold: float, survival: Sequence[float], agreement: float | None = None, audited: float = 0.0
) -> ProfilePoint:
    """A threshold at which masks are accepted so often; none at 1, as if drafts were never right."""
    none = [0.0] * len(survival)
    found = look_ahead(*(np.array(shares, dtype=float) for shares in (survival, none, none)))
    return ProfilePoint(
        threshold, tuple(found.tokens_B.tolist()), tuple(found.positions_B.tolist()), agreement, audited
    )


PROFILE = profile()
SPEED = ReplicaSpeed(4, STEP_TIME, PROFILE, 0.0)


def class_state(name: str = "standard", **fields: float) -> ClassState:
    zeros = {"running": 0, "waiting": 0, "arrived": 0, "prompt_tokens": 0, "ended": 0, "tokens": 0}
    return ClassState(**({"name": name, "threshold": 0.95} | zeros | fields))  # type: ignore[arg-type]


def engine_state(*classes: ClassState, **fields: Any) -> EngineState:
    usual = {
        "max_num_seqs": 4,
        "classes": classes or (class_state(),),
        "tokens_running": 0,
        "kv_cache_usage": 0.0,
        "kv_tokens": 0,
        "steps": 0,
        "preemptions": 0,
        "threshold_changes": 0,
        "block": 4,
        "profile": PROFILE,
        "step_time": STEP_TIME,
        "ttft_p95_s": None,
        "tpot_p95_s": None,
    }
    return EngineState(**(usual | fields))  # type: ignore[arg-type]


def report(number: int, seconds: float, *classes: ClassState, replica: str = "a", **fields: Any) -> ReplicaReport:
    return ReplicaReport(replica=replica, number=number, seconds=seconds, state=engine_state(*classes, **fields))


def directive(number: int = 1, threshold: float = 0.6, **fields: Any) -> Directive:
    """The answer to a report."""
    usual = {
        "replica": "a",
        "controller": "first",
        "answers": number,
        "thresholds": {"standard": threshold},
        "lease_s": 5.0,
        "desired_replicas": 1,
        "paused": False,
    }
    return Directive(**(usual | fields))  # type: ignore[arg-type]


def plan_of(*classes: ServiceClass, ceiling: float = 0.95, **settings: Any) -> ControlPlan:
    return ControlPlan(
        settings=ControlSettings(**settings),  # type: ignore[arg-type]
        ceiling=ceiling,
        classes=classes or (ServiceClass(floor=0.5),),
    )


def wanted(name: str = "standard", requests_s: float = 0.0, **fields: float) -> ClassDemand:
    usual = {"prompt_tokens": 20.0, "output_tokens": 64.0, "running": 0.0, "waiting": 0.0}
    return ClassDemand(name=name, requests_s=requests_s, **(usual | fields))


def load_of(*classes: ClassDemand, replicas: int = 1, **fields: Any) -> ClusterLoad:
    usual = {"speed": SPEED, "rows": 4 * replicas, "ttft_p95_s": None, "tpot_p95_s": None}
    return ClusterLoad(replicas=replicas, classes=classes, **(usual | fields))  # type: ignore[arg-type]


def requests_at(share: float, threshold: float = 0.95, speed: ReplicaSpeed = SPEED) -> float:
    """Requests a second, of the usual size, that take this share of one replica's time."""
    one = wanted(requests_s=1.0)
    return share / load_of(one, speed=speed).arriving_share(one.name, threshold)


@dataclass(slots=True)
class _Asked:
    since_s: float
    left: float
    tokens: int


class Plant:
    """A replica: what arrives waits for a row, runs at the speed of its threshold, and ends."""

    PROMPT, TOKENS, TICK_S, WINDOW_S = 20, 64, 0.1, 10.0

    def __init__(
        self, name: str, seed: int, classes: Sequence[str] = ("standard",), speed: ReplicaSpeed = SPEED
    ) -> None:
        self._random, self._speed, self._name = random.Random(seed), speed, name
        self.thresholds = dict.fromkeys(classes, 0.95)
        self._counts = {each: {"arrived": 0, "prompt_tokens": 0, "ended": 0, "tokens": 0} for each in classes}
        self._waiting: deque[tuple[str, _Asked]] = deque()
        self._running: list[tuple[str, _Asked]] = []
        self._firsts: deque[tuple[float, float]] = deque()
        self._paces: deque[tuple[float, float]] = deque()
        self._now_s, self._number = 0.0, 0

    def run(self, seconds: float, requests_s: Mapping[str, float]) -> None:
        for _ in range(round(seconds / self.TICK_S)):
            self._tick(requests_s)

    def report(self) -> ReplicaReport:
        self._number += 1
        return ReplicaReport(replica=self._name, number=self._number, seconds=self._now_s, state=self.state())

    def take(self, directive: Directive) -> None:
        self.thresholds = dict(directive.thresholds)

    def state(self) -> EngineState:
        return engine_state(
            *(
                class_state(
                    name,
                    threshold=threshold,
                    running=sum(each == name for each, _ in self._running),
                    waiting=sum(each == name for each, _ in self._waiting),
                    **self._counts[name],
                )
                for name, threshold in self.thresholds.items()
            ),
            max_num_seqs=self._speed.rows,
            step_time=self._speed.step_time,
            ttft_p95_s=self._p95(self._firsts),
            tpot_p95_s=self._p95(self._paces),
        )

    def _tick(self, requests_s: Mapping[str, float]) -> None:
        self._now_s += self.TICK_S
        reading_s = 0.0
        for name, rate in requests_s.items():
            wait_s = self._random.expovariate(rate) if rate else self.TICK_S
            while wait_s < self.TICK_S:
                tokens = 1 + int(self._random.expovariate(1 / self.TOKENS))
                self._waiting.append((name, _Asked(self._now_s, tokens, tokens)))
                self._counts[name]["arrived"] += 1
                self._counts[name]["prompt_tokens"] += self.PROMPT
                wait_s += self._random.expovariate(rate)
        while self._waiting and len(self._running) < self._speed.rows:
            name, asked = self._waiting.popleft()
            reading_s += self._speed.prompt_seconds(self.PROMPT)
            self._firsts.append((self._now_s, self._now_s - asked.since_s + self._speed.prompt_seconds(self.PROMPT)))
            self._running.append((name, asked))
        for name, asked in self._running:
            pace = float(self._speed.rates(self.thresholds[name])[len(self._running) - 1]) / len(self._running)
            self._paces.append((self._now_s, 1 / pace))
            asked.left -= pace * max(0.0, self.TICK_S - reading_s)
        for name, asked in [each for each in self._running if each[1].left <= 0]:
            self._counts[name]["ended"] += 1
            self._counts[name]["tokens"] += asked.tokens
        self._running = [each for each in self._running if each[1].left > 0]

    def _p95(self, kept: deque[tuple[float, float]]) -> float | None:
        while kept and self._now_s - kept[0][0] > self.WINDOW_S:
            kept.popleft()
        values = sorted(value for _, value in kept)
        return values[int(0.95 * (len(values) - 1))] if values else None


def without(state: EngineState, field: str) -> EngineState:
    """The state as a version sends it that lacks a field."""
    broken = replace(state)
    object.__delattr__(broken, field)
    return broken
