"""Ray shell: connect to a Ray cluster, or start one on this machine."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from mars_ray.errors import OutputError, RunError, first_line
from mars_ray.ray_private import stop_driver_messages
from mars_ray.storage.private import private_folder
from mars_ray.usable_cpus import usable_cpus

TEMPORARY_LENGTH = 36
"""Maximum length of the temporary folder's path, so that Ray's socket paths in it have at most 107 characters."""


def connect() -> None:
    """Join the cluster named by `RAY_ADDRESS`, or start a local cluster. Does nothing if already connected.

    The output of workers is not shown. The sockets, logs and token of a local cluster are private to this user. Raises
    `OutputError` if they cannot be made private, and `RunError` if there is no cluster or Ray does not start.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local: dict[str, Any] = {}
    if not is_shared():
        # Otherwise, Ray gives its workers a lower priority than other programs, which take nearly all of a core then.
        os.environ.setdefault("RAY_worker_niceness", "0")
        local = {"address": "local", "num_cpus": usable_cpus(), "include_dashboard": False}
        local["_temp_dir"] = str(private_folder(temporary_folder()) / "ray")
        with suppress(OutputError):  # without a home folder, Ray reports its own error
            private_folder(Path.home() / ".ray")
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with _sigterm_kept():
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
        except Exception as error:  # Ray raises plain ones
            failure = first_line(error)
            if is_shared():
                raise RunError(f"no Ray cluster is at RAY_ADDRESS, {os.environ['RAY_ADDRESS']}: {failure}.") from error
            raise RunError(f"Ray did not start on this machine: {failure}. Try again when it is less busy.") from error
    with suppress(OSError):  # Ray creates the token file readable by everyone
        (Path.home() / ".ray" / "auth_token").chmod(0o600)
    # Otherwise, Ray prints pages of stack traces when a node is lost and at the end of a job.
    stop_driver_messages()


def temporary_folder() -> Path:
    """Return the private folder for sockets and logs of a local cluster. Ray's default folder is open to everybody."""
    preferred = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").absolute()
    folders = [parent / f"mars-ray-{os.geteuid()}" for parent in (preferred, Path("/tmp"))]
    return next((folder for folder in folders if len(str(folder)) <= TEMPORARY_LENGTH), folders[-1])


def is_shared() -> bool:
    """Return whether the cluster may have other users, because `RAY_ADDRESS` names it."""
    return bool(os.environ.get("RAY_ADDRESS"))


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM after the `with` block, because Ray's handler prints a stack trace."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit:  # raised by Ray's handler of SIGTERM
        handler(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
