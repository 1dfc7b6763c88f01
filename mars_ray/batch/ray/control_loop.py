"""Ray shell: report the backlog of a job to its controller once a second, and read the state of the job's workers."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

from ray.exceptions import RayError

from mars_ray.batch.output.report import Status
from mars_ray.batch.run.live_stats import LiveStats
from mars_ray.control.cluster_load import Backlog
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.batch_job import Yielding
from mars_ray.control.core.ray_controller import RayController, online_statuses, remove_controllers
from mars_ray.control.core.status import ClusterStatus
from mars_ray.errors import MarsRayError

EVERY_S = 1.0
CLUSTER_S = 5.0
"""Maximum seconds to wait for the cluster at the end of a job, because the cluster may have been stopped as well."""
NEWS = 1.5
"""Factor by which a delay must change before it is reported again."""


class ControlLoop:
    """Thread that talks to the controller. It is a context manager, and the thread runs during the `with` block.

    `tokens_left` returns the backlog of the job. The thread calls `on_update` once a second.
    """

    def __init__(
        self,
        app: str,
        plan: ControlPlan,
        tokens_left: Callable[[], float],
        deadline_s: float | None,
        on_update: Callable[[], None],
    ) -> None:
        self._app = app
        self._plan = plan
        self._tokens_left = tokens_left
        self._on_update = on_update
        self._deadline_s = deadline_s
        self.start_deadline()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="control-loop", daemon=True)
        self.note = ""
        """Message for the user, for example about a delay; usually empty."""
        self._reported_late_s = 0.0
        self.stats = LiveStats(time.monotonic)

    def __enter__(self) -> "ControlLoop":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(CLUSTER_S)
        removing = threading.Thread(target=remove_controllers, args=(self._app,), name="remover", daemon=True)
        removing.start()
        removing.join(CLUSTER_S)

    def start_deadline(self) -> None:
        """Count the seconds of the deadline from now."""
        self._ends_s = None if self._deadline_s is None else time.monotonic() + self._deadline_s

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline: negative once the deadline has passed, None if the job has no deadline."""
        return None if self._ends_s is None else self._ends_s - time.monotonic()

    def deadline_summary(self, status: Status) -> str:
        """Return how far before or after its deadline the job finished, in words; empty without a deadline."""
        left_s = self.left_s
        if left_s is None:
            return ""
        ended = "stopped" if status == "stopped" else "ended"
        return f"{ended} {timedelta(seconds=round(abs(left_s)))} {'before' if left_s >= 0 else 'after'} the deadline"

    async def _run(self) -> None:
        controller = RayController(self._app, self._plan)
        yielding = Yielding(self._plan.settings.recover_s)
        while not self._ended.is_set():
            # Workers can continue without a controller, or without the head of the cluster, for a while.
            with suppress(MarsRayError, RayError, RuntimeError):
                paused = yielding.follow(await online_statuses(), time.monotonic())
                backlog = Backlog(tokens=self._tokens_left(), seconds=self.left_s)
                self._read(await controller.update_backlog(backlog, paused=paused), paused)
            if not self._ended.is_set():
                self._on_update()
            await asyncio.to_thread(self._ended.wait, EVERY_S)

    def _read(self, status: ClusterStatus, paused: bool) -> None:
        self.stats.update(status.replicas)
        [batch_class] = status.classes
        late_s = batch_class.late_s
        if paused:
            self.note = "paused: callers of the endpoint need the whole cluster"
        elif late_s:
            if self._reported_late_s <= late_s * NEWS and late_s <= self._reported_late_s * NEWS:
                return
            self._reported_late_s = late_s
            self.note = (
                f"late: even at threshold {batch_class.threshold:g}, the fastest that quality allows, the job ends "
                f"about {timedelta(seconds=round(late_s))} after its deadline"
            )
        else:
            self.note = ""
            self._reported_late_s = 0.0
