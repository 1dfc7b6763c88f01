"""Ray shell: run an endpoint for `mars-ray serve`, on a new cluster on this machine or on the one at `RAY_ADDRESS`."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import ray
from ray import serve
from ray.serve.schema import ServeDeploySchema

from mars_ray.adapter.card import resolve_adapters
from mars_ray.control.core.ray_controller import remove_controllers
from mars_ray.control.policies.policy import bounds_of, describe_bounds
from mars_ray.engine.choose_engine import check_engine
from mars_ray.errors import ConfigError, InterruptedRunError, ModelError, ServeError
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import resolve_model
from mars_ray.ray_cluster import connect
from mars_ray.ray_private import delete_application, start_serve
from mars_ray.serve.deploy.front import BEHIND, CERTIFICATE, KEY, check_certificate, has_load_balancer
from mars_ray.serve.deploy.serve_config import ServeConfig, parse_config
from mars_ray.serve.ray.app import DRAIN_SECONDS

POLL_SECONDS = 0.2

EXAMPLE = """\
  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{{"model": "{model}", \\
    "messages": [{{"role": "user", "content": "JSON with the keys name, age, city: Oscar, 34, lives in Dallas."}}]}}'"""


KEY_HEADER = ' -H "Authorization: Bearer $MARS_RAY_API_KEY"'


class StopSignals:
    """Handles SIGINT within the block. Use it in the main thread only."""

    def __init__(self) -> None:
        self._received = threading.Event()

    def __enter__(self) -> "StopSignals":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a signal and return whether one arrived. A second signal raises `InterruptedRunError`."""
        return self._received.wait(seconds)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._received.is_set():
            raise InterruptedRunError("stopped at once; running requests were cut off.")
        self._received.set()


def run(
    schema: ServeDeploySchema, settings: type[ServeConfig], clean_up: Callable[[str, Callable[[str], None]], None]
) -> None:
    """Run the endpoint of a deploy file until a signal stops it, then let running requests finish.

    `settings` is the class of the endpoint's settings. `clean_up` removes what a platform leaves behind of the
    application of this name; its second argument deletes an application and waits until it is gone.

    The endpoint stays up if another `mars-ray serve` or `serve deploy` has deployed it again in the meantime.

    Prints the endpoint's address to standard output once it is ready, and everything else to standard error. Raises
    `ConfigError` or `ModelError` before anything is started, and `ServeError` if the endpoint does not start.
    """
    started_s = time.monotonic()
    name = schema.applications[0].name
    config = parse_config(settings, schema.applications[0].args)
    if "RAY_ADDRESS" not in os.environ:
        _check_this_machine(schema, config)
    elif schema.http_options.ssl_certfile and has_load_balancer():
        raise ConfigError(
            f"http_options.ssl_certfile: on an existing cluster each node has its own load balancer. Set {CERTIFICATE} "
            f"and {KEY} there before `ray start`, and leave it out here; see docs/deploy.md."
        )
    _say("starting Ray", started_s)
    connect()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        with StopSignals() as signals:
            _say("starting Ray Serve", started_s)
            serve_schema = _behind_the_load_balancer(schema)
            client = start_serve(
                http_options=serve_schema.http_options.model_dump(),
                proxy_location=schema.proxy_location,
                global_logging_config=schema.logging_config,
            )
            _say("starting the gateway, loading the model", started_s)
            client.deploy_apps(serve_schema)
            deployed_s = _deployed_s(name)
            if _wait_until_up(name, signals):
                client.wait_for_proxies_serving(wait_for_applications_running=True)
                url = _url(schema)
                print(f"ready in {time.monotonic() - started_s:.1f} s: {url}/v1, for example:", flush=True)
                print(
                    EXAMPLE.format(url=url, model=config.model_name, key=KEY_HEADER if config.knows_callers else ""),
                    flush=True,
                )
                for line in [*filter(None, [config.engine.notice]), *_thresholds(config)]:
                    _say(line, started_s)
                signals.wait()
            if _deployed_s(name) == deployed_s:
                _say("stopping: running requests may finish; repeat the signal to stop at once", started_s)
                _delete(name)
                clean_up(config.controller or name, _delete)
                if config.controller is None:  # one with a name may be shared; without replicas it ends itself
                    remove_controllers(name)
            else:
                _say("the endpoint has been redeployed or deleted meanwhile: leaving it as it is", started_s)
    finally:
        ray.shutdown()


def _behind_the_load_balancer(schema: ServeDeploySchema) -> ServeDeploySchema:
    """Return the schema for Serve. Behind HAProxy on one machine, gateways listen on loopback without TLS."""
    if "RAY_ADDRESS" in os.environ or not has_load_balancer():
        return schema
    listening = {"host": BEHIND, "ssl_certfile": None, "ssl_keyfile": None}
    return schema.model_copy(update={"http_options": schema.http_options.model_copy(update=listening)})


def _say(line: str, started_s: float) -> None:
    print(f"mars-ray: {time.monotonic() - started_s:5.1f} s  {line}", file=sys.stderr, flush=True)


def _thresholds(config: ServeConfig) -> list[str]:
    """Return a line about each class's threshold range, or no lines if only other machines have the model."""
    try:
        bounds = bounds_of(config.plan(resolve_model(config.model)), [])
    except ModelError:
        return []
    return [describe_bounds(name, class_bounds) for name, class_bounds in bounds.items()]


def _check_this_machine(schema: ServeDeploySchema, config: ServeConfig) -> None:
    """Raise an error early for a missing model, bad keys, a bad certificate or a port in use."""
    model = check_folder(resolve_model(config.model))
    check_engine(model, config.engine, resolve_adapters(config.adapter, config.adapters))
    config.plan(model.folder)
    config.check_keys()
    http = schema.http_options
    if http.ssl_certfile and http.ssl_keyfile:
        check_certificate(Path(http.ssl_certfile), Path(http.ssl_keyfile))
    try:
        with socket.socket(socket.AF_INET6 if ":" in http.host else socket.AF_INET) as probe:
            # Connections left over from an earlier server do not make the port busy.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((http.host, http.port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {http.host}:{http.port}: {os.strerror(error.errno or 0)}. Choose another --port."
        ) from None


def _deployed_s(name: str) -> float | None:
    """Return the time of the last deployment by Serve's clock, or None if the application does not exist."""
    application = serve.status().applications.get(name)
    return None if application is None else application.last_deployed_time_s


def _wait_until_up(name: str, signals: StopSignals) -> bool:
    """Return True once the application runs, or False if a signal arrives first. Raises `ServeError`."""
    while not signals.wait(POLL_SECONDS):
        application = serve.status().applications.get(name)
        if application is None or application.status == "DEPLOYING":
            continue
        if application.status == "RUNNING":
            return True
        messages = [deployment.message for deployment in application.deployments.values() if deployment.message]
        reason = (messages or [application.message])[0].strip().splitlines()
        raise ServeError(f"the endpoint did not start: {reason[-1] if reason else application.status}")
    return False


def _delete(name: str) -> None:
    """Delete an application and wait until it is gone."""
    delete_application(name)
    ends_s = time.monotonic() + DRAIN_SECONDS + 10
    while name in serve.status().applications and time.monotonic() < ends_s:
        time.sleep(POLL_SECONDS)


def _url(schema: ServeDeploySchema) -> str:
    host = schema.http_options.host
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    scheme = "https" if schema.http_options.ssl_certfile else "http"
    return f"{scheme}://{shown}:{schema.http_options.port}{(schema.applications[0].route_prefix or '').rstrip('/')}"
