"""Ray shell: autoscaling policy that runs enough engines to meet the demand at full quality.

Serve's own policy counts requests in flight. A lower threshold shortens each request, so fewer are in flight, and the
engines needed for full quality would never start. So the controller computes how many engines the threshold that it
wants would need. With `min_replicas: 0`, the last engine ends when the controller has seen no request for a while, and
Serve starts one when the next request comes.
"""

from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext

DESIRED = "mars_desired_replicas"


def by_capacity(ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas that the controller wants, or, without a controller, that Serve's own policy
    wants."""
    wanted = (ctx.aggregated_metrics or {}).get(DESIRED) or {}
    if not wanted:
        by_requests: tuple[float, dict[str, Any]] = replica_queue_length_autoscaling_policy(ctx)
        return by_requests
    return max(wanted.values()), {}
