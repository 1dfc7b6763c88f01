"""The controller `chat` of a cluster, as tests of replicas with vLLM see it."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from mars_ray.control.core.status import ClusterStatus
from mars_ray.ray_private import NAMESPACE

CONTROL = {
    "recover_s": 2.0,
    "lease_s": 5.0,
    "min_agreement": 0.0,
    "max_accuracy_loss": 1.0,
    "in_time_per_accuracy": 0.0,
}


def until(what: Callable[[], object], *, within_s: float) -> None:
    ends_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < ends_s, status()
        time.sleep(0.1)


def controller() -> Any:
    names = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
    [name] = [name for name in names if name.startswith("controller:chat:")]
    return ray.get_actor(name, namespace=NAMESPACE)


def call(method: str, *arguments: object) -> Any:
    return ray.get(controller().call.remote(method, *arguments), timeout=10)


def status() -> ClusterStatus | None:
    with suppress(RayError, ValueError):  # it starts
        answered: ClusterStatus = call("status")
        return answered
    return None
