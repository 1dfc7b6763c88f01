"""Plan the requests of a load in order of arrival: lazily, and reproducibly for a given seed."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from mars_ray.data.prompt_file import Conversation
from mars_ray.errors import ConfigError
from mars_ray.load.arrivals import Poisson, TraceRow
from mars_ray.load.prompts import Texts, conversations
from mars_ray.load.record import PlannedRequest

PROMPT_WORDS_MAX = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors that scale a trace to the capacity of a machine."""

    speed: float = 1.0
    """Factor by which arrivals are sped up."""
    prompt: float = 1.0
    output: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Planned requests, and their total number if it is known in advance."""

    requests: Iterator[PlannedRequest]
    total: int | None


def closed_loop(prompts: Sequence[Conversation], seed: int, requests: int | None, max_tokens: int) -> LoadPlan:
    """Plan requests with prompts in random order; the plan is endless if `requests` is None."""
    prompt_stream = conversations(prompts, _random(seed, "prompts"))
    planned = (PlannedRequest(messages=messages, max_tokens=max_tokens) for messages in prompt_stream)
    return LoadPlan(islice(planned, requests), requests)


def poisson(
    rate: Poisson,
    prompts: Sequence[Conversation],
    seed: int,
    requests: int | None,
    duration_s: float | None,
    max_tokens: int,
) -> LoadPlan:
    """Plan Poisson arrivals until `requests` are planned or `duration_s` is over, whichever comes first."""

    def planned() -> Iterator[PlannedRequest]:
        prompt_stream = conversations(prompts, _random(seed, "prompts"))
        for arrival_s, messages in zip(rate.arrivals_s(_random(seed, "arrivals")), prompt_stream, strict=False):
            if duration_s is not None and arrival_s >= duration_s:
                return
            yield PlannedRequest(messages=messages, max_tokens=max_tokens, scheduled_s=arrival_s)

    return LoadPlan(islice(planned(), requests), requests if duration_s is None else None)


def replay(
    rows: Sequence[TraceRow],
    scales: Scales,
    prompts: Sequence[Conversation],
    seed: int,
    requests: int | None,
    duration_s: float | None,
    max_tokens: int | None,
) -> LoadPlan:
    """Plan the first `requests` requests of a trace, except those that arrive after `duration_s` at the scaled speed.

    Prompts have one word per prompt token of the trace, multiplied by `scales.prompt`. To correct the ratio of tokens
    to words, compare with the true token counts in the usage of the replies.
    """
    selected_rows = [row for row in rows[:requests] if duration_s is None or row.arrival_s / scales.speed < duration_s]
    longest = max(_scaled(row.context_tokens, scales.prompt) for row in selected_rows)
    if longest > PROMPT_WORDS_MAX:
        raise ConfigError(
            f"prompt_scale is {scales.prompt}; it makes a prompt of {longest:,} words; the limit is"
            f" {PROMPT_WORDS_MAX:,}. Give a smaller scale."
        )

    def planned() -> Iterator[PlannedRequest]:
        texts = Texts(prompts, _random(seed, "prompts"))
        for row in selected_rows:
            text = texts.of(_scaled(row.context_tokens, scales.prompt))
            tokens = _scaled(row.generated_tokens, scales.output)
            yield PlannedRequest(
                messages=({"role": "user", "content": text},),
                max_tokens=tokens if max_tokens is None else min(tokens, max_tokens),
                scheduled_s=row.arrival_s / scales.speed,
            )

    return LoadPlan(planned(), len(selected_rows))


def _scaled(tokens: int, scale: float) -> int:
    return max(1, math.floor(tokens * scale + 0.5))


def _random(seed: int, purpose: str) -> random.Random:
    """Return a separate random source per purpose, so that prompts do not change when arrivals do."""
    return random.Random(f"{seed} {purpose}")
