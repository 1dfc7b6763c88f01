"""Limit the size of request heads and the time for them to arrive, because uvicorn limits neither.

In:    connections to a gateway's own port, without a load balancer in front.
Out:   connections whose heads arrive complete, in time and within the size limit; the others end with a 431 or 408.
Never: counts bodies, which are read only from known callers (`middleware/body`).
"""

from asyncio import TimerHandle, Transport

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 10.0
"""Maximum seconds for a head to arrive, as in the load balancer (`deploy/haproxy`)."""
TOO_LARGE = b"431 Request Header Fields Too Large"
TOO_SLOW = b"408 Request Timeout"


class BoundedHeadProtocol(HttpToolsProtocol):
    """One connection. `bound_heads` installs this class and sets the maximum size of a head."""

    most_bytes = 64 * 1024
    _head_bytes = 0
    _late: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass data on to the parser, which finds where heads begin and end."""
        super().data_received(data)
        if self._late:
            self._head_bytes += len(data)
            if self._head_bytes > self.most_bytes:
                self._refuse(TOO_LARGE)

    def on_message_begin(self) -> None:
        """Start the time limit for the next head."""
        super().on_message_begin()
        if not self._late:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """Cancel the time limit, because the head is complete."""
        self._stop_waiting()
        super().on_headers_complete()

    def _wait_for_head(self) -> None:
        self._head_bytes = 0
        self._late = self.loop.call_later(HEAD_SECONDS, self._refuse, TOO_SLOW)

    def _stop_waiting(self) -> None:
        if self._late:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes) -> None:
        self._stop_waiting()
        if self.cycle is None or self.cycle.response_complete:  # never write into the middle of an answer
            self.transport.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        self.transport.close()


def bound_heads(most_bytes: int) -> None:
    """Limit the heads of requests to about `most_bytes` in servers that uvicorn starts later in this process."""
    BoundedHeadProtocol.most_bytes = most_bytes
    auto.AutoHTTPProtocol = BoundedHeadProtocol
