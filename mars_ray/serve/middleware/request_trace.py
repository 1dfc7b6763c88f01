"""The record of a traced HTTP request, from which its spans are made when its response has ended.

In:    the settings of the request; its calls of engines.
Out:   one record, which travels with the request's `Exchange`.
Never: holds a prompt, an answer or a key, and needs OpenTelemetry.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mars_ray.engine.request import Request
from mars_ray.traces.engine_call import EngineCall

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
