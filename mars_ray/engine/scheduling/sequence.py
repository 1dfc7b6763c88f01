"""The state of one sequence between the steps of the engine. It decides nothing: the scheduler and `verify` do."""

from dataclasses import dataclass, field

from mars_ray.engine.chunk import Finished, FinishReason
from mars_ray.engine.grammar.matcher import Matcher
from mars_ray.engine.request import Request
from mars_ray.engine.scheduling.detokenizer import IncrementalDetokenizer
from mars_ray.errors import MarsRayError


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the n sequences of a request. What counts is in `tokens`; drafts behind them are still to be verified."""

    request: Request
    index: int
    """Which of the n sequences of the request this is, from 0."""
    seed: int
    max_tokens: int
    """Tokens it may generate."""
    stop_ids: frozenset[int]
    detokenizer: IncrementalDetokenizer
    tokens: list[int]
    """The prompt and what left the engine."""
    matcher: Matcher | None = None
    """Where the sequence is in its grammar; between steps, behind `tokens`."""
    num_computed_tokens: int = 0
    """Leading tokens whose keys and values are in the cache."""
    slot: int | None = None
    """The slot of the KV cache; None while the sequence waits."""
    draft_tokens: list[int] = field(default_factory=list)
    """Fed after `tokens` to be verified: predictions at masks that fell short of the threshold, or what a grammar
    forces."""
    accepted_confidences: list[float] = field(default_factory=list)
    """Confidences of the tokens at the end of `tokens` that the last step accepted at masks."""
    draft_confidences: list[float] = field(default_factory=list)
    """Confidences of `draft_tokens`; none where a grammar forces them."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that the cache held already when the sequence started."""
    forwards: int = 0
    """Runs of the network that gave at least one token."""
    added_s: float = 0.0
    """When it was queued."""
    started_s: float | None = None
    """When it first got a slot."""
    first_token_s: float | None = None
    """When it gained its first token."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens the network has yet to see; at least one while the sequence lives."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.request.tenant

    @property
    def service_class(self) -> str:
        """The class of service of the request."""
        return self.request.service_class

    def finished(self, reason: FinishReason, now_s: float, error: MarsRayError | None = None) -> Finished:
        """Return how the sequence ended and what it took."""
        return Finished(
            reason=reason,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            tokens=self.num_output_tokens,
            forwards=self.forwards,
            queued_s=(now_s if self.started_s is None else self.started_s) - self.added_s,
            error=error,
        )
