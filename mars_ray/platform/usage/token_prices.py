"""Prices of tokens, from which budgets in money and the prices in usage reports follow."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PricePerMillion = Annotated[float, Field(ge=0, le=1e6)]

BILLIONTHS = 10**9
"""Money is added up in billionths of a unit of the currency, as integers, so that sums are exact."""


class TokenPrices(BaseModel):
    """Prices per million tokens, in any currency."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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
