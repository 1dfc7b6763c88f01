"""Part the text of an answer into content and tool calls, as it arrives.

In:    pieces of text, cut anywhere; the format of the calls; the names of the tools.
Out:   parts of the answer, whose joined texts do not depend on the cuts.
Never: loses text: whatever is no call of a known tool remains content. Only white space next to calls is dropped.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator

from mars_ray.chat.call_format import CallFormat
from mars_ray.engine.begun_marker import begun_marker
from mars_ray.openai_api.answer_parts import AnswerPart, CallPart, ContentPart
from mars_ray.openai_api.pythonic_calls import read_calls

HEADER_CHARS = 512
"""Maximum characters of a call up to its arguments for which the arguments are streamed."""

_HEADER = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class BracketScanner:
    """Finds the end of a bracketed value whose text arrives in pieces. Brackets in strings do not count."""

    def __init__(self, quotes: str = '"', depth: int = 0) -> None:
        self._quotes = quotes
        self._quote = ""
        self._escaped = False
        self._depth = depth

    def end_in(self, text: str, start: int = 0) -> int | None:
        """Return the index after the bracket that closes the value; None if the value continues."""
        for index in range(start, len(text)):
            char = text[index]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in "{[(":
                self._depth += 1
            elif char in "}])":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


class CallParser:
    """Parts the text of one answer. The joined parts are the same however the text is cut into pieces.

    The methods from `_start` on are the states. Each takes what it can from the buffer, and names the next state.
    """

    def __init__(self, call_format: CallFormat, names: Collection[str]) -> None:
        self._format = call_format
        self._names = names
        self._markers = tuple(filter(None, (call_format.marker, call_format.optional_marker)))
        self._state: Callable[[], Iterable[AnswerPart]] = self._text if call_format.marker else self._start
        self._buffer = ""
        """Text that has arrived and is not parsed yet."""
        self._raw = ""
        """Text withheld because it may be a call. It becomes content if no call follows."""
        self._scanner = BracketScanner()
        self._scanned = 0
        """Characters of the buffer that the scanner has seen."""
        self._calls = 0
        self._trimming = False
        """True after a call, until the next content begins."""

    @property
    def in_arguments(self) -> bool:
        """True while the arguments of a call are incomplete."""
        return self._state == self._arguments

    def push(self, text: str) -> Iterator[AnswerPart]:
        """Take a piece of the answer and yield the parts that it completes."""
        self._buffer += text
        while True:
            before = (self._state, len(self._buffer))
            yield from self._state()
            if before == (self._state, len(self._buffer)):
                return

    def finish(self) -> Iterator[AnswerPart]:
        """Yield the rest of the answer. No text may be pushed afterwards."""
        rest = self._raw + self._buffer
        in_call = self.in_arguments or self._state == self._tail
        closing = self._state == self._after and self._closing().startswith(self._buffer.strip())
        if not in_call and not closing:
            yield from self._content(rest, last=True)

    def _start(self) -> Iterable[AnswerPart]:
        """Before the first character that is not white space, where calls without a marker may begin."""
        stripped = self._buffer.lstrip()
        first = self._format.begin or "{"
        if stripped.startswith(first):
            self._to_list(len(self._buffer) - len(stripped) + len(self._format.begin))
        elif stripped:
            self._state = self._text
        return ()

    def _to_list(self, consumed: int) -> None:
        self._raw += self._buffer[:consumed]
        self._buffer = self._buffer[consumed:]
        self._state = self._list

    def _text(self) -> Iterator[AnswerPart]:
        positions = [(at, marker) for marker in self._markers if (at := self._buffer.find(marker)) >= 0]
        if positions:
            at, marker = min(positions)
            content = self._buffer[:at].rstrip()
            self._buffer = self._buffer[len(content) :]
            yield from self._content(content)
            self._to_list(at - len(content) + len(marker))
            return
        kept = self._buffer[: len(self._buffer) - begun_marker(self._buffer, self._markers)].rstrip()
        self._buffer = self._buffer[len(kept) :]
        yield from self._content(kept)

    def _list(self) -> Iterator[AnswerPart]:
        """After the text that announces calls."""
        stripped = self._buffer.lstrip()
        if self._format.name == "pythonic":
            self._state = self._pythonic
            self._scanner = BracketScanner("\"'", depth=1)
            self._scanned = 0
        elif stripped.startswith("{"):
            self._to_list(len(self._buffer) - len(stripped))
            self._state = self._header
            self._scanner = BracketScanner()
            self._scanned = 0
        elif stripped.startswith("[") and self._format.end and not self._raw.endswith("["):
            self._to_list(len(self._buffer) - len(stripped) + 1)
        elif stripped:
            yield from self._no_call()

    def _header(self) -> Iterator[AnswerPart]:
        """Inside a call, before its arguments."""
        header = _HEADER.match(self._buffer[:HEADER_CHARS])
        name = _text_of(header[1]) if header else None
        if header and name is not None and name in self._names:
            self._buffer = self._buffer[header.end() :]
            self._scanner = BracketScanner()
            self._state = self._arguments
            yield self._call(name, "")
            return
        end = self._scanner.end_in(self._buffer, self._scanned)
        self._scanned = len(self._buffer)
        if end is None:
            return
        call = _call_of(self._buffer[:end])
        if call is None or call[0] not in self._names:
            self._raw += self._buffer[:end]
            self._buffer = self._buffer[end:]
            yield from self._no_call()
            return
        self._buffer = self._buffer[end:]
        self._state = self._after
        yield self._call(*call)

    def _arguments(self) -> Iterator[AnswerPart]:
        end = self._scanner.end_in(self._buffer)
        arguments = self._buffer if end is None else self._buffer[:end]
        self._buffer = self._buffer[len(arguments) :]
        if arguments:
            yield CallPart(self._calls - 1, arguments)
        if end is not None:
            self._state = self._tail
            self._scanned = 0
            self._scanner = BracketScanner(depth=1)

    def _tail(self) -> Iterable[AnswerPart]:
        """After the arguments: skip the rest of the call's object, which may hold an id or lack its closing bracket."""
        stripped = self._buffer.lstrip()
        if not stripped:
            return ()
        if stripped[0] not in ",}":
            self._state = self._after
            return ()
        end = self._scanner.end_in(self._buffer, self._scanned)
        self._scanned = len(self._buffer)
        if end is not None:
            self._buffer = self._buffer[end:]
            self._state = self._after
        return ()

    def _after(self) -> Iterable[AnswerPart]:
        """After a call: skip the text that separates or ends calls."""
        stripped = self._buffer.lstrip()
        closing = self._closing()
        separator = self._format.separator.strip()
        if not stripped or (len(stripped) < len(closing) and closing.startswith(stripped)):
            return ()
        if closing and stripped.startswith(closing):
            self._buffer = stripped[len(closing) :]
            self._state = self._text
        elif not self._format.marker.startswith(separator) and stripped.startswith(separator):
            self._buffer = stripped[len(separator) :]
            self._state = self._list
        else:
            self._state = self._text
        return ()

    def _closing(self) -> str:
        """Return the text that ends a call, or the list of calls."""
        return self._format.end or self._format.tail.partition("\n")[2]

    def _pythonic(self) -> Iterator[AnswerPart]:
        """Inside a list of pythonic calls."""
        end = self._scanner.end_in(self._buffer, self._scanned)
        self._scanned = len(self._buffer)
        if end is None:
            return
        calls = read_calls(self._buffer[: end - 1])
        if not calls or any(name not in self._names for name, _ in calls):
            yield from self._no_call()
            return
        self._buffer = self._buffer[end:]
        self._state = self._text
        for name, arguments in calls:
            yield self._call(name, arguments)

    def _call(self, name: str, arguments: str) -> CallPart:
        self._calls += 1
        self._raw = ""
        self._trimming = True
        return CallPart(self._calls - 1, arguments, name)

    def _no_call(self) -> Iterator[AnswerPart]:
        """Return withheld text as content, because it is not a call."""
        self._state = self._text
        raw = self._raw
        content = raw.rstrip()
        self._raw = ""
        self._buffer = raw[len(content) :] + self._buffer
        yield from self._content(content)

    def _content(self, text: str, last: bool = False) -> Iterator[AnswerPart]:
        if self._trimming:
            text = text.lstrip()
            if last and not text:
                return
        if text:
            self._trimming = False
            yield ContentPart(text)


def _text_of(quoted: str) -> str | None:
    try:
        text: str = json.loads(quoted)
    except ValueError:
        return None
    return text


def _call_of(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a complete JSON object; None if it is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            return (name, arguments) if isinstance(json.loads(arguments), dict) else None
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        return name, "{}"
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
