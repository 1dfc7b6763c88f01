"""Rows as people have them: a prompt or a conversation, perhaps an id, options, and columns of their own.

The output has a record for each sequence: the answer, and the row's own columns. A prompt is never truncated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from reprlib import repr as shortened
from typing import Any

from mars_ray.batch.rows.columns import OURS
from mars_ray.batch.rows.json_rows import parse_row
from mars_ray.batch.rows.row_format import JsonRecord, ParsedRow
from mars_ray.batch.rows.row_ids import id_in, own_id
from mars_ray.batch.rows.row_options import decode_of, sampling_of
from mars_ray.batch.rows.template import PromptTemplate
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.records import Message, parse_messages
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import BadRecordError

plain_id = partial(own_id, column="id")
"""Return the id that a row has, if any."""

LEAST_LOGPROB = -9999.0
"""The least logprob that is written: JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFormatSettings:
    """How rows become requests, where they say nothing themselves."""

    sampling: SamplingParams
    decode: DecodeParams
    template: str | None = None
    """Jinja, over the columns of a row; what it writes is the message of the user."""
    prompt_column: str | None = None
    """Holds text or a conversation; None looks for `messages`, then `prompt`."""
    trace: bool = False
    """Keep the ids of the tokens, and how many of them each forward gave."""


class PlainFormat:
    """The format of plain rows, see `RowFormat`. Raises `ConfigError` for a template that is none."""

    def __init__(self, settings: PlainFormatSettings, encoder: ChatEncoder) -> None:
        self._settings, self._encoder = settings, encoder
        self._template = None if settings.template is None else PromptTemplate(settings.template)

    def parse(self, id: str, raw: bytes) -> ParsedRow:
        """Return the row. Raises `BadRecordError` or `RequestError` with the reason."""
        columns = parse_row(raw)
        id_in(columns, "id")
        for name in columns:
            if name not in ("id", _kept(name)) and _kept(name) in columns:
                raise BadRecordError(f"it has both {name!r} and {_kept(name)!r}; rename one, the output needs the name")
        messages = self._messages(columns)
        prompt = tuple(self._encoder.prompt(messages))
        if not prompt:
            raise BadRecordError("the chat template renders it to nothing")
        request = Request(
            id=id,
            prompt=prompt,
            sampling=sampling_of(id, columns, self._settings.sampling),
            decode=decode_of(columns, self._settings.decode),
        )
        return ParsedRow(id=id, request=request, prompt_text=_last_question(messages), columns=columns)

    def output_records(self, row: ParsedRow, answers: Sequence[Chunk]) -> list[JsonRecord]:
        """Return a record for each sequence."""
        own = {_kept(name): value for name, value in row.columns.items() if name != "id"}
        if own.get("input_prompt") in (None, row.prompt_text):
            own.pop("input_prompt", None)
        logprobs = row.request.sampling.logprobs is not None
        return [
            {"id": row.id, "sample": sample, "prompt": row.prompt_text}
            | _outcome(answer)
            | ({"logprobs": _logprobs(answer)} if logprobs else {})
            | (
                {"token_ids": list(answer.tokens), "accepted": list(answer.accepted_lengths)}
                if self._settings.trace
                else {}
            )
            | own
            for sample, answer in enumerate(answers)
        ]

    def error_record(self, id: str, raw: bytes, error: Exception) -> JsonRecord:
        """Return id, reason and the row as it came, what is not UTF-8 in it replaced."""
        return {"id": id, "reason": str(error), "row": raw.decode(errors="replace")}

    def _messages(self, columns: JsonRecord) -> tuple[Message, ...]:
        if self._template is not None:
            messages = _question(self._template.fill(columns))
        else:
            messages = _conversation(columns, self._settings.prompt_column)
        if messages[-1]["role"] == "assistant":
            raise BadRecordError("its last message is the assistant's: there is nothing left to answer")
        if not messages[-1]["content"].strip():
            raise BadRecordError("its prompt is empty")
        return messages


def _conversation(columns: JsonRecord, column: str | None) -> tuple[Message, ...]:
    wanted = ("messages", "prompt") if column is None else (column,)
    name = next((name for name in wanted if columns.get(name) is not None), None)
    if name is None:
        missing = "neither 'prompt' nor 'messages'" if column is None else f"no {column!r}"
        raise BadRecordError(f"it has {missing}, only {shortened(sorted(columns))}", missing=wanted)
    value = columns[name]
    if name == "messages" or isinstance(value, list):
        return parse_messages(value)
    if not isinstance(value, str):
        raise BadRecordError(f"{name!r} must be text, not {type(value).__name__} {shortened(value)}")
    return _question(value)


def _question(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _last_question(messages: tuple[Message, ...]) -> str:
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return asked[-1] if asked else messages[-1]["content"]


def _kept(name: str) -> str:
    """Return the name that a column of a row has in the output."""
    return f"input_{name}" if name in OURS else name


def _outcome(answer: Chunk) -> JsonRecord:
    assert answer.finished is not None
    tokens = answer.finished.tokens
    forwards = answer.finished.forwards
    return {
        "text": answer.text,
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards if forwards else 0.0,
        "threshold": answer.threshold,
        "finish_reason": answer.finished.reason,
    }


def _logprobs(answer: Chunk) -> list[dict[str, Any]]:
    return [
        {
            "token": token,
            "logprob": max(entry.chosen, LEAST_LOGPROB),
            "top": [[other, max(logprob, LEAST_LOGPROB)] for other, logprob in entry.top],
        }
        for token, entry in zip(answer.tokens, answer.logprobs, strict=True)
    ]
