"""Ray shell: autoscaling policy that runs enough engines to meet the demand at full quality.

Serve's own policy counts requests in flight. A lower threshold shortens each request, so fewer are in flight, and the
engines needed for full quality would never start. So the controller computes how many engines the threshold that it
wants would need. With `min_replicas: 0`, the last engine ends when the controller has seen no request for a while, and
Serve starts one when the next request comes.
"""

from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext

from mars_ray.control.core.lease import Lease

DESIRED = "mars_desired_replicas"


def autoscaling_stats(lease: Lease, *, idle: bool) -> dict[str, float]:
    """Return what a replica tells `by_capacity`: the replicas that its controller desires, or nothing if unknown.

    The controller desires 0 while nothing is asked for, and also for requests before it knows the engine's speed.
    """
    directive = lease.directive
    known = directive and (directive.desired_replicas or idle)
    return {DESIRED: float(directive.desired_replicas)} if directive and known else {}


def by_capacity(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas that the controller wants, or, without a controller, that Serve's own policy
    wants."""
    wanted = (ctx.aggregated_metrics or {}).get(DESIRED) or {}
    if not wanted:
        by_requests: tuple[float, dict[str, Any]] = replica_queue_length_autoscaling_policy(ctx)
        return by_requests
    return max(wanted.values()), {}
