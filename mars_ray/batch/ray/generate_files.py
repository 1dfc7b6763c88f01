"""Ray shell: read the rows of a job with Ray Data, send them to actors that decode them, and write the results on the
driver.

Ray Data's own checkpoint is not used. Its guarantee needs a single writer, it loses blocks that are not written, counts
rows without output as done, takes two rows with one id for one, and needs more CPUs to resume than to start
(`tests/batch/test_checkpoint_ray.py`).
"""

import hashlib
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pyarrow as pa
import ray
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import RayError

from mars_ray.batch.output.folder import open_output
from mars_ray.batch.output.report import JobReport, Status
from mars_ray.batch.ray.control_loop import ControlLoop
from mars_ray.batch.ray.decoder_pool import answered_blocks, choose_places, pool_settings, start_decoders
from mars_ray.batch.rows.row_tables import RowResult, failure_in
from mars_ray.batch.run.job import Job
from mars_ray.batch.run.job_plan import JobPlan, plan_job
from mars_ray.batch.run.job_progress import NAME, JobProgress
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.batch.run.placement import Place, calls_per_decoder, rows_per_block
from mars_ray.batch.run.row_store import RowStore
from mars_ray.control.core.ray_controller import BATCH
from mars_ray.data.ray_read import read_stream
from mars_ray.errors import InterruptedRunError, RunError
from mars_ray.program import CtrlC
from mars_ray.ray_cluster import connect
from mars_ray.ray_private import reason_of
from mars_ray.traces.trace_settings import traces_are_on

NOTES = 10
"""Maximum number of notes on the input to print. The report has all."""
READ_BYTES = 4 << 20
"""Maximum size of a table to read. With Ray's default, 128 MiB, workers would wait until most of the input is read."""
NO_PROGRESS_S = 24 * 3600
"""Seconds without a table after which Ray stops. The reader waits while the engines are busy, and Ray's default, 30
minutes, is too short for a 7B model on CPUs."""


def generate_files(options: GenerateOptions) -> JobReport:
    """Answer every row of the input. Rows that cannot be answered are written to an errors file.

    The same call resumes a stopped job. Raises an `InputError` for unusable options or input before any work starts,
    `InterruptedRunError` on Ctrl-C, and `RunError` if the work cannot continue. In each case, the rows answered so far
    are kept.
    """
    return run_job(plan_job(options))


def run_job(plan: JobPlan) -> JobReport:
    """Run a planned job; see `generate_files`."""
    options = plan.options
    show_notes(plan.input.notes)
    with open_output(options.output, new=options.new) as output, RowStore(output.ledger.path) as store:
        plan = plan.agree_with(output)
        if options.retry_errors:
            output.forget_errors()
        survey = store.fill(plan.input.files, id_column=plan.row_format.id_column, limit=options.limit)
        places = _connect(plan, survey.rows)
        output.begin(plan.file_format, plan.output_columns(survey.kinds))
        show_notes(output.notes)
        trace_row, end_trace = _traces(survey.rows)
        job = Job(
            output,
            total=output.ledger.done + store.rows,  # rows that have left the input are done, too
            workers=len(places),
            settings=plan.reported_settings,
            clock=time.monotonic,
            on_row=trace_row,
        )
        app = f"{BATCH}{hashlib.sha256(os.fsencode(str(output.folder.absolute()))).hexdigest()[:12]}"
        shown_job = _ShownJob(job)
        control_loop = ControlLoop(
            app, plan.engines.control, job.estimate_tokens_left, options.deadline_s, shown_job.refresh
        )
        status: Status = "stopped"
        try:
            with shown_job.with_control(control_loop):
                try:
                    with CtrlC() as ctrl_c, _decoders(plan, places, app) as decoders:
                        for table in _answers(plan, store, survey.rows, decoders):
                            with ctrl_c.deferred():
                                shown_job.add(table)
                    status = "complete with errors" if job.errors else "complete"
                except KeyboardInterrupt:
                    # The task that reads the rows may not have begun, and fails when their store is gone.
                    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
                finally:  # flush before calling Ray, which may have been stopped together with this process
                    output.flush()
        finally:
            report = job.report(
                status,
                model=plan.engines.model.name,
                notes=plan.input.notes,
                deadline=control_loop.deadline_summary(status),
                notice=control_loop.stats.notice or plan.engines.workers.notice,  # a short job has no reports
            )
            output.report(report)
            end_trace(report)
    if status == "stopped":
        raise InterruptedRunError(
            f"Stopped after {report.rows} of {report.total} rows; they are in {options.output}. "
            f"Run the same command {'without --new ' if options.new else ''}to continue."
        )
    return report


