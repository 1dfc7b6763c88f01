"""Errors for users. Each message says what is wrong, gives the value, and says what to do.

MarsRayError
├── InputError                an input or option cannot be used           exit code 2
│   ├── ConfigError           a setting is unknown, missing or out of range
│   │   └── UnknownNameError  no key or account has this name
│   ├── DataError             a data file is missing, unreadable or not of the expected form
│   │   ├── EmptyDataError    a data file holds no usable record
│   │   └── BadRecordError    one record of a data file is not usable
│   ├── ModelError            a model folder is missing or incomplete
│   │   ├── UnsafeModelError  loading a model would run code that came with it
│   │   └── AdapterError      an adapter is incomplete, too large, or was trained for another base model
│   ├── OutputError           the output folder is in use or not writable
│   ├── ClusterError          the Ray cluster is too small for the options
│   ├── ReportError           a report of a replica, or its directive, is invalid
│   └── RequestError          a request to the engine is not usable
│       ├── PromptTooLongError  the prompt does not fit the model's context
│       ├── GrammarError      the schema or regular expression cannot be used
│       ├── ResponseNotFoundError  a stored response does not exist or is another account's
│       ├── StoredNotFoundError  a file or a batch does not exist or is another owner's
│       ├── QuotaError        an owner has stored as much as the limits allow
│       ├── BatchEndedError   a batch has ended, so it cannot be cancelled
│       └── FileInUseError    a batch that has not ended needs the file
└── RunError                  the work started but could not be finished  exit code 1
    ├── DivergedError         the loss is no longer a finite number
    ├── QueueFullError        the queue of the engine is full
    ├── StepError             the model failed on a request while decoding it
    ├── SlowReaderError       the reader of a stream stopped taking chunks
    ├── ServeError            the endpoint did not start
    ├── UnavailableError      a request cannot be answered at the moment
    │   └── AdapterUnavailableError   because its adapter cannot be loaded
    ├── ReplicaLostError      the replica that served a request died
    ├── EngineHungError       an engine hung, and only this request can be the cause
    └── InterruptedRunError   the user stopped the work; it can resume    exit code 130, 143 for SIGTERM
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import repr as shortened
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import ValidationError


class MarsRayError(Exception):
    """Base of all errors meant for a user. The command line prints the message and exits with `exit_code`."""

    exit_code: ClassVar[int] = 1


class InputError(MarsRayError):
    """An input or option cannot be used. No work was started."""

    exit_code = 2


class ConfigError(InputError):
    """A setting is unknown, missing or out of range."""


class UnknownNameError(ConfigError):
    """No key or account has this name."""


class DataError(InputError):
    """A data file is missing, unreadable or not of the expected form."""


class EmptyDataError(DataError):
    """A data file holds no usable record."""


class BadRecordError(DataError):
    """One record is not usable. The message gives the reason, and `missing` names the columns that the record lacks."""

    def __init__(self, message: str, *, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class ModelError(InputError):
    """A model folder is missing or incomplete."""


class UnsafeModelError(ModelError):
    """Loading a model folder would run code that came with the model."""


class AdapterError(ModelError):
    """An adapter cannot be used: it is incomplete, was trained for another base model, or is too large for the memory
    that is set for adapters. `adapter` is the name that requests use for it, if it has one."""

    def __init__(self, message: str, *, adapter: str | None = None) -> None:
        super().__init__(message)
        self.adapter = adapter


class OutputError(InputError):
    """The output folder is in use or not writable."""


class ClusterError(InputError):
    """The Ray cluster is too small for the options."""


class ReportError(InputError):
    """A report of a replica, or its directive, is invalid and was not applied."""


class RequestError(InputError):
    """A request to the engine is not usable: a value is unknown, out of range or beyond a limit.

    `param` is the field that the error is about, and `code` its kind, both as in OpenAI's errors.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer in the context of the model."""


class GrammarError(RequestError):
    """A schema or a regular expression cannot be used: it is malformed, or too expensive to compile or to follow."""


class ResponseNotFoundError(RequestError):
    """No stored response of this owner has the id: it was never stored, has expired, or belongs to another account."""


class StoredNotFoundError(RequestError):
    """No file or batch of this owner has the id: it never existed, was deleted or has expired, or belongs to another
    owner."""


class QuotaError(RequestError):
    """An owner has stored as much as the limits allow."""


class BatchEndedError(RequestError):
    """A batch has ended, so it cannot be cancelled."""


class FileInUseError(RequestError):
    """A file cannot be deleted, because a batch that has not ended needs it."""


class RunError(MarsRayError):
    """The work started but could not be finished."""


class DivergedError(RunError):
    """The training loss is no longer a finite number."""


class QueueFullError(RunError):
    """The queue of the engine is full. The same request may be accepted later."""


class StepError(RunError):
    """The model, or the processing of the model's output, failed on this request."""


class SlowReaderError(RunError):
    """The reader of a stream stopped taking chunks, so the request was cancelled."""


class ServeError(RunError):
    """The endpoint did not start."""


class UnavailableError(RunError):
    """A request cannot be answered now, because no engine is up or another part of the endpoint does not answer."""


class AdapterUnavailableError(UnavailableError):
    """A request cannot be answered now, because its adapter cannot be loaded where it was sent."""


class ReplicaLostError(RunError):
    """The replica that served a request died before the answer was complete."""


class EngineHungError(RunError):
    """An engine hung, and only this request can be the cause. The request may be tried once more, in case it is not."""


class InterruptedRunError(RunError):
    """The user stopped the work. Finished work is saved, and the same command resumes it."""

    exit_code = 130


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for the end of a message: the known name that is closest to `name`; empty if none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {str(close[0])!r}?" if close else ""


_SHOULD = re.compile(r"^(?:Value error, |[A-Z][a-z]+ should (?=be|have|match))")
_BOUNDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}


def problems_of(error: "ValidationError") -> str:
    """Return the problems that pydantic has with values: for each its name, its value, and what it must be."""
    return "; ".join(
        _problem(".".join(map(str, problem["loc"])), problem["msg"], problem["input"])
        for problem in error.errors(include_url=False, include_context=False)
    )


def _problem(name: str, message: str, value: object) -> str:
    if message == "Extra inputs are not permitted":
        return f"{name} is not a setting; check its spelling"
    if message == "Field required":
        return f"{name} is missing"
    rule = _SHOULD.sub(lambda start: "" if start[0].startswith("Value") else "must ", message)
    for words, bound in _BOUNDS.items():
        rule = rule.replace(words, bound)
    if not name:
        return rule
    return f"{name} is {shortened(value)}{', ' if rule.startswith('must ') else ': '}{rule}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop; the name of its class if the message is
    empty."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise `ConfigError` if the argument `name` of a public function is not a `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {shortened(value)}, must be {kind.__name__}.")
