"""Limits on one request, on one key and on this process.

Each limit is checked by the code that would pay the cost of exceeding it.
"""

from pydantic import BaseModel, Field

from mars_ray.chat.request_body import MESSAGES_MAX, TOOLS_MAX
from mars_ray.engine.request import N_MAX, STOP_CHARACTERS_MAX, STOP_STRINGS_MAX, TOP_LOGPROBS_MAX

PROMPTS_MAX = 4096
"""Maximum value of the limit `prompts`."""

LOGIT_BIAS_MAX = 4096
"""Maximum value of the limit `logit_bias`."""


class RequestLimits(BaseModel, extra="forbid", frozen=True):
    """Limits of the HTTP gateway. The engine has its own limits, which depend on the model and the memory."""

    body_bytes: int = Field(2**20, ge=1)
    """Maximum bytes of a request body. With `requests` bodies in memory at once, the defaults use up to 256 MiB."""
    header_bytes: int = Field(16 * 2**10, ge=1)
    """Maximum bytes of path, query and headers together."""
    body_seconds: float = Field(10, gt=0)
    """Maximum seconds from the end of the headers to the end of the body; slower clients are disconnected."""
    prompt_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of one prompt; None means that only the model's limit applies."""
    output_tokens: int = Field(4096, ge=1)
    """Maximum tokens of one answer. A larger `max_tokens` is lowered to it."""
    default_output_tokens: int = Field(1024, ge=1)
    """Maximum tokens of a chat answer whose request sets no `max_tokens`. A longer answer ends there with the finish
    reason "length"."""
    n: int = Field(8, ge=1, le=N_MAX)
    """Maximum answers per prompt."""
    prompts: int = Field(128, ge=1, le=PROMPTS_MAX)
    """Maximum prompts per call of /v1/completions."""
    top_logprobs: int = Field(20, ge=0, le=TOP_LOGPROBS_MAX)
    """Maximum alternatives listed per token."""
    prompt_scores: int = Field(2**15, ge=1)
    """Maximum log-probabilities of prompt tokens per request: tokens of the prompts, times one more than the tokens
    listed at each."""
    stop: int = Field(32, ge=0, le=STOP_STRINGS_MAX)
    """Maximum stop strings per request. OpenAI's API takes 4, but editors send a dozen for completions of code."""
    stop_chars: int = Field(256, ge=1, le=STOP_CHARACTERS_MAX)
    """Maximum characters of one stop string."""
    logit_bias: int = Field(300, ge=0, le=LOGIT_BIAS_MAX)
    """Maximum tokens that one request may bias."""
    messages: int = Field(1024, ge=1, le=MESSAGES_MAX)
    """Maximum messages of one conversation."""
    tools: int = Field(128, ge=1, le=TOOLS_MAX)
    """Maximum tools of one request."""
    requests_per_key: int = Field(64, ge=1)
    """Maximum requests in flight per key. Without keys, this limit applies to all callers together."""
    tokenize_per_key: int = Field(4, ge=1)
    """Maximum requests in flight to /tokenize and /detokenize per key. This limit is low because one process tokenises
    for all callers."""
    requests: int = Field(256, ge=1)
    """Maximum requests in flight in this process, over all keys. A few more are reserved for operators."""
