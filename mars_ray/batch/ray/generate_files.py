"""Answer files of rows with Ray Data: read, decode in a pool of actors, write on the driver (shell)."""

import hashlib
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data
from pydantic import TypeAdapter
from ray.data import ActorPoolStrategy
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import RayError

from mars_ray.batch.output.folder import LEDGER, Format, open_output
from mars_ray.batch.output.report import JobReport, Status
from mars_ray.batch.ray.decoder import Decoder
from mars_ray.batch.ray.oversee import STARTING, Overseer
from mars_ray.batch.ray.pool import pass_arguments_by_value
from mars_ray.batch.ray.source import READ_RECORDS, Rows, read_rows
from mars_ray.batch.rows.columns import Kind, Survey
from mars_ray.batch.rows.forms import FormSettings, open_form
from mars_ray.batch.rows.openai_form import OpenAISettings, is_openai_batch, openai_id
from mars_ray.batch.rows.plain_form import PlainSettings, plain_id
from mars_ray.batch.run.control_plan import batch_plan
from mars_ray.batch.run.job import Job
from mars_ray.batch.run.job_progress import NAME, JobProgress
from mars_ray.control.core.ray_controller import BATCH
from mars_ray.control.laws.limits import bounds_of
from mars_ray.control.settings import ControlPlan
from mars_ray.data.record_file import check_source, read_records
from mars_ray.data.sources import find_sources
from mars_ray.engine.grammar.library import check_grammar
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.messages import EngineSpec
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import ClusterError, ConfigError, EmptyDataError, InterruptedRunError, RunError
from mars_ray.model.card import read_card
from mars_ray.model.digest import folder_digest
from mars_ray.model.dtype import AskedDtype, Dtype, ResolvedDtype, resolve_dtype
from mars_ray.model.resolve import resolve_model
from mars_ray.progress import ProgressLine
from mars_ray.ray_cluster import cluster_cpus, connect, silent_once_stopped

BLOCK_ROWS = 64
"""As a rule; a small job has blocks for all workers."""
BLOCKS = 4096
"""At most, for Ray keeps some kilobytes of each: a job has larger ones rather than more."""
CALLS = 8
"""Blocks an actor works on at a time. A block leaves when its last row is done, so there are several times as many
rows as an engine decodes together: it never runs empty, however long single rows take."""

SPREAD = 4
"""Blocks for each worker at least."""
READ_BYTES = 4 << 20
"""Rows are handed on in pieces of at most so much. By Ray's 128 MiB workers would wait for most of an input."""
QUEUE = 1 << 16
"""Sequences that may wait in an engine: more than a worker ever adds."""

FIRST_TOKENS = 64
"""Of an answer, before any row is done."""

NO_PROGRESS_S = 24 * 3600
"""Ray gives up when no block is finished for so long. Its half an hour is too short for rows of a 7B on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What to answer, with what, and where to."""

    input: tuple[str, ...]
    """Files, folders, globs: JSONL (plain, gz, zst), parquet, or OpenAI batch files."""
    output: Path
    """A folder that is absent, empty, or holds this very job, which then goes on."""
    model: str = "bundled"
    form: PlainSettings
    """Of OpenAI batch files only the defaults of decoding count."""
    format: Format = "parquet"
    """OpenAI batch files are answered as JSONL, whatever it says."""
    limit: int | None = None
    """Only the first rows of the input."""
    new: bool = False
    """Put an earlier job in the folder aside and begin again."""
    retry_errors: bool = False
    """Do the rows with errors again."""
    deadline_s: float | None = None
    """The job should end so soon: it takes the highest threshold, up to its own, that does it."""
    max_quality_loss: float | None = None
    """No threshold at which calibration found more right answers lost. Without a deadline the lowest such is taken."""
    workers: int = 1
    """Actors that decode, each with its own copy of the model."""
    cpus: float | None = None
    """Of each worker; None shares what there is. From 2 on, a step uses as many threads."""
    gpus: float = 0.0
    """Of each worker."""
    dtype: AskedDtype = "auto"
    """A job that goes on keeps what `auto` was when it began."""
    compiled: bool = True
    """Compile the decoding step in the background where a compiler is present."""


