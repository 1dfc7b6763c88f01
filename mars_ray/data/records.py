"""Read training records: conversations with at least one assistant turn, in the forms that data sets have.

In:    JSON objects with `messages`, `conversations` as in ShareGPT, `prompt` and its answer as text or as messages, or
       `instruction`, `input` and `output` as in Alpaca; perhaps with `tools`.
Out:   checked messages and tools, as OpenAI's chat API takes them.
Never: leaves out a part of a conversation that a model would see, because it would learn incomplete answers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

from mars_ray.chat.conversation import PlainMessage, ToolDefinition, read_arguments, read_messages, read_tools
from mars_ray.chat.nesting import LEVELS, is_nested_too_deeply
from mars_ray.chat.unicode_text import refuse_lone_surrogates
from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import BadRecordError, RequestError

Message = PlainMessage
"""A message in the form of OpenAI's chat API, whose content is one text."""

JSON = json.JSONDecoder()
ANSWERS = ("response", "completion")
"""Columns with the answer to `prompt`."""
SHARE_GPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles by their names in ShareGPT's `from`, as in data sets, LLaMA-Factory and axolotl."""


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation from whose assistant turns a model learns."""

    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    """Functions that the chat template describes."""


def parse_record(raw: bytes) -> Record:
    """Parse one record. Raises `BadRecordError` with the reason if it is invalid."""
    # In parquet every record has every column, so null means that a field is absent.
    fields = {name: value for name, value in parse_object(raw).items() if value is not None}
    try:
        name, messages = _raw_messages(fields)
        _refuse_unlearnt(messages)
        checked = read_messages(messages, name, answered=False)
        tools = [read_tools(value, key) for key in ("tools", "functions") if (value := json_value(fields.get(key)))]
        if len(tools) > 1:
            raise BadRecordError("it has both 'tools' and 'functions'; give one")
    except RequestError as error:
        raise BadRecordError(str(error).removesuffix(".")) from error
    answers = [message for message in checked if message["role"] == "assistant"]
    for call in (call for answer in answers for call in answer.get("tool_calls", ())):
        if read_arguments(call["function"]["arguments"]) is None:
            raise BadRecordError(f"the arguments of the call {call['id'][:NAME_CHARS]!r} are not a JSON object")
    if not any(message["content"].strip() or message.get("tool_calls") for message in answers):
        raise BadRecordError("it has no response: there is nothing to learn from it")
    return Record(checked, tuple(tools[0]) if tools else ())


def parse_object(raw: bytes, decoder: json.JSONDecoder = JSON) -> dict[str, Any]:
    """Parse the UTF-8 JSON text of an object, with or without a byte-order mark. Raises `BadRecordError`."""
    try:
        # Decode here, because json.loads would also accept UTF-16 and lone surrogates.
        fields = decoder.decode(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise BadRecordError(f"it is not JSON ({error}): {raw[:60]!r}") from None
    if not isinstance(fields, dict):
        raise BadRecordError(f"it is not a JSON object but {raw[:60]!r}")
    if is_nested_too_deeply(raw, fields):
        raise BadRecordError(f"it is nested more than {LEVELS} levels deep: {raw[:60]!r}")
    return fields


def json_value(value: Any) -> Any:
    """Return the value of a JSON text, which tables hold where a column of lists does not fit. Return any other value,
    and text that is no JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def turns_of(fields: Mapping[str, Any], name: str, role: str) -> list[Any]:
    """Return the messages in a column, which holds a list of them or one text. Raises `BadRecordError`."""
    value = fields[name]
    return value if isinstance(value, list) else [{"role": role, "content": _text(fields, name)}]


def _refuse_unlearnt(messages: Any) -> None:
    """Raise `BadRecordError` for an answer that should not be learnt, as OpenAI's fine-tuning files mark it."""
    turns = [turn for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    if any(turn.get("role") == "assistant" and turn.get("weight") in (0, False) for turn in turns):
        raise BadRecordError("it has an answer of weight 0, but all answers of a record are learnt")


def _raw_messages(fields: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the messages of a record before they are checked, and the name of their column."""
    if "messages" in fields:
        return "messages", _with_system(fields, json_value(fields["messages"]))
    for name in ("conversations", "conversation"):
        if name in fields:
            return name, _with_system(fields, _from_share_gpt(json_value(fields[name]), name))
    if "prompt" in fields:
        turns = [*turns_of(fields, "prompt", "user"), *turns_of(fields, _answer(fields), "assistant")]
        return "messages", _with_system(fields, turns)
    if "instruction" in fields and "output" in fields:
        if fields.get("history"):
            raise BadRecordError("it has 'history', which is not read; write all turns as 'messages'")
        parts = [_text(fields, name) for name in ("instruction", "input") if name in fields]
        question = "\n\n".join(filter(None, parts))
        turns = [{"role": "user", "content": question}, *turns_of(fields, "output", "assistant")]
        return "messages", _with_system(fields, turns)
    raise BadRecordError(f"it has neither 'messages' nor 'prompt' and 'response', only {shortened(sorted(fields))}")


def _answer(fields: Mapping[str, Any]) -> str:
    name = next((name for name in ANSWERS if name in fields), None)
    if name is None:
        raise BadRecordError("it has no 'response' or 'completion' to its 'prompt'")
    return name


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise BadRecordError(f"{name!r} must be text, not {type(value).__name__} {shortened(value)}")
    refuse_lone_surrogates({name: value})
    return value


def _with_system(fields: Mapping[str, Any], turns: Any) -> Any:
    """Return turns after the message in the column `system` or `system_prompt`, unless they begin with it."""
    name = next((name for name in ("system", "system_prompt") if fields.get(name)), None)
    if not isinstance(turns, list) or name is None:
        return turns
    system = {"role": "system", "content": _text(fields, name)}
    return turns if turns[:1] == [system] else [system, *turns]


def _from_share_gpt(turns: Any, name: str) -> Any:
    """Return turns with `from` and `value` as messages, and anything else as it is."""
    if not isinstance(turns, list):
        return turns
    return [_share_gpt_message(turn, f"{name}.{n}") if _is_share_gpt(turn) else turn for n, turn in enumerate(turns)]


def _is_share_gpt(turn: Any) -> bool:
    return isinstance(turn, dict) and "from" in turn and "role" not in turn


def _share_gpt_message(turn: dict[str, Any], name: str) -> dict[str, Any]:
    speaker, value = turn["from"], turn.get("value")
    if speaker not in list(SHARE_GPT_ROLES):
        raise BadRecordError(f"{name} is from {shortened(speaker)}; the known ones are {', '.join(SHARE_GPT_ROLES)}")
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    message = {**rest, "role": SHARE_GPT_ROLES[speaker], "content": value}
    if speaker != "function_call":
        return message
    calls = json_value(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadRecordError(f"{name} is a function_call, whose value must be JSON with name and arguments")
    functions = ({"name": call["name"], "arguments": call.get("arguments", {})} for call in calls)
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return message | {"content": None, "tool_calls": tool_calls}
