"""Set the environment variables of Ray and Ray Serve for an endpoint, before they are imported.

In:    a private folder for the files of the proxy; where it is to listen.
Out:   environment variables; those the user has set stay.
Never: opens a port beyond this machine.
"""

import os
import random
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
    "RAY_worker_niceness": "0",  # by default whatever else runs here comes before the engine
    # HAProxy in front and gRPC between replicas: half of the default's cost per request.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # How long a gateway lives on without requests, so that balancers elsewhere notice; ours is on this machine.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # HAProxy is looked after by an actor of Ray's, which is replaced after three failed checks in a row.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.25",
    # By default it is killed when it is not up after 15 s, which on a busy machine goes on for ever.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}

PROXY = """#!/bin/sh
exec '{python}' -P -m mars_ray.serve.deploy.haproxy "$@"
"""


def set_environment(folder: Path, http_options: Mapping[str, Any]) -> None:
    """Set the variables that are not set yet. `folder` must be private to this user and live as long as the endpoint.

    What `http_options` of the deploy file say holds for a cluster that is started here. On one that is there already,
    the environment of its nodes does.
    """
    stats, metrics = islice(free_ports(), 2)
    proxy = folder / "haproxy"
    proxy.write_text(PROXY.format(python=sys.executable))
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
    if "RAY_ADDRESS" not in os.environ:  # our own cluster never runs without tokens
        os.environ["RAY_AUTH_MODE"] = SETTINGS["RAY_AUTH_MODE"]
        set_front(http_options)


def haproxy_files(folder: Path) -> dict[str, str]:
    """Return the variables that put HAProxy's configuration and sockets into `folder`; Ray's default is open to all."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def free_ports() -> Iterator[int]:
    """Yield free ports outside the range from which the kernel picks ports.

    Ray opens hundreds of ports while it starts, all from the kernel's range (32768 and up) or, in a cluster of
    several machines, from 10002 to 19999; a port between the two is still free when HAProxy gets to it.
    """
    for port in random.sample(range(20_000, 30_000), 10_000):
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
        yield port
