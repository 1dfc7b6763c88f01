"""Parts of an answer as the messages and deltas of OpenAI's chat API.

In:    parts of one choice, in order.
Out:   one message, or one delta per part.
Never: depends on how the parts were cut: joined deltas equal the message.
"""

from collections.abc import Iterable

from openai.types.chat.chat_completion_chunk import (
    ChoiceDelta,
    ChoiceDeltaFunctionCall,
    ChoiceDeltaToolCall,
    ChoiceDeltaToolCallFunction,
)
from openai.types.chat.chat_completion_message import ChatCompletionMessage, FunctionCall
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)

from mars_ray.chat.conversation import call_id
from mars_ray.openai_api.answer_parts import AnswerPart, CallPart, ContentPart, ReasoningPart, joined, parted_answer
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.choices import ChoiceFinishReason


class ChoiceParts:
    """The parts of one choice. The ids of calls are made from `id`."""

    def __init__(self, plan: AnswerPlan, id: str, choice: int) -> None:
        self._plan = plan
        self._parser = plan.parser()
        self._id = id
        self._choice = choice
        self._called = False

    def push(self, text: str, finish_reason: ChoiceFinishReason | None) -> list[AnswerPart]:
        """Take a piece of the answer's text and return its parts, each joined with its equals. A finish reason ends the
        answer."""
        parts = [*self._parser.push(text), *(self._parser.finish() if finish_reason else ())]
        self._called = self._called or any(isinstance(part, CallPart) for part in parts)
        return [*joined(parts)]

    def finish_reason(self, reason: ChoiceFinishReason) -> ChoiceFinishReason:
        """Return the finish reason of the choice, which tells whether it has calls. If a stop string cuts off a call,
        the reason stays `stop`, so that clients do not run the call."""
        if not self._called or reason != "stop" or self._parser.in_arguments:
            return reason
        return "function_call" if self._legacy else "tool_calls"

    def message(self, parts: Iterable[AnswerPart]) -> ChatCompletionMessage:
        """Return the message of all parts."""
        answer = parted_answer(parts)
        calls = [Function(name=call.name, arguments=call.arguments) for call in answer.tool_calls]
        content = answer.content or (None if calls else "")
        message = ChatCompletionMessage(role="assistant", content=content, refusal=None)
        if self._plan.reasoning:
            message = message.model_copy(update={"reasoning_content": answer.reasoning_content or None})
        if calls and self._legacy:
            message.function_call = FunctionCall(name=calls[0].name, arguments=calls[0].arguments)
        elif calls:
            message.tool_calls = [
                ChatCompletionMessageFunctionToolCall(id=self._call_id(index), type="function", function=call)
                for index, call in enumerate(calls)
            ]
        return message

    def delta(self, part: AnswerPart) -> ChoiceDelta:
        """Return the delta of one part."""
        match part:
            case ContentPart(text):
                return ChoiceDelta(content=text)
            case ReasoningPart(text):
                return ChoiceDelta.construct(reasoning_content=text)
            case CallPart(_, arguments, name) if self._legacy:
                call = ChoiceDeltaFunctionCall(arguments=arguments, **({"name": name} if name else {}))
                return ChoiceDelta(function_call=call)
            case CallPart(index, arguments, str(name)):
                function = ChoiceDeltaToolCallFunction(name=name, arguments=arguments)
                opened = ChoiceDeltaToolCall(index=index, id=self._call_id(index), type="function", function=function)
                return ChoiceDelta(tool_calls=[opened])
            case CallPart(index, arguments):
                function = ChoiceDeltaToolCallFunction(arguments=arguments)
                return ChoiceDelta(tool_calls=[ChoiceDeltaToolCall(index=index, function=function)])

    @property
    def _legacy(self) -> bool:
        return self._plan.offered is not None and self._plan.offered.legacy

    def _call_id(self, index: int) -> str:
        calls = self._plan.model.calls
        return call_id(self._id, self._choice, index, short=calls is not None and calls.name == "mistral")
