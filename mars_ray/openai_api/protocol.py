"""What may stand in the body of a request: OpenAI's fields under OpenAI's names, and ours.

In:    parsed JSON.
Out:   a checked request; every field in it is acted upon, or cannot change the answer.
Never: ignores a field that would change the answer. Such a one is refused by name.

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
        "service_tier",
    )
)
"""Accepted and without effect: they say who asks, what is kept or billed, or what may make it cheaper."""

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
"""Not supported, and what they may hold all the same because it asks for nothing; null always may."""


NO_TEXT = ("tool_calls", "function_call", "audio")
"""What an assistant's message of OpenAI's may hold beside text; null or empty it says nothing."""


class Body(BaseModel):
    """A JSON object without fields we do not know. Types are not converted: "5" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    """How a stream is cut."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """As vLLM has it: with `include_usage`, every chunk says what was used so far."""
    include_obfuscation: bool = False
    """Accepted: padding against an observer of the network, which the answer does not depend on."""
    single_tokens: bool = False
    """Ours: one chunk for each token instead of one for each step."""


class TextPart(Body):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class _Turn(Body):
    """One turn of a conversation."""

    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_what_is_not_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("role") == "assistant":
            value = _as_text(value)
        parts = value.get("content")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ApiError.bad_request(f"content of type {kind[:40]!r} is not supported; only text is.", "messages")
        return {key: item for key, item in value.items() if item is not None}


Text = str | Annotated[list[TextPart], Field(min_length=1)]


class Asked(_Turn):
    """What the assistant is told."""

    role: Literal["developer", "system", "user"]
    content: Text


class Said(_Turn):
    """What the assistant said. OpenAI's answers may have null there, and clients send them back."""

    role: Literal["assistant"]
    content: Text | None = None


Message = Annotated[Asked | Said, Field(discriminator="role")]


def text_of(message: Message) -> str:
    """Return the content as one text."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(part.text for part in message.content)


def _as_text(turn: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's turn with nothing but text: what it refused in is what it said."""
    for name in NO_TEXT:
        if turn.get(name):
            raise ApiError.bad_request(f"messages with {name} are not supported.", "messages")
    # Annotations point into the text, which stands by itself.
    kept = {key: item for key, item in turn.items() if key not in (*NO_TEXT, "annotations", "refusal")}
    if isinstance(parts := kept.get("content"), list):
        kept["content"] = [_refusal_as_text(part) for part in parts]
    if (refusal := turn.get("refusal")) is not None:
        if kept.get("content") is not None:
            raise ApiError.bad_request("a message has either content or refusal, not both.", "messages")
        kept["content"] = refusal
    return kept


def _refusal_as_text(part: Any) -> Any:
    if isinstance(part, dict) and part.keys() == {"type", "refusal"} and part["type"] == "refusal":
        return {"type": "text", "text": part["refusal"]}
    return part


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema and what it is called. It always holds to the letter, `strict` or not."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


Positive = Annotated[int, Field(ge=1)]


class GenerateRequest(Body):
    """The fields both kinds of completion share. What depends on the model or on limits is checked in `translate`."""

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
    """Confidence a token ahead needs, for this request alone."""
    threshold_floor: Annotated[float, Field(ge=0, le=1)] | None = None
    """Follow the threshold of the server, but not below this."""
    mode: Literal["ar", "threshold", "exact"] | None = None
    block: Annotated[int, Field(ge=1, le=64)] | None = None
    """Tokens proposed per forward at most; without it the engine chooses."""

    @model_validator(mode="before")
    @classmethod
    def _keep_what_asks_for_something(cls, value: Any) -> Any:
        """Drop nulls and what is ignored; refuse what is not supported."""
        if not isinstance(value, dict):
            return value
        asked = {name: item for name, item in value.items() if item is not None and name not in IGNORED}
        for name, neutral in NEUTRAL.items():
            if name in asked and asked.pop(name) not in neutral:
                raise ApiError.bad_request(
                    f"{name} is not supported by this server; leave it out.", name, "unsupported_parameter"
                )
        return asked

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


class TokenizeRequest(Body):
    """Body of `/tokenize`: a text, or a conversation as the model would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class TokenizeResponse(BaseModel):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    """Answer of `/detokenize`."""

    prompt: str