def generate_files(options: GenerateOptions) -> JobReport:
    """Answer every row of the input; what cannot be answered goes to an errors file, and the others go on.

    The same call goes on with a job that was stopped. Raises an `InputError` before any work when something given is
    unusable, `InterruptedRunError` on Ctrl-C, and `RunError` when the work cannot go on; rows answered so far are kept.
    """
    _check_numbers(options)
    if options.form.sampling.grammar is not None:
        check_grammar(options.form.sampling.grammar)
    model = resolve_model(options.model).absolute()  # workers have another working folder
    read_card(model)
    paths = tuple(path.absolute() for given in options.input for path in find_sources(given))
    openai = is_openai_batch(_first(paths))
    plan, decode = _controlled(options, model)
    form: FormSettings = replace(options.form, decode=decode)
    if openai:
        form = OpenAISettings(model=model.name, decode=decode)
    open_form(form, model)  # what is wrong with model or template is said before any work
    dtype = resolve_dtype(options.dtype, model, "cuda" if options.gpus else "cpu")
    settings = {"model": folder_digest(model), "dtype": dtype.name, "threshold": plan.ceiling, **_flat(form)}
    with open_output(options.output, new=options.new) as output:
        if options.dtype == "auto" and (began := output.ledger.setting("dtype")) is not None:
            dtype = ResolvedDtype(began, "that the job began with")
            settings["dtype"] = began
        output.ledger.agree(settings)
        rows = Rows(
            paths=paths,
            ledger=options.output.absolute() / LEDGER,
            given=openai_id if openai else plain_id,
            salt=json.dumps(settings, sort_keys=True),
            limit=options.limit,
        )
        survey = _survey(paths, options.limit)
        output.kinds, output.format = _kept(survey.kinds, options.form), "jsonl" if openai else options.format
        if options.retry_errors:
            output.ledger.forget_errors()
        app = f"{BATCH}{hashlib.sha256(str(output.folder.absolute()).encode()).hexdigest()[:12]}"
        if not ray.is_initialized():
            print(f"{NAME}: starting Ray; {dtype.name}: {dtype.reason}", file=sys.stderr)
        connect()
        pass_arguments_by_value()
        _check_cluster(options)
        job = Job(output, total=survey.rows, workers=options.workers, settings=settings, clock=time.monotonic)
        watched = _Watched(job)
        overseer = Overseer(app, plan, partial(_tokens_left, job), options.deadline_s, watched.hear)
        block_rows = min(
            max(BLOCK_ROWS, math.ceil(survey.rows / BLOCKS)), math.ceil(survey.rows / (SPREAD * options.workers))
        )
        status: Status = "stopped"
        try:
            with watched.by(overseer), silent_once_stopped():
                try:
                    for table in _tables(_outcomes(options, model, dtype.name, form, rows, plan, app, block_rows)):
                        watched.take(table)
                    status = "complete with errors" if job.errors else "complete"
                except KeyboardInterrupt:
                    pass
                finally:  # before anything is asked of Ray: who stops this process may have stopped Ray, too
                    output.settle()
        finally:
            report = job.report(status, model=options.model, deadline=_kept_deadline(overseer, status))
            output.report(report)
    if status == "stopped":
        raise InterruptedRunError(
            f"Stopped after {report.rows} of {report.total} rows; they are in {options.output}. "
            "The same command goes on."
        )
    return report


class _Watched:
    """A job and who watches it: rows come from one thread, what workers report from another."""

    def __init__(self, job: Job) -> None:
        self._job, self._progress, self._lock = job, JobProgress(), threading.Lock()

    @contextmanager
    def by(self, overseer: Overseer) -> Iterator[None]:
        """Show the job within the block."""
        self._overseer = overseer
        with self._progress:
            self._progress.phase(STARTING)
            with overseer:
                yield

    def take(self, table: pa.Table) -> None:
        """Take finished rows."""
        with self._lock:
            self._job.take(table)
            self._show()

    def hear(self, phase: str | None) -> None:
        """Take what workers do, or with None that there are figures of them."""
        with self._lock:
            if phase is None:
                self._show()
            else:
                self._progress.phase(phase)

    def _show(self) -> None:
        self._progress.update(self._job.figures(self._overseer.flight, self._overseer.note))


