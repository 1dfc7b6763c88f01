"""The form of an API: how its errors look, how its streams end, and where its clients put the key."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mars_ray.openai_api.api_error import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiForm:
    """Form of the API that a path belongs to. The defaults are those of OpenAI's chat completions."""

    translated: Callable[[ApiError], ApiError] = lambda error: error
    """Gives an error of a begun stream the names of this API."""
    body: Callable[[ApiError, str], dict[str, Any]] = lambda error, _request_id: error.body()
    """Returns the body of an error; the second argument is the id of the request."""
    error_event: str | None = None
    """Name of the event that ends a stream with an error; None for an event without a name."""
    stream_error: Callable[[ApiError, int], dict[str, Any]] | None = None
    """Returns the error that ends a stream after so many events; None means `body`."""
    ends_with_done: bool = True
    """Whether a stream ends with `[DONE]`."""
    id_header: bytes | None = None
    """Header in which clients look for the id of a request, besides `x-request-id`."""
    key_header: bytes | None = None
    """Header in which clients may send the key alone, instead of in Authorization."""


OPENAI = ApiForm()


@dataclass(frozen=True, slots=True)
class Uploads:
    """Path whose bodies are read while they arrive, because they are too large to be kept."""

    path: str
    max_bytes: int
    """Maximum bytes of one body."""
    at_once: int
    """Maximum bodies of one key at the same time."""
