"""Answer files of rows with Ray Data: read, decode in a pool of actors, write on the driver (shell)."""

import hashlib
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import ray
import ray.data
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import RayError

from mars_ray.batch.output.open_output import open_output
from mars_ray.batch.output.report import JobReport, Status
from mars_ray.batch.ray.control_loop import STARTING, ControlLoop
from mars_ray.batch.ray.decoder_pool import (
    AnsweredBlocks,
    calls_of,
    choose_places,
    pool_settings,
    start_decoders,
)
from mars_ray.batch.ray.source import InputRows, read_undone_rows
from mars_ray.batch.rows.openai_format import openai_id
from mars_ray.batch.rows.plain_format import plain_id
from mars_ray.batch.rows.row_result import failure_in
from mars_ray.batch.run.block_size import calls_per_decoder, rows_per_block
from mars_ray.batch.run.job import Job
from mars_ray.batch.run.job_plan import JobPlan, plan_job, survey_input
from mars_ray.batch.run.job_progress import NAME, JobProgress
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.batch.run.placement import Place
from mars_ray.control.core.ray_controller import BATCH
from mars_ray.errors import InterruptedRunError, RunError
from mars_ray.model.resolve import pin
from mars_ray.ray_cluster import connect
from mars_ray.ray_private import pass_arguments_by_value

READ_BYTES = 4 << 20
"""Rows are handed on in pieces of at most so much. By Ray's 128 MiB workers would wait for most of an input."""
NO_PROGRESS_S = 24 * 3600
"""Ray gives up when no block is finished for so long. Its half an hour is too short for rows of a 7B on CPUs."""


def generate_files(options: GenerateOptions) -> JobReport:
    """Answer every row of the input; what cannot be answered goes to an errors file, and the others go on.

    The same call goes on with a job that was stopped. Raises an `InputError` before any work when something given is
    unusable, `InterruptedRunError` on Ctrl-C, and `RunError` when the work cannot go on; rows answered so far are kept.
    """
    plan = plan_job(options)
    with open_output(options.output, new=options.new) as output:
        plan = plan.agree_with(output)
        survey = survey_input(plan.paths, options.limit)
        places = _connect(plan, survey.rows)
        output.begin(plan.file_format, plan.output_columns(survey.kinds))
        if options.retry_errors:
            output.forget_errors()
        job = Job(
            output,
            total=survey.rows,
            workers=len(places),
            settings=plan.reported_settings,
            clock=time.monotonic,
        )
        app = f"{BATCH}{hashlib.sha256(str(output.folder.absolute()).encode()).hexdigest()[:12]}"
        watched = _WatchedJob(job)
        control_loop = ControlLoop(
            app, plan.engines.control, job.estimate_tokens_left, options.deadline_s, watched.refresh
        )
        status: Status = "stopped"
        try:
            with watched.by(control_loop):
                try:
                    with _decoders(plan, places, app) as decoders:
                        for table in _tables(_dataset(plan, output.ledger.path, survey.rows, decoders)):
                            watched.add(table)
                    status = "complete with errors" if job.errors else "complete"
                except KeyboardInterrupt:
                    pass
                finally:  # before anything is asked of Ray: who stops this process may have stopped Ray, too
                    output.flush()
        finally:
            report = job.report(
                status,
                model=pin(options.model, plan.engines.model.folder),
                deadline=control_loop.deadline_summary(status),
            )
            output.report(report)
    if status == "stopped":
        raise InterruptedRunError(
            f"Stopped after {report.rows} of {report.total} rows; they are in {options.output}. "
            "The same command goes on."
        )
    return report


class _WatchedJob:
    """A job and its progress: rows come from one thread, what workers report from another."""

    def __init__(self, job: Job) -> None:
        self._job, self._progress, self._lock = job, JobProgress(), threading.Lock()

    @contextmanager
    def by(self, control_loop: ControlLoop) -> Iterator[None]:
        """Show the job within the block."""
        self._control_loop = control_loop
        with self._progress:
            self._progress.starting(STARTING)
            with control_loop:
                yield

    def add(self, table: pa.Table) -> None:
        """Take finished rows."""
        with self._lock:
            self._job.add(table)
            self._show()

    def refresh(self, startup_status: str | None) -> None:
        """Show what workers do while they start, or with None the metrics of the job."""
        with self._lock:
            if startup_status is None:
                self._show()
            else:
                self._progress.starting(startup_status)

    def _show(self) -> None:
        self._progress.update(self._job.metrics(self._control_loop.stats, self._control_loop.note))


def _connect(plan: JobPlan, rows: int) -> tuple[Place, ...]:
    """Join the cluster; return where workers run. Raises `ClusterError` for one smaller than what the job asks for."""
    if not ray.is_initialized():
        dtype = plan.engines.model.dtype
        print(f"{NAME}: starting Ray; {dtype.name}: {dtype.reason}", file=sys.stderr)
    connect()
    pass_arguments_by_value()
    return choose_places(plan.engines, rows=rows)


@contextmanager
def _decoders(plan: JobPlan, places: tuple[Place, ...], app: str) -> Iterator[Sequence[str]]:
    """Start the decoders, hand out their names, and end them with the block."""
    decoders = start_decoders(pool_settings(plan.engines, places), app)
    try:
        yield list(decoders)
    finally:
        for each in decoders.values():
            ray.kill(each)


def _dataset(plan: JobPlan, ledger: Path, total: int, decoders: Sequence[str]) -> ray.data.Dataset:
    """Return the dataset whose blocks are results; nothing runs yet."""
    options, count = plan.options, len(decoders)
    rows = InputRows(
        paths=plan.paths,
        ledger=ledger.absolute(),
        own_id=openai_id if plan.openai else plain_id,
        limit=options.limit,
    )
    block_rows = rows_per_block(total, count)
    results = read_undone_rows(rows, block_rows).map_batches(
        AnsweredBlocks,
        fn_constructor_args=(decoders, pickle.dumps(plan.row_format)),
        compute=calls_of(calls_per_decoder(block_rows) * count),
        num_cpus=0,
        batch_size=None,
        batch_format="pyarrow",
    )
    results.context.target_max_block_size = READ_BYTES
    results.context.enable_progress_bars = False  # ours shows rows and tokens instead of blocks
    results.context.execution_no_progress_timeout_s = NO_PROGRESS_S
    results.context.memory_usage_poll_interval_s = None  # in a thread for each call, and nobody reads it
    return results


def _tables(results: ray.data.Dataset) -> Iterator[pa.Table]:
    """Yield tables of results. Raises `RunError` when a worker or Ray fails."""
    try:
        for table in results.iter_batches(batch_size=None, batch_format="pyarrow"):
            if reason := failure_in(table):
                raise _failed(reason)
            yield table
    except (RayError, ExecutionTimeoutError) as error:
        # The stack of the process that failed, and its error in the last line.
        raise _failed(str(error).strip().splitlines()[-1]) from error


def _failed(reason: str) -> RunError:
    return RunError(f"The run failed: {reason.removesuffix('.')}. What was done is kept; the same command goes on.")
