"""Ray shell: pipeline stage that sends its rows to a running endpoint."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pyarrow as pa
from openai.types.chat.chat_completion import ChatCompletion
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from mars_ray.batch.rows.row_tables import RowResult, from_row_table
from mars_ray.batch.rows.stage_rows import rows_to_answer, with_answers
from mars_ray.batch.run.adaptive_limit import AdaptiveLimit
from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig, body_of, refusal_of, result_of
from mars_ray.errors import (
    BadRecordError,
    EngineHungError,
    MarsRayError,
    QueueFullError,
    ReplicaLostError,
    RequestError,
    RunError,
    StepError,
    UnavailableError,
    first_line,
)
from mars_ray.openai_api.api_error import ENGINE_HUNG

CONNECT_RETRIES = 5
"""Maximum number of retries when connecting to the endpoint; together they take a few seconds."""
PATIENCE_S = 600.0
"""Seconds without any answer after which the stage gives up on the endpoint."""
PAUSE_S = 1.0
"""Seconds to wait after a refusal without a Retry-After header."""
FAILURES = 3
"""Number of times that the endpoint fails on the same row before the row gets an error."""
RETRIED_STATUSES = frozenset({408, 409, 429, 502, 503, 504})
RETRIED_ERRORS = (
    QueueFullError,
    UnavailableError,
    ReplicaLostError,
    RayActorError,
    BackPressureError,
    DeploymentUnavailableError,
)
"""Errors of a Serve application, or of Ray for lack of a gateway, after which a request is sent again, just as after
one of the HTTP statuses in `RETRIED_STATUSES`."""

Complete = Callable[..., Awaitable[ChatCompletion]]
"""Sends a request with the given fields, `messages` among them."""


class _RefusedForNow(Exception):
    """Raised when the endpoint refuses a request for now. The request can be sent again after `after_s` seconds."""

    def __init__(self, reason: str, after_s: float = PAUSE_S) -> None:
        super().__init__(reason)
        self.after_s = after_s


class EndpointRows:
    """Actor that sends the rows of several blocks concurrently to an endpoint."""

    def __init__(self, config: EndpointProcessorConfig) -> None:
        self._config = config
        self._limit = AdaptiveLimit(config.concurrency)
        self._complete: asyncio.Future[Complete] | None = None
        self._answered_s = 0.0

    async def __call__(self, block: pa.Table) -> pa.Table:
        """Return the rows of a block with their answers.

        Raises `RequestError` for a row without an answer unless `should_continue_on_error` is set, and `RunError` if no
        endpoint answers.
        """
        if self._complete is None:
            self._complete = asyncio.ensure_future(_connect(self._config))
        complete = await asyncio.shield(self._complete)
        row_ids, raws = from_row_table(rows_to_answer(block))
        results = await asyncio.gather(
            *(self._result(complete, row_id.key, raw) for row_id, raw in zip(row_ids, raws, strict=True))
        )
        return with_answers(block, results, raise_errors=not self._config.should_continue_on_error)

    async def _result(self, complete: Complete, key: bytes, raw: bytes) -> RowResult:
        try:
            return result_of(key, await self._answer(complete, body_of(raw, self._config)))
        except (BadRecordError, RequestError, StepError, EngineHungError) as error:
            return refusal_of(key, str(error))

    async def _answer(self, complete: Complete, body: dict[str, Any]) -> ChatCompletion:
        """Send a request and return the answer. While the endpoint has no room, the request is sent again."""
        failures = 0
        began_s = time.monotonic()
        while True:
            after_s = PAUSE_S
            async with self._limit.turn() as turn:
                try:
                    answer = await complete(**body)
                    self._limit.answered()
                    self._answered_s = time.monotonic()
                    return answer
                except _RefusedForNow as refused:
                    self._limit.refused(turn)
                    if time.monotonic() - max(began_s, self._answered_s) > PATIENCE_S:
                        raise RunError(f"the endpoint gave no answer for {PATIENCE_S:g} s: {refused}") from refused
                    after_s = refused.after_s
                except StepError:
                    failures += 1
                    if failures == FAILURES:
                        raise
            await asyncio.sleep(after_s)


async def _connect(config: EndpointProcessorConfig) -> Complete:
    """Return a function that sends a request body to the endpoint. Raises `RunError` if no endpoint answers."""
    return _connect_app(config) if config.url is None else await _connect_url(config)


async def _connect_url(config: EndpointProcessorConfig) -> Complete:
    client = openai.AsyncOpenAI(base_url=config.url, api_key=config.api_key or "none", max_retries=0)
    try:
        models = await client.with_options(max_retries=CONNECT_RETRIES, timeout=10).models.list()
        model = config.model or models.data[0].id
    except (openai.OpenAIError, IndexError) as error:
        raise RunError(f"no endpoint answers at {config.url}: {error}") from error

    async def complete(messages: Any, **fields: Any) -> ChatCompletion:
        try:
            return await client.chat.completions.create(model=model, messages=messages, extra_body=fields)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise RequestError(error.message) from error
        except openai.APIConnectionError as error:
            raise _RefusedForNow(str(error)) from error
        except openai.APIStatusError as error:
            if error.status_code in RETRIED_STATUSES:
                raise _RefusedForNow(error.message, _seconds(error.response.headers.get("retry-after"))) from error
            if error.status_code >= 500:
                kind = EngineHungError if error.code == ENGINE_HUNG else StepError
                raise kind(f"the endpoint failed: {error.message}") from error
            raise RunError(f"the endpoint at {config.url} refused the request: {error.message}") from error

    return complete


def _seconds(retry_after: str | None) -> float:
    """Return the delay in a Retry-After header, at most 60 seconds. A header with a date counts as missing."""
    try:
        return min(60.0, float(retry_after or PAUSE_S))
    except ValueError:
        return PAUSE_S


def _connect_app(config: EndpointProcessorConfig) -> Complete:
    try:
        handle = serve.get_app_handle(config.app)
    except RayServeException as error:
        raise RunError(f"there is no application {config.app!r} on this cluster: {error}") from error

    async def complete(messages: Any, **fields: Any) -> ChatCompletion:
        try:
            answer: ChatCompletion = await handle.complete.remote(messages, model=config.model, **fields)
            return answer
        except (RayTaskError, MarsRayError, *RETRIED_ERRORS) as raised:
            # Ray's error is also an instance of our error class, but its message is a stack trace.
            error = raised.cause if isinstance(raised, RayTaskError) else raised
            if isinstance(error, RETRIED_ERRORS):
                raise _RefusedForNow(first_line(error)) from error
            raise error from None

    return complete
