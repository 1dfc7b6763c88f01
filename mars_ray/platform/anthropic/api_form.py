"""The form of Anthropic's API: its errors, its streams and the header of its key."""

from typing import Any, Literal

from pydantic import BaseModel

from mars_ray.openai_api.api_error import ApiError
from mars_ray.serve.middleware.api_form import ApiForm

PATH = "/v1/messages"

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's type of an error, by HTTP status. Other statuses have the type `invalid_request_error`."""


NO_THREADS = "thread_unsupported_request"
"""Code of the error that makes Anthropic's client send all messages again, without a thread."""


class MessagesErrorDetails(BaseModel):
    """Details of an error for programs."""

    error_code: str


class MessagesError(BaseModel):
    """The error object of Anthropic's API."""

    type: str
    message: str
    details: MessagesErrorDetails | None = None
    """Present for errors that Anthropic's client handles by itself."""


class MessagesErrorResponse(BaseModel):
    """Body of every error response of the Messages API."""

    type: Literal["error"]
    error: MessagesError
    request_id: str


def uses_messages_api(path: str) -> bool:
    """Return whether a path belongs to the Messages API."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return an error as the body of an answer of Anthropic's API."""
    shown: dict[str, Any] = {"type": TYPES.get(error.status, "invalid_request_error"), "message": error.message}
    if error.code == NO_THREADS:
        shown["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": shown, "request_id": request_id}


ANTHROPIC = ApiForm(body=error_body, error_event="error", ends_with_done=False, key_header=b"x-api-key")
