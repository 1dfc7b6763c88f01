"""Connect to a Ray cluster, or start one on this machine (shell)."""

import logging
import os

import ray


def connect() -> None:
    """Join the cluster named by `RAY_ADDRESS`, else start a local one; does nothing when already connected.

    Workers keep their output to themselves: what a user should see comes through our own progress and results.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)


def cluster_cpus() -> float:
    """Return the logical CPUs of the whole cluster."""
    return float(ray.cluster_resources().get("CPU", 0))
