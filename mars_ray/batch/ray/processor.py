"""Ray shell: build a stage for a user's Ray Data pipeline, with the interface of `ray.data.llm`."""

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ray.data
from ray.data import ActorPoolStrategy

from mars_ray.batch.ray.decoder_pool import choose_places, pool_settings
from mars_ray.batch.ray.endpoint_rows import EndpointRows
from mars_ray.batch.ray.shared_pool import AnsweredRows
from mars_ray.batch.rows.stage_rows import Preprocess, with_requests
from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig
from mars_ray.batch.run.placement import CALLS
from mars_ray.batch.run.processor_config import ProcessorConfig, plan_stage

POOLS_OF_A_CLUSTER = 4
"""Number of parts into which a cluster is divided. A pool of engines takes one part; the pipeline keeps the others."""

Postprocess = Callable[[dict[str, Any]], dict[str, Any]]
Answer = Callable[[ray.data.Dataset], ray.data.Dataset]
"""Adds the answer columns to blocks of requests."""


class Processor:
    """Adds answers to the rows of a dataset. Runs lazily, like any Ray Data operation."""

    def __init__(
        self, answer: Answer, batch_size: int, preprocess: Preprocess | None, postprocess: Postprocess | None
    ) -> None:
        self._answer = answer
        self._batch_size = batch_size
        self._preprocess = preprocess
        self._postprocess = postprocess

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """Return the dataset with the answer columns added. Raises `ClusterError` if the cluster is too small."""
        requests = dataset.map_batches(
            partial(with_requests, preprocess=self._preprocess), batch_format="pyarrow", batch_size=None
        )
        answered = self._answer(requests.repartition(target_num_rows_per_block=self._batch_size))
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
    answer = _by_engines(config) if isinstance(config, ProcessorConfig) else _by_endpoint(config)
    return Processor(answer, config.batch_size, preprocess, postprocess)


def _by_engines(config: ProcessorConfig) -> Answer:
    """Return a function that answers with engines, which stages with equal engine settings share."""
    engines, settings = plan_stage(config)
    settings.open(engines.model)  # raises an error now if the model is unusable
    row_format = pickle.dumps((settings, engines.model))
    if engines.workers.notice:
        print(f"stage: {engines.workers.notice}", file=sys.stderr)

    def answer(blocks: ray.data.Dataset) -> ray.data.Dataset:
        pool = pool_settings(engines, choose_places(engines, part=POOLS_OF_A_CLUSTER))
        shared = replace(pool, deadline_s=config.deadline_s)
        raise_errors = not config.should_continue_on_error
        return _by_actor(
            blocks, CALLS * config.concurrency, AnsweredRows, shared, row_format, config.rows, raise_errors
        )

    return answer


def _by_endpoint(config: EndpointProcessorConfig) -> Answer:
    """Return a function that answers with a running endpoint."""
    config.check()
    # Allow enough concurrent calls for the next block to start before the last row of a block is answered.
    calls = 2 + config.concurrency // config.batch_size
    return lambda blocks: _by_actor(blocks, calls, EndpointRows, config)


def _by_actor(blocks: ray.data.Dataset, calls: int, actor: type, *arguments: object) -> ray.data.Dataset:
    """Map blocks with one actor, which is made with `arguments` and works on up to `calls` blocks at a time."""
    return blocks.map_batches(
        actor,
        fn_constructor_args=arguments,
        compute=ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=calls, max_concurrent_calls_per_actor=calls),
        num_cpus=0,
        batch_format="pyarrow",
        batch_size=None,
    )


def _postprocessed(row: dict[str, Any], postprocess: Postprocess) -> dict[str, Any]:
    return row if row["error"] is not None else postprocess(row)