def show_notes(notes: Sequence[str]) -> None:
    """Print the first notes on the input of a job."""
    for note in notes[:NOTES]:
        print(f"{NAME}: {note}", file=sys.stderr)
    if len(notes) > NOTES:
        print(f"{NAME}: {len(notes) - NOTES} more notes are in the report", file=sys.stderr)


def _traces(rows: int) -> tuple[Callable[[RowResult], None], Callable[[JobReport], None]]:
    """Return functions that trace a row and end the trace of the job. They do nothing while traces are off."""
    if not traces_are_on(os.environ):
        return (lambda _: None), (lambda _: None)
    from mars_ray.batch.run.job_spans import JobSpans
    from mars_ray.traces.tracer import Tracer

    spans = JobSpans(Tracer(os.environ, instance=uuid4().hex), rows=rows)
    return spans.add, spans.end


class _ShownJob:
    """A job and its progress display. Results arrive in one thread, reports of workers in another."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._progress = JobProgress()
        self._lock = threading.Lock()

    @contextmanager
    def with_control(self, control_loop: ControlLoop) -> Iterator[None]:
        """Run the control loop and show the job while the `with` block runs."""
        self._control_loop = control_loop
        with self._progress:
            self._progress.show_now()
            with control_loop:
                yield

    def add(self, table: pa.Table) -> None:
        """Add a table of results."""
        with self._lock:
            self._job.add(table)
            self._show()

    def refresh(self) -> None:
        """Show the metrics of the job, once a worker has any."""
        stats = self._control_loop.stats
        with self._lock:
            if stats.tokens or any(stats.running.values()):
                self._show()
            else:
                self._progress.refresh()

    def _show(self) -> None:
        stats = self._control_loop.stats
        notes = [self._control_loop.note]
        if stats.restarts:
            notes.append(f"engines that ended and were started again: {stats.restarts}; their rows run one at a time")
        self._progress.update(self._job.metrics(stats, "  ".join(filter(None, notes))))


def _connect(plan: JobPlan, rows: int) -> tuple[Place, ...]:
    """Join the cluster and return the places of the workers. Raises `ClusterError` if the workers do not fit."""
    if not ray.is_initialized():
        dtype = plan.engines.model.dtype
        print(f"{NAME}: starting Ray; {dtype.name}: {dtype.reason}", file=sys.stderr)
    if plan.engines.workers.notice:
        print(f"{NAME}: {plan.engines.workers.notice}", file=sys.stderr)
    connect()
    return choose_places(plan.engines, rows=rows)


@contextmanager
def _decoders(plan: JobPlan, places: tuple[Place, ...], app: str) -> Iterator[Sequence[Any]]:
    """Start the decoders, yield their handles, and kill the decoders after the `with` block."""
    decoders = start_decoders(pool_settings(plan.engines, places), app)
    try:
        yield decoders
    finally:
        for decoder in decoders:
            ray.kill(decoder)


def _answers(plan: JobPlan, store: RowStore, total: int, decoders: Sequence[Any]) -> Iterator[pa.Table]:
    """Yield tables of results. Raises `RunError` if a worker or Ray fails."""
    block_rows = rows_per_block(total, len(decoders))
    blocks = _blocks(store, block_rows)
    row_format = pickle.dumps((plan.row_format, plan.engines.model))
    at_once = calls_per_decoder(block_rows) * len(decoders)
    try:
        for table in answered_blocks(blocks, decoders, row_format, at_once=at_once):
            if reason := failure_in(table):
                raise _failed(reason)
            yield table
    except (RayError, ExecutionTimeoutError) as error:
        raise _failed(reason_of(error)) from error


def _blocks(store: RowStore, rows_per_block: int) -> Iterator[pa.Table]:
    """Yield the rows to answer in blocks. A single task reads the rows on this machine, where the store is."""
    stream = read_stream(store.tables, [store.path], here=True)
    stream.context.target_max_block_size = READ_BYTES
    stream.context.enable_progress_bars = False  # `JobProgress` shows the progress instead
    stream.context.execution_no_progress_timeout_s = NO_PROGRESS_S
    stream.context.memory_usage_poll_interval_s = None  # polling costs a thread for each call
    yield from stream.iter_batches(batch_size=rows_per_block, batch_format="pyarrow")


def _failed(reason: str) -> RunError:
    return RunError(
        f"The run failed: {reason.removesuffix('.')}. Finished rows are kept; run the same command, "
        "without --new, to continue."
    )
