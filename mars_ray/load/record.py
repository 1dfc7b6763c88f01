"""One request of a load: what was planned, and what its client saw, in seconds since the load began.

A chunk is an event with text, a tool call or a reasoning step in it. It may hold several tokens, and nobody says how
many: there are gaps between chunks here, and no latency "between tokens" but the mean that TPOT is.
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
    """Any other refusal below 500."""
    SERVER_ERROR = "5xx"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    """No connection, or one that ended before an answer began."""
    BROKEN = "broken stream"
    """The answer began and did not come to its end, or is not what the protocol says."""
    ERROR_EVENT = "error event"
    """An error sent inside an answer that had begun with 200."""
    INTERRUPTED = "interrupted"
    """The request was under way when the load was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A request to send."""

    messages: tuple[Message, ...]
    max_tokens: int
    scheduled_s: float | None = None
    """When it arrives in an open loop; None in a closed one, where it is sent when a client is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that was sent."""

    number: int
    """Its place in the plan, from 0."""
    outcome: RequestOutcome
    scheduled_s: float | None = None
    waited: bool = False
    """Whether all clients were busy when it was to be sent."""
    sent_s: float
    chunk_s: tuple[float, ...] = ()
    """Moments at which chunks came; none without streaming."""
    end_s: float
    http_status: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_per_forward: float | None = None
    retry_after_s: float | None = None
    """What a 429 asked for, when it asked in seconds."""
    error: str | None = None

    @property
    def asked_s(self) -> float:
        """When its user would have asked: latencies of an open loop hold the wait for a free client."""
        return self.sent_s if self.scheduled_s is None else self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """First chunk - sent."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def ttft_asked_s(self) -> float | None:
        """First chunk - asked."""
        return self.chunk_s[0] - self.asked_s if self.chunk_s else None

    @property
    def e2e_s(self) -> float:
        """End - asked."""
        return self.end_s - self.asked_s

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
        """Sent - asked: the wait for a free client, and how late the load generator itself was."""
        return self.sent_s - self.asked_s
