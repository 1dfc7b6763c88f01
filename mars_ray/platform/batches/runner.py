"""Find the batches that have not ended, and work on several of them at a time.

In:    the batches in the storage.
Out:   a driver for each, begun by earliest deadline, in turn for each owner; the work that is left, for the controller;
       figures for the metrics.
Never: gives a batch up because the storage does not answer or another process works on it: it tries again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from itertools import islice

from mars_ray.control.cluster_load import Backlog
from mars_ray.errors import DataError, MarsRayError
from mars_ray.platform.batches.batch_run import BatchCounts, BatchRun, BatchTools
from mars_ray.platform.batches.batch_store import ENDED, BatchFigures, BatchState, StoredBatch
from mars_ray.platform.batches.storage_paths import RESULTS, result_id
from mars_ray.serve.http.streams import cancel_tasks

log = logging.getLogger(__name__)

BATCHES = 32
"""Maximum number of batches that run at the same time; the others wait."""
BATCHES_OF_OWNER = 4
"""Maximum number of batches of one owner that run at the same time. Those that pause do not count."""
ENDING = 16
"""Maximum number of batches, in addition, that run only to end: their deadline has passed, or they were cancelled."""
RETRY_S = 5.0
"""Seconds until a batch is tried again whose driver failed."""
FIGURES_S = 20.0
"""Seconds between two publications of figures."""
SWEEP_S = 3600.0
"""Seconds between two removals of expired files."""


class BatchRunner:
    """Runs the batches of an endpoint. `report` gets the work that is left every `tools.poll_s` seconds, by model."""

    def __init__(
        self, tools: BatchTools, report: Callable[[Mapping[str, Backlog]], Awaitable[None]] | None = None
    ) -> None:
        self._tools = tools
        self._report = report
        self._waiting: dict[str, BatchState] = {}
        """States of batches without a driver, by id. Only drivers change them."""
        self._running: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._ending = set[str]()
        """Ids of running batches that have only to end."""
        self._waits_s: dict[str, float] = {}
        """Time at which a batch may be tried again, by id."""
        self._swept_s: float | None = None
        self._complaint = ""
        """The last error of the storage, which the log has once."""

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(_repeat(self._look, self._tools.poll_s))
                # Report in a task of its own: while the storage is slow, the controller would forget the backlog.
                if report := self._report:
                    loops.create_task(_repeat(lambda: report(self.backlogs()), self._tools.poll_s))
                loops.create_task(_repeat(self._publish, FIGURES_S))
        finally:
            await cancel_tasks(*(task for _, task in self._running.values()))

    def backlogs(self) -> dict[str, Backlog]:
        """Return the work that is left for each model. A batch counts for the model of its first row that names one.

        Paused batches are left out, because more room does not help them.
        """
        runs: dict[str, list[BatchRun]] = {}
        for run, _ in self._running.values():
            if not self._tools.calls.is_paused(run.batch):
                runs.setdefault(self._tools.calls.caller.model_of(run.state.model), []).append(run)
        return {model: self._backlog(of_model) for model, of_model in runs.items()}

    def _backlog(self, runs: list[BatchRun]) -> Backlog:
        """Return the tokens that are left, and the seconds in which they are needed.

        With several batches, the seconds are those of the batch that needs the most tokens per second, together with
        all batches that end before it.
        """
        tokens = 0.0
        worst: tuple[float, float] = (0.0, 0.0)
        seconds: float | None = None
        for run in sorted(runs, key=lambda run: run.left_s):
            tokens += run.state.rows_left * self._tools.calls.mean_tokens
            rate = tokens / max(run.left_s, 1.0)
            if tokens and (seconds is None or rate > worst[0]):
                worst = rate, tokens
                seconds = run.left_s
        return Backlog(tokens=worst[1], seconds=seconds)

    async def _look(self) -> None:
        now_s = self._tools.clock()
        try:
            unfinished = await asyncio.to_thread(self._tools.batches.unfinished)
            if self._swept_s is None or now_s - self._swept_s >= SWEEP_S:
                self._swept_s = now_s
                await asyncio.to_thread(self._sweep, unfinished)
        except MarsRayError as error:
            if str(error) != self._complaint:
                log.warning("batches wait: %s", error)
            self._complaint = str(error)
            return
        self._complaint = ""
        waiting = [
            batch
            for batch in unfinished
            if batch.id not in self._running and self._waits_s.get(batch.id, now_s) <= now_s
        ]
        for batch in self._next_batches(waiting):
            self._start(batch)
            waiting.remove(batch)
        room = ENDING - len(self._ending)
        if waiting and room > 0:
            for batch in await asyncio.to_thread(self._to_end, waiting, room):
                self._ending.add(batch.id)
                self._start(batch)

    def _next_batches(self, waiting: list[StoredBatch]) -> list[StoredBatch]:
        """Return the batches to start, each of the owner with the fewest running ones. `waiting` is in order of
        deadlines.

        Paused batches keep no place. A limit of their key would hold up its other batches too, so those wait.
        """
        begun = [run.batch for id, (run, _) in self._running.items() if id not in self._ending]
        limited_keys = {batch.key for batch in begun if self._tools.calls.is_limited(batch)}
        running = Counter(batch.owner for batch in begun if not self._tools.calls.is_paused(batch))
        left = [batch for batch in waiting if batch.key not in limited_keys]
        chosen: list[StoredBatch] = []
        while left and running.total() < BATCHES:
            batch = min(left, key=lambda batch: running[batch.owner])
            if running[batch.owner] >= BATCHES_OF_OWNER:
                break
            running[batch.owner] += 1
            left.remove(batch)
            chosen.append(batch)
        return chosen

    def _to_end(self, waiting: list[StoredBatch], room: int) -> list[StoredBatch]:
        """Return up to `room` batches that are cancelled or past their deadline, so that only their end is left to
        store."""
        ended = (
            batch
            for batch in waiting
            if batch.expires_at <= self._tools.unix_clock() or self._tools.batches.is_cancelled(batch)
        )
        return list(islice(ended, room))

    def _start(self, batch: StoredBatch) -> None:
        run = BatchRun(batch, self._tools)
        self._running[batch.id] = run, asyncio.create_task(self._drive(batch, run))

    async def _drive(self, batch: StoredBatch, run: BatchRun) -> None:
        try:
            await run.run()
            self._waits_s.pop(batch.id, None)
        except Exception as error:  # one batch must not stop the others
            unexpected = not isinstance(error, MarsRayError)
            log.warning("batch %s waits %g s: %s", batch.id, RETRY_S, error, exc_info=unexpected)
            self._waits_s[batch.id] = self._tools.clock() + RETRY_S
        finally:
            del self._running[batch.id]
            self._ending.discard(batch.id)
            self._tools.calls.forget(batch)

    async def _publish(self) -> None:
        # Both at one moment: drivers go on while the storage answers, and no batch may count as unfinished and ended.
        states = {id: run.state for id, (run, _) in self._running.items()}
        counts = deepcopy(self._tools.counts)
        with suppress(MarsRayError):  # the log has a line about a storage that is away
            await asyncio.to_thread(lambda: self._tools.batches.write_figures(self._all_figures(states, counts)))

    def _state(self, batch: StoredBatch) -> BatchState:
        """Return the state of a batch. A damaged one counts as that of a new batch; its driver says so in the log."""
        try:
            return self._tools.batches.state(batch)
        except DataError:
            return BatchState()

    def _all_figures(self, states: dict[str, BatchState], counts: BatchCounts) -> BatchFigures:
        """Return the figures of all batches. `states` holds the states of running batches by id, and `counts` the
        counts of ended ones at the same moment."""
        batches = self._tools.batches.unfinished()
        waiting = [batch for batch in batches if batch.id not in states]
        self._waiting = {batch.id: self._waiting.get(batch.id) or self._state(batch) for batch in waiting}
        states = self._waiting | states
        batches = [batch for batch in batches if states[batch.id].status not in ENDED]  # about to be forgotten
        statuses = ["waiting" if batch.id in self._waiting else states[batch.id].status for batch in batches]
        return BatchFigures(
            unix_s=self._tools.unix_clock(),
            unfinished=Counter(statuses),
            rows_left=sum(states[batch.id].rows_left for batch in batches),
            deadline_unix_s=batches[0].expires_at if batches else None,
            ended=counts.ended,
            rows=counts.rows,
            file_bytes=self._tools.files.bytes_of_all(),
        )

    def _sweep(self, unfinished: list[StoredBatch]) -> None:
        # The id of a file of results begins with the time of its batch: while it is written it can look abandoned.
        kept = {result_id(batch.id, name) for batch in unfinished for name in RESULTS}
        # After a clock has jumped forward, an input can look expired before the rows of its batch are read.
        kept |= {batch.request.input_file_id for batch in unfinished}
        self._tools.files.sweep(kept)
        self._tools.batches.sweep()


async def _repeat(work: Callable[[], Awaitable[None]], pause_s: float) -> None:
    while True:
        try:
            await work()
        except Exception:  # the batches that run must go on
            log.exception("the runner of batches tries again in %g s", pause_s)
        await asyncio.sleep(pause_s)
