"""Ray shell: private parts of Ray that this package uses, with the reason for each. Checked against Ray 2.60.0.

A new version of Ray may change these parts without notice, so no other file of the package uses private modules or
functions of Ray; `tests/test_imports.py` checks this. Ray Serve is imported inside the functions, because importing it
takes seconds and because it reads the environment on import.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

log = logging.getLogger(__name__)

NAMESPACE = "mars-ray"
"""Namespace of mars-ray's named actors and of its entries in the cluster's key-value store."""


def kv_get(key: str) -> bytes | None:
    """Return an entry of the key-value store on the cluster's head node, or None if the entry does not exist.

    Entries outlive actors, which is necessary for overrides set by operators. Ray has no public interface to the store.
    """
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(key, namespace=NAMESPACE)
    return value


def kv_put(key: str, value: bytes | str) -> None:
    """Write an entry of the key-value store; see `kv_get`."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by node id. The public function only returns the sum over all nodes."""
    from ray._private.state import available_resources_per_node

    resources: dict[str, dict[str, float]] = available_resources_per_node()
    return resources


def reason_of(error: BaseException) -> str:
    """Return the line of the message of one of Ray's errors that names its reason, without a full stop at its end.

    This is the last line, after the stack trace of the failed process. If memory ran out, an earlier line says so, and
    the last one is advice.
    """
    lines = str(error).strip().splitlines() or [repr(error)]
    reason = next((line for line in lines if "running low on memory" in line), lines[-1])
    return reason.removesuffix(".")


def stop_driver_messages() -> None:
    """Stop the driver from printing messages of the cluster. The options of `ray.init` silence only the workers."""
    driver = ray._private.worker.global_worker
    driver.threads_stopped.set()
    driver.gcs_error_subscriber.close()


def start_serve(**options: Any) -> Any:
    """Start Ray Serve with all options of a config file, and return its client. `serve.start` has fewer options."""
    from ray.serve._private.api import serve_start

    return serve_start(**options)


def delete_application(name: str) -> None:
    """Begin to delete a Serve application, and return at once. The public `serve.delete` waits for the end."""
    from ray import serve

    serve.delete(name, _blocking=False)


def deploy_application(app: Any, name: str) -> None:
    """Begin to deploy a Serve application without a route, and return at once. The public `serve.run` waits."""
    from ray import serve

    serve.run_many([serve.RunTarget(app, name=name, route_prefix=None)], wait_for_applications_running=False)


def serve_http_options() -> Any:
    """Return the HTTP options of Ray Serve, such as its port. A replica has no public way to read them."""
    from ray.serve.context import _get_global_client

    return _get_global_client().http_config


async def broadcast(handle: Any, method: str, *args: Any, within_s: float) -> AsyncGenerator[Any, None]:
    """Call `method` on all replicas of a deployment, and yield the answers that arrive within `within_s` seconds.

    Answers are yielded as they arrive. The public interface waits for all answers, so a single replica that hangs would
    hold back the answers of the others.
    """
    from ray.serve.exceptions import RayServeException

    try:
        async with asyncio.timeout(within_s):
            results = await handle.broadcast(method, *args)._fetch_replica_results_async()
    except (TimeoutError, RayError, RayServeException):
        return
    answers = [asyncio.ensure_future(result.get_async()) for result in results]
    try:
        for answer in asyncio.as_completed(answers, timeout=within_s):
            try:
                yield await answer
            except TimeoutError:
                return
            except Exception as error:
                log.debug("a replica failed to answer: %r", error)
    finally:
        for result, answer in zip(results, answers, strict=True):
            if not answer.done():
                answer.cancel()
                result.cancel()


def is_sent(response: Any) -> bool:
    """Return whether a replica has taken a handle call. The public interface does not tell this from a call that waits
    for a replica."""
    future = response._replica_result_future
    return bool(future.done())


@contextmanager
def fresh_request_id() -> Iterator[None]:
    """Give a handle call made within the block its own request id.

    Normally a handle call takes its internal request id from the context, so two calls for one HTTP request have the
    same id. Serve's router identifies pending calls by this id alone, so it finds a replica for the first call but
    searches forever for the second. Serve also uses the id to cancel calls together with their HTTP request, so a call
    made within the block must be cancelled by its caller.
    """
    from ray.serve._private.utils import generate_request_id
    from ray.serve.context import _get_serve_request_context, _serve_request_context

    context = replace(_get_serve_request_context(), _internal_request_id=generate_request_id())
    outside = _serve_request_context.set(context)
    try:
        yield
    finally:
        _serve_request_context.reset(outside)
