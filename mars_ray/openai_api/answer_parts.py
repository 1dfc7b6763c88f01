"""The parts of an answer: content, reasoning and tool calls.

In:    parts in order, as parsers yield them.
Out:   longer parts, or one `PartedAnswer`.
Never: depends on how the parts were cut.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Text of an answer outside reasoning and calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text of the reasoning before an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a tool call: its beginning, with the name, or further text of its arguments."""

    index: int
    """Number of the call in its answer, from 0."""
    arguments: str
    """Text to append to the arguments, which are a JSON object."""
    name: str | None = None
    """Name of the function, in the first part of a call only."""


AnswerPart = ContentPart | ReasoningPart | CallPart


class PartParser(Protocol):
    """Parts one answer whose text arrives in pieces."""

    @property
    def in_arguments(self) -> bool:
        """True while the arguments of a call are incomplete."""

    def push(self, text: str) -> Iterator[AnswerPart]:
        """Take a piece of the answer and yield the parts that it completes."""

    def finish(self) -> Iterator[AnswerPart]:
        """Yield the rest of the answer. No text may be pushed afterwards."""


class PlainParser:
    """The parser of an answer that is content alone."""

    in_arguments = False

    def push(self, text: str) -> Iterator[AnswerPart]:
        """Yield the text."""
        if text:
            yield ContentPart(text)

    def finish(self) -> Iterator[AnswerPart]:
        """Yield nothing, because no text is held back."""
        yield from ()


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a tool that an answer holds."""

    name: str
    arguments: str
    """The arguments, a JSON object as text."""


@dataclass(frozen=True, slots=True)
class PartedAnswer:
    """The parts of the text of an answer."""

    content: str
    reasoning_content: str = ""
    tool_calls: list[FunctionCall] = field(default_factory=list)


def parted_answer(parts: Iterable[AnswerPart]) -> PartedAnswer:
    """Return all parts of an answer as one object."""
    parts = list(joined(parts))
    return PartedAnswer(
        content="".join(part.text for part in parts if isinstance(part, ContentPart)),
        reasoning_content="".join(part.text for part in parts if isinstance(part, ReasoningPart)),
        tool_calls=[FunctionCall(part.name or "", part.arguments) for part in parts if isinstance(part, CallPart)],
    )


def joined(parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
    """Join neighbours that belong together: texts of one kind, and a call with its arguments."""
    last: AnswerPart | None = None
    for part in parts:
        match last, part:
            case (ContentPart(before), ContentPart(text)):
                last = ContentPart(before + text)
            case (ReasoningPart(before), ReasoningPart(text)):
                last = ReasoningPart(before + text)
            case (CallPart(index, before, name), CallPart(_, text, None)):
                last = CallPart(index, before + text, name)
            case _:
                if last is not None:
                    yield last
                last = part
    if last is not None:
        yield last