def _check_numbers(options: GenerateOptions) -> None:
    for name, value in (("workers", options.workers), ("limit", options.limit)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    if options.cpus is not None and not 0 < options.cpus < math.inf:
        raise ConfigError(f"cpus is {options.cpus}; it must be above 0.")
    if not 0 <= options.gpus < math.inf:
        raise ConfigError(f"gpus is {options.gpus}; it must be at least 0.")


def _first(paths: tuple[Path, ...]) -> bytes:
    """Return the first row. Raises `EmptyDataError`."""
    for path in paths:
        for [raw] in read_records(path, 1):
            return raw
    raise EmptyDataError(f"{', '.join(map(str, paths))} holds no rows.")


def _survey(paths: tuple[Path, ...], limit: int | None) -> Survey:
    """Read all of the input once: a damaged file is found now, and how much there is to do is known from the start."""
    survey = Survey()
    with ProgressLine("look at the input", total=None) as progress:
        for path in paths:
            check_source(path)
            for chunk in read_records(path, READ_RECORDS):
                survey.look(chunk if limit is None else chunk[: limit - survey.rows])
                progress.update(survey.rows, {})
    return survey


def _controlled(options: GenerateOptions, model: Path) -> tuple[ControlPlan, DecodeParams]:
    """Return what the controller goes by, and what rows ask for that say nothing themselves.

    Only a job with a deadline leaves the threshold to the controller.
    """
    decode = options.form.decode
    ceiling = 1.0 if decode.threshold is None else decode.threshold
    plan = batch_plan(
        model, threshold=ceiling, deadline_s=options.deadline_s, max_quality_loss=options.max_quality_loss
    )
    if decode.mode is not Mode.THRESHOLD:
        return plan, decode  # no threshold changes what it answers
    if options.deadline_s is not None:
        return plan, replace(decode, threshold=None)
    if options.max_quality_loss is not None:
        [bounds] = bounds_of(plan, []).values()
        return plan, replace(decode, threshold=bounds.floor)
    return plan, replace(decode, threshold=ceiling)


def _tokens_left(job: Job) -> float:
    left = job.tokens_left
    return job.left * FIRST_TOKENS if left is None else left


def _kept_deadline(overseer: Overseer, status: Status) -> str:
    left_s = overseer.left_s
    if left_s is None:
        return ""
    ended = "stopped" if status == "stopped" else "ended"
    return f"{ended} {timedelta(seconds=round(abs(left_s)))} {'before' if left_s >= 0 else 'after'} the deadline"


def _kept(kinds: dict[str, Kind | None], form: PlainSettings) -> dict[str, Kind | None]:
    """Return the columns of the input that stand beside ours: `prompt` is one of ours where it was the question."""
    asked = form.template is None and form.prompt_column is None and "messages" not in kinds
    return {name: kind for name, kind in kinds.items() if not (asked and name == "prompt")}


def _flat(form: FormSettings) -> dict[str, Any]:
    """Return settings by dotted names, as JSON."""
    found: dict[str, Any] = {"form": type(form).__name__.removesuffix("Settings").lower()}
    nested = [("", TypeAdapter[Any](type(form)).dump_python(form, mode="json"))]
    while nested:
        prefix, fields = nested.pop()
        for name, value in fields.items():
            if isinstance(value, dict) and value:
                nested.append((f"{prefix}{name}.", value))
            else:
                found[f"{prefix}{name}"] = value
    return found


def _check_cluster(options: GenerateOptions) -> None:
    there, wanted = cluster_cpus(), options.workers * (options.cpus or 1.0)
    if wanted > there:
        raise ClusterError(
            f"{options.workers} workers need {wanted:g} CPUs, the cluster has {there:g}. "
            "Lower workers or join a larger cluster with RAY_ADDRESS."
        )
    gpus = ray.cluster_resources().get("GPU", 0.0)
    if options.workers * options.gpus > gpus:
        raise ClusterError(
            f"{options.workers} workers need {options.workers * options.gpus:g} GPUs, the cluster has {gpus:g}."
        )


def _outcomes(
    options: GenerateOptions,
    model: Path,
    dtype: Dtype,
    form: FormSettings,
    rows: Rows,
    plan: ControlPlan,
    app: str,
    block_rows: int,
) -> ray.data.Dataset:
    # Together the actors leave one CPU to the task that reads, or it would wait for ever.
    share = min(1.0, math.floor(100 * (cluster_cpus() - 1) / options.workers) / 100)
    outcomes = read_rows(rows, block_rows).map_batches(
        Decoder,
        fn_constructor_kwargs={
            "form": form,
            "plan": plan,
            "app": app,
            "spec": EngineSpec(
                folder=model,
                dtype=dtype,
                threads=max(1, int(options.cpus or 1)),
                # Whoever asks for many tokens pays for them; the queue never refuses what a worker adds.
                options=EngineOptions(
                    queue=QUEUE,
                    request_tokens=QUEUE * options.form.sampling.max_tokens,
                    threshold=plan.ceiling,
                    classes=plan.classes,
                    compiled=options.compiled,
                ),
            ),
        },
        compute=ActorPoolStrategy(
            size=options.workers, max_tasks_in_flight_per_actor=CALLS, max_concurrent_calls_per_actor=CALLS
        ),
        num_cpus=options.cpus or share,
        num_gpus=options.gpus or None,
        batch_size=None,
        batch_format="pyarrow",
    )
    outcomes.context.target_max_block_size = READ_BYTES
    outcomes.context.enable_progress_bars = False  # ours shows rows and tokens instead of blocks
    outcomes.context.execution_no_progress_timeout_s = NO_PROGRESS_S
    outcomes.context.memory_usage_poll_interval_s = None  # in a thread for each call, and nobody reads it
    return outcomes


def _tables(outcomes: ray.data.Dataset) -> Iterator[pa.Table]:
    try:
        yield from outcomes.iter_batches(batch_size=None, batch_format="pyarrow")
    except (RayError, ExecutionTimeoutError) as error:
        # Of what a worker raised only the text comes here, with the worker's stack above and advice of Ray's below.
        lines = str(error).strip().splitlines()
        ours = [line.partition(": ")[2] for line in lines if line.startswith("mars_ray.errors.")]
        reason = (ours or lines)[-1].removesuffix(".")
        raise RunError(f"The run failed: {reason}. What was done is kept; the same command goes on.") from error
