"""What the routes of operators ask of the controller, wherever it is."""

from typing import Protocol

from mars_ray.control.core.live_report import LiveReport, RunningJob
from mars_ray.control.core.status import ClusterStatus


class ControlClient(Protocol):
    """The controller, wherever it is."""

    async def status(self) -> ClusterStatus:
        """Return what it knows and decided."""

    async def live(self, controller: str, after: int) -> LiveReport:
        """Return the cluster now, and its history behind frame `after` of that life of the controller."""

    async def jobs(self) -> list[RunningJob]:
        """Return the batch jobs on the cluster."""

    async def set_threshold(self, threshold: float, name: str | None, seconds: float | None) -> None:
        """Override the policy for a class, or all. Raises `ConfigError`."""

    async def clear_threshold(self, name: str | None) -> None:
        """Let the policy decide again. Raises `ConfigError`."""
