"""Settings, request bodies and results of a stage that sends its rows to a running endpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from openai.types.chat.chat_completion import ChatCompletion
from openai.types.chat.chat_completion_message import ChatCompletionMessage

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.batch.rows.row_options import sampling_options
from mars_ray.batch.rows.row_tables import RowResult, as_json
from mars_ray.data.prompt_file import raw_messages
from mars_ray.data.records import json_value
from mars_ray.errors import ConfigError, RequestError
from mars_ray.openai_api.chat_prompts import TOOL_FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointProcessorConfig:
    """Settings of a stage that sends its rows to a running endpoint. Give either `url` or `app`.

    Requests are sent with OpenAI's `service_tier: flex`. A mars-ray endpoint serves them when other callers leave room.
    A refused request is sent again after the delay in its Retry-After header.
    """

    url: str | None = None
    """Base URL of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."""
    app: str | None = None
    """Name of a Serve application on this cluster, made by `build_openai_app` or `build_deployment`."""
    model: str | None = None
    """Name of the model at the endpoint. None means the first that it lists, or the main model of `app`."""
    api_key: str | None = field(default=None, repr=False)
    """Key for `url`. None for an endpoint that asks for none."""
    threshold: float | None = None
    """Threshold for rows that do not set one. None means the endpoint's default."""
    mode: Literal["ar", "threshold", "exact"] | None = None
    """Mode for rows that do not set one. None means the endpoint's default."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, such as `max_tokens`, for rows that do not set them."""
    concurrency: int = 32
    """Maximum number of requests in flight."""
    batch_size: int = 64
    """Number of rows in a block. A block leaves the stage when its last row is done."""
    should_continue_on_error: bool = False
    """If a row fails, put its error into the column `error` and skip `postprocess` for the row, instead of ending the
    job."""

    def check(self) -> None:
        """Raise a `ConfigError` if a value is out of range, or if not exactly one of `url` and `app` is set."""
        if (self.url is None) == (self.app is None):
            raise ConfigError("give either url or app, to name the endpoint.")
        if self.app is not None and self.api_key is not None:
            raise ConfigError("api_key is set, but an app asks for no key. Leave it out, or give url instead of app.")
        if self.concurrency < 1 or self.batch_size < 1:
            raise ConfigError(
                f"concurrency is {self.concurrency} and batch_size {self.batch_size}, both must be at least 1."
            )


def body_of(raw: bytes, config: EndpointProcessorConfig) -> dict[str, Any]:
    """Return the body of a row's request, without the name of the model.

    Raises `BadRecordError` for a row without a prompt, and `RequestError` for an unknown parameter in `sampling`.
    """
    row = json.loads(raw)
    _, messages = raw_messages(row)
    sampling = {**config.sampling, **sampling_options(row.get("sampling"))}
    if (schema := sampling.pop("schema", None)) is not None:
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
        except (ValueError, RecursionError):
            raise RequestError("the schema in sampling is not JSON.") from None
        sampling["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    decode = {name: getattr(config, name) if row.get(name) is None else row[name] for name in ("threshold", "mode")}
    tools = {name: row.get(name) for name in TOOL_FIELDS}
    tools["tools"] = json_value(tools["tools"])
    fields = {name: value for name, value in (sampling | decode | tools).items() if value is not None}
    return {"messages": messages, "service_tier": "flex", **fields}


def result_of(key: bytes, answer: ChatCompletion) -> RowResult:
    """Return the result of a row. For several answers, `tokens` is null, because endpoints report only the total."""
    usage = answer.usage
    figures = {
        "tokens": usage.completion_tokens if usage and len(answer.choices) == 1 else None,
        "tokens_per_forward": getattr(usage, "tokens_per_forward", None),
        "threshold": getattr(usage, "threshold_low", None),
    }
    records = [
        {"sample": choice.index, "finish_reason": choice.finish_reason} | _message(choice.message) | figures
        for choice in answer.choices
    ]
    return RowResult(key=key, records=tuple(map(as_json, records)))


def _message(message: ChatCompletionMessage) -> JsonRecord:
    calls = [call.function for call in message.tool_calls or () if call.type == "function"]
    return {
        "text": message.content or "",
        "reasoning_content": getattr(message, "reasoning_content", None),
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in calls] or None,
    }


def refusal_of(key: bytes, reason: str) -> RowResult:
    """Return the error result of a row that got no answer."""
    return RowResult(key=key, error=as_json({"reason": reason}), reason=reason)
