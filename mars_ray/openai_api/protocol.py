"""The bodies of requests as pydantic models: OpenAI's fields under OpenAI's names, and ours.

In:    parsed JSON.
Out:   a checked request; every field in it is acted upon, or cannot change the answer.
Never: ignores a field that would change the answer; such a field is refused by name.

Names and meanings: OpenAI API reference, as the types of the `openai` package spell it; `top_k`, `min_p`,
`repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids` as vLLM extends it. `threshold`, `threshold_floor`,
`mode` and `block` are ours.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mars_ray.engine.mode import Mode
from mars_ray.openai_api.api_error import ApiError

IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
    )
)
"""Fields that are accepted without effect: they say who asks, what is kept or billed, or what may make it cheaper."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that are not supported, with the values that are accepted because they ask for nothing; null always is."""

NO_TEXT = ("tool_calls", "function_call", "audio")
"""What an assistant's message may hold beside text; accepted when null or empty, because it then says nothing."""


class RequestBody(BaseModel):
    """A JSON object with known fields only. Types are not converted: "5" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(RequestBody):
    """What a stream holds, and how it is cut into chunks."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's option: with `include_usage`, every chunk says what was used so far."""
    include_obfuscation: bool = False
    """Accepted: padding against an observer of the network, which the answer does not depend on."""
    single_tokens: bool = False
    """Our option: one chunk for each token instead of one for each step."""


class TextPart(RequestBody):
    """A part of a message's content: text."""

    type: Literal["text"]
    text: str


class _BaseMessage(RequestBody):
    """One message of a conversation."""

    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_content(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("role") == "assistant":
            value = _text_only(value)
        parts = value.get("content")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ApiError.bad_request(f"content of type {kind[:40]!r} is not supported; only text is.", "messages")
        return {key: item for key, item in value.items() if item is not None}


Text = str | Annotated[list[TextPart], Field(min_length=1)]


class InputMessage(_BaseMessage):
    """A message to the assistant."""

    role: Literal["developer", "system", "user"]
    content: Text


class AssistantMessage(_BaseMessage):
    """A message of the assistant. Its content may be null: OpenAI's answers have that, and clients send them back."""

    role: Literal["assistant"]
    content: Text | None = None


Message = Annotated[InputMessage | AssistantMessage, Field(discriminator="role")]


def text_of(message: Message) -> str:
    """Return the content as one text."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(part.text for part in message.content)


def _text_only(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with nothing but text; the text of a refusal counts as its content."""
    for name in NO_TEXT:
        if message.get(name):
            raise ApiError.bad_request(f"messages with {name} are not supported.", "messages")
    # Annotations point into the text, which stands by itself.
    kept = {key: item for key, item in message.items() if key not in (*NO_TEXT, "annotations", "refusal")}
    if isinstance(parts := kept.get("content"), list):
        kept["content"] = [_refusal_as_text(part) for part in parts]
    if (refusal := message.get("refusal")) is not None:
        if kept.get("content") is not None:
            raise ApiError.bad_request("a message has either content or refusal, not both.", "messages")
        kept["content"] = refusal
    return kept


def _refusal_as_text(part: Any) -> Any:
    if isinstance(part, dict) and part.keys() == {"type", "refusal"} and part["type"] == "refusal":
        return {"type": "text", "text": part["refusal"]}
    return part


class TextFormat(RequestBody):
    """Answer with any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    """Answer with a JSON object of any kind."""

    type: Literal["json_object"]


class JsonSchema(RequestBody):
    """A JSON schema and its name. The answer always holds to it, `strict` or not."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(RequestBody):
    """Answer with JSON that holds to a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


Positive = Annotated[int, Field(ge=1)]


class GenerateRequest(RequestBody):
    """The fields that chat and completion requests share. Limits, and what depends on the model, `translate` checks."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Positive | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Positive = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] = (
        TextFormat(type="text")
    )
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Confidence that a token ahead needs, for this request alone."""
    threshold_floor: Annotated[float, Field(ge=0, le=1)] | None = None
    """Follow the threshold of the server, but not below this."""
    mode: Literal["ar", "threshold", "exact"] | None = None
    service_tier: str | None = None
    """OpenAI's `flex` may wait until others leave room: it is of the class `batch`, where the operator has one."""
    block: Annotated[int, Field(ge=1, le=64)] | None = None
    """Tokens proposed per forward at most; without it the engine chooses."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, value: Any) -> Any:
        """Drop nulls and ignored fields; refuse fields that are not supported."""
        if not isinstance(value, dict):
            return value
        kept = {name: item for name, item in value.items() if item is not None and name not in IGNORED}
        for name, neutral in NEUTRAL.items():
            if name in kept and kept.pop(name) not in neutral:
                raise ApiError.bad_request(
                    f"{name} is not supported by this server; leave it out.", name, "unsupported_parameter"
                )
        return kept

    @property
    def decode_mode(self) -> Mode | None:
        """The mode asked for."""
        return None if self.mode is None else Mode(self.mode)


class ChatCompletionRequest(GenerateRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0


class CompletionRequest(GenerateRequest):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def texts(self) -> list[str]:
        """The prompts given as text."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [each for each in self.prompt if isinstance(each, str)]

    @property
    def ids(self) -> list[list[int]]:
        """The prompts given as token ids."""
        if self.prompt and isinstance(self.prompt[0], int):
            return [[each for each in self.prompt if isinstance(each, int)]]
        return [each for each in self.prompt if isinstance(each, list)]


class TokenizeRequest(RequestBody):
    """Body of `/tokenize`: a text, or a conversation that goes through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class TokenizeResponse(BaseModel):
    """Response of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(RequestBody):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    """Response of `/detokenize`."""

    prompt: str
