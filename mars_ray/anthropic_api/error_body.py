"""Errors in the form of the API that a request used: Anthropic's below `/v1/messages`, OpenAI's everywhere else."""

from typing import Any, Literal

from pydantic import BaseModel

from mars_ray.openai_api.api_error import ApiError

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


class MessagesError(BaseModel):
    """The error object of Anthropic's API."""

    type: str
    message: str


class MessagesErrorResponse(BaseModel):
    """Body of every error response of the Messages API."""

    type: Literal["error"]
    error: MessagesError
    request_id: str


def uses_messages_api(path: str) -> bool:
    """Return whether a path belongs to the Messages API."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_body(error: ApiError, path: str, request_id: str) -> dict[str, Any]:
    """Return the body of an error in the form of the API that `path` belongs to."""
    if not uses_messages_api(path):
        return error.body()
    kind = TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
