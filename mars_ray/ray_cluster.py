"""Connect to a Ray cluster, or start one on this machine (shell)."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from mars_ray.ray_private import stop_driver_messages


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
    with _sigterm_kept():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
    # A node that is lost would be pages of stacks, and so would the end of a job.
    stop_driver_messages()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Give SIGTERM back to who handled it: Ray takes it, and shows a stack of its own."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit:  # what Ray made of one that came meanwhile
        handler(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def cluster_cpus() -> float:
    """Return the logical CPUs of the whole cluster."""
    return float(ray.cluster_resources().get("CPU", 0))
