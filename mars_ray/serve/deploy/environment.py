"""Set the environment variables of Ray and Ray Serve for an endpoint, before Ray is imported.

In:    a private folder for the proxy's files; the address on which the proxy listens.
Out:   environment variables; variables that the user has set keep their values.
Never: opens a port to other machines, except at that address.
"""

import os
import random
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from mars_ray.serve.deploy.front import set_front

SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise, Ray gives its workers a lower priority than other processes.
    "RAY_worker_niceness": "0",
    # HAProxy in front and gRPC between replicas halve the cost per request compared with Ray's defaults.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Seconds for which a stopping gateway stays up so that the load balancer can notice the shutdown. The minimum is
    # enough because our load balancer is on this machine.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # A Ray actor supervises HAProxy. Ray replaces this actor after three failed checks in a row.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.25",
    # Ray kills the actor if it is not ready in time. With the default of 15 s, the actor on a busy machine would be
    # killed and restarted forever.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}

PROXY = """#!/bin/sh
exec {python} -P -m mars_ray.serve.deploy.haproxy "$@"
"""


def set_environment(folder: Path, http_options: Mapping[str, Any]) -> None:
    """Set the variables that are not set yet. `folder` must be private to this user and exist while the endpoint runs.

    The deploy file's `http_options` apply to a cluster that is started here. On an existing cluster, the environment of
    its nodes applies instead.
    """
    stats, metrics = islice(free_ports(), 2)
    proxy = folder / "haproxy"
    proxy.write_text(PROXY.format(python=shlex.quote(sys.executable)))
    proxy.chmod(0o700)
    settings = (
        SETTINGS
        | haproxy_files(folder)
        | {
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(proxy),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        }
    )
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if "RAY_ADDRESS" not in os.environ:  # a cluster started here always requires tokens
        os.environ["RAY_AUTH_MODE"] = SETTINGS["RAY_AUTH_MODE"]
        set_front(http_options)


def haproxy_files(folder: Path) -> dict[str, str]:
    """Return the variables that put HAProxy's files and sockets into `folder`, because any user can open Ray's default
    folder."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def free_ports() -> Iterator[int]:
    """Yield free ports outside the range from which the kernel picks ports.

    While Ray starts, it opens hundreds of ports, all in the kernel's range (32768 and up) or, in a cluster of several
    machines, in the range from 10002 to 19999. A port between these ranges is still free when HAProxy opens it.
    """
    for port in random.sample(range(20_000, 30_000), 10_000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        yield port
