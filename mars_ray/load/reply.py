"""What an answer says, read as it comes, after OpenAI's chat completions; no field is needed that only we send."""

import json
from collections.abc import Mapping
from typing import Any

from mars_ray.load.record import RequestOutcome, RequestRecord

DONE = "[DONE]"
ERROR_CHARACTERS_MAX = 200
TOKENS_MAX = 10**9
"""A usage beyond this is no measurement, and is left out."""


class ReplyRecorder:
    """Notes one request and its reply as it arrives; until it ends it counts as interrupted."""

    def __init__(self, number: int, scheduled_s: float | None, waited: bool, sent_s: float) -> None:
        self._number, self._scheduled_s, self._waited, self._sent_s = number, scheduled_s, waited, sent_s
        self._outcome = RequestOutcome.INTERRUPTED
        self._end_s: float | None = None
        self._error: str | None = None
        self._chunk_s: list[float] = []
        self._usage: Mapping[str, Any] = {}
        self._finished = False
        self._retry_after_s: float | None = None
        self.http_status: int | None = None
        """The HTTP status; None until an answer begins."""

    @property
    def ended(self) -> bool:
        """Whether the outcome is known."""
        return self._end_s is not None

    def end(self, outcome: RequestOutcome, now_s: float, error: str | None = None) -> None:
        """Note how it ended; the first end counts."""
        if not self.ended:
            self._outcome, self._end_s, self._error = outcome, now_s, _shortened(error)

    def refused(self, headers: Mapping[str, str], body: str, now_s: float) -> None:
        """Note an answer whose status is not one of success."""
        assert self.http_status is not None, "an answer begins before it is read"
        if self.http_status == 429:
            self._retry_after_s = _seconds(headers.get("Retry-After"))
        outcome = RequestOutcome.LIMITED if self.http_status == 429 else RequestOutcome.CLIENT_ERROR
        self.end(
            RequestOutcome.SERVER_ERROR if self.http_status >= 500 else outcome, now_s, _reason(self.http_status, body)
        )

    def event(self, data: str, now_s: float) -> None:
        """Read one event of a stream. Raises `ValueError` when it is none of a chat completion."""
        if data.strip() == DONE:
            self.end(RequestOutcome.OK, now_s)
            return
        for choice in self._completion(data, now_s):
            delta = choice.get("delta")
            # Text, a tool call, a step of reasoning: whatever it is, something came. A role alone is nothing yet.
            if isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role"):
                self._chunk_s.append(now_s)
            self._finished = self._finished or bool(choice.get("finish_reason"))

    def body(self, text: str, now_s: float) -> None:
        """Read an answer that is no stream. Raises `ValueError` when it is no chat completion."""
        if not self._completion(text, now_s) and not self.ended:
            raise ValueError("the answer has no choices")
        self.end(RequestOutcome.OK, now_s)

    def stream_ended(self, now_s: float) -> None:
        """Note that no more events come. Some servers leave the last one out; the answer is whole all the same."""
        if self._finished:
            self.end(RequestOutcome.OK, now_s)
        else:
            self.end(RequestOutcome.BROKEN, now_s, "the stream ended before the answer did")

    def record(self, now_s: float) -> RequestRecord:
        """Return what is known by now."""
        return RequestRecord(
            number=self._number,
            outcome=self._outcome,
            scheduled_s=self._scheduled_s,
            waited=self._waited,
            sent_s=self._sent_s,
            chunk_s=tuple(self._chunk_s),
            end_s=now_s if self._end_s is None else self._end_s,
            http_status=self.http_status,
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            completion_tokens=_count(self._usage.get("completion_tokens")),
            tokens_per_forward=_positive(self._usage.get("tokens_per_forward")),
            retry_after_s=self._retry_after_s,
            error=self._error,
        )

    def _completion(self, text: str, now_s: float) -> list[dict[str, Any]]:
        """Return the choices; keep usage and an error on the way."""
        try:
            found = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(found, dict):
            raise ValueError(f"it is not a JSON object: {text[:60]!r}")
        if found.get("error"):
            self.end(RequestOutcome.ERROR_EVENT, now_s, _message(found))
        if isinstance(found.get("usage"), dict):
            self._usage = found["usage"]
        choices = found.get("choices")
        return [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []


def _reason(status: int, body: str) -> str:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = body
    return f"HTTP {status}: {_message(found) if isinstance(found, dict) else body.strip()}"


def _message(found: dict[str, Any]) -> str:
    """Return the message of an error as OpenAI spells it, or all there is."""
    error = found.get("error", found)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _shortened(text: str | None) -> str | None:
    """Make text of a server fit for one line of a terminal."""
    line = " ".join((text or "").split())[:ERROR_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else "?" for character in line) or None


def _seconds(header: str | None) -> float | None:
    """Return a Retry-After in seconds; one that names a date is left out: its clock is not ours."""
    return float(header) if header and header.isascii() and header.isdigit() else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKENS_MAX else None


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value is not True and 0 < value < TOKENS_MAX else None
