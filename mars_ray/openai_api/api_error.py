"""Errors as callers see them: an HTTP status and OpenAI's error object.

In:    an error of a class in `errors`, or any other exception.
Out:   an `ApiError`: status, body, headers.
Never: reveals to callers what only operators may know: paths, reprs of objects, the text of internal errors.
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
    "insufficient_quota",
    "server_error",
]

MESSAGE_CHARS = 1000
"""Maximum characters of a message, enough to show what is wrong even if the message quotes a long input from the
caller."""


class ApiError(Exception):
    """A failed request as the caller sees it. The caller gets the error's message verbatim."""

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
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @classmethod
    def bad_request(cls, message: str, param: str | None = None, code: str | None = None) -> "ApiError":
        """Return the 400 error for a request that cannot be served because of its field `param`."""
        return cls(400, message, type="invalid_request_error", param=param, code=code)

    @classmethod
    def unavailable(cls, message: str, code: str, retry_after_s: float, param: str | None = None) -> "ApiError":
        """Return the 503 error for a request that may be served after these seconds."""
        headers = {"retry-after": f"{retry_after_s:.0f}"}
        return cls(503, message, type="server_error", param=param, code=code, headers=headers)

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the error object that OpenAI's clients expect."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class _ErrorKind(NamedTuple):
    """HTTP status and fields for errors of one class."""

    status: int
    type: ErrorType
    code: str | None
    shown: bool
    """Whether callers may see the message, because it is only about their own request."""
    param: str | None = None
    """The field of the body that the error is about."""


NO_RETRY = {"x-should-retry": "false"}
"""Headers by which OpenAI's clients do not send a request again by themselves."""
ENGINE_HUNG = "engine_hung"
"""Error code of a request that hung engines. It must not be sent to another engine."""

_INTERNAL = _ErrorKind(500, "server_error", "internal_error", shown=False)

_ERROR_KINDS: dict[type[MarsRayError], _ErrorKind] = {
    errors.RequestError: _ErrorKind(400, "invalid_request_error", None, shown=True),
    errors.PromptTooLongError: _ErrorKind(400, "invalid_request_error", "context_length_exceeded", shown=True),
    errors.GrammarError: _ErrorKind(400, "invalid_request_error", None, shown=True, param="response_format"),
    errors.ResponseNotFoundError: _ErrorKind(404, "invalid_request_error", "response_not_found", shown=True),
    errors.StoredNotFoundError: _ErrorKind(404, "invalid_request_error", "not_found", shown=True),
    errors.QuotaError: _ErrorKind(413, "invalid_request_error", "quota_exceeded", shown=True),
    errors.BatchEndedError: _ErrorKind(409, "invalid_request_error", "batch_ended", shown=True),
    errors.FileInUseError: _ErrorKind(409, "invalid_request_error", "file_in_use", shown=True),
    errors.QueueFullError: _ErrorKind(429, "rate_limit_error", "overloaded", shown=True),
    # 408 means that the caller was too slow: here, too slow to read the response instead of to write the request.
    errors.SlowReaderError: _ErrorKind(408, "invalid_request_error", "slow_reader", shown=True),
    errors.UnavailableError: _ErrorKind(503, "server_error", "unavailable", shown=True),
    errors.AdapterUnavailableError: _ErrorKind(503, "server_error", "adapter_unavailable", shown=True),
    errors.ReplicaLostError: _ErrorKind(503, "server_error", "replica_lost", shown=True),
    errors.EngineHungError: _ErrorKind(500, "server_error", ENGINE_HUNG, shown=True),
    errors.StepError: _ErrorKind(500, "server_error", "step_failed", shown=False),
    # None of these is about a request. If one occurs during serving, it is our bug, and its message may name files.
    **dict.fromkeys(
        (
            errors.ClusterError,
            errors.ConfigError,
            errors.DataError,
            errors.DivergedError,
            errors.InterruptedRunError,
            errors.ModelError,
            errors.OutputError,
            errors.ReportError,
            errors.ServeError,
        ),
        _INTERNAL,
    ),
}
"""The base classes `InputError` and `RunError` are left out, so that each new class under them needs its own entry."""


def error_kind(error_class: type[MarsRayError]) -> _ErrorKind | None:
    """Return the table entry for the class or its nearest base class; None means that the table lacks an entry."""
    return next((_ERROR_KINDS[base] for base in error_class.__mro__ if base in _ERROR_KINDS), None)


def api_error(error: MarsRayError, *, request_id: str | None = None, retry_after_s: int = 1) -> ApiError:
    """Return the error to send to the caller. `retry_after_s` is sent with errors that may vanish on a retry."""
    kind = error_kind(type(error)) or _INTERNAL
    if not kind.shown:
        return _hidden(kind, request_id)
    own = error if isinstance(error, errors.RequestError) else None
    return ApiError(
        kind.status,
        _shortened(str(error)),
        type=kind.type,
        param=own.param if own and own.param is not None else kind.param,
        code=own.code if own and own.code is not None else kind.code,
        headers=_retry_headers(error, kind.status, retry_after_s),
    )


def _retry_headers(error: MarsRayError, status: int, retry_after_s: int) -> dict[str, str] | None:
    """Return the headers that tell clients when to repeat a request, or not to; OpenAI's clients repeat a 500."""
    if isinstance(error, errors.EngineHungError):
        return NO_RETRY
    return {"retry-after": str(max(1, retry_after_s))} if status in (429, 503) else None


def internal_error(request_id: str | None = None) -> ApiError:
    """Return the error for an unexpected exception, which reveals only the request id."""
    return _hidden(_INTERNAL, request_id)


def _hidden(kind: _ErrorKind, request_id: str | None) -> ApiError:
    hint = f"request id {request_id}" if request_id else "the request id is in the header x-request-id"
    return ApiError(kind.status, f"internal error, {hint}.", type=kind.type, code=kind.code)


def _shortened(message: str) -> str:
    return message if len(message) <= MESSAGE_CHARS else message[: MESSAGE_CHARS - 1] + "…"
