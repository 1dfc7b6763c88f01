"""Interface of a meter, which admits requests by their size and counts their usage. The core's admits all requests."""

from mars_ray.serve.middleware.exchange import Exchange


class Meter:
    """A meter without limits."""

    async def admit(self, exchange: Exchange, model: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Admit a request that may use up to these tokens. Raises an `ApiError` for a refused request."""

    async def count(self, exchange: Exchange) -> None:
        """Count an answered request, before the end of its answer is sent."""

    def end(self, exchange: Exchange) -> None:
        """End a request that was admitted, however it ended."""
