"""Plain row format: each row has a prompt or a conversation, and optionally an id, options and other columns.

The output has one record per answer, which includes the row's other columns. Prompts are never truncated.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from mars_ray.batch.rows.columns import kept_name
from mars_ray.batch.rows.row_format import JsonRecord, ParsedRow, parse_row
from mars_ray.batch.rows.row_ids import RowId, id_in
from mars_ray.batch.rows.row_options import OPTIONS, decode_of, present, sampling_of
from mars_ray.batch.rows.template import PromptTemplate
from mars_ray.chat.conversation import last_user_text
from mars_ray.data.prompt_file import Conversation, prompt_of
from mars_ray.data.records import json_value
from mars_ray.engine.chunk import Chunk, TokenLogprobs
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import BadRecordError
from mars_ray.model.folder import ResolvedModel
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.chat_prompts import TOOL_FIELDS, ChatPrompts, sampling_with_plan
from mars_ray.openai_api.tools import check_choice_without_tools

READ_COLUMNS = frozenset((*OPTIONS, *TOOL_FIELDS, "id", "messages"))
"""Columns with a meaning of their own, except `prompt`."""

LEAST_LOGPROB = -9999.0
"""Lowest logprob that is written, because JSON cannot represent negative infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFormatSettings:
    """Settings of the format, and default options for rows that do not set them."""

    id_column: ClassVar[str] = "id"
    sampling: SamplingParams
    decode: DecodeParams
    template: str | None = None
    """Jinja template for the user's message. Its variables are the columns of a row."""
    prompt_column: str | None = None
    """Column that holds a text or a conversation. None means `messages`, or `prompt` in rows without `messages`."""
    trace: bool = False
    """Also write the token ids of each answer, and the number of tokens that each forward accepted."""

    def open(self, model: ResolvedModel) -> "PlainFormat":
        """Return the format with the tokenizer of a model; see `RowFormatSettings`."""
        return PlainFormat(self, model.load_tokenizer())


class PlainFormat:
    """Plain row format; see `RowFormat`. Raises `ConfigError` for an invalid template."""

    def __init__(self, settings: PlainFormatSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._settings = settings
        self._chat_prompts = ChatPrompts(tokenizer)
        self._template = None if settings.template is None else PromptTemplate(settings.template)

    def parse(self, id: str, raw: bytes) -> ParsedRow:
        """Parse a row. Raises `BadRecordError` or `RequestError` with the reason."""
        columns = parse_row(raw)
        id_in(columns, "id")
        sampling = sampling_of(id, columns, self._settings.sampling)
        decode = decode_of(columns, self._settings.decode)
        messages = self._messages(columns, answered=sampling.max_tokens > 0)
        tools = present(columns, *TOOL_FIELDS)
        tools["tools"] = json_value(tools.get("tools"))
        plan = None
        if tools["tools"]:
            rendered = self._chat_prompts.with_tools(messages, tools)
            plan = rendered.plan
            sampling = sampling_with_plan(sampling, plan)
            prompt = tuple(rendered.ids)
            prompt_text = rendered.text
        else:
            check_choice_without_tools(tools.get("tool_choice"))
            prompt = self._prompt(messages)
            prompt_text = last_user_text(messages)
        if not prompt:
            raise BadRecordError("the chat template renders it as an empty prompt")
        request = Request(id=id, prompt=prompt, sampling=sampling, decode=decode)
        return ParsedRow(id=id, request=request, prompt_text=prompt_text, columns=columns, plan=plan)

    def output_records(self, row: ParsedRow, answers: Sequence[Chunk]) -> list[JsonRecord]:
        """Return one record for each answer."""
        input_columns = {kept_name(name): value for name, value in row.columns.items() if name != "id"}
        if input_columns.get("input_prompt") in (None, row.prompt_text):
            input_columns.pop("input_prompt", None)
        logprobs = row.request.sampling.logprobs is not None
        scored = row.request.sampling.prompt_logprobs is not None
        return [
            {"id": row.id, "sample": sample, "prompt": row.prompt_text}
            | _outcome(answer)
            | ({} if row.plan is None else _parted(row.plan, answer.text))
            | ({"logprobs": _logprobs(answer.tokens, answer.logprobs)} if logprobs else {})
            | ({"prompt_logprobs": _prompt_logprobs(row, answers[0]) if sample == 0 else None} if scored else {})
            | (
                {"token_ids": list(answer.tokens), "accepted": list(answer.accepted_lengths)}
                if self._settings.trace
                else {}
            )
            | input_columns
            for sample, answer in enumerate(answers)
        ]

    def error_record(self, row_id: RowId, raw: bytes, error: Exception) -> JsonRecord:
        """Return the id, the reason and the text of a row, with invalid UTF-8 replaced."""
        return {"id": row_id.id, "reason": str(error), "row": raw.decode(errors="replace")}

    def _messages(self, columns: JsonRecord, *, answered: bool) -> Conversation:
        if self._template is None:
            return prompt_of(columns, self._settings.prompt_column, answered=answered)
        return prompt_of({"prompt": self._template.fill(columns)})

    def _prompt(self, messages: Conversation) -> tuple[int, ...]:
        """Return the tokens of a conversation, up to the beginning of the answer, or whole if it is only scored."""
        encoder = self._chat_prompts.encoder
        scored = messages[-1]["role"] == "assistant"
        return tuple(encoder.ids(encoder.whole_text(messages)) if scored else encoder.prompt(messages))


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


def _parted(plan: AnswerPlan, text: str) -> JsonRecord:
    parts = asdict(plan.parted(text))
    return {"text": parts.pop("content"), **parts}


def _prompt_logprobs(row: ParsedRow, answer: Chunk) -> list[dict[str, Any]]:
    """Return an entry for each token of the prompt; the first token has no log-probability."""
    first, *tokens = row.request.prompt
    return [{"token": first, "logprob": None, "top": []}, *_logprobs(tokens, answer.prompt_logprobs)]


def _logprobs(tokens: Sequence[int], entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "token": token,
            "logprob": max(entry.chosen, LEAST_LOGPROB),
            "top": [[candidate, max(logprob, LEAST_LOGPROB)] for candidate, logprob in entry.top],
        }
        for token, entry in zip(tokens, entries, strict=True)
    ]
