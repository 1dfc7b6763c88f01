"""Part the reasoning of a model from its answer, as the text arrives.

In:    pieces of text, cut anywhere; the texts that begin and end reasoning; the parser of the answer after it.
Out:   parts of reasoning and of the answer, whose joined texts do not depend on the cuts.
Never: loses text, except the markers and the white space next to them.
"""

from collections.abc import Iterator

from mars_ray.chat.call_format import ReasoningFormat
from mars_ray.engine.begun_marker import begun_marker
from mars_ray.openai_api.answer_parts import AnswerPart, PartParser, PlainParser, ReasoningPart


class ReasoningParser:
    """Parts one answer. `begun` means that the prompt ends inside the reasoning. `answer` parts what follows it."""

    def __init__(self, form: ReasoningFormat, *, begun: bool, answer: PartParser | None = None) -> None:
        self._form = form
        self._parser = answer or PlainParser()
        self._in_reasoning = begun
        self._looking = not begun
        """True until the first text, which may be the marker that begins reasoning."""
        self._trimming = begun
        """True directly after a marker, where white space is dropped."""
        self._buffer = ""

    @property
    def in_arguments(self) -> bool:
        """True while the arguments of a call are incomplete."""
        return self._parser.in_arguments

    def push(self, text: str) -> Iterator[AnswerPart]:
        """Take a piece of the answer and yield the parts that it completes."""
        self._buffer += text
        if self._looking and not self._begin():
            return
        if self._in_reasoning:
            yield from self._reason()
        if not self._in_reasoning:
            yield from self._answer()

    def finish(self) -> Iterator[AnswerPart]:
        """Yield the text that was held back. No text may be pushed afterwards."""
        held = "" if self._trimming and self._buffer.isspace() else self._buffer
        if held and self._in_reasoning:
            yield ReasoningPart(held)
        elif held:
            yield from self._parser.push(held)
        yield from self._parser.finish()

    def _begin(self) -> bool:
        """Look for reasoning at the beginning of the answer, and return whether enough text has arrived to decide."""
        begin = self._form.begin
        stripped = self._buffer.lstrip()
        if stripped.startswith(begin):
            self._buffer = stripped[len(begin) :]
            self._in_reasoning = self._trimming = True
        elif begin.startswith(stripped):
            return False
        self._looking = False
        return True

    def _reason(self) -> Iterator[ReasoningPart]:
        if self._trimming:
            self._buffer = self._buffer.lstrip()
        end = self._form.end
        reasoning, marker, rest = self._buffer.partition(end)
        if not marker:
            reasoning = reasoning[: len(reasoning) - begun_marker(reasoning, [end])]
        reasoning = reasoning.rstrip()
        if reasoning:
            self._trimming = False
            yield ReasoningPart(reasoning)
        self._buffer = rest if marker else self._buffer[len(reasoning) :]
        if marker:
            self._in_reasoning = False
            self._trimming = True

    def _answer(self) -> Iterator[AnswerPart]:
        if self._trimming:
            self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._trimming = False
            yield from self._parser.push(self._buffer)
            self._buffer = ""
