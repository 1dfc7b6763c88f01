"""Connect to a Ray cluster, or start one on this machine (shell)."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from mars_ray.errors import OutputError
from mars_ray.ray_private import stop_driver_messages
from mars_ray.storage.private import private_folder
from mars_ray.usable_cpus import usable_cpus

TEMPORARY_LENGTH = 36
"""Characters of a folder with which the paths of Ray's sockets below it are within the 107 that the system allows."""


def connect() -> None:
    """Join the cluster named by `RAY_ADDRESS`, else start a local one; does nothing when already connected.

    Workers keep their output to themselves: what a user should see comes through our own progress and results. Sockets,
    logs and token of a local cluster are for this user alone. Raises `OutputError` where they cannot be.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local: dict[str, Any] = {}
    if not is_shared():
        local = {"address": "local", "num_cpus": usable_cpus(), "include_dashboard": False}
        local["_temp_dir"] = str(private_folder(temporary_folder()) / "ray")
        with suppress(OutputError):  # no home: Ray says what it cannot do without
            private_folder(Path.home() / ".ray")
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with _sigterm_kept():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
    with suppress(OSError):  # Ray makes it readable for all
        (Path.home() / ".ray" / "auth_token").chmod(0o600)
    # A node that is lost would be pages of stacks, and so would the end of a job.
    stop_driver_messages()


def temporary_folder() -> Path:
    """Return the folder around `ray`, where a local cluster keeps sockets and logs: Ray opens that one to everybody."""
    given = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").absolute()
    folders = [parent / f"mars-ray-{os.geteuid()}" for parent in (given, Path("/tmp"))]
    return next((each for each in folders if len(str(each)) <= TEMPORARY_LENGTH), folders[-1])


def is_shared() -> bool:
    """Return whether the cluster is one that others may use, too: the one that `RAY_ADDRESS` names."""
    return bool(os.environ.get("RAY_ADDRESS"))


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
