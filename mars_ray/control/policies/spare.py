"""Thresholds and replicas for the batches of an endpoint, which run in the capacity that callers leave.

In:    the load, with the work left of all batches and the time until it is needed.
Out:   the load of callers alone; the decision for the class of batches; the replicas that its deadline needs.
Never: lowers a threshold or adds a replica for batches that end in time without.

Rows of batches arrive as fast as they are answered, so their arrivals say nothing about what they need.
"""

from collections.abc import Mapping
from dataclasses import replace

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.policies.policy import Bounds, Decision
from mars_ray.engine.service_class import BATCH_CLASS

LEAST_S = 1.0
"""Minimum seconds assumed until a deadline."""


def has_batches(load: ClusterLoad) -> bool:
    """Return whether batches have work left."""
    classes = [demand.name for demand in load.classes]
    return load.job is not None and load.job.backlog.tokens > 0 and BATCH_CLASS in classes


def callers_alone(load: ClusterLoad) -> ClusterLoad:
    """Return the load without the rows of batches."""
    classes = tuple(
        replace(demand, requests_s=0.0, running=0.0, waiting=0.0) if demand.name == BATCH_CLASS else demand
        for demand in load.classes
    )
    return replace(load, classes=classes)


def needed_tokens_s(load: ClusterLoad) -> float:
    """Return the tokens per second with which the batches end in time; 0 without batches or a deadline."""
    if load.job is None or load.job.backlog.seconds is None or not has_batches(load):
        return 0.0
    return load.job.backlog.tokens / max(load.job.backlog.seconds, LEAST_S)


def needed_replicas(load: ClusterLoad, threshold: float) -> float:
    """Return the replicas, as a fraction, that the batches need to end in time at a threshold."""
    needed = needed_tokens_s(load)
    return needed / load.answer_tokens_s(BATCH_CLASS, threshold) if load.speed and needed else 0.0


def decide_for_batches(load: ClusterLoad, bounds: Bounds, callers: Mapping[str, Decision]) -> Decision:
    """Take the highest threshold at which the batches end in time next to callers with the decisions `callers`."""
    needed = needed_tokens_s(load)
    if load.speed is None or not needed:
        return Decision(bounds.ceiling, "batches take what callers leave; no deadline or no speed known yet")
    alone = callers_alone(load)
    used = sum(alone.share_with_queue(name, decision.threshold) for name, decision in callers.items())
    free = max(0.0, load.replicas - used)
    for level in bounds.choices:
        tokens_s = free * load.answer_tokens_s(BATCH_CLASS, level)
        if tokens_s >= needed:
            return Decision(level, f"batches need {needed:.0f} of the {tokens_s:.0f} tokens/s that callers leave")
    return Decision(
        bounds.floor, f"batches end late: they need {needed:.0f} tokens/s, and callers leave {tokens_s:.0f}"
    )
