"""Every private part of Ray that this package uses, each with the reason. All were checked against Ray 2.60.0 (shell).

A new version of Ray may change any of them without a word, so nothing else in the package names a private module or
function of Ray; `tests/test_imports.py` holds that. Modules are imported where they are used: importing Ray Serve or
Ray Data takes seconds, and Serve reads the environment then.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import ray
from ray.exceptions import RayError

log = logging.getLogger(__name__)

NAMESPACE = "mars-ray"
"""Namespace of our named actors and of our entries in the cluster's key-value store."""


def kv_get(key: str) -> bytes | None:
    """Return an entry of the key-value store of the cluster's head, which Ray offers its own libraries alone.

    What lies there outlives actors, which is what overrides of operators need.
    """
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    return found


def kv_put(key: str, value: bytes | str) -> None:
    """Write an entry of the key-value store; see `kv_get`."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)


def kv_delete(key: str) -> None:
    """Remove an entry of the key-value store; see `kv_get`."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key, namespace=NAMESPACE)


def free_resources() -> dict[str, dict[str, float]]:
    """Return what nobody has taken of each node, by node id: the public way to ask sums up the whole cluster."""
    from ray._private.state import available_resources_per_node

    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def cut_without_cpu(blocks: Any) -> Any:
    """Have the tasks of a dataset's last step, a repartition, ask for no CPU: `Dataset.repartition` cannot say so.

    Where engines have all CPUs, they would never run.
    """
    blocks._logical_plan.dag.ray_remote_args["num_cpus"] = 0
    return blocks


def stop_driver_messages() -> None:
    """Let the driver print nothing of what the cluster tells it: `ray.init` can silence no more than the workers."""
    driver = ray._private.worker.global_worker
    driver.threads_stopped.set()
    driver.gcs_error_subscriber.close()


def pass_arguments_by_value() -> None:
    """Have Ray Data hand the actors of its pools their arguments themselves, for they are small.

    It hands them references into the object store. Ray cannot start an actor again once what they refer to is lost,
    and says so in a line at every start.
    """
    from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

    ActorPoolMapOperator._map_transformer_ref = property(attrgetter("_map_transformer"))
    ActorPoolMapOperator._data_context_ref = property(attrgetter("data_context"))


def start_serve(**options: Any) -> Any:
    """Start Ray Serve with all options of a config file and return its client: `serve.start` takes fewer."""
    from ray.serve._private.api import serve_start

    return serve_start(**options)


def delete_application(name: str) -> None:
    """Begin to take a Serve application down: the public `serve.delete` waits until it is gone."""
    from ray import serve

    serve.delete(name, _blocking=False)


def serve_http_options() -> Any:
    """Return where and how Ray Serve listens, which a replica has no public way to ask for."""
    from ray.serve.context import _get_global_client

    return _get_global_client().http_config


async def broadcast(handle: Any, method: str, *args: Any, within_s: float) -> AsyncGenerator[Any, None]:
    """Yield what the replicas of a deployment answer to a call of `method`, as it comes and for so long.

    The public way to read the answers waits for all: one replica that hangs would hide those of the others.
    """
    from ray.serve.exceptions import RayServeException

    try:
        async with asyncio.timeout(within_s):
            results = await handle.broadcast(method, *args)._fetch_replica_results_async()
    except (TimeoutError, RayError, RayServeException):
        return
    answers = [asyncio.ensure_future(each.get_async()) for each in results]
    try:
        for answer in asyncio.as_completed(answers, timeout=within_s):
            try:
                yield await answer
            except TimeoutError:
                return
            except Exception as error:
                log.debug("a replica does not answer: %r", error)
    finally:
        for result, answer in zip(results, answers, strict=True):
            if not answer.done():
                answer.cancel()
                result.cancel()


@contextmanager
def fresh_request_id() -> Iterator[None]:
    """Give the handle call made within the block a request id that no other call has.

    A handle call gets its internal request id from the context it is made in, and Serve's router knows what it has to
    place by that id alone. Of two calls made for one HTTP request it finds the first only, and looks for a place for
    the second for ever. Serve cancels calls together with the HTTP request whose id they have; whoever makes a call
    here has to cancel it.
    """
    from ray.serve._private.utils import generate_request_id
    from ray.serve.context import _get_serve_request_context, _serve_request_context

    context = replace(_get_serve_request_context(), _internal_request_id=generate_request_id())
    outside = _serve_request_context.set(context)
    try:
        yield
    finally:
        _serve_request_context.reset(outside)
