"""What the replicas did in the last fifteen minutes, for people who look at it.

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

from mars_ray.control.core.status import ReplicaStatus
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
