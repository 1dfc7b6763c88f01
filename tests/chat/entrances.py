"""Each way for a conversation into mars-ray: what it makes of messages, or the words with which it refuses them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from pydantic import ValidationError
from upath import UPath

from mars_ray.batch.rows.openai_format import CHAT, OpenAIBatchFormat, OpenAIFormatSettings
from mars_ray.batch.rows.plain_format import PlainFormat, PlainFormatSettings
from mars_ray.batch.rows.row_format import RowFormat
from mars_ray.batch.rows.stage_rows import rows_to_answer, with_requests
from mars_ray.chat.conversation import plain_messages, template_text
from mars_ray.chat.validation_errors import validation_error
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import read_prompts
from mars_ray.data.records import parse_record
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.errors import InputError
from mars_ray.evaluation.task_files import read_references
from mars_ray.llm.requests import as_conversation, encode_conversations
from mars_ray.model.folder import open_model
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.tools import conversation

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWER = {"role": "assistant", "content": "So."}

Entrance = Callable[[Any], tuple[int, ...]]
"""Returns the tokens of a prompt. Raises a typed error."""


@cache
def encoder() -> ChatEncoder:
    return ChatEncoder(_tokenizer())


@cache
def _tokenizer() -> Any:
    return open_model("bundled").load_tokenizer()


@cache
def _plain() -> PlainFormat:
    return PlainFormat(PlainFormatSettings(sampling=SamplingParams(), decode=DecodeParams()), _tokenizer())


@cache
def _batch_file() -> OpenAIBatchFormat:
    return OpenAIBatchFormat(OpenAIFormatSettings(model_name="bundled", decode=DecodeParams()), _tokenizer(), 2048)


def _row(row_format: RowFormat, fields: dict[str, Any]) -> tuple[int, ...]:
    return row_format.parse("a", json.dumps(fields).encode()).request.prompt


def _stage(messages: Any) -> tuple[int, ...]:
    rows = with_requests(pa.table({"n": [1]}), lambda _row: {"messages": messages})
    [raw] = rows_to_answer(rows)["raw"].to_pylist()
    return _plain().parse("a", raw).request.prompt


def _file(read: Callable[[UPath], Any], fields: dict[str, Any]) -> tuple[int, ...]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_text(json.dumps(fields))
        return tuple(encoder().prompt(read(UPath(path))))


def _record(messages: Any) -> tuple[int, ...]:
    """A training record of the conversation and an answer, without that answer."""
    whole = [*messages, ANSWER] if isinstance(messages, list) and messages else messages
    return tuple(encoder().prompt(parse_record(json.dumps({"messages": whole}).encode()).messages[:-1]))


def _request(messages: Any) -> tuple[int, ...]:
    """A request to the endpoint, without its HTTP."""
    body = {"model": "bundled", "messages": messages}
    try:
        checked = ChatCompletionRequest.model_validate(body)
    except ValidationError as error:
        raise validation_error(error.errors(), body) from None
    talk = conversation(plain_messages(checked.messages), None, encoder().format)
    assert template_text(talk)
    return tuple(encoder().ids(encoder().prompt_text(talk.messages)))


ENTRANCES: dict[str, Entrance] = {
    "row": lambda messages: _row(_plain(), {"messages": messages}),
    "row with JSON text": lambda messages: _row(_plain(), {"messages": json.dumps(messages)}),
    "row of a batch file": lambda messages: _row(
        _batch_file(), {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m", "messages": messages}}
    ),
    "stage": _stage,
    "LLM": lambda messages: encode_conversations(_tokenizer(), [as_conversation(messages)])[0][0],
    "prompt file": lambda messages: _file(lambda path: read_prompts(path)[0], {"messages": messages}),
    "reference file": lambda messages: _file(
        lambda path: read_references(path, "exact")[0].messages, {"messages": messages, "reference": "a"}
    ),
    "training record": _record,
    "request": _request,
}
WITH_TOOLS: dict[str, Entrance] = {
    "row": lambda messages: _row(_plain(), {"messages": messages, "tools": [TOOL]}),
    "row with JSON text": lambda messages: _row(_plain(), {"messages": messages, "tools": json.dumps([TOOL])}),
    "LLM": lambda messages: encode_conversations(_tokenizer(), [as_conversation(messages)], [TOOL])[0][0],
    "row of a batch file": lambda messages: _row(
        _batch_file(),
        {
            "custom_id": "a",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "m", "messages": messages, "tools": [TOOL]},
        },
    ),
}


def outcome(entrance: Entrance, messages: Any) -> tuple[int, ...] | str:
    """Return the tokens of the prompt, or the words of the refusal without what the entrance puts around them."""
    try:
        return entrance(messages)
    except InputError as error:
        words = str(error)
    words = words.rpartition("a.jsonl, record 1: ")[2].rpartition("a.jsonl, line 1: ")[2]
    return words.removesuffix(".")
