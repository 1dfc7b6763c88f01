"""What goes wrong behind the access middleware is answered with OpenAI's errors, and tells nothing of the inside."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from mars_ray import errors
from mars_ray.errors import (
    ConfigError,
    MarsRayError,
    PromptTooLongError,
    QueueFullError,
    ReplicaLostError,
    StepError,
    UnavailableError,
)
from mars_ray.openai_api.api_error import MESSAGE_CHARS, ApiError, api_error, error_kind
from mars_ray.openai_api.request_limits import RequestLimits
from tests.serve.access_samples import (
    HOST,
    OK_START,
    Client,
    Inner,
    KnownKeys,
    access,
    call,
    scope_of,
)

# --- failures inside ---


def raising(error: Exception, *, begun: bool = False) -> Inner:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send(OK_START)
        raise error

    return Inner(fail)


def test_an_unforeseen_exception_is_an_internal_error_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client = call(access(raising(RuntimeError("/home/secret"))), scope_of("/v1/x", [HOST]))
    assert (client.status, client.error["type"]) == (500, "server_error")
    assert client.error["message"] == "internal error, request id made-here."
    assert "/home/secret" not in str(client.received)
    assert "made-here" in caplog.text
    assert "Traceback" in caplog.text


def test_an_exception_after_the_response_began_is_logged_and_breaks_it_off(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("late")
    client = Client([{"type": "http.request", "body": b""}])
    with pytest.raises(RuntimeError) as caught:
        asyncio.run(access(raising(error, begun=True))(scope_of("/v1/x", [HOST]), client.receive, client.send))
    assert caught.value is error
    assert len(client.received) == 1
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "code", "shown"),
    [
        (ApiError(404, "no such model", type="not_found_error", code="model_not_found"), 404, "model_not_found", True),
        (PromptTooLongError("too long"), 400, "context_length_exceeded", True),
        (QueueFullError("full"), 429, "overloaded", True),
        (UnavailableError("none is up"), 503, "unavailable", True),
        (ReplicaLostError("it died"), 503, "replica_lost", True),
        (StepError("decoding failed: RuntimeError('/x')."), 500, "step_failed", False),
        (ConfigError("/etc/x"), 500, "internal_error", False),
    ],
)
def test_errors_of_the_house_are_answered_as_the_table_says(
    error: Exception, status: int, code: str, shown: bool
) -> None:
    client = call(access(raising(error), retry_after_s=3), scope_of("/v1/x", [HOST]))
    assert (client.status, client.error["code"]) == (status, code)
    assert (client.error["message"] == str(error)) == shown
    assert client.headers.get(b"retry-after") == (b"3" if status in (429, 503) else None)


# --- errors ---

FAMILIES = {errors.MarsRayError, errors.InputError, errors.RunError}
"""Raised by nobody; were they in the table, a new class under them would find an answer nobody chose."""


def all_errors(base: type[MarsRayError] = MarsRayError) -> Iterator[type[MarsRayError]]:
    yield base
    for each in base.__subclasses__():
        yield from all_errors(each)


def test_every_error_of_the_tree_has_a_status() -> None:
    ours = {each for each in all_errors() if each.__module__ == errors.__name__}
    assert len(ours) == sum(issubclass(each, MarsRayError) for _, each in inspect.getmembers(errors, inspect.isclass))
    assert {each.__name__ for each in ours - FAMILIES if error_kind(each) is None} == set()


def test_the_status_is_that_of_the_nearest_base() -> None:
    assert api_error(errors.BadRecordError("x")).status == 500
    assert api_error(errors.EngineHungError("x")).headers == {"x-should-retry": "false"}
    assert api_error(PromptTooLongError("x")).code == "context_length_exceeded"
    assert api_error(MarsRayError("/secret")).message == "internal error, the request id is in the header x-request-id."


def test_an_error_quotes_no_more_of_a_request_than_helps() -> None:
    assert len(api_error(errors.RequestError("x" * 10_000)).message) == MESSAGE_CHARS


def test_the_body_of_an_error_is_openais() -> None:
    error = ApiError.bad_request("n is 9", "n", "too_many")
    assert error.status == 400
    assert error.body() == {
        "error": {"message": "n is 9", "type": "invalid_request_error", "param": "n", "code": "too_many"}
    }


# --- the rest ---


def test_a_websocket_is_closed_before_it_is_accepted(keys: KnownKeys) -> None:
    inner, client = Inner(), Client([{"type": "websocket.connect"}])
    scope = scope_of("/healthz", [HOST]) | {"type": "websocket"}
    asyncio.run(access(inner, keys)(scope, client.receive, client.send))
    assert (client.received, inner.scopes) == ([{"type": "websocket.close", "code": 1008}], [])


def test_lifespan_passes_and_unknown_scopes_do_not() -> None:
    passed: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    client = Client([])
    asyncio.run(access(inner)({"type": "lifespan"}, client.receive, client.send))
    with pytest.raises(ValueError, match="'mqtt'"):
        asyncio.run(access(inner)({"type": "mqtt"}, client.receive, client.send))
    assert passed == ["lifespan"]


@pytest.mark.parametrize("wrong", [{"bodybytes": 1}, {"body_bytes": 0}, {"body_seconds": 0}, {"prompt_tokens": 0}])
def test_unknown_and_impossible_limits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        RequestLimits(**wrong)
