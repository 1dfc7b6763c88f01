"""Interface through which a platform adds to the core of a gateway.

In:    the core calls these methods and never knows who implements them.
Out:   routes, callers, forms of other APIs, metrics, and a meter.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cached_property

from fastapi import APIRouter

from mars_ray.serve.middleware.api_form import OPENAI, ApiForm, Uploads
from mars_ray.serve.middleware.callers import Callers
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.storage.audit_log import AuditLog, AuditWriter


class Meter:
    """Admits requests by their size and counts their usage. This one admits all requests and counts nothing."""

    async def admit(self, exchange: Exchange, model: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Admit a request that may use up to these tokens. Raises an `ApiError` for a refused request."""

    async def count(self, exchange: Exchange) -> None:
        """Count an answered request, before the end of its answer is sent."""

    def end(self, exchange: Exchange) -> None:
        """End a request that was admitted, however it ended."""


class Extension:
    """Adds nothing. Subclasses override what they add."""

    callers: Callers | None = None
    """Callers that have access. None gives everybody access."""
    meter: Meter = Meter()
    uploads: Uploads | None = None
    tokenizer_paths: frozenset[str] = frozenset()
    """Further paths that use only the tokenizer."""
    measured_paths: frozenset[str] = frozenset()
    """Further paths with their own label in metrics and spans."""

    @cached_property
    def audit(self) -> AuditWriter:
        """Writer of operators' acts, which the app closes."""
        return AuditWriter(AuditLog(None))

    def routes(self) -> Sequence[APIRouter]:
        """Return further routes."""
        return ()

    def api_of(self, _path: str) -> ApiForm:
        """Return the form of the API that a path belongs to."""
        return OPENAI

    async def metrics(self) -> Sequence[str]:
        """Return further metrics as OpenMetrics text."""
        return ()

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run what the extension needs within the block, which lasts as long as the app."""
        return nullcontext()
