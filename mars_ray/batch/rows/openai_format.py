"""Row format of OpenAI batch files. Answers are the same as those of a mars-ray endpoint.

An input line is {"custom_id", "method", "url", "body"}, and the matching output line is {"id", "custom_id", "response",
"error"}. For a body that the endpoint would reject, the response holds the status and error that the endpoint would
return. For any other failure, the output line has an error and no response. Bodies follow the rules of the endpoint,
except that they may name any model or none.

Source of the format: OpenAI API reference, "The request input object" and "The request output object" of batches.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from reprlib import repr as shortened
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from mars_ray.batch.rows.row_format import JsonRecord, ParsedRow, parse_row
from mars_ray.batch.rows.row_ids import RowId, id_in
from mars_ray.batch.rows.row_options import decode_of
from mars_ray.chat.unicode_text import refuse_lone_surrogates
from mars_ray.chat.validation_errors import validation_error
from mars_ray.data.records import parse_object
from mars_ray.engine.chunk import Chunk
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.process.messages import EngineFacts
from mars_ray.engine.request import N_MAX, DecodeParams, Request
from mars_ray.engine.service_class import STANDARD
from mars_ray.errors import BadRecordError, InputError, RequestError
from mars_ray.method.metric import Metric
from mars_ray.model.folder import ResolvedModel
from mars_ray.model.token_bytes import token_bytes
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.api_error import api_error
from mars_ray.openai_api.chat_prompts import ChatPrompts
from mars_ray.openai_api.choices import answers_of
from mars_ray.openai_api.infill import InfillMarkers, infill_markers, infill_prompt
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.openai_api.prompt_scores import shown_prompt, shown_prompts
from mars_ray.openai_api.protocol import ChatCompletionRequest, CompletionRequest
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    ResponseMetadata,
)
from mars_ray.openai_api.translate import check_limits, engine_requests, lowered_max_tokens
from mars_ray.openai_api.usage import ResponseUsage

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, type[ChatCompletionRequest | CompletionRequest]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
}
FIELDS = frozenset(("custom_id", "method", "url", "body"))


def is_openai_batch(first_raw: bytes) -> bool:
    """Return whether a file with this first line is an OpenAI batch file. The line may lack one of the four fields."""
    try:
        return len(FIELDS & parse_object(first_raw).keys()) >= len(FIELDS) - 1
    except BadRecordError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIFormatSettings:
    """Settings of the format, and default options for request bodies that do not set them."""

    id_column: ClassVar[str] = "custom_id"
    model_name: str
    """Model name to write into the answers."""
    decode: DecodeParams

    def open(self, model: ResolvedModel) -> "OpenAIBatchFormat":
        """Return the format with the tokenizer of a model; see `RowFormatSettings`."""
        defaults = generation_defaults(model.folder)
        return OpenAIBatchFormat(self, model.load_tokenizer(), model.max_positions, defaults)


class OpenAIBatchFormat:
    """Row format of OpenAI batch files; see `RowFormat`.

    `positions` is the context length of the model. `default_sampling` has the model's own sampling parameters, which
    apply if a body does not set them.
    """

    def __init__(
        self,
        settings: OpenAIFormatSettings,
        tokenizer: PreTrainedTokenizerBase,
        positions: int,
        default_sampling: Mapping[str, Any] = MappingProxyType({}),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._decode = settings.decode
        self._tokenizer = tokenizer
        self._clock = clock
        self._chat_prompts = ChatPrompts(tokenizer)
        self._default_sampling = default_sampling
        self._limits = RequestLimits(output_tokens=positions, default_output_tokens=positions, n=N_MAX, prompts=1)
        # Only the context length and the token bytes are used here; the other values are placeholders.
        engine = EngineFacts(
            max_model_len=positions, vocab_size=len(tokenizer), block=1, token_bytes=token_bytes(tokenizer)
        )
        self._model = ModelInfo(name=settings.model_name, created=0, engine=engine)

    def parse(self, id: str, raw: bytes) -> ParsedRow:
        """Parse a row. Raises `BadRecordError` or `RequestError` with the reason."""
        line = parse_row(raw)
        url = line.get("url")
        if id_in(line, "custom_id") is None:
            raise BadRecordError(f"it has no 'custom_id': {raw[:60]!r}", missing=("custom_id",))
        if line.get("method") != "POST":
            raise BadRecordError(f"its 'method' is {shortened(line.get('method'))}, must be 'POST'")
        if url not in list(BODIES):
            raise BadRecordError(f"its 'url' is {shortened(url)}, must be {' or '.join(BODIES)}")
        try:
            refuse_lone_surrogates(line.get("body"))
            body = BODIES[url].model_validate(line.get("body"))
            if body.stream:
                raise RequestError("a batch file cannot stream; leave stream out.", param="stream")
            check_limits(body, self._limits)
            prompt, prompt_text, plan = self._prompt(body)
            request = self._request(id, body, prompt, plan)
            return ParsedRow(id=id, request=request, prompt_text=prompt_text, columns={"body": body}, plan=plan)
        except ValidationError as error:
            raise validation_error(error.errors(), line.get("body")) from None
        except BadRecordError as error:
            raise RequestError(str(error)) from error

    def output_records(self, row: ParsedRow, answers: Sequence[Chunk]) -> list[JsonRecord]:
        """Return the output line of a row, as a list of one record."""
        body: ChatCompletionRequest | CompletionRequest = row.columns["body"]
        chat = isinstance(body, ChatCompletionRequest)
        prompt = row.request.prompt
        usage = ResponseUsage(prompt_tokens=len(prompt), max_tokens=lowered_max_tokens(body, [row.request]))
        metadata = ResponseMetadata(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{_digest(row.id)}",
            created=int(self._clock()),
            model=self._model.name,
            token_bytes=self._model.engine.token_bytes,
        )
        for answer in answers:
            usage.add(answer)
        builder: ResponseBuilder
        if isinstance(body, ChatCompletionRequest):
            builder = ChatResponseBuilder(metadata, row.plan, shown_prompt(body, prompt))
        else:
            shown = shown_prompts(body, [prompt], metadata.bytes_of)
            builder = CompletionResponseBuilder(metadata, shown, n=body.n)
        unaudited = [replace(answer, audits=()) for answer in answers]
        response = builder.full(answers_of(unaudited, body.n, 0, logprobs=body.shows_logprobs), usage.usage())
        return [_line(row.id, row.id, _response(row.id, 200, response.model_dump(mode="json", exclude_unset=True)))]

    def error_record(self, row_id: RowId, raw: bytes, error: Exception) -> JsonRecord:  # noqa: ARG002
        """Return the line for the errors file."""
        id = row_id.id
        custom_id = id if row_id.is_own else None
        if isinstance(error, RequestError):
            api = api_error(error)
            return _line(id, custom_id, _response(id, api.status, api.body()))
        code = "invalid_request" if isinstance(error, InputError) else "processing_failed"
        return _line(id, custom_id, None, {"code": code, "message": str(error)})

    def _prompt(self, body: ChatCompletionRequest | CompletionRequest) -> tuple[list[int], str, AnswerPlan | None]:
        """Return the prompt as token ids, and as text to show in the output, and the plan of a chat answer."""
        if isinstance(body, ChatCompletionRequest):
            prompt = self._chat_prompts.render(body, self._limits)
            return prompt.ids, prompt.text, prompt.plan
        if body.texts:
            [text] = body.texts
            read = infill_prompt(self._infill, text, body.suffix) if body.suffix else text
            ids: list[int] = self._tokenizer(read)["input_ids"]
            return ids, text, None
        [ids] = body.ids
        return ids, str(ids), None

    @cached_property
    def _infill(self) -> InfillMarkers | None:
        return infill_markers(self._tokenizer.get_vocab())  # a copy of the whole vocabulary, so not once a row

    def _request(
        self, id: str, body: ChatCompletionRequest | CompletionRequest, prompt: list[int], plan: AnswerPlan | None
    ) -> Request:
        decode = decode_of({"mode": body.mode, "threshold": body.threshold}, self._decode)
        if body.threshold_floor is not None:
            decode = replace(decode, threshold=None, metric=Metric.PROBABILITY, floor=body.threshold_floor)
        [request] = engine_requests(
            body,
            [prompt],
            request_id=id,
            tenant="",
            service_class=STANDARD,
            model=self._model,
            limits=self._limits,
            default_mode=self._decode.mode,
            default_sampling=self._default_sampling,
            plan=plan,
        )
        return replace(request, decode=replace(decode, block=body.block or decode.block))


def _line(id: str, custom_id: str | None, response: JsonRecord | None, error: JsonRecord | None = None) -> JsonRecord:
    return {"id": f"batch_req_{_digest(id)}", "custom_id": custom_id, "response": response, "error": error}


def _response(id: str, status: int, body: dict[str, Any]) -> JsonRecord:
    return {"status_code": status, "request_id": f"req_{_digest(id)}", "body": body}


def _digest(id: str) -> str:
    return hashlib.blake2b(id.encode(), digest_size=12).hexdigest()
