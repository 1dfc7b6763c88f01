"""Ray Serve's autoscaling with its delays. A replica that still has requests finishes them before it ends."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_ray.errors import ConfigError


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
