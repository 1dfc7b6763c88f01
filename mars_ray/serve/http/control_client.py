"""Interface to the controller of a model."""

from typing import Protocol

from mars_ray.control.core.live_view import LiveReport, RunningJob
from mars_ray.control.core.status import ClusterStatus


class ControlClient(Protocol):
    """Client of the controller, wherever it runs."""

    async def status(self) -> ClusterStatus:
        """Return the state and the decisions of the controller."""

    async def live(self, controller: str, after: int) -> LiveReport:
        """Return the cluster's state, and its history after frame `after` of the controller with id `controller`."""

    async def jobs(self) -> list[RunningJob]:
        """Return the batch jobs on the cluster."""

    async def set_threshold(self, threshold: float, name: str | None, seconds: float | None) -> None:
        """Override the policy for the class `name`, or for all classes if `name` is None. Raises `ConfigError`."""

    async def clear_threshold(self, name: str | None) -> None:
        """End the override for `name`, so that the policy decides again. Raises `ConfigError`."""
