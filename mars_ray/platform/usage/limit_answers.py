"""Grants and refusals of limits as callers see them: OpenAI's headers and errors."""

import math
from collections.abc import Iterator

from mars_ray.openai_api.api_error import ApiError
from mars_ray.platform.usage.limiter import Allowance, Granted, LimitRefusal

NO_RETRY = {"x-should-retry": "false"}
"""Header by which OpenAI's clients do not send a refused request again by themselves."""


def allowance_headers(left: Granted) -> dict[str, str]:
    """Return OpenAI's headers about what is left of the limits per minute."""
    return dict([*_headers("requests", left.requests), *_headers("tokens", left.tokens)])


def _headers(name: str, allowance: Allowance | None) -> Iterator[tuple[str, str]]:
    if allowance:
        yield f"x-ratelimit-limit-{name}", str(allowance.limit)
        yield f"x-ratelimit-remaining-{name}", str(allowance.remaining)
        yield f"x-ratelimit-reset-{name}", duration(allowance.reset_s)


def duration(seconds: float) -> str:
    """Return a time as in OpenAI's headers, such as 1m3s, 12s or 250ms."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def limit_error(refusal: LimitRefusal) -> ApiError:
    """Return the error for a refused request.

    A rate is a 429 with `retry-after`. A spent budget is a 429 `insufficient_quota`, as from OpenAI, because clients
    know it, while a 402 is an unknown error to them. A request that can never run is a 400.
    """
    match refusal.kind:
        case "too_large":
            return ApiError.bad_request(refusal.message, "max_tokens", "request_exceeds_limit")
        case "budget":
            return ApiError(
                429, refusal.message, type="insufficient_quota", code="insufficient_quota", headers=NO_RETRY
            )
        case _:
            seconds = str(max(1, math.ceil(refusal.retry_after_s)))
            message = f"{refusal.message} Try again in {seconds} s."
            headers = {"retry-after": seconds}
            return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
