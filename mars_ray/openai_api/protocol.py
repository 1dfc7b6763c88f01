"""The bodies of requests as pydantic models: OpenAI's fields under OpenAI's names, and ours.

In:    parsed JSON.
Out:   a checked request, in which every field either takes effect or cannot change the answer.
Never: ignores a field that would change the answer; the error that refuses such a field names it.

Names and meanings are those of the OpenAI API reference, spelt as in the types of the `openai` package. `top_k`,
`min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `prompt_logprobs` and
`thinking_token_budget` are vLLM's extensions. Those of `LookaheadFields` are ours.
"""

from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from mars_ray.chat.messages import Messages
from mars_ray.chat.request_body import Items, ModelName, RequestBody, tagged_by
from mars_ray.engine.request import NUMBERS
from mars_ray.errors import RequestError
from mars_ray.openai_api.request_limits import LOGIT_BIAS_MAX, PROMPTS_MAX
from mars_ray.openai_api.strict_schema import closed_schema
from mars_ray.openai_api.tools import ToolFields

IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
    )
)
"""Fields that are accepted without effect. They concern the caller's identity, storage, billing or possible savings.
`verbosity` is a style that only models trained for it follow."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
}
"""Unsupported fields, with the values that are accepted because they request nothing. Null is always accepted."""


class StreamOptions(RequestBody):
    """Options for the contents of a stream and for how it is cut into chunks."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's option: with `include_usage`, every chunk carries the usage so far."""
    include_obfuscation: bool = False
    """Accepted without effect: padding that hides the length of chunks from network observers."""
    single_tokens: bool = False
    """Our option: one chunk per token instead of one per step."""


class TextFormat(RequestBody):
    """Format of an answer: any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    """Format of an answer: any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestBody):
    """A JSON schema and its name. The answer always conforms to the schema, whether it is `strict` or not."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Whether `additionalProperties: false` is added to every object that does not set it."""

    @property
    def enforced(self) -> dict[str, Any]:
        """The schema that the answer conforms to. Raises `RequestError` if it is strict and cannot be closed."""
        return closed_schema(self.json_schema) if self.strict else self.json_schema


class JsonSchemaFormat(RequestBody):
    """Format of an answer: JSON that conforms to a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type"), tagged_by("type")
]

Positive = Annotated[int, Field(ge=1)]


def _within_limits(name: str) -> Any:
    """Return the limits of a sampling parameter as a constraint of a field."""
    limits = NUMBERS[name]
    return Field(gt=limits.low, le=limits.high) if limits.above else Field(ge=limits.low, le=limits.high)


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Accepted without effect: a model reasons as its chat template says, and `thinking_token_budget` limits it."""


def _few_biases(biases: Any) -> Any:
    """Refuse too many entries before checking any of them, because pydantic creates one error per invalid entry."""
    if isinstance(biases, dict) and len(biases) > LOGIT_BIAS_MAX:
        raise ValueError(f"logit_bias has {len(biases)} tokens; it may have up to {LOGIT_BIAS_MAX}")
    return biases


LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_biases)]


def supported_fields(value: Any, ignored: Set[str], neutral: Mapping[str, tuple[object, ...]]) -> Any:
    """Return an object without nulls and ignored fields, and any other value as it is.

    Raises `RequestError` for fields of `neutral` whose values request something.
    """
    if not isinstance(value, dict):
        return value
    kept = {name: item for name, item in value.items() if item is not None and name not in ignored}
    refused = [name for name in value if name in neutral and name in kept and kept.pop(name) not in neutral[name]]
    if refused:
        *others, last = refused
        named = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        message = f"{named} not supported by this server; leave {'them' if others else 'it'} out."
        raise RequestError(message, param=refused[0], code="unsupported_parameter")
    return kept


class LookaheadFields(RequestBody):
    """How far an answer looks ahead. All APIs take these fields."""

    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """What a token ahead must reach to be kept, for this request only."""
    threshold_floor: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lowest threshold allowed for this request, which otherwise follows the server's threshold."""
    mode: Literal["ar", "threshold", "exact"] | None = None
    block: Annotated[int, Field(ge=1, le=64)] | None = None
    """Maximum number of tokens proposed per forward; None lets the engine choose."""

    @property
    def lookahead(self) -> dict[str, Any]:
        """The values of these fields by name."""
        return {name: getattr(self, name) for name in LookaheadFields.model_fields}


