"""Limits of one request, one key and this process.

Each limit is checked by the code that would pay for going beyond it.
"""

from pydantic import BaseModel, ConfigDict, Field

MESSAGES_MAX = 4096
"""Messages that the limit `messages` may be raised to: checking each holds all other callers up."""

PARTS_MAX = 4096
"""Parts of one message's content."""

PROMPTS_MAX = 4096
"""Prompts that the limit `prompts` may be raised to."""

LOGIT_BIAS_MAX = 4096
"""Tokens that the limit `logit_bias` may be raised to."""


class RequestLimits(BaseModel):
    """The limits of the HTTP gateway. The engine has its own for what the model and the memory allow."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    body_bytes: int = Field(2**20, ge=1)
    """Bytes of a request body. With `requests` bodies held at a time, the defaults cost 256 MiB at most."""
    header_bytes: int = Field(16 * 2**10, ge=1)
    """Bytes of path, query and headers together."""
    body_seconds: float = Field(10, gt=0)
    """Seconds from the end of the headers to the end of the body: a client that trickles is cut off."""
    prompt_tokens: int | None = Field(None, ge=1)
    """Tokens of one prompt; None leaves it to what the model takes."""
    output_tokens: int = Field(4096, ge=1)
    """Tokens of one answer, and so the largest `max_tokens`."""
    default_output_tokens: int = Field(1024, ge=1)
    """Tokens of a chat answer whose request names no `max_tokens`; it then ends with the finish reason "length"."""
    n: int = Field(8, ge=1)
    """Answers to one prompt."""
    prompts: int = Field(128, ge=1, le=PROMPTS_MAX)
    """Prompts of one call of /v1/completions."""
    top_logprobs: int = Field(20, ge=0)
    """Alternatives listed for each token."""
    stop: int = Field(4, ge=0)
    """Stop strings of a request."""
    stop_chars: int = Field(256, ge=1)
    """Characters of one stop string."""
    logit_bias: int = Field(300, ge=0, le=LOGIT_BIAS_MAX)
    """Tokens a request may bias."""
    messages: int = Field(1024, ge=1, le=MESSAGES_MAX)
    """Messages of one conversation."""
    requests_per_key: int = Field(64, ge=1)
    """Requests in flight for one key; without keys, for all callers together."""
    tokenize_per_key: int = Field(4, ge=1)
    """Requests in flight to /tokenize and /detokenize for one key: one process tokenises for all callers."""
    requests: int = Field(256, ge=1)
    """Requests in flight in this process, all keys together. Operators have a few more of their own."""
