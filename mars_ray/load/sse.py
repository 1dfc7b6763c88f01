"""Parse a stream of server-sent events, received as bytes split anywhere, into the data of each event.

The parser follows the WHATWG standard: lines end with CR, LF or both, a colon begins a comment, data lines are joined,
and a blank line ends an event. Names and ids of events are ignored, because OpenAI's protocol does not use them.

Existing parsers do not fit: aiohttp has none, and httpx-sse reads lines of an httpx response without limiting their
length.
"""

import re

EVENT_BYTES_MAX = 4 << 20
"""Maximum size of an event, far larger than any chunk of an answer."""

LINE_END = re.compile(rb"\r\n|\r|\n")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseParser:
    """Parser of one stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._first_line = True
        self._after_cr = False

    def feed(self, received: bytes) -> list[str]:
        """Return the data of the events that `received` completes. Raises `ValueError` if an event is too long."""
        if not received:
            return []
        if self._after_cr and received.startswith(b"\n"):
            received = received[1:]  # second half of a CR LF that was split
            self._after_cr = False
            if not received:
                return []
        self._after_cr = received.endswith(b"\r")
        *lines, self._rest = LINE_END.split(self._rest + received)
        events = [event for line in lines if (event := self._line(line)) is not None]
        if len(self._rest) + self._data_bytes > EVENT_BYTES_MAX:
            raise ValueError(f"an event has more than {EVENT_BYTES_MAX >> 20} MiB")
        return events

    def _line(self, line: bytes) -> str | None:
        if self._first_line:
            line = line.removeprefix(BYTE_ORDER_MARK)
            self._first_line = False
        if not line:
            event = b"\n".join(self._data).decode() if self._data else None
            self._data = []
            self._data_bytes = 0
            return event
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + 1
        return None
