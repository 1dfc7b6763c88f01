"""Plan the requests of a load in order of arrival: lazily, and reproducibly for a given seed.

Prompts are real text, because the speed of decoding depends on how well the model predicts its answers.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path

from mars_ray.data.prompt_file import Conversation
from mars_ray.errors import ConfigError
from mars_ray.load.arrivals import Poisson, Scales, TraceRow
from mars_ray.load.record import PlannedRequest

PROMPT_WORDS_MAX = 1_000_000


def bundled_prompts() -> Path:
    """Return the path of the prompt file in the package."""
    return Path(str(files("mars_ray") / "assets" / "prompts.jsonl"))


def conversations(prompts: Sequence[Conversation], random_source: random.Random) -> Iterator[Conversation]:
    """Yield prompts endlessly, in shuffled passes over all of them."""
    while True:
        yield from random_source.sample(prompts, len(prompts))


class Texts:
    """Source of texts of any length, made of prompts in random order."""

    def __init__(self, prompts: Sequence[Conversation], random_source: random.Random) -> None:
        self._drawn = conversations(prompts, random_source)

    def of(self, words: int) -> str:
        """Return the next text, which has `words` words."""
        collected: list[str] = []
        while len(collected) < words:
            collected += " ".join(message["content"] for message in next(self._drawn)).split()
        return " ".join(collected[:words])


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
    scaled_rows = [row.scaled(scales) for row in rows[:requests]]
    selected_rows = [row for row in scaled_rows if duration_s is None or row.arrival_s < duration_s]
    longest = max(row.context_tokens for row in selected_rows)
    if longest > PROMPT_WORDS_MAX:
        raise ConfigError(
            f"prompt_scale is {scales.prompt}; it makes a prompt of {longest:,} words; the limit is"
            f" {PROMPT_WORDS_MAX:,}. Give a smaller scale."
        )

    def planned() -> Iterator[PlannedRequest]:
        texts = Texts(prompts, _random(seed, "prompts"))
        for row in selected_rows:
            yield PlannedRequest(
                messages=({"role": "user", "content": texts.of(row.context_tokens)},),
                max_tokens=min(row.generated_tokens, max_tokens or row.generated_tokens),
                scheduled_s=row.arrival_s,
            )

    return LoadPlan(planned(), len(selected_rows))


def _random(seed: int, purpose: str) -> random.Random:
    """Return a separate random source per purpose, so that prompts do not change when arrivals do."""
    return random.Random(f"{seed} {purpose}")
