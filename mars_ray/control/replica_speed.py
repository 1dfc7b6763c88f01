"""The speed of a replica at each threshold, from its step-time model and its profile.

In:    the number of rows, the step time, and the tokens and positions per forward at each threshold.
Out:   the tokens per second for any number of running sequences, using the fastest block.
Never: measures anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mars_ray.engine.stats.lookahead import interpolate
from mars_ray.engine.stats.profile import ProfilePoint
from mars_ray.engine.stats.state import EngineState
from mars_ray.engine.stats.step_time import StepTime

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """Decoding speed of one replica, or of a typical one of several replicas."""

    rows: int
    step_time: StepTime
    profile: tuple[ProfilePoint, ...]
    """Tokens and positions per forward at each threshold, from threshold 1 downwards."""
    kv_tokens_per_row: float
    _cache: dict[float, Array] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Computed rates by threshold, because policies need the same ones repeatedly."""

    def rates(self, threshold: float) -> Array:
        """Return the tokens per second for each number of running sequences from 1 to `rows`, as an array [rows]."""
        if threshold not in self._cache:
            self._cache[threshold] = self._rates(threshold)
        return self._cache[threshold]

    def max_tokens_s(self, threshold: float) -> float:
        """Return the tokens per second at a threshold while all rows decode a sequence each."""
        return float(self.rates(threshold)[-1])

    def prompt_seconds(self, tokens: float) -> float:
        """Return the seconds for which reading a prompt delays the other rows."""
        return self.step_time.prompt_s + self.step_time.prompt_token_s * tokens

    def _rates(self, threshold: float) -> Array:
        times = self.step_time
        thresholds = [point.threshold for point in self.profile]
        tokens_B, positions_B = interpolate(thresholds, lambda index: self.profile[index].lookahead, threshold)
        rows_R1 = np.arange(1, self.rows + 1)[:, None]
        per_row_s_B = times.seq_s + times.position_s * positions_B + times.kv_token_s * self.kv_tokens_per_row
        per_step_s_B = times.fixed_s + times.masks_s * (np.arange(len(tokens_B)) > 0)
        rates_R: Array = (rows_R1 * tokens_B / (per_step_s_B + rows_R1 * per_row_s_B)).max(axis=1)
        rates_R.flags.writeable = False
        return rates_R


def speed_of(states: Sequence[EngineState]) -> ReplicaSpeed | None:
    """Return the speed of a typical one of several replicas; None until a replica has measured its speed."""
    measured = [state for state in states if state.step_time is not None and state.profile]
    if not measured:
        return None
    times = [state.step_time for state in measured if state.step_time is not None]
    running = sum(state.running for state in measured)
    kv_tokens = sum(state.kv_tokens for state in measured if state.running)  # an idle engine keeps its last figure
    return _first_equal(
        ReplicaSpeed(
            rows=round(_mean([state.max_num_seqs for state in measured])),
            step_time=_mean_step_time(times),
            profile=_mean_profile([state.profile for state in measured]),
            kv_tokens_per_row=round(kv_tokens / running, -1) if running else 0.0,
        )
    )


@lru_cache(maxsize=64)
def _first_equal(speed: ReplicaSpeed) -> ReplicaSpeed:
    """Return an equal speed of an earlier call if there is one, so that its rates are not computed again."""
    return speed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_step_time(times: Sequence[StepTime]) -> StepTime:
    if len(times) == 1:
        return times[0]
    return StepTime(**{name: _mean([getattr(time, name) for time in times]) for name in StepTime.__dataclass_fields__})


def _mean_profile(profiles: Sequence[tuple[ProfilePoint, ...]]) -> tuple[ProfilePoint, ...]:
    if all(profile is profiles[0] for profile in profiles):
        return profiles[0]
    return tuple(
        replace(
            points[0],
            tokens=tuple(map(_mean, zip(*(point.tokens for point in points), strict=False))),
            positions=tuple(map(_mean, zip(*(point.positions for point in points), strict=False))),
        )
        for points in zip(*profiles, strict=False)
    )
