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
from mars_ray.batch.run.adaptive_limit import AdaptiveLimit
from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig, body_of, refusal_of, result_of
from mars_ray.errors import (
    BadRecordError,
    MarsRayError,
    QueueFullError,
    ReplicaLostError,
    RequestError,
    RunError,
    StepError,
    UnavailableError,
)

FIRST_RETRIES = 5
"""An endpoint that is not there is given up after so many, some seconds."""
PATIENCE_S, PAUSE_S = 600.0, 1.0
"""One that answers nothing for so long any more is given up; who is refused waits, unless he is told how long."""
FAILURES = 3
"""A row at which the endpoint fails so often has no answer."""
FOR_NOW = frozenset({408, 409, 429, 502, 503, 504})
"""Statuses of what is refused for now only, as the errors of an application below."""
ERRORS_FOR_NOW = (QueueFullError, UnavailableError, ReplicaLostError)

Complete = Callable[[dict[str, Any]], Awaitable[ChatCompletion]]


class _RefusedForNow(Exception):
    """Ask again after `after_s`."""

    def __init__(self, reason: str, after_s: float = PAUSE_S) -> None:
        super().__init__(reason)
        self.after_s = after_s


class EndpointRows:
    """Has the blocks of a stage answered by an endpoint, several at a time."""

    def __init__(self, config: EndpointProcessorConfig) -> None:
        self._config, self._limit = config, AdaptiveLimit(config.concurrency)
        self._complete: asyncio.Future[Complete] | None = None
        self._answered_s = 0.0

    async def __call__(self, block: pa.Table) -> pa.Table:
        """Return the rows of a block with their answers.

        Raises `RequestError` for a row without an answer unless the stage is to go on, and `RunError` when no endpoint
        is there.
        """
        if self._complete is None:
            self._complete = asyncio.ensure_future(_connected(self._config))
        complete = await asyncio.shield(self._complete)
        self._answered_s = self._answered_s or time.monotonic()
        row_ids, raws = from_row_table(rows_to_answer(block))
        results = await asyncio.gather(
            *(self._result(complete, each.key, raw) for each, raw in zip(row_ids, raws, strict=True))
        )
        return with_answers(block, results, raise_errors=not self._config.should_continue_on_error)

    async def _result(self, complete: Complete, key: bytes, raw: bytes) -> RowResult:
        try:
            return result_of(key, await self._answered(complete, body_of(raw, self._config)))
        except (BadRecordError, RequestError, StepError) as error:
            return refusal_of(key, str(error))

    async def _answered(self, complete: Complete, body: dict[str, Any]) -> ChatCompletion:
        """Return the answer, asked for until the endpoint has room."""
        failures, after_s = 0, PAUSE_S
        while True:
            async with self._limit.place() as place:
                try:
                    answer = await complete(body)
                    self._limit.answered()
                    self._answered_s = time.monotonic()
                    return answer
                except _RefusedForNow as refused:
                    self._limit.refused(place)
                    if time.monotonic() - self._answered_s > PATIENCE_S:
                        raise RunError(f"the endpoint answers nothing any more: {refused}") from refused
                    after_s = refused.after_s
                except StepError:
                    failures += 1
                    if failures == FAILURES:
                        raise
            await asyncio.sleep(after_s)


async def _connected(config: EndpointProcessorConfig) -> Complete:
    """Return what answers a body. Raises `RunError` when nobody is there."""
    return _by_handle(config) if config.url is None else await _by_http(config)


async def _by_http(config: EndpointProcessorConfig) -> Complete:
    client = openai.AsyncOpenAI(base_url=config.url, api_key=config.api_key, max_retries=0)
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
        except openai.APIConnectionError as error:
            raise _RefusedForNow(str(error)) from error
        except openai.APIStatusError as error:
            if error.status_code in FOR_NOW:
                raise _RefusedForNow(error.message, _seconds(error.response.headers.get("retry-after"))) from error
            if error.status_code >= 500:
                raise StepError(f"the endpoint failed: {error.message}") from error
            raise RunError(f"the endpoint at {config.url} does not serve this: {error.message}") from error

    return complete


def _seconds(retry_after: str | None) -> float:
    """Return how long a refusal asks to wait. A date, which HTTP allows too, no server of models sends."""
    try:
        return min(60.0, float(retry_after or PAUSE_S))
    except ValueError:
        return PAUSE_S


def _by_handle(config: EndpointProcessorConfig) -> Complete:
    try:
        handle = serve.get_app_handle(config.app)
    except RayServeException as error:
        raise RunError(f"there is no application {config.app!r} on this cluster: {error}") from error

    async def complete(body: dict[str, Any]) -> ChatCompletion:
        messages, fields = body["messages"], {name: body[name] for name in body if name != "messages"}
        try:
            answer: ChatCompletion = await handle.complete.remote(messages, **fields)
            return answer
        except (RayTaskError, MarsRayError) as raised:
            # Ray's error is of our class too, but its message is a stack.
            error = raised.cause if isinstance(raised, RayTaskError) else raised
            if isinstance(error, ERRORS_FOR_NOW):
                raise _RefusedForNow(str(error)) from error
            raise error from None

    return complete
