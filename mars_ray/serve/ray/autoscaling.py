"""Autoscaling policy for Serve: as many engines as demand needs at full quality (shell).

Serve's own policy counts requests. A lowered threshold makes each of them shorter, so there would be fewer, and the
engines that quality waits for would never come. The controller says what demand would take at the threshold it wants.
"""

from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext

DESIRED = "mars_desired_replicas"


def by_capacity(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas that the controller wants; without a controller, Serve's number by requests."""
    wanted = (ctx.aggregated_metrics or {}).get(DESIRED) or {}
    if not wanted:
        by_requests: tuple[float, dict[str, Any]] = replica_queue_length_autoscaling_policy(ctx)
        return by_requests
    return max(wanted.values()), {}
