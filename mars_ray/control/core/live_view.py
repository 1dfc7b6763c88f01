"""History of the replicas over the last fifteen minutes, and the report for the live view.

In:    the newest reports, every `STEP_S` seconds.
Out:   frames: a few figures of each replica at one moment.
Never: grows: 180 frames of 1,000 replicas take 5 MB, and what is beyond either is left out.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_ray.control.cluster_load import BatchJobState, ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.status import ClusterStatus, ReplicaStatus
from mars_ray.engine.stats.profile import GRID
from mars_ray.engine.stats.state import EngineState

STEP_S = 5.0
FRAMES = 180
REPLICAS_MAX = 2000
FIGURES = ("load", "threshold", "block", "tokens_s", "tokens_per_forward", "agreement", "queue")
"""Rows in use, as a share; the least threshold in force; the block; tokens made each second; what a forward gives at
that threshold and block; the share of audited tokens that agree; sequences that wait."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The replicas at one moment. `R` replicas, `F` figures."""

    number: int
    """Grows by one for each frame of a controller, from 1."""
    unix_s: float
    replicas: tuple[str, ...]
    values_RF: NDArray[np.float32]
    """NaN for what is not known."""


class FrameHistory:
    """The frames of the last fifteen minutes."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque(maxlen=FRAMES)
        self._tokens: dict[str, int] = {}
        """Tokens each replica had made at the last frame."""
        self._last_s: float | None = None
        self._number = 0

    def observe(self, replicas: Iterable[ReplicaStatus], now_s: float, unix_s: float) -> None:
        """Add a frame if it is time for one."""
        if self._last_s is not None and now_s - self._last_s < STEP_S:
            return
        seconds = math.inf if self._last_s is None else now_s - self._last_s
        self._last_s, self._number = now_s, self._number + 1
        known = list(itertools.islice(replicas, REPLICAS_MAX))
        tokens = {each.replica: each.state.tokens for each in known}
        rows = []
        for each in known:
            before = self._tokens.get(each.replica)
            made = math.nan if before is None else max(0, tokens[each.replica] - before) / seconds
            rows.append(_figures(each.state, made))
        self._tokens = tokens
        values_RF = np.array(rows, dtype=np.float32).reshape(len(rows), len(FIGURES))
        self._frames.append(Frame(self._number, unix_s, tuple(tokens), values_RF))

    def after(self, number: int) -> tuple[Frame, ...]:
        """Return the frames behind frame `number`, all that are kept for 0."""
        return tuple(each for each in self._frames if each.number > number)


def _figures(state: EngineState, tokens_s: float) -> tuple[float, ...]:
    least = min(each.threshold for each in state.classes)
    point = next((point for point in state.profile if point.threshold <= least), None)
    gained = agreement = math.nan
    if point is not None:
        gained = point.tokens[min(state.block, len(point.tokens)) - 1]
        agreement = math.nan if point.agreement is None else point.agreement
    load = state.running / state.max_num_seqs
    return load, least, state.block, tokens_s, gained, agreement, state.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Speed and demand now, if all classes had one threshold."""

    threshold: float
    tokens_s: float
    """Tokens a second of all replicas with all rows in use."""
    demand: float
    """What is asked for, queues included, as a share of what all replicas can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReport:
    """The cluster now, and the history that the reader does not have yet."""

    controller: str
    """Which life of the controller this is: another after each restart."""
    status: ClusterStatus
    """Its replicas are left out: the frames have what is shown of them."""
    replicas: int
    curve: tuple[CurvePoint, ...]
    """Falling from the ceiling; empty before any speed was measured."""
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A batch job on the cluster."""

    name: str
    job: BatchJobState
    tokens: int
    """Tokens its workers have made in this run."""
    workers: int
    late_s: float
    paused: bool


def curve_of(load: ClusterLoad, plan: ControlPlan) -> tuple[CurvePoint, ...]:
    """Return speed and demand at each threshold up to the ceiling; empty before a speed was measured."""
    if load.speed is None or not load.replicas:
        return ()
    thresholds = sorted({plan.ceiling, *(each for each in GRID if each < plan.ceiling)}, reverse=True)
    return tuple(
        CurvePoint(
            threshold=threshold,
            tokens_s=load.replicas * load.speed.max_tokens_s(threshold),
            demand=sum(load.share_with_queue(each.name, threshold) for each in load.classes) / load.replicas,
        )
        for threshold in thresholds
    )
