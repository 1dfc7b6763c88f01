"""The driver's side of the controller: a thread tells it what is left of the job, and reads how its workers stand.

This is a shell: it speaks Ray.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

from mars_ray.batch.output.report import Status
from mars_ray.batch.ray.startup_status import clear_startup_status, read_startup_status
from mars_ray.batch.run.live_stats import LiveStats
from mars_ray.control.backlog import Backlog
from mars_ray.control.core.ray_controller import RayController, online_statuses, remove_controllers
from mars_ray.control.core.status import ClusterStatus
from mars_ray.control.replica.yielding import Yielding
from mars_ray.control.settings import ControlPlan
from mars_ray.errors import MarsRayError

EVERY_S = 1.0
STARTING = "starting workers"
CLUSTER_S = 5.0
"""At the end, the cluster is waited for so long: what stopped the job may have stopped it, too."""
NEWS = 1.5
"""Times as late as was said, or as little, is worth a new line."""


class ControlLoop:
    """Works in a thread of its own, within the block; `tokens_left` says what is left of the job.

    From there it calls `on_update`, with what workers do while they start, and with None once `stats` has numbers.
    """

    def __init__(
        self,
        app: str,
        plan: ControlPlan,
        tokens_left: Callable[[], float],
        deadline_s: float | None,
        on_update: Callable[[str | None], None],
    ) -> None:
        self._app, self._plan, self._tokens_left, self._on_update = app, plan, tokens_left, on_update
        self._ends_s = None if deadline_s is None else time.monotonic() + deadline_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="control-loop", daemon=True)
        self.note = ""
        """What a person should know of the job now."""
        self._reported_late_s = 0.0
        self.stats = LiveStats(time.monotonic)

    def __enter__(self) -> "ControlLoop":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(CLUSTER_S)
        removing = threading.Thread(target=self._remove, name="remover", daemon=True)
        removing.start()
        removing.join(CLUSTER_S)

    def _remove(self) -> None:
        clear_startup_status(self._app)
        remove_controllers(self._app)

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, below 0 once it passed."""
        return None if self._ends_s is None else self._ends_s - time.monotonic()

    def deadline_summary(self, status: Status) -> str:
        """Say how the job that ends now stands to its deadline; empty without one."""
        left_s = self.left_s
        if left_s is None:
            return ""
        ended = "stopped" if status == "stopped" else "ended"
        return f"{ended} {timedelta(seconds=round(abs(left_s)))} {'before' if left_s >= 0 else 'after'} the deadline"

    async def _run(self) -> None:
        controller, yielding = RayController(self._app, self._plan), Yielding(self._plan.settings.recover_s)
        while not self._ended.is_set():
            with suppress(MarsRayError):  # without a controller, workers decide alone for a while
                paused = yielding.follow(await online_statuses(), time.monotonic())
                backlog = Backlog(tokens=self._tokens_left(), seconds=self.left_s)
                self._read(await controller.update_backlog(backlog, paused=paused), paused)
            if not self._ended.is_set():
                began = self.stats.tokens or any(self.stats.running.values())
                self._on_update(None if began else await asyncio.to_thread(read_startup_status, self._app) or STARTING)
            await asyncio.to_thread(self._ended.wait, EVERY_S)

    def _read(self, status: ClusterStatus, paused: bool) -> None:
        self.stats.update(status.replicas)
        [found] = status.classes
        if paused:
            self.note = "paused: the cluster's callers need what there is"
        elif found.late_s:
            if self._reported_late_s <= found.late_s * NEWS and found.late_s <= self._reported_late_s * NEWS:
                return  # a person has read that
            self._reported_late_s = found.late_s
            self.note = (
                f"late: even at threshold {found.floor:g}, the lowest that quality allows, the job ends about "
                f"{timedelta(seconds=round(found.late_s))} after its deadline"
            )
        else:
            self.note, self._reported_late_s = "", 0.0
