"""Answer a file of rows with Ray Data: read, decode in a pool of actors, write on the driver (shell)."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import pyarrow as pa
import ray.data
import torch
from ray.data import ActorPoolStrategy
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import RayError

from mars_ray.batch.generator import Generator
from mars_ray.batch.job import GenerateJob, GenerateReport
from mars_ray.batch.outcomes import outcome_table
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.ray_read import read_raw
from mars_ray.data.record_file import check_source, read_records
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import ClusterError, ConfigError, EmptyDataError, MarsRayError, RunError
from mars_ray.model.card import read_card
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import resolve_model
from mars_ray.model.tokenizer import load_tokenizer
from mars_ray.progress import ProgressLine
from mars_ray.ray_cluster import cluster_cpus, connect

ROWS_PER_BLOCK = 128
"""What one actor takes at a time: several times what it decodes together, for its batch runs empty at the end of a
block, and few enough to spread and to show progress."""

NO_PROGRESS_S = 24 * 3600
"""Ray gives up when no block is finished for so long. Its half an hour is too short for 128 rows of a 7B on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What to answer, with what, and where to."""

    input: Path
    """JSONL (plain or gz) or parquet, with `prompt` or `messages`."""
    output: Path
    """A folder that is absent or empty."""
    model: str = "bundled"
    sampling: SamplingParams
    decode: DecodeParams
    workers: int = 1
    """Actors that decode, each with its own copy of the model."""


def generate(options: GenerateOptions) -> GenerateReport:
    """Answer every row of the input; what cannot be answered goes to an errors file, and the others go on.

    Raises an `InputError` before any work when something given is unusable, `InterruptedRunError` on Ctrl-C, and
    `RunError` when the work cannot go on; the rows answered so far are written.
    """
    if options.workers < 1:
        raise ConfigError(f"workers is {options.workers}; it must be at least 1.")
    source, model = options.input.absolute(), resolve_model(options.model).absolute()  # workers have another folder
    _check_model(model)
    check_source(source)
    actors = _useful_actors(source, options.workers)
    job = GenerateJob(options.output, actors)
    try:
        connect()
        _check_cluster(options.workers)
        outcomes = _answered(source, model, options, actors)
        with ProgressLine(f"generate {source.name}", total=None) as progress:
            return job.collect(_blocks(outcomes, options.output), progress)
    except MarsRayError:
        job.discard()
        raise


def _check_model(folder: Path) -> None:
    found = check_folder(folder)
    read_card(folder)
    ChatEncoder(load_tokenizer(folder, found.config, found.tokenizer_is_custom))


def _useful_actors(source: Path, workers: int) -> int:
    """Return how many workers will have something to do: a block each, or they would load the model for nothing."""
    blocks = sum(1 for _ in islice(read_records(source, ROWS_PER_BLOCK), workers))
    if not blocks:
        raise EmptyDataError(f"{source} holds no rows.")
    return blocks


def _check_cluster(workers: int) -> None:
    cpus = cluster_cpus()
    if workers > cpus:
        raise ClusterError(
            f"{workers} workers need as many CPUs, the cluster has {cpus:g}. "
            "Lower workers or join a larger cluster with RAY_ADDRESS."
        )


def _answered(source: Path, model: Path, options: GenerateOptions, actors: int) -> ray.data.Dataset:
    cpus = cluster_cpus()
    outcomes = read_raw(source, ROWS_PER_BLOCK).map_batches(
        Decoder,
        fn_constructor_kwargs={
            "model": model,
            "sampling": options.sampling,
            "decode": options.decode,
        },
        compute=ActorPoolStrategy(size=actors),
        # Together the actors leave one CPU to the task that reads, or it would wait for ever.
        num_cpus=min(1.0, math.floor(100 * (cpus - 1) / actors) / 100),
        batch_format="pyarrow",
    )
    outcomes.context.enable_progress_bars = False  # ours shows rows and tokens instead of blocks
    outcomes.context.execution_options.preserve_order = True  # the output is in the order of the input
    outcomes.context.execution_no_progress_timeout_s = NO_PROGRESS_S
    return outcomes


class Decoder:
    """One actor: loads the model once, then answers block after block."""

    def __init__(self, model: Path, sampling: SamplingParams, decode: DecodeParams) -> None:
        self._model, self._sampling, self._decode = model, sampling, decode

    @cached_property
    def _generator(self) -> Generator:
        # Made by the first block: when a constructor fails, Ray starts the actor again and again.
        options = EngineOptions(request_tokens=self._sampling.max_tokens)  # whoever asks for it pays for it
        torch.set_num_threads(1)  # more workers use more cores; threads of one step spend their time waiting
        return Generator(load_checkpoint(self._model), self._sampling, self._decode, options)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Raw rows in, outcomes out."""
        generator = self._generator
        started_s = time.monotonic()
        outcomes = generator.run(batch["raw"].to_pylist())
        return outcome_table(outcomes, time.monotonic() - started_s)


def _blocks(outcomes: ray.data.Dataset, output: Path) -> Iterator[pa.Table]:
    try:
        yield from outcomes.iter_batches(batch_size=None, batch_format="pyarrow")
    except (RayError, ExecutionTimeoutError) as error:
        # Of what a worker raised only the text comes here, with the worker's stack above and advice of Ray's below.
        lines = str(error).strip().splitlines()
        ours = [line.partition(": ")[2] for line in lines if line.startswith("mars_ray.errors.")]
        reason = (ours or lines)[-1].removesuffix(".")
        raise RunError(f"The run failed: {reason}. The rows answered before it are in {output}.") from error
