"""Turn the counts of the plug-in into the profile and the step times that the controller reads."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import nnls

from mars_ray.engine.stats.profile import Profile, ProfilePoint
from mars_ray.engine.stats.step_time import StepTime


class Records:
    """Profile and step times of one engine. `profile` begins with the calibration of the model's card."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._step_times: Mapping[int, Mapping[str, float]] = {}

    def read(self, record: Mapping[str, Any]) -> None:
        """Take over a `mars_record`."""
        self._step_times = record["step_times"]

    def points(self) -> tuple[ProfilePoint, ...]:
        """Return the profile by threshold."""
        return self._profile.points()

    def step_time(self) -> StepTime | None:
        """Return step times as a linear function of positions; None before the first steps."""
        sums = [total for total in self._step_times.values() if total["steps"]]
        if not sums:
            return None
        steps_S, positions_S, seconds_S = (
            np.array([total[name] for total in sums], dtype=float) for name in ("steps", "positions", "seconds")
        )
        weight_S = 1 / (seconds_S / np.sqrt(steps_S)).clip(min=1e-9)  # relative errors, by the number of steps
        work_S2 = np.column_stack([steps_S, positions_S])
        (fixed, position), _ = nnls(work_S2 * weight_S[:, None], seconds_S * weight_S)
        return StepTime(fixed_s=float(fixed), position_s=float(position), prompt_token_s=float(position))
