"""Decide when batch work makes way for online classes on the same cluster.

In:    the status of each online controller, and the time.
Out:   whether batch workers must stop taking rows.
Never: mistakes a threshold set by an operator for load.
"""

from collections.abc import Sequence

from mars_ray.control.core.status import ClusterStatus


class Yielding:
    """Makes batch work yield once load affects an online class, until none is affected for `recover_s` seconds."""

    def __init__(self, recover_s: float) -> None:
        self._recover_s = recover_s
        self._short_s: float | None = None
        """Time at which load last affected a class."""

    def follow(self, online: Sequence[ClusterStatus], now_s: float) -> bool:
        """Return whether batch work must yield now."""
        short = any(map(_short, online))
        if short:
            self._short_s = now_s
        return short or (self._short_s is not None and now_s - self._short_s < self._recover_s)


def _short(status: ClusterStatus) -> bool:
    """Return whether load affects callers, as shown by lowered thresholds, waiting requests, or missing replicas."""
    return (
        any(item.threshold < item.ceiling and item.override is None for item in status.classes)
        or any(replica.state.waiting for replica in status.replicas)
        or status.desired_replicas > len(status.replicas)
    )
