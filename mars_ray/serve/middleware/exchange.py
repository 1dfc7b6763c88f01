"""One HTTP request and what became of it, for the log and the metrics.

In:    what the door sees of it, and the tally of the answer.
Out:   one record.
Never: holds an answer or a key; a prompt only where the operator asked for it.
"""

import re
from dataclasses import dataclass

from mars_ray.engine.service_class import STANDARD
from mars_ray.openai_api.usage import Tally

_TRACE_PARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Filled while the request is answered."""

    request_id: str
    method: str
    path: str
    arrived_unix_s: float
    trace_id: str | None = None
    """Of the W3C header `traceparent`, where the caller sent one."""
    key: str | None = None
    """Name of the caller's key; None on open paths and for callers that were refused at the door."""
    service_class: str = STANDARD
    """That of the key."""
    status: int | None = None
    """None when nothing was answered: the client had left."""
    code: str | None = None
    """OpenAI's error code of a refusal."""
    headers_s: float | None = None
    """Seconds until the answer began."""
    seconds: float = 0.0
    """Until it was over."""
    tally: Tally | None = None
    prompt: str | list[dict[str, str]] | None = None
    """Where the operator asked for it in the log."""


def trace_id_of(headers: list[tuple[bytes, bytes]]) -> str | None:
    """Return the trace id in a W3C `traceparent` header (Trace Context, section 3.2), if there is a valid one."""
    sent = [value for name, value in headers if name == b"traceparent"]
    found = _TRACE_PARENT.fullmatch(sent[0]) if len(sent) == 1 else None
    return found[1].decode() if found and set(found[1]) != {ord("0")} else None
