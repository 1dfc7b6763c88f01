"""Requests of a load, as planned and as measured by the client, and the limits that a request should meet.

Times are in seconds since the load began. A chunk is an event with text, a tool call or a reasoning step. Events do not
state how many tokens they contain, so gaps are measured between chunks, and TPOT is a mean over the answer.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

import typer

from mars_ray.data.records import Message
from mars_ray.errors import ConfigError

FIGURES = ("ttft", "tpot", "e2e")
Slo = Annotated[tuple[str, ...], typer.Option(help="Latency targets in ms, such as 'ttft:200,tpot:20,e2e:2000'.")]


class RequestOutcome(StrEnum):
    """Outcome of a request."""

    OK = "ok"
    LIMITED = "429"
    CLIENT_ERROR = "4xx"
    """Any status from 300 to 499 except 429."""
    SERVER_ERROR = "5xx"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    """The connection failed, or closed before the reply began."""
    BROKEN = "broken stream"
    """The reply began, but was cut off or violated the protocol."""
    ERROR_EVENT = "error event"
    """An error event in a reply with status 200."""
    INTERRUPTED = "interrupted"
    """The request was in flight when the load was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A request to send."""

    messages: tuple[Message, ...]
    max_tokens: int
    scheduled_s: float | None = None
    """Arrival time in an open loop; None in a closed loop, which sends a request as soon as a client is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that was sent."""

    number: int
    """Index in the plan, from 0."""
    outcome: RequestOutcome
    scheduled_s: float | None = None
    waited: bool = False
    """True if all clients were busy when the request was due."""
    sent_s: float
    chunk_s: tuple[float, ...] = ()
    """Arrival times of the chunks; empty without streaming."""
    end_s: float
    http_status: int | None = None
    text: str = ""
    """Text of the answer as far as it arrived."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_per_forward: float | None = None
    retry_after_s: float | None = None
    """`Retry-After` of a 429 reply, if it was given in seconds."""
    error: str | None = None

    @property
    def due_s(self) -> float:
        """Arrival time in an open loop, so that latencies include the wait for a client; otherwise the sending time."""
        return self.sent_s if self.scheduled_s is None else self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time from sending the request to the first chunk."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def ttft_due_s(self) -> float | None:
        """Time from `due_s` to the first chunk."""
        return self.chunk_s[0] - self.due_s if self.chunk_s else None

    @property
    def e2e_s(self) -> float:
        """Time from `due_s` to the end of the reply."""
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None for answers of one token or of unknown size."""
        if not self.chunk_s or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.end_s - self.chunk_s[0]) / (self.completion_tokens - 1)

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Time from each chunk to the next."""
        return [after - before for before, after in pairwise(self.chunk_s)]

    @property
    def delay_s(self) -> float:
        """Time from `due_s` to sending: the wait for a free client plus the lateness of the load generator."""
        return self.sent_s - self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSlo:
    """Limits in milliseconds; None means no limit. In an open loop, ttft and e2e are measured from the arrival."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """Return True if a request completed within all limits."""
        if record.outcome is not RequestOutcome.OK:
            return False
        tpot_s = record.tpot_s
        if record.completion_tokens in (0, 1):  # no second token to wait for
            tpot_s = 0.0
        figures = ((record.ttft_due_s, self.ttft_ms), (tpot_s, self.tpot_ms), (record.e2e_s, self.e2e_ms))
        return all(limit is None or (value is not None and 1000 * value <= limit) for value, limit in figures)


def parse_slo(texts: Iterable[str]) -> RequestSlo | None:
    """Return the limits in `texts`, or None if there are none. Raises `ConfigError` for an unusable limit."""
    limits: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, _, value = part.partition(":")
        if name not in FIGURES:
            raise ConfigError(f"slo {part!r} is unknown; give {', '.join(f'{figure}:MS' for figure in FIGURES)}.")
        if f"{name}_ms" in limits:
            raise ConfigError(f"slo {name} is given twice; give it once.")
        limits[f"{name}_ms"] = _milliseconds(part, value)
    return RequestSlo(**limits) if limits else None


def _milliseconds(part: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"slo {part!r} is not usable; after the colon give milliseconds above 0, such as ttft:200.")
    return value
