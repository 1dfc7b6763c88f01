"""Limits of a key or an account: requests and tokens per minute, and budgets per day and month."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=10**15)]
Money = Annotated[float, Field(gt=0, le=1e12)]


class UsageLimits(BaseModel):
    """Limits of one key or of all keys of an account together. None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and answered tokens per minute."""
    tokens_per_day: Count | None = None
    """Prompt and answered tokens per day in UTC."""
    tokens_per_month: Count | None = None
    """Prompt and answered tokens per calendar month in UTC."""
    money_per_day: Money | None = None
    """Price of the tokens per day in UTC, in the currency of the prices."""
    money_per_month: Money | None = None
    """Price of the tokens per calendar month in UTC, in the currency of the prices."""
