"""The speed of a replica at each threshold, from its step-time model and its profile.

In:    rows, step time, what each threshold gives and costs in a forward.
Out:   tokens per second for any number of sequences that run, at the block that gives most.
Never: measures anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.stats.lookahead import interpolate
from mars_ray.engine.stats.profile import ProfilePoint
from mars_ray.engine.stats.state import EngineState
from mars_ray.engine.stats.step_time import StepTime

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """How fast a replica decodes, or a typical one of several."""

    rows: int
    step_time: StepTime
    profile: tuple[ProfilePoint, ...]
    """What each threshold gives and costs in a forward, falling from 1."""
    kv_tokens_per_row: float
    _known: dict[float, Array] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Rates by threshold: they are asked for again and again."""

    def rates(self, threshold: float) -> Array:
        """Return tokens per second with 1, 2, ... `rows` sequences running, [rows]."""
        if threshold not in self._known:
            self._known[threshold] = self._rates(threshold)
        return self._known[threshold]

    def max_tokens_s(self, threshold: float) -> float:
        """Return tokens per second with all rows in use."""
        return float(self.rates(threshold)[-1])

    def prompt_seconds(self, tokens: float) -> float:
        """Return the seconds for which reading a prompt keeps the other rows waiting."""
        return self.step_time.prompt_s + self.step_time.prompt_token_s * tokens

    def _rates(self, threshold: float) -> Array:
        known, times = [each.threshold for each in self.profile], self.step_time
        tokens_B, positions_B = interpolate(known, lambda number: self.profile[number].lookahead, threshold)
        rows_R1 = np.arange(1, self.rows + 1)[:, None]
        per_row_s_B = times.seq_s + times.position_s * positions_B + times.kv_token_s * self.kv_tokens_per_row
        per_step_s_B = times.fixed_s + times.masks_s * (np.arange(len(tokens_B)) > 0)
        rates_R: Array = (rows_R1 * tokens_B / (per_step_s_B + rows_R1 * per_row_s_B)).max(axis=1)
        rates_R.flags.writeable = False
        return rates_R


def speed_of(states: Sequence[EngineState]) -> ReplicaSpeed | None:
    """Return the speed of a typical one of several replicas; None before any has measured its own."""
    known = [state for state in states if state.step_time is not None and state.profile]
    if not known:
        return None
    times = [state.step_time for state in known if state.step_time is not None]
    running = sum(state.running for state in known)
    kv_tokens = sum(state.kv_tokens for state in known)
    return ReplicaSpeed(
        rows=round(_mean([state.max_num_seqs for state in known])),
        step_time=_typical(times),
        profile=_together([state.profile for state in known]),
        kv_tokens_per_row=round(kv_tokens / running, -1) if running else 0.0,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _typical(times: Sequence[StepTime]) -> StepTime:
    if len(times) == 1:
        return times[0]
    return StepTime(**{name: _mean([getattr(each, name) for each in times]) for name in StepTime.__dataclass_fields__})


def _together(profiles: Sequence[tuple[ProfilePoint, ...]]) -> tuple[ProfilePoint, ...]:
    if all(each is profiles[0] for each in profiles):
        return profiles[0]
    return tuple(
        replace(
            points[0],
            tokens=tuple(map(_mean, zip(*(point.tokens for point in points), strict=False))),
            positions=tuple(map(_mean, zip(*(point.positions for point in points), strict=False))),
        )
        for points in zip(*profiles, strict=False)
    )
