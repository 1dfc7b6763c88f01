"""One sequence on its way through the engine.

In:    a request and what the engine resolved for it.
Out:   which of its tokens the network has yet to see, and how much it may still generate.
Never: decides anything; the scheduler and the walk do.
"""

from dataclasses import dataclass, field

from mars_ray.engine.grammar.matcher import Matcher
from mars_ray.engine.request import Request
from mars_ray.engine.scheduling.detokenizer import TextStream


@dataclass(slots=True, eq=False)
class Sequence:
    """The state between steps: `tokens` that count, `cached` leading ones the cache holds, `drafts` behind them."""

    request: Request
    index: int
    """Which of the n of its request."""
    seed: int
    limit: int
    """Tokens it may generate."""
    stop_ids: frozenset[int]
    text: TextStream
    tokens: list[int]
    """The prompt and what left the engine."""
    matcher: Matcher | None = None
    """Where it is in its grammar; between steps, behind `tokens`."""
    cached: int = 0
    row: int | None = None
    drafts: list[int] = field(default_factory=list)
    """Fed behind `tokens` to be verified: in exact mode tokens proposed at masks, in any what a grammar forces."""
    looked_ahead: list[float] = field(default_factory=list)
    """Threshold mode: for each token at the end of `tokens` that was accepted at a mask, the least confidence in
    its draft up to it."""
    prefix_hit: int = 0
    forwards: int = 0
    added_s: float = 0.0
    started_s: float | None = None
    """When it first got a row."""
    said_s: float | None = None
    """When it last gained a token."""

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.request.tenant

    @property
    def service_class(self) -> str:
        """The class of its request."""
        return self.request.service_class

    @property
    def generated(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens not yet fed; at least one while the sequence lives."""
        return len(self.tokens) - self.cached
