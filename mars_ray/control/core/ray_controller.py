"""Ray shell: one named, detached Ray actor that runs a `Controller`, and its clients.

The actor is not part of a Serve deployment: after a crash it is back in two seconds instead of ten, and handles to it
stay valid. Its name contains a digest of its plan, so replicas with different settings use different controllers. Two
versions of an application that run at the same time during an update therefore do not share a controller.
"""

import hashlib
from dataclasses import replace

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.controller import Controller
from mars_ray.control.core.live_view import RunningJob
from mars_ray.control.core.policy_changes import PolicyChange
from mars_ray.control.core.status import ClusterStatus
from mars_ray.errors import ConfigError
from mars_ray.ray_actor import ActorClient, FoundActor, SharedActor, ask_actors, kill_actors, named_actors, remote
from mars_ray.ray_private import kv_get, kv_put
from mars_ray.storage.audit_log import AuditLog, AuditWriter
from mars_ray.storage.location import locate

BATCH = "generate-"
"""Prefix of the application names of batch jobs."""
IDLE_SECONDS = 60.0
"""Seconds without reports from replicas or a driver after which a controller ends itself."""
ASK_SECONDS = 5.0
_KIND = "controller:"


class ControllerActor(SharedActor):
    """The actor that runs the controller. Reports of replicas and drivers keep it alive, questions of operators do
    not."""

    USED_BY = (Controller.handle_report.__name__, Controller.update_backlog.__name__)

    def __init__(self, app: str, plan: ControlPlan, audit: str | None) -> None:
        self._audit = AuditWriter(AuditLog(None if audit is None else locate(audit), "policy"))
        super().__init__(Controller(plan, store=_ClusterStore(app, plan.model), observe_change=self._record))

    def unused(self) -> bool:
        """Return whether no replica and no driver has reported for `IDLE_SECONDS`."""
        return self.silent_s >= IDLE_SECONDS

    def _record(self, change: PolicyChange) -> None:
        action = "threshold.lowered" if change.lowest < change.before else "threshold.raised"
        details = {"before": change.before, "after": change.after, "lowest": change.lowest, "changes": change.changes}
        self._audit.record("policy", action, change.service_class, cause=change.cause, details=details)


class RayController(ActorClient):
    """Client of an application's controller, which is started when first needed. Use it within one event loop.

    `audit` is the folder or URL where the controller records what its policy does. All methods raise
    `UnavailableError` if no controller answers.
    """

    WITHIN_S = ASK_SECONDS
    SILENT = "no controller answers; replicas decide alone."

    handle_report = remote(Controller.handle_report)
    update_backlog = remote(Controller.update_backlog)
    status = remote(Controller.status)
    live = remote(Controller.live)
    set_threshold = remote(Controller.set_threshold)
    clear_threshold = remote(Controller.clear_threshold)

    def __init__(self, app: str, plan: ControlPlan, audit: str | None = None) -> None:
        digest = hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:12]
        super().__init__(ControllerActor, f"{_prefix(app)}{digest}", app, plan, audit)

    async def jobs(self) -> list[RunningJob]:
        """Return the batch jobs on the cluster, sorted by name, except those whose controller does not answer."""
        answers = await ask_actors(f"{_KIND}{BATCH}", Controller.job, ASK_SECONDS)
        return [replace(job, name=_app_of(name)) for name, job in sorted(answers.items()) if job]


class FoundController(FoundActor):
    """Client of a controller that runs, for operators without an endpoint of ours. Use it within one event loop."""

    WITHIN_S = RayController.WITHIN_S
    SILENT = RayController.SILENT

    status = RayController.status
    set_threshold = RayController.set_threshold
    clear_threshold = RayController.clear_threshold


def find_controllers(app: str) -> list[FoundController]:
    """Return the controllers of an application: more than one if its replicas have different models or settings.

    Raises `ConfigError` if there is none.
    """
    apps = {name: _app_of(name) for name in named_actors(_KIND)}
    controllers = [FoundController(name) for name, owner in apps.items() if owner == app]
    if not controllers:
        names = ", ".join(sorted(set(apps.values())))
        raise ConfigError(
            f"controller is {app!r}; "
            + (f"the cluster has {names}." if names else "the cluster has none. Start its replicas.")
        )
    return controllers


def remove_controllers(app: str) -> None:
    """End the controllers of an application that is gone, and those of its further models."""
    kill_actors(_prefix(app))


async def online_statuses() -> list[ClusterStatus]:
    """Return the status of every controller on the cluster that answers and whose replicas serve callers."""
    answers = await ask_actors(_KIND, Controller.status, ASK_SECONDS)
    return [status for name, status in answers.items() if not name.startswith(f"{_KIND}{BATCH}")]


def _prefix(app: str) -> str:
    return f"{_KIND}{app}:"


def _app_of(actor: str) -> str:
    """Return the application in the name of an actor, which ends with the digest of a plan."""
    return actor.removeprefix(_KIND).rpartition(":")[0]


class _ClusterStore:
    """An `OverrideStore` in the key-value store of the cluster's head, which lives as long as the cluster."""

    def __init__(self, app: str, model: str) -> None:
        self._key = f"overrides:{app}:{model}"

    def load(self) -> bytes | None:
        return kv_get(self._key)

    def save(self, overrides: bytes) -> None:
        kv_put(self._key, overrides)
