"""The stage of a pipeline whose rows an endpoint answers: what Ray Data runs as one actor (shell)."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pyarrow as pa
from openai.types.chat.chat_completion import ChatCompletion
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException

from mars_ray.batch.rows.row_result import RowResult
from mars_ray.batch.rows.row_table import from_row_table
from mars_ray.batch.rows.stage_rows import rows_to_answer, with_answers
from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig, body_of, refusal_of, result_of
from mars_ray.errors import (
    BadRecordError,
    MarsRayError,
    QueueFullError,
    ReplicaLostError,
    RequestError,
    RunError,
    UnavailableError,
)

FIRST_RETRIES = 5
"""An endpoint that is not there is given up after so many, some seconds."""
RETRIES = 100
"""An endpoint that answered before is asked again for ten minutes at least: it may start anew, or be full for long."""
PATIENCE_S, PAUSE_S = 600.0, 1.0
FOR_NOW = (QueueFullError, UnavailableError, ReplicaLostError)
"""What an application refuses for now only."""

Complete = Callable[[dict[str, Any]], Awaitable[ChatCompletion]]


class EndpointRows:
    """Has the blocks of a stage answered by an endpoint, several at a time."""

    def __init__(self, config: EndpointProcessorConfig) -> None:
        self._config, self._places = config, asyncio.Semaphore(config.concurrency)
        self._complete: asyncio.Future[Complete] | None = None

    async def __call__(self, block: pa.Table) -> pa.Table:
        """Return the rows of a block with their answers.

        Raises `RequestError` for a row without an answer unless the stage is to go on, and `RunError` when no endpoint
        is there.
        """
        if self._complete is None:
            self._complete = asyncio.ensure_future(_connected(self._config))
        complete = await asyncio.shield(self._complete)
        row_ids, raws = from_row_table(rows_to_answer(block))
        results = await asyncio.gather(
            *(self._result(complete, each.key, raw) for each, raw in zip(row_ids, raws, strict=True))
        )
        return with_answers(block, results, raise_errors=not self._config.should_continue_on_error)

    async def _result(self, complete: Complete, key: bytes, raw: bytes) -> RowResult:
        try:
            async with self._places:
                return result_of(key, await complete(body_of(raw, self._config)))
        except (BadRecordError, RequestError) as error:
            return refusal_of(key, str(error))


async def _connected(config: EndpointProcessorConfig) -> Complete:
    """Return what answers a body. Raises `RunError` when nobody is there."""
    return _by_handle(config) if config.url is None else await _by_http(config)


async def _by_http(config: EndpointProcessorConfig) -> Complete:
    # It waits as long as `Retry-After` says, and tries again.
    client = openai.AsyncOpenAI(base_url=config.url, api_key=config.api_key, max_retries=RETRIES)
    try:
        models = await client.with_options(max_retries=FIRST_RETRIES, timeout=10).models.list()
        model = config.model or models.data[0].id
    except (openai.OpenAIError, IndexError) as error:
        raise RunError(f"no endpoint answers at {config.url}: {error}") from error

    async def complete(body: dict[str, Any]) -> ChatCompletion:
        messages, fields = body["messages"], {name: body[name] for name in body if name != "messages"}
        try:
            return await client.chat.completions.create(model=model, messages=messages, extra_body=fields)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise RequestError(error.message) from error
        except openai.OpenAIError as error:
            raise RunError(f"the endpoint at {config.url} answers no more: {error}") from error

    return complete


def _by_handle(config: EndpointProcessorConfig) -> Complete:
    try:
        handle = serve.get_app_handle(config.app)
    except RayServeException as error:
        raise RunError(f"there is no application {config.app!r} on this cluster: {error}") from error

    async def complete(body: dict[str, Any]) -> ChatCompletion:
        messages, fields = body["messages"], {name: body[name] for name in body if name != "messages"}
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer: ChatCompletion = await handle.complete.remote(messages, **fields)
                return answer
            except (RayTaskError, MarsRayError) as raised:
                # Ray's error is of our class too, but its message is a stack.
                error = raised.cause if isinstance(raised, RayTaskError) else raised
                if not isinstance(error, FOR_NOW):
                    raise error from None
                if time.monotonic() > ends_s:
                    raise RunError(f"the application {config.app!r} answers no more: {error}") from error
                await asyncio.sleep(PAUSE_S)

    return complete
