"""A request of a load as planned, and as its client measured it, in seconds since the load began.

A chunk is an event with text, a tool call or a reasoning step. Events do not tell how many tokens they hold, so gaps
are measured between chunks, and TPOT is a mean over the answer.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from mars_ray.data.records import Message


class RequestOutcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    LIMITED = "429"
    CLIENT_ERROR = "4xx"
    """Any other status from 300 to 499."""
    SERVER_ERROR = "5xx"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    """No connection, or one that closed before a reply began."""
    BROKEN = "broken stream"
    """The reply began but was cut off, or violates the protocol."""
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
    """Arrival time in an open loop; None in a closed loop, which sends a request when a client is free."""


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
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_per_forward: float | None = None
    retry_after_s: float | None = None
    """The `Retry-After` of a 429, if it was in seconds."""
    error: str | None = None

    @property
    def due_s(self) -> float:
        """Arrival time in an open loop, so latencies include the wait for a free client; else the time of sending."""
        return self.sent_s if self.scheduled_s is None else self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """First chunk - sent."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def ttft_due_s(self) -> float | None:
        """First chunk - due."""
        return self.chunk_s[0] - self.due_s if self.chunk_s else None

    @property
    def e2e_s(self) -> float:
        """End - due."""
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
        """Sent - due: the wait for a free client plus the lateness of the load generator."""
        return self.sent_s - self.due_s
