"""Requests of a load, as planned and as measured by the client. Times are in seconds since the load began.

A chunk is an event with text, a tool call or a reasoning step. Events do not state how many tokens they contain, so
gaps are measured between chunks, and TPOT is a mean over the answer.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from mars_ray.data.records import Message


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
