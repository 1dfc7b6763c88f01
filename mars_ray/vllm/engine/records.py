"""Turn what the plug-in observes into the profile and the step times that the controller reads."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from mars_ray.engine.stats.profile import Profile, ProfilePoint
from mars_ray.engine.stats.step_time import StepTime
from mars_ray.method.drafts import FIXED_PRICE
from mars_ray.vllm.forward_log import LoggedForward
from mars_ray.vllm.step_rule import draft_positions


class Records:
    """Profile and step times of one engine. `profile` begins with the calibration of the model's card.

    `stop_ids` are the stop tokens of the model. Predictions after a stop token are left out.
    """

    def __init__(self, profile: Profile, stop_ids: frozenset[int]) -> None:
        self._profile = profile
        self._stop_ids = stop_ids
        self._step_times: Mapping[int, Mapping[str, float]] = {}

    def read(self, record: Mapping[str, Any], forwards: Iterable[LoggedForward]) -> None:
        """Add a `mars_record` and the forwards since the last call."""
        self._step_times = record["step_times"]
        for forward in forwards:
            self._observe(forward)

    def points(self) -> tuple[ProfilePoint, ...]:
        """Return the profile by threshold for the full block only, because vLLM uses the same block in each step."""
        points = self._profile.points()
        positions = 1.0 + draft_positions(len(points[0].tokens))
        return tuple(replace(point, tokens=point.tokens[-1:], positions=(positions,)) for point in points)

    @property
    def positions(self) -> int:
        """Positions that forwards computed so far, those of prompts included."""
        return sum(int(total["positions"]) for total in self._step_times.values())

    def step_time(self) -> StepTime | None:
        """Return step times as a linear function of positions; None before the first steps."""
        sums = [total for total in self._step_times.values() if total["steps"]]
        if not sums:
            return None
        steps_S, positions_S, seconds_S = (
            np.array([total[name] for total in sums], dtype=float) for name in ("steps", "positions", "seconds")
        )
        weight_S = np.sqrt(steps_S) / seconds_S.clip(min=1e-9)  # relative errors of means, which have less noise
        work_S2 = np.column_stack([steps_S, positions_S])
        (fixed, position), _ = nnls(work_S2 * weight_S[:, None], seconds_S * weight_S)
        return StepTime(fixed_s=float(fixed), position_s=float(position), prompt_token_s=float(position))

    def _observe(self, forward: LoggedForward) -> None:
        """Record a forward, as `engine/sampling/commit` does for our own engine."""
        ended = self._first_stop(forward.drafts[: forward.right]) is not None  # what vLLM read after it has no meaning
        read = bool(forward.mask_confidences)
        self._profile.observe_rows((1,), read=read or ended, surprised=forward.right < len(forward.drafts))
        if read and not ended:
            stop = self._first_stop(forward.tokens)
            looked, confidences = len(forward.mask_confidences), forward.mask_confidences[:stop]
            self._profile.observe_masks(looked, confidences, FIXED_PRICE, ends=stop is not None)
        accepted = len(forward.accepted_confidences)
        if forward.drafts:
            stop = self._first_stop(forward.drafts)
            drafts = forward.draft_confidences[: None if stop is None else stop + 1]
            ratios = forward.ratios[: len(drafts)]
            self._profile.observe_drafts(drafts, ratios, after=accepted, ends=stop is not None)
            if self._profile.lenient:
                self._profile.observe_audit(0.0, ratios, forward.agreed)
            elif not accepted and forward.threshold >= 1:
                self._profile.observe_audit(0.0, drafts, [ratio == 1 for ratio in ratios])
        if accepted:
            self._profile.observe_audit(forward.threshold, forward.accepted_confidences, forward.agreed)

    def _first_stop(self, tokens: Iterable[int]) -> int | None:
        return next((index for index, token in enumerate(tokens) if token in self._stop_ids), None)
