"""Decide when batch work makes way for online classes on the same cluster.

In:    the states of the online controllers, a clock.
Out:   whether batch workers take no new rows.
Never: counts a threshold that an operator set by hand as load.
"""

from collections.abc import Sequence

from mars_ray.control.core.status import ClusterStatus


class Yielding:
    """Yields as soon as an online class is short of anything, and until none was for `recover_s` seconds."""

    def __init__(self, recover_s: float) -> None:
        self._recover_s = recover_s
        self._short_s: float | None = None
        """When a class was short last."""

    def follow(self, online: Sequence[ClusterStatus], now_s: float) -> bool:
        """Return whether to yield now."""
        short = any(map(_short, online))
        if short:
            self._short_s = now_s
        return short or (self._short_s is not None and now_s - self._short_s < self._recover_s)


def _short(status: ClusterStatus) -> bool:
    """Return whether callers suffer from load: lower thresholds, waiting, or missing replicas."""
    return (
        any(each.threshold < each.ceiling and each.override is None for each in status.classes)
        or any(each.state.waiting for each in status.replicas)
        or status.desired_replicas > len(status.replicas)
    )
