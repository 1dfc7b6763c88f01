"""Counts of one request with their price, and their sums by day, account, key and model.

In:    the counts of requests; prices of tokens.
Out:   sums; both as JSON.
Never: adds counts of different days, accounts, keys or models.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from mars_ray.openai_api.usage import ResponseUsage

THRESHOLD_STEPS = 100
"""Steps of the histogram over thresholds, which bounds its size. A threshold counts at the step below it."""


PricePerMillion = Annotated[float, Field(ge=0, le=1e6)]

BILLIONTHS = 10**9
"""Money is added up in billionths of a unit of the currency, as integers, so that sums are exact."""


class TokenPrices(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Prices per million tokens, in any currency."""

    prompt: PricePerMillion
    """Price of a million prompt tokens that were not in the cache."""
    cached: PricePerMillion | None = None
    """Price of a million prompt tokens that were in the cache; None means the price of other prompt tokens."""
    answered: PricePerMillion
    """Price of a million answered tokens."""

    def billionths(self, prompt_tokens: int, cached_tokens: int, answered_tokens: int) -> int:
        """Return the price of a request in billionths. `prompt_tokens` includes `cached_tokens`."""
        cached = self.prompt if self.cached is None else self.cached
        millions = self.prompt * (prompt_tokens - cached_tokens) + cached * cached_tokens
        return round((millions + self.answered * answered_tokens) * (BILLIONTHS // 10**6))

    def most_billionths(self, prompt_tokens: int, answered_tokens: int) -> int:
        """Return the highest price that a request may have, however many of its tokens are in the cache."""
        cached = (0, prompt_tokens)
        return max(self.billionths(prompt_tokens, tokens, answered_tokens) for tokens in cached)


class UsageGroup(NamedTuple):
    """The day, account, key and model whose requests are added up."""

    day: str
    """Day in UTC on which the requests arrived, such as 2026-11-25."""
    account: str
    key: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCounts:
    """Counts of one or more requests."""

    requests: int = 1
    prompt_tokens: int = 0
    """Prompt tokens, including the cached ones."""
    cached_tokens: int = 0
    answered_tokens: int = 0
    accepted: Mapping[str, int] = field(default_factory=dict)
    """Number of answered tokens that were accepted without verification, by threshold, such as "0.95"."""
    price_billionths: int = 0
    """Price in billionths of a unit of the currency."""

    @property
    def tokens(self) -> int:
        """Prompt and answered tokens, which limits and budgets count."""
        return self.prompt_tokens + self.answered_tokens

    def __add__(self, other: "UsageCounts") -> "UsageCounts":
        accepted = dict(self.accepted)
        for threshold, tokens in other.accepted.items():
            accepted[threshold] = accepted.get(threshold, 0) + tokens
        return UsageCounts(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            answered_tokens=self.answered_tokens + other.answered_tokens,
            accepted=accepted,
            price_billionths=self.price_billionths + other.price_billionths,
        )

    @classmethod
    def of(cls, usage: ResponseUsage, price_billionths: int) -> "UsageCounts":
        """Return the counts of one request."""
        accepted: dict[str, int] = {}
        for threshold, tokens in usage.accepted.items():
            step = f"{int(threshold * THRESHOLD_STEPS + 1e-9) / THRESHOLD_STEPS:.2f}"
            accepted[step] = accepted.get(step, 0) + tokens
        return cls(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            answered_tokens=usage.tokens,
            accepted=accepted,
            price_billionths=price_billionths,
        )


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """Counts of one request, which count once however often the record is sent."""

    id: str
    """Random or derived from stored ids, and never chosen by a caller."""
    group: UsageGroup
    counts: UsageCounts

    def to_json(self) -> list[Any]:
        """Return the record as JSON; the inverse of `from_json`."""
        return [self.id, list(self.group), asdict(self.counts)]

    @staticmethod
    def from_json(value: list[Any]) -> "UsageRecord":
        """Return the record in a JSON value. Raises `TypeError` or `ValueError` if it is damaged."""
        id, group, counts = value
        return UsageRecord(str(id), UsageGroup(*group), UsageCounts(**counts))


UsageSums = dict[UsageGroup, UsageCounts]


def add_up(sums: UsageSums, rows: Iterable[tuple[UsageGroup, UsageCounts]]) -> None:
    """Add rows to `sums`."""
    for group, counts in rows:
        sums[group] = sums[group] + counts if group in sums else counts


def day_of(unix_s: float) -> str:
    """Return the day of a Unix time in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()


def month_of(day: str) -> str:
    """Return the calendar month of a day, such as 2026-11."""
    return day[:7]
