"""Ray shell: build a stage for a user's Ray Data pipeline, with the interface of `ray.data.llm`."""

import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import ray.data
from ray.data import ActorPoolStrategy

from mars_ray.batch.ray.decoder_pool import choose_places, pool_settings
from mars_ray.batch.ray.endpoint_rows import EndpointRows
from mars_ray.batch.ray.shared_pool import AnsweredRows, SharedPoolSettings
from mars_ray.batch.rows.stage_rows import Preprocess, with_requests
from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig
from mars_ray.batch.run.placement import CALLS
from mars_ray.batch.run.processor_config import ProcessorConfig, plan_stage

POOLS_OF_A_CLUSTER = 4
"""Number of parts into which a cluster is divided. A pool of engines takes one part; the pipeline keeps the others."""

Postprocess = Callable[[dict[str, Any]], dict[str, Any]]


class _Stage(Protocol):
    """Interface of a stage that answers blocks of requests."""

    def answer(self, blocks: ray.data.Dataset) -> ray.data.Dataset:
        """Return the blocks with the answer columns added."""


class Processor:
    """Adds answers to the rows of a dataset. Runs lazily, like any Ray Data operation."""

    def __init__(
        self, stage: _Stage, batch_size: int, preprocess: Preprocess | None, postprocess: Postprocess | None
    ) -> None:
        self._stage = stage
        self._batch_size = batch_size
        self._preprocess = preprocess
        self._postprocess = postprocess

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """Return the dataset with the answer columns added. Raises `ClusterError` if the cluster is too small."""
        requests = dataset.map_batches(
            partial(with_requests, preprocess=self._preprocess), batch_format="pyarrow", batch_size=None
        )
        answered = self._stage.answer(requests.repartition(target_num_rows_per_block=self._batch_size))
        if self._postprocess is None:
            return answered
        return answered.map(partial(_postprocessed, postprocess=self._postprocess))


def build_processor(
    config: ProcessorConfig | EndpointProcessorConfig,
    preprocess: Preprocess | None = None,
    postprocess: Postprocess | None = None,
) -> Processor:
    """Return a stage for a Ray Data pipeline. Raises an `InputError` for an unusable model or value.

    `preprocess` maps a row to its request: `messages` or `prompt`, and optionally `sampling` (an object with
    `max_tokens`, `temperature`, `seed`, `schema` …), `threshold` and `mode`. Without `preprocess`, the columns with
    these names are used. `postprocess` maps a row with the columns of the answer to the output row.
    """
    stage = _EngineStage(config) if isinstance(config, ProcessorConfig) else _EndpointStage(config)
    return Processor(stage, config.batch_size, preprocess, postprocess)


class _EngineStage:
    """Stage that answers with engines. Stages with equal engine settings share their engines."""

    def __init__(self, config: ProcessorConfig) -> None:
        self._config = config
        self._engines, row_format = plan_stage(config)
        row_format.open(self._engines.model)  # raises an error now if the model is unusable
        self._row_format = pickle.dumps(row_format)
        if self._engines.workers.notice:
            print(f"stage: {self._engines.workers.notice}", file=sys.stderr)

    def answer(self, blocks: ray.data.Dataset) -> ray.data.Dataset:
        config = self._config
        pool = pool_settings(self._engines, choose_places(self._engines, part=POOLS_OF_A_CLUSTER))
        return blocks.map_batches(
            AnsweredRows,
            fn_constructor_args=(SharedPoolSettings(pool=pool, deadline_s=config.deadline_s), self._row_format),
            fn_constructor_kwargs={"rows": config.rows, "raise_errors": not config.should_continue_on_error},
            compute=_single_actor(CALLS * config.concurrency),
            num_cpus=0,
            batch_format="pyarrow",
            batch_size=None,
        )


class _EndpointStage:
    """Stage that answers with a running endpoint."""

    def __init__(self, config: EndpointProcessorConfig) -> None:
        config.check()
        self._config = config

    def answer(self, blocks: ray.data.Dataset) -> ray.data.Dataset:
        # Allow enough concurrent calls for the next block to start before the last row of a block is answered.
        calls = 2 + self._config.concurrency // self._config.batch_size
        return blocks.map_batches(
            EndpointRows,
            fn_constructor_args=(self._config,),
            compute=_single_actor(calls),
            num_cpus=0,
            batch_format="pyarrow",
            batch_size=None,
        )


def _single_actor(calls: int) -> ActorPoolStrategy:
    """Return a pool of one actor that works on up to `calls` blocks at a time."""
    return ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=calls, max_concurrent_calls_per_actor=calls)


def _postprocessed(row: dict[str, Any], postprocess: Postprocess) -> dict[str, Any]:
    return row if row["error"] is not None else postprocess(row)
