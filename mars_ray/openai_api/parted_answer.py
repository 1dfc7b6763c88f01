"""The parts of one answer, joined: content, reasoning and tool calls.

In:    parts in order, or the whole text of an answer and its plan.
Out:   one `PartedAnswer`.
Never: depends on how the parts were cut.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.call_parser import AnswerPart, CallPart, ContentPart, ReasoningPart


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


def joined(parts: Iterable[AnswerPart]) -> PartedAnswer:
    """Return all parts of an answer as one object."""
    content = reasoning = ""
    calls: list[FunctionCall] = []
    for part in parts:
        match part:
            case ContentPart(text):
                content += text
            case ReasoningPart(text):
                reasoning += text
            case CallPart(_, arguments, str(name)):
                calls.append(FunctionCall(name, arguments))
            case CallPart(_, arguments):
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + arguments)
    return PartedAnswer(content, reasoning, calls)


def parted_answer(plan: AnswerPlan, text: str) -> PartedAnswer:
    """Return the parts of the whole text of an answer."""
    parser = plan.parser()
    return joined([*parser.push(text), *parser.finish()])
