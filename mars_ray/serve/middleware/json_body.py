"""Read request bodies as JSON before FastAPI parses them.

In:    the headers and the body of a request, for a route that takes a body.
Out:   the parsed value; an `ApiError` that names the wrong header, or the wrong place in the body.
Never: guesses: it refuses every other type or encoding, invalid UTF-8, invalid JSON and strings that are not text.
"""

import gc
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from email.message import Message
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from mars_ray.chat.nesting import LEVELS, is_nested_too_deeply
from mars_ray.chat.unicode_text import refuse_lone_surrogates
from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import RequestError
from mars_ray.openai_api.api_error import ApiError, api_error

_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
"""Pattern of a lone surrogate that is escaped in JSON text. It can match wrongly after an escaped backslash, so every
match is confirmed in the parsed value."""


class JsonRoute(APIRoute):
    """A route whose body, if it has one, is JSON in UTF-8."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, changed so that it gets the body that this module has parsed."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def read_json(request: Request) -> Response:
            parsed = _JsonRequest(request.scope, request.receive)
            if body := await parsed.body():
                _check_headers(request)
                parsed.value = parse(body)
            return await handle(parsed)

        return read_json


class _JsonRequest(Request):
    """A request with a parsed body."""

    value: Any = None

    async def json(self) -> Any:
        """Return the parsed body."""
        return self.value


def parse(body: bytes) -> Any:
    """Return the value of a JSON text. Raises an `ApiError`."""
    try:
        text = body.decode("utf-8-sig")
        with _no_collecting():
            value = json.loads(text)
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _no_json(f"line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _no_json("it is nested too deeply") from None
    except ValueError:
        raise _no_json("a number has too many digits") from None
    if is_nested_too_deeply(text, value):
        raise _no_json(f"it is nested more than {LEVELS} levels deep")
    if _LONE_SURROGATE.search(text):
        try:
            refuse_lone_surrogates(value)
        except RequestError as error:
            raise api_error(error) from None
    return value


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Turn the garbage collector off within the block. For half a million new lists, its scans took two thirds of the
    time and found nothing to collect."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_headers(request: Request) -> None:
    """Raise an `ApiError` 415 unless the headers describe uncompressed JSON."""
    for encoding in request.headers.getlist("content-encoding"):
        if encoding.strip().lower() not in ("", "identity"):
            raise ApiError(
                415,
                f"The Content-Encoding is {encoding[:NAME_CHARS]}; send the body uncompressed, without this header.",
                type="invalid_request_error",
                code="unsupported_encoding",
                headers={"accept-encoding": "identity"},
            )
    kind = Message()
    media_type = request.headers.get("content-type") or "missing"
    kind["content-type"] = media_type
    if kind.get_content_type() != "application/json":
        raise ApiError(
            415,
            f"The Content-Type is {media_type[:NAME_CHARS]}; send JSON, and the header Content-Type: application/json.",
            type="invalid_request_error",
            code="unsupported_media_type",
        )


def _no_json(reason: str) -> ApiError:
    return ApiError.bad_request(f"the body is not JSON: {reason}.", code="invalid_json")
