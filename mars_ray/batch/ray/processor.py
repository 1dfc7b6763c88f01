"""Our stage in somebody's own Ray Data pipeline, in the shape of `ray.data.llm` (shell)."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import ray.data

from mars_ray.batch.ray.answered_rows import AnsweredRows
from mars_ray.batch.ray.decoder_pool import calls_of, choose_places, pool_settings
from mars_ray.batch.ray.endpoint_rows import EndpointRows
from mars_ray.batch.ray.shared_pool import SharedPoolSettings
from mars_ray.batch.rows.open_format import open_row_format
from mars_ray.batch.rows.stage_rows import Preprocess, with_requests
from mars_ray.batch.run.block_size import CALLS
from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig
from mars_ray.batch.run.processor_config import ProcessorConfig, plan_stage

POOLS_OF_A_CLUSTER = 4
"""Pools that have room on a cluster together with the tasks that read, map and write, unless they ask for more."""

Postprocess = Callable[[dict[str, Any]], dict[str, Any]]


class _Stage(Protocol):
    """What answers blocks of requests."""

    def answered(self, blocks: ray.data.Dataset) -> ray.data.Dataset:
        """Return the blocks with the columns of the answers."""


class Processor:
    """Turns a dataset into one whose rows are answered; nothing runs until that is consumed."""

    def __init__(
        self, stage: _Stage, batch_size: int, preprocess: Preprocess | None, postprocess: Postprocess | None
    ) -> None:
        self._stage, self._batch_size = stage, batch_size
        self._preprocess, self._postprocess = preprocess, postprocess

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """Return the dataset with the columns of the answers. Raises `ClusterError` for too small a cluster."""
        requests = dataset.map_batches(
            partial(with_requests, preprocess=self._preprocess), batch_format="pyarrow", batch_size=None
        )
        answered = self._stage.answered(requests.repartition(target_num_rows_per_block=self._batch_size))
        if self._postprocess is None:
            return answered
        return answered.map(partial(_postprocessed, postprocess=self._postprocess))


def build_processor(
    config: ProcessorConfig | EndpointProcessorConfig,
    preprocess: Preprocess | None = None,
    postprocess: Postprocess | None = None,
) -> Processor:
    """Return the stage. Raises an `InputError` for a model or a value that cannot be used.

    `preprocess` returns what a row asks for: `messages` or `prompt`, and perhaps `sampling` (an object with
    `max_tokens`, `temperature`, `seed`, `schema` …), `threshold` and `mode`. Without it the row's own columns of these
    names ask. `postprocess` gets the row with the columns of the answer, and returns the row that leaves.
    """
    stage = _EngineStage(config) if isinstance(config, ProcessorConfig) else _EndpointStage(config)
    return Processor(stage, config.batch_size, preprocess, postprocess)


class _EngineStage:
    """Answers with engines that the stages of a job share."""

    def __init__(self, config: ProcessorConfig) -> None:
        self._config = config
        self._engines, row_format = plan_stage(config)
        open_row_format(row_format, self._engines.model)  # a model that cannot be used is one line now
        self._row_format = pickle.dumps(row_format)

    def answered(self, blocks: ray.data.Dataset) -> ray.data.Dataset:
        config = self._config
        pool = pool_settings(self._engines, choose_places(self._engines, part=POOLS_OF_A_CLUSTER))
        return blocks.map_batches(
            AnsweredRows,
            fn_constructor_args=(SharedPoolSettings(pool=pool, deadline_s=config.deadline_s), self._row_format),
            fn_constructor_kwargs={"rows": config.rows, "raise_errors": not config.should_continue_on_error},
            compute=calls_of(CALLS * config.concurrency),
            num_cpus=0,
            batch_format="pyarrow",
            batch_size=None,
        )


class _EndpointStage:
    """Answers with an endpoint that runs."""

    def __init__(self, config: EndpointProcessorConfig) -> None:
        config.check()
        self._config = config

    def answered(self, blocks: ray.data.Dataset) -> ray.data.Dataset:
        # The next block is there before the last row of the one before is.
        calls = 2 + self._config.concurrency // self._config.batch_size
        return blocks.map_batches(
            EndpointRows,
            fn_constructor_args=(self._config,),
            compute=calls_of(calls),
            num_cpus=0,
            batch_format="pyarrow",
            batch_size=None,
        )


def _postprocessed(row: dict[str, Any], postprocess: Postprocess) -> dict[str, Any]:
    return row if row["error"] is not None else postprocess(row)
