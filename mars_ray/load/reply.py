"""Record a chat completion while it arrives. Only the standard fields of OpenAI's API are required.

The parser of server-sent events follows the WHATWG standard: lines end with CR, LF or both, a colon begins a comment,
data lines are joined, and a blank line ends an event. Names and ids of events are ignored, because OpenAI's protocol
does not use them. Existing parsers do not fit: aiohttp has none, and httpx-sse reads lines of an httpx response without
limiting their length.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mars_ray.load.record import RequestOutcome, RequestRecord

EVENT_BYTES_MAX = 4 << 20
"""Maximum size of an event, far larger than any chunk of an answer."""

LINE_END = re.compile(rb"\r\n|\r|\n")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DONE = "[DONE]"
ERROR_CHARACTERS_MAX = 200
TOKENS_MAX = 10**9
"""Limit on token counts; counts in a reply's usage that reach the limit are ignored."""


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


class ReplyRecorder:
    """Recorder of one request and its reply. A reply that has not ended counts as interrupted."""

    def __init__(self, number: int, scheduled_s: float | None, waited: bool, sent_s: float) -> None:
        self._record = RequestRecord(
            number=number,
            outcome=RequestOutcome.INTERRUPTED,
            scheduled_s=scheduled_s,
            waited=waited,
            sent_s=sent_s,
            end_s=sent_s,
        )
        self._chunk_s: list[float] = []
        self._texts: list[str] = []
        self._usage: Mapping[str, Any] = {}
        self._finished = False
        self._retry_after_s: float | None = None
        self.http_status: int | None = None
        """HTTP status; None until the reply begins."""
        self.ended = False
        """True once the outcome is known."""

    def end(self, outcome: RequestOutcome, now_s: float, error: str | None = None) -> None:
        """Record the outcome; only the first call counts."""
        if not self.ended:
            self.ended = True
            self._record = replace(self._record, outcome=outcome, end_s=now_s, error=one_line(error))

    def refused(self, headers: Mapping[str, str], body: str, now_s: float) -> None:
        """Record a reply with an error status."""
        assert self.http_status is not None, "the status is known before the body is read"
        if self.http_status == 429:
            self._retry_after_s = _seconds(headers.get("Retry-After"))
            outcome = RequestOutcome.LIMITED
        else:
            outcome = RequestOutcome.SERVER_ERROR if self.http_status >= 500 else RequestOutcome.CLIENT_ERROR
        self.end(outcome, now_s, _reason(self.http_status, body))

    def event(self, data: str, now_s: float) -> None:
        """Record one event of a stream. Raises `ValueError` if `data` is not part of a chat completion."""
        if data.strip() == DONE:
            self.end(RequestOutcome.OK, now_s)
            return
        for choice in self._completion(data, now_s):
            delta = choice.get("delta")
            self._keep_text(delta)
            # Text, a tool call or reasoning counts as a chunk; a role alone does not.
            if isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role"):
                self._chunk_s.append(now_s)
            self._finished = self._finished or bool(choice.get("finish_reason"))

    def body(self, text: str, now_s: float) -> None:
        """Record a reply that is not streamed. Raises `ValueError` if it is not a chat completion."""
        choices = self._completion(text, now_s)
        if not choices and not self.ended:
            raise ValueError("the answer has no choices")
        for choice in choices:
            self._keep_text(choice.get("message"))
        self.end(RequestOutcome.OK, now_s)

    def stream_ended(self, now_s: float) -> None:
        """Record the end of the stream.

        An answer with a finish reason counts as complete even without the final event, because some servers omit it.
        """
        if self._finished:
            self.end(RequestOutcome.OK, now_s)
        else:
            self.end(RequestOutcome.BROKEN, now_s, "the stream ended before the answer")

    def record(self, now_s: float) -> RequestRecord:
        """Return the record of the request as of `now_s`."""
        return replace(
            self._record,
            chunk_s=tuple(self._chunk_s),
            end_s=self._record.end_s if self.ended else now_s,
            http_status=self.http_status,
            text="".join(self._texts),
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            completion_tokens=_count(self._usage.get("completion_tokens")),
            tokens_per_forward=_positive(self._usage.get("tokens_per_forward")),
            retry_after_s=self._retry_after_s,
        )

    def _keep_text(self, message: object) -> None:
        if isinstance(message, dict) and isinstance(content := message.get("content"), str):
            self._texts.append(content)

    def _completion(self, text: str, now_s: float) -> list[dict[str, Any]]:
        """Return the choices of a completion or an event, and store its usage and error, if any."""
        try:
            completion = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(completion, dict):
            raise ValueError(f"it is not a JSON object: {text[:60]!r}")
        if completion.get("error"):
            self.end(RequestOutcome.ERROR_EVENT, now_s, _message(completion))
        if isinstance(completion.get("usage"), dict):
            self._usage = completion["usage"]
        choices = completion.get("choices")
        return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _reason(status: int, body: str) -> str:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = body
    return f"HTTP {status}: {_message(answer) if isinstance(answer, dict) else body.strip()}"


def _message(answer: dict[str, Any]) -> str:
    """Return the message of an error in OpenAI's format, or the whole answer in any other format."""
    error = answer.get("error", answer)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def one_line(text: str | None) -> str | None:
    """Shorten a server's text to one printable line."""
    line = " ".join((text or "").split())[:ERROR_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else "?" for character in line) or None


def _seconds(header: str | None) -> float | None:
    """Return a Retry-After in seconds, or None for a date, because a date depends on the server's clock."""
    return float(header) if header and header.isascii() and header.isdigit() else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKENS_MAX else None


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value is not True and 0 < value < TOKENS_MAX else None
