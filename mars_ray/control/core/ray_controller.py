"""Ray shell: one named, detached Ray actor that runs a `Controller`, and its clients.

The actor is not part of a Serve deployment: after a crash it is back in two seconds instead of ten, and handles to it
stay valid. Its name contains a digest of its plan, so replicas with different settings use different controllers. Two
versions of an application that run at the same time during an update therefore do not share a controller.
"""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util import list_named_actors

from mars_ray.control.cluster_load import Backlog
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.controller import Controller
from mars_ray.control.core.live_view import LiveReport, RunningJob
from mars_ray.control.core.overrides import Override, from_json, to_json
from mars_ray.control.core.policy_changes import PolicyChange
from mars_ray.control.core.status import ClusterStatus
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.errors import MarsRayError, UnavailableError
from mars_ray.ray_private import NAMESPACE, kv_get, kv_put
from mars_ray.storage.audit_log import AuditLog
from mars_ray.storage.location import locate

BATCH = "generate-"
"""Prefix of the application names of batch jobs."""
IDLE_SECONDS = 60.0
"""Seconds without reports from replicas or a driver after which a controller ends itself."""
REPORTS = ("handle_report", "update_backlog")
"""Methods by which replicas and drivers report."""
ASK_SECONDS = 5.0
_KIND = "controller:"


class ControllerActor:
    """The actor that runs the controller."""

    def __init__(self, app: str, plan: ControlPlan, audit: str | None) -> None:
        self._audit = AuditLog(None if audit is None else locate(audit), "policy")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._controller = Controller(plan, store=_ClusterStore(app, plan.model), observe_change=self._record)
        self._last_report_s = time.monotonic()
        self._watching = asyncio.get_event_loop().create_task(self._end_when_idle())

    async def call(self, method: str, *args: Any, **settings: Any) -> Any:
        """Return the result of a method of the controller, or its error, because Ray wraps exceptions in its own."""
        if method in REPORTS:
            self._last_report_s = time.monotonic()
        try:
            return getattr(self._controller, method)(*args, **settings)
        except MarsRayError as error:
            return error

    def _record(self, change: PolicyChange) -> None:
        action = "threshold.lowered" if change.lowest < change.before else "threshold.raised"
        details = {"before": change.before, "after": change.after, "lowest": change.lowest, "changes": change.changes}
        # In a thread, because the storage may be slow and reports must be answered meanwhile.
        record = partial(self._audit.record, cause=change.cause, details=details)
        self._writer.submit(record, "policy", action, change.service_class)

    async def _end_when_idle(self) -> None:
        while time.monotonic() - self._last_report_s < IDLE_SECONDS:
            await asyncio.sleep(1)
        ray.kill(ray.get_runtime_context().current_actor)


class RayController:
    """Client of an application's controller, which is started when first needed. Use it within one event loop.

    `audit` is the folder or URL where the controller records what its policy does.
    """

    def __init__(self, app: str, plan: ControlPlan, audit: str | None = None) -> None:
        self._app = app
        self._plan = plan
        self._audit = audit
        self._handle: Any = None

    async def handle_report(self, report: ReplicaReport) -> Directive:
        """Return the directive that answers a report.

        Raises `ReportError`. Like all methods of this class, also raises `UnavailableError` if no controller answers.
        """
        directive: Directive = await self._ask("handle_report", report)
        return directive

    async def status(self) -> ClusterStatus:
        """Return the state of the cluster and the controller's decisions."""
        status: ClusterStatus = await self._ask("status")
        return status

    async def live(self, controller: str, after: int) -> LiveReport:
        """Return the report for a live view that already holds the frames up to `after` of the life `controller`."""
        report: LiveReport = await self._ask("live", controller, after)
        return report

    async def jobs(self) -> list[RunningJob]:
        """Return the batch jobs on the cluster, except those whose controller does not answer."""
        return await running_jobs()

    async def update_backlog(self, backlog: Backlog, *, paused: bool) -> ClusterStatus:
        """Set a batch job's remaining work and whether its workers stop taking rows; return the cluster's status."""
        status: ClusterStatus = await self._ask("update_backlog", backlog, paused=paused)
        return status

    async def set_threshold(self, threshold: float, name: str | None, seconds: float | None) -> None:
        """Override the policy. Raises `ConfigError`."""
        await self._ask("set_threshold", threshold, name, seconds)

    async def clear_threshold(self, name: str | None) -> None:
        """Let the policy decide again. Raises `ConfigError`."""
        await self._ask("clear_threshold", name)

    async def _ask(self, method: str, *args: Any, **settings: Any) -> Any:
        if self._handle is None:
            self._handle = await asyncio.to_thread(self._start)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                answer = await self._handle.call.remote(method, *args, **settings)
        except (RayError, TimeoutError) as error:
            if isinstance(error, ActorDiedError):  # the actor ended itself or was killed for good: start a new one
                self._handle = None
            raise UnavailableError(
                "no controller answers; replicas decide alone. Try again in a few seconds."
            ) from error
        if isinstance(answer, MarsRayError):
            raise answer
        return answer

    def _start(self) -> Any:
        digest = hashlib.sha256(self._plan.model_dump_json().encode()).hexdigest()[:12]
        actor = ray.remote(ControllerActor).options(
            name=f"{_prefix(self._app)}{digest}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
        )
        return actor.remote(self._app, self._plan, self._audit)


def remove_controllers(app: str) -> None:
    """End the controllers of an application that is gone."""
    for name in _named(_prefix(app)):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


async def online_statuses() -> list[ClusterStatus]:
    """Return the status of every controller on the cluster that answers and whose replicas serve callers."""
    names = await asyncio.to_thread(_named, _KIND)
    answers = await _ask_all([name for name in names if not name.startswith(f"{_KIND}{BATCH}")], "status")
    return [answer for answer in answers.values() if isinstance(answer, ClusterStatus)]


async def running_jobs() -> list[RunningJob]:
    """Return the batch jobs on the cluster, sorted by name, except those whose controller does not answer."""
    answers = await _ask_all(await asyncio.to_thread(_named, f"{_KIND}{BATCH}"), "job")
    return [
        replace(answer, name=name.removeprefix(_KIND).partition(":")[0])
        for name, answer in sorted(answers.items())
        if isinstance(answer, RunningJob)
    ]


async def _ask_all(names: Sequence[str], method: str) -> dict[str, object]:
    """Return the answer or the exception of each controller, keyed by the controller's name."""

    async def ask(name: str) -> object:
        handle = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
        async with asyncio.timeout(ASK_SECONDS):
            return await handle.call.remote(method)

    return dict(zip(names, await asyncio.gather(*map(ask, names), return_exceptions=True), strict=True))


def _named(prefix: str) -> list[str]:
    """Return the names of all controllers whose name begins with `prefix`."""
    actors = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)]


def _prefix(app: str) -> str:
    return f"{_KIND}{app}:"


class _ClusterStore:
    """An `OverrideStore` in the key-value store of the cluster's head, which lives as long as the cluster."""

    def __init__(self, app: str, model: str) -> None:
        self._key = f"overrides:{app}:{model}"

    def load(self) -> dict[str, Override]:
        saved = kv_get(self._key)
        return from_json(saved) if saved else {}

    def save(self, overrides: dict[str, Override]) -> None:
        kv_put(self._key, to_json(overrides))
