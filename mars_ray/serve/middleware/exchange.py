"""The record of one HTTP request and its response, for the log, the metrics and the spans.

In:    facts from the access middleware; the usage of the response; the calls of engines of a traced request.
Out:   one record, which travels with the request in its ASGI scope.
Never: holds an answer or a key, or a prompt unless the operator turned on the logging of prompts; needs OpenTelemetry.
"""

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from starlette.requests import HTTPConnection
from starlette.types import Scope

from mars_ray.engine.request import Request
from mars_ray.engine.service_class import STANDARD
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.middleware.api_form import OPENAI, ApiForm
from mars_ray.serve.middleware.callers import Caller
from mars_ray.traces.engine_call import EngineCall

_SCOPE_KEY = "mars_ray.exchange"
_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

Operation = Literal["chat", "text_completion"]
"""Operation in the words of OpenTelemetry's conventions for generative AI."""


@dataclass(slots=True)
class TracedGeneration:
    """The generation of the answers to one HTTP request."""

    operation: Operation
    model: str
    streamed: bool
    calls: list[EngineCall]
    """The call for each prompt."""
    began_unix_s: float = field(default_factory=time.time)


@dataclass(slots=True)
class RequestTrace:
    """The trace of one HTTP request."""

    span: Any
    """The span of the HTTP request, which has begun."""
    trace_id: str
    """32 hexadecimal digits."""
    generation: TracedGeneration | None = None
    """None until the request has passed all checks, and for requests that generate nothing."""

    def generate(
        self, operation: Operation, model: str, requests: Sequence[Request], *, streamed: bool
    ) -> list[EngineCall]:
        """Begin the generation. Return the call for each request; its request carries the trace id."""
        calls = [EngineCall(replace(request, trace_id=self.trace_id)) for request in requests]
        self.generation = TracedGeneration(operation, model, streamed, calls)
        return calls


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One HTTP exchange, filled in while the request is answered."""

    request_id: str
    method: str
    path: str
    arrived_unix_s: float
    trace_id: str | None = None
    """Trace id of the request: the one in the W3C header `traceparent`, or one of our own if the request is traced."""
    trace: RequestTrace | None = None
    """Trace of the request; None if it is not traced. The log leaves it out."""
    api: ApiForm = OPENAI
    """Form of the API that the path belongs to. The log leaves it out."""
    key: str | None = None
    """Name of the caller's key; None on open paths and for callers who were refused before they were identified."""
    owner: str = ""
    """Owner of what the request stores; empty without keys."""
    caller: Caller | None = None
    """The caller; None without keys. The log leaves it out."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that are added to the answer. The log leaves them out."""
    meter_id: str | None = None
    """Id of the request at the meter; None before it was admitted there, and without a meter. The log leaves it out."""
    service_class: str = STANDARD
    """Class of service of the key or token."""
    status: int | None = None
    """HTTP status; None if the client left before its body had arrived, 499 if it left before the answer."""
    code: str | None = None
    """OpenAI's error code, if the request was refused."""
    headers_s: float | None = None
    """Seconds until the response began."""
    seconds: float = 0.0
    """Seconds until the response ended."""
    usage: ResponseUsage | None = None
    prompt: str | list[dict[str, str]] | None = None
    """The prompt, if the operator turned on the logging of prompts."""

    @property
    def operator(self) -> str:
        """Name of the caller in the audit log."""
        return f"key:{self.key}" if self.owner and self.key and ":" not in self.key else str(self.key)

    def put_in(self, scope: Scope) -> Scope:
        """Return a copy of an ASGI scope, with this exchange added; `of` gets the exchange from the copy."""
        # Copy the state too: servers may share it between requests, and no request may change another one's state.
        return {**scope, "state": {**(scope.get("state") or {})}, _SCOPE_KEY: self}

    @classmethod
    def of(cls, scope: Scope) -> "Exchange":
        """Return the exchange of a request that has passed the access middleware."""
        exchange: Exchange = scope[_SCOPE_KEY]
        return exchange


def owner_of(http: HTTPConnection) -> str:
    """Return the owner of what a request stores."""
    return Exchange.of(http.scope).owner


def trace_id_of(headers: list[tuple[bytes, bytes]]) -> str | None:
    """Return the trace id in a W3C `traceparent` header (Trace Context, section 3.2), or None if it is not
    valid."""
    parents = [value for name, value in headers if name == b"traceparent"]
    match = _TRACE_PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    return match[1].decode() if match and set(match[1]) != {ord("0")} else None


PATH_CHARS = 200
"""Maximum characters of a path in the log, because unknown callers choose the path. JSON may take six bytes for one."""

UNLOGGED = ("api", "caller", "headers", "meter_id")
"""Fields of an exchange that the log leaves out."""

log = logging.getLogger("mars_ray.requests")


def log_exchange(exchange: Exchange) -> None:
    """Write the log line of an exchange. Open paths are left out, because probes request them every few seconds."""
    if exchange.key is not None or exchange.code is not None:
        fields = asdict(replace(exchange, trace=None, api=OPENAI, caller=None))
        fields |= fields.pop("usage") or {}
        for name in UNLOGGED:
            del fields[name]
        fields["path"] = exchange.path[:PATH_CHARS]
        log.info(json.dumps({name: _rounded(value) for name, value in fields.items() if value is not None}))


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value
