"""Tools and calls as plain text, for models whose chat template renders neither.

In:    messages for a chat template, tools, and the format in which calls are to be written.
Out:   messages with text alone: the tools in a system message, calls and their results in the format's words.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mars_ray.chat.call_format import CallFormat

TemplateMessage = dict[str, Any]
"""A message as chat templates read it: `role`, `content` and perhaps `tool_calls`, whose arguments are objects."""


def written_calls(call_format: CallFormat, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls in the text of a format. Each call is a name and its arguments."""
    texts = [
        call_format.head + name + call_format.middle + _arguments(call_format, arguments) + call_format.tail
        for name, arguments in calls
    ]
    return call_format.begin + call_format.separator.join(texts) + call_format.end


def generic_messages(
    messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]], call_format: CallFormat
) -> list[TemplateMessage]:
    """Return the conversation with tools, calls and results written as text."""
    texts: list[TemplateMessage] = []
    for message in (_as_text(message, call_format) for message in messages):
        # A result is a message of the user here, and many templates refuse two messages of one role in a row.
        if texts and message["role"] == texts[-1]["role"] == "user":
            texts[-1] = texts[-1] | {"content": f"{texts[-1]['content']}\n\n{message['content']}"}
        else:
            texts.append(message)
    if not tools:
        return texts
    example = written_calls(call_format, [("NAME", {"ARGUMENT": "VALUE"})])
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    system = f"You may call these functions:\n{described}\nTo call a function, write:\n{example}"
    if texts[0]["role"] == "system":
        return [texts[0] | {"content": f"{texts[0]['content']}\n\n{system}"}, *texts[1:]]
    return [{"role": "system", "content": system}, *texts]


def _as_text(message: TemplateMessage, call_format: CallFormat) -> TemplateMessage:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        written = written_calls(
            call_format, ((call["function"]["name"], call["function"]["arguments"]) for call in calls)
        )
        return {"role": "assistant", "content": "\n".join(filter(None, (message["content"], written)))}
    return message


def _arguments(call_format: CallFormat, arguments: Mapping[str, Any]) -> str:
    if call_format.name != "pythonic":
        return json.dumps(arguments, ensure_ascii=False)
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
