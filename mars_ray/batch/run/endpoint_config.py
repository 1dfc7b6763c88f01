"""A stage that sends its rows to an endpoint that runs, plain Python: what it asks there, and what came of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from openai.types.chat.chat_completion import ChatCompletion

from mars_ray.batch.rows.row_options import asked_in_sampling
from mars_ray.batch.rows.row_result import RowResult, as_json
from mars_ray.errors import BadRecordError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointProcessorConfig:
    """A stage that starts no engine. Give `url` or `app`.

    Requests are of OpenAI's `service_tier: flex`: one of ours serves them when other callers leave room. What it
    refuses for now is sent again after as long as it says.
    """

    url: str | None = None
    """Base URL of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."""
    app: str | None = None
    """Name of a Serve application on this cluster, made by `build_openai_app` or `build_deployment`."""
    model: str | None = None
    """What the endpoint calls the model; None takes the first it lists."""
    api_key: str = field(default="none", repr=False)
    threshold: float | None = None
    """Confidence that a token ahead needs, for rows that name none; None leaves it to the endpoint."""
    mode: Literal["ar", "threshold", "exact"] | None = None
    """The mode of rows that name none; None leaves it to the endpoint."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of rows that say nothing themselves, such as `max_tokens`."""
    concurrency: int = 32
    """Requests on their way at a time."""
    batch_size: int = 64
    """Rows of a block. It leaves the stage when its last row is done."""
    should_continue_on_error: bool = False
    """A row without an answer says why in the column `error`, and passes `postprocess` by; else it ends the job."""

    def check(self) -> None:
        """Raise a `ConfigError` for what cannot be."""
        if (self.url is None) == (self.app is None):
            raise ConfigError("give url or app: where the endpoint is.")
        if self.concurrency < 1 or self.batch_size < 1:
            raise ConfigError(
                f"concurrency is {self.concurrency} and batch_size {self.batch_size}; both must be at least 1."
            )


def body_of(raw: bytes, config: EndpointProcessorConfig) -> dict[str, Any]:
    """Return the body that asks what a row asks, without the name of the model.

    Raises `BadRecordError`, and `RequestError` where `sampling` names what is no parameter of sampling.
    """
    asked = json.loads(raw)
    messages = asked.get("messages")
    if messages is None:
        if asked.get("prompt") is None:
            raise BadRecordError("it has neither 'prompt' nor 'messages'")
        messages = [{"role": "user", "content": asked["prompt"]}]
    sampling = {**config.sampling, **asked_in_sampling(asked.get("sampling"))}
    if (schema := sampling.pop("schema", None)) is not None:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        sampling["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    decode = {name: asked.get(name, getattr(config, name)) for name in ("threshold", "mode")}
    fields = {name: value for name, value in (sampling | decode).items() if value is not None}
    return {"messages": messages, "service_tier": "flex", **fields}


def result_of(key: bytes, answer: ChatCompletion) -> RowResult:
    """Return what became of a row. Tokens of several answers are not told apart by an endpoint."""
    usage, alone = answer.usage, len(answer.choices) == 1
    figures = {
        "tokens": usage.completion_tokens if usage and alone else None,
        "tokens_per_forward": getattr(usage, "tokens_per_forward", None),
        "threshold": getattr(usage, "threshold_low", None),
    }
    records = [
        {"sample": each.index, "text": each.message.content or "", "finish_reason": each.finish_reason} | figures
        for each in answer.choices
    ]
    return RowResult(key=key, records=tuple(map(as_json, records)))


def refusal_of(key: bytes, reason: str) -> RowResult:
    """Return that a row has no answer, and why."""
    return RowResult(key=key, error=as_json({"reason": reason}), reason=reason)
