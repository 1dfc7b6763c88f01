"""What a caller is told when a request fails: OpenAI's error object and an HTTP status.

In:    an error of the tree in `errors`, or any other exception.
Out:   an `ApiError`: status, body, headers.
Never: tells a caller what only the operator may know: paths, reprs of objects, the text of an internal error.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from mars_ray import errors
from mars_ray.errors import MarsRayError

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "server_error",
]

MESSAGE_CHARS = 1000
"""A message may quote what the caller sent; this much of it is enough to see what is wrong."""


class ApiError(Exception):
    """A failed request as the caller sees it. Its message is shown word for word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: ErrorType,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = dict(headers or {})

    @classmethod
    def bad_request(cls, message: str, param: str | None = None, code: str | None = None) -> "ApiError":
        """Return the 400 for a request whose field `param` cannot be served."""
        return cls(400, message, type="invalid_request_error", param=param, code=code)

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the object OpenAI's clients expect."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class _Answer(NamedTuple):
    """How the errors of one class are answered."""

    status: int
    type: ErrorType
    code: str | None
    shown: bool
    """Whether the message is about the request alone, and so for the caller's eyes."""


_INTERNAL = _Answer(500, "server_error", "internal_error", shown=False)

_ANSWERS: dict[type[MarsRayError], _Answer] = {
    errors.ReportError: _Answer(500, "server_error", "internal_error", shown=False),
    errors.RequestError: _Answer(400, "invalid_request_error", None, shown=True),
    errors.PromptTooLongError: _Answer(400, "invalid_request_error", "context_length_exceeded", shown=True),
    errors.QueueFullError: _Answer(429, "rate_limit_error", "overloaded", shown=True),
    # The caller did not do its part in time: what 408 means, though here it is reading and not writing.
    errors.SlowReaderError: _Answer(408, "invalid_request_error", "slow_reader", shown=True),
    errors.UnavailableError: _Answer(503, "server_error", "unavailable", shown=True),
    errors.ReplicaLostError: _Answer(503, "server_error", "replica_lost", shown=True),
    errors.StepError: _Answer(500, "server_error", "step_failed", shown=False),
    # None of these is about a request. Met while serving, they are our bug, and their messages name files.
    errors.ConfigError: _INTERNAL,
    errors.DataError: _INTERNAL,
    errors.ModelError: _INTERNAL,
    errors.OutputError: _INTERNAL,
    errors.ClusterError: _INTERNAL,
    errors.DivergedError: _INTERNAL,
    errors.ServeError: _INTERNAL,
    errors.InterruptedRunError: _INTERNAL,
}
"""The families `InputError` and `RunError` are left out, so that a new class under them has to be thought about."""


def answer_to(kind: type[MarsRayError]) -> _Answer | None:
    """Return how errors of this class are answered: by the nearest base in the table. None is a gap in the table."""
    return next((_ANSWERS[base] for base in kind.__mro__ if base in _ANSWERS), None)


def api_error(error: MarsRayError, *, request_id: str | None = None, retry_after_s: int = 1) -> ApiError:
    """Return what the caller is told. `retry_after_s` goes with errors that trying again later can mend."""
    answer = answer_to(type(error)) or _INTERNAL
    if not answer.shown:
        return _hidden(answer, request_id)
    return ApiError(
        answer.status,
        _shortened(str(error)),
        type=answer.type,
        code=answer.code,
        headers={"retry-after": str(max(1, retry_after_s))} if answer.status in (429, 503) else None,
    )


def internal_error(request_id: str | None = None) -> ApiError:
    """Return what the caller is told about an exception nobody foresaw: how to ask the operator for it."""
    return _hidden(_INTERNAL, request_id)


def _hidden(answer: _Answer, request_id: str | None) -> ApiError:
    named = f"request id {request_id}" if request_id else "the request id is in the header x-request-id"
    return ApiError(answer.status, f"internal error, {named}.", type=answer.type, code=answer.code)


def _shortened(message: str) -> str:
    return message if len(message) <= MESSAGE_CHARS else message[: MESSAGE_CHARS - 1] + "…"