class GenerateRequest(LookaheadFields):
    """Fields that chat and completion requests share. `translate` checks limits and whatever depends on the model."""

    model: ModelName = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Positive | None = None
    """Maximum tokens of an answer. A value above the server's limit or the room in the context is lowered."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, _within_limits("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Number of most likely tokens to choose from; 0 and -1 mean all tokens."""
    min_p: Annotated[float, _within_limits("min_p")] = 0.0
    n: Positive = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Items[str] = Field([])
    stop_token_ids: Items[int] = Field([])
    ignore_eos: bool = False
    logit_bias: LogitBias = Field({})
    presence_penalty: Annotated[float, _within_limits("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, _within_limits("frequency_penalty")] = 0.0
    repetition_penalty: Annotated[float, _within_limits("repetition_penalty")] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """vLLM's field: number of most likely tokens to list at each token of the prompt, besides that token."""
    response_format: ResponseFormat = TextFormat(type="text")
    service_tier: str | None = None
    """OpenAI's `flex` lets a request wait for spare capacity: it joins the class `batch`, if the operator has defined
    one."""
    reasoning_effort: ReasoningEffort | None = None
    prompt_cache_key: str | None = None
    """Requests of a caller with the same key prefer the same engine, which has their common beginning cached. Without
    a key, those do whose conversations begin alike, up to the first message of the user."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unused_fields(cls, value: Any) -> Any:
        return supported_fields(value, IGNORED, NEUTRAL)

    @property
    def requested_tokens(self) -> int | None:
        """Maximum tokens of an answer that the request sets; None if it sets none."""
        return self.max_tokens

    @property
    def candidates(self) -> int:
        """Number of answers to generate for each prompt, of which the best `n` are returned."""
        return self.n

    @property
    def shows_logprobs(self) -> bool:
        """Whether the response has the log-probabilities of the answer."""
        return False


class ChatCompletionRequest(ToolFields, GenerateRequest):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    """vLLM's field: maximum tokens of the reasoning."""

    @property
    def requested_tokens(self) -> int | None:
        """Maximum tokens of an answer that the request sets; None if it sets none."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def shows_logprobs(self) -> bool:
        """Whether the response has the log-probabilities of the answer."""
        return self.logprobs


def _few_prompts(prompt: Any) -> Any:
    """Refuse too many prompts before checking any of them."""
    if isinstance(prompt, list) and len(prompt) > PROMPTS_MAX and not isinstance(prompt[0], int):
        raise ValueError(f"prompt has {len(prompt)} prompts; it may have up to {PROMPTS_MAX}")
    return prompt


class CompletionRequest(GenerateRequest):
    """Body of `/v1/completions`."""

    prompt: Annotated[str | Items[str] | Items[int] | Items[Items[int]], BeforeValidator(_few_prompts)]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 needs `echo` or `prompt_logprobs`."""
    echo: bool = False
    """Whether the text, and with `logprobs` the log-probabilities, begin with the prompt."""
    best_of: Positive | None = None
    """Number of answers to generate. The `n` with the highest mean log-probability of their tokens are returned."""
    suffix: str | None = None
    """Text after the answer, for models that can fill in the middle."""

    @property
    def candidates(self) -> int:
        """Number of answers to generate for each prompt, of which the best `n` are returned."""
        return self.best_of or self.n

    @property
    def shows_logprobs(self) -> bool:
        """Whether the response has the log-probabilities of the answer."""
        return self.logprobs is not None

    @property
    def scored(self) -> int | None:
        """Number of most likely tokens needed at each token of the prompt; None if the prompt is not scored."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None, 0 if self.max_tokens == 0 else None]
        return max((count for count in counts if count is not None), default=None)

    # All items of a list have the same type, so only the first is inspected: there may be half a million of them.

    @property
    def texts(self) -> list[str]:
        """The prompts given as text."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return self.prompt if self.prompt and isinstance(self.prompt[0], str) else []

    @property
    def ids(self) -> list[list[int]]:
        """The prompts given as token ids."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], str):
            return []
        return cast(list[list[int]], [self.prompt] if isinstance(self.prompt[0], int) else self.prompt)


class TokenizeRequest(RequestBody):
    """Body of `/tokenize`: a text, or a conversation to format with the chat template."""

    model: ModelName = None
    prompt: str | None = None
    messages: Messages | None = None

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

    model: ModelName = None
    tokens: Items[int]


class DetokenizeResponse(BaseModel):
    """Response of `/detokenize`."""

    prompt: str
