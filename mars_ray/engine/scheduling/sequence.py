"""State of one sequence between the steps of an engine. The scheduler and `verify` make the decisions."""

from dataclasses import dataclass, field

from mars_ray.engine.chunk import Finished, FinishReason, TokenLogprobs
from mars_ray.engine.drafting.text_drafter import SequenceText, TextDraft
from mars_ray.engine.grammar.matcher import Matcher
from mars_ray.engine.request import Request
from mars_ray.engine.scheduling.detokenizer import IncrementalDetokenizer
from mars_ray.errors import MarsRayError

FORCED_DRAFTS = 64
"""Maximum number of a sequence's drafts that a grammar forces. A step computes the logits of all drafts."""


@dataclass(slots=True)
class Drafts:
    """Proposed tokens that the next forward feeds after the tokens of a sequence, and verifies."""

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    """Estimated probability that each token is right if all tokens before it are right."""
    text: TextDraft | None = None
    """The draft from text that these tokens are; None for other sources."""
    replaced: list[float] = field(default_factory=list)
    """Probabilities of the drafts from masks that a draft from text replaced."""

    @classmethod
    def certain(cls, tokens: list[int]) -> "Drafts":
        """Return tokens that a grammar forces."""
        return cls(tokens, [1.0] * len(tokens))

    def after(self, count: int) -> "Drafts":
        """Return the drafts from masks that follow the first `count`."""
        return Drafts(self.tokens[count:], self.probabilities[count:])


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the n sequences of a request. `tokens` are final; the drafts after them are not verified yet."""

    request: Request
    index: int
    """Index among the n sequences of the request, from 0."""
    seed: int
    max_tokens: int
    """Maximum number of tokens to generate."""
    stop_ids: frozenset[int]
    detokenizer: IncrementalDetokenizer
    tokens: list[int]
    """Token ids of the prompt and of the output returned so far."""
    matcher: Matcher | None = None
    """Position in the grammar; between steps this is the position after `tokens`. None without a grammar."""
    num_computed_tokens: int = 0
    """Number of leading tokens whose keys and values are in the cache."""
    slot: int | None = None
    """Slot of the KV cache; None while the sequence waits."""
    drafts: Drafts = field(default_factory=Drafts)
    """Predictions at masks that fell short of the threshold, or a copy from text, and tokens that a grammar forces."""
    prediction: tuple[int, float] | None = None
    """Token that the last step predicts to follow, at its first mask, and its probability. The next step verifies it,
    even if it is not a draft. None without masks, and where tokens may be accepted at masks."""
    text: SequenceText | None = None
    """Indexes of the prompt and the answer; None before the first draft from text."""
    accepted_confidences: list[float] = field(default_factory=list)
    """Confidences of the tokens that the last step accepted at masks; these tokens are the last of `tokens`."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt's tokens so far; None if they are not asked for or already returned."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that were already in the cache when the sequence started."""
    forwards: int = 0
    """Number of forwards that gave the sequence at least one token."""
    added_s: float = 0.0
    """Time at which the sequence was queued."""
    started_s: float | None = None
    """Time at which the sequence first got a slot."""
    first_token_s: float | None = None
    """Time at which the sequence gained its first token."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_partial_tokens(self) -> int:
        """Number of generated tokens that come from an engine that died."""
        partial = self.request.partial_answers.get(self.index)
        return len(partial.tokens) if partial else 0

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens that the network has not seen yet; at least one until the sequence ends."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def reuses_cache(self) -> bool:
        """Whether the sequence may begin with what the cache holds. Scoring a prompt needs the logits of all of it."""
        return self.prompt_logprobs is None

    @property
    def tenant(self) -> str:
        """Owner of the request."""
        return self.request.tenant

    @property
    def service_class(self) -> str:
        """Class of service of the request."""
        return self.request.service_class

    def finished(self, reason: FinishReason, now_s: float, error: MarsRayError | None = None) -> Finished:
        """Return the finish reason with the counts and the times of the sequence."""
        started_s = now_s if self.started_s is None else self.started_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return Finished(
            reason=reason,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            tokens=self.num_output_tokens,
            forwards=self.forwards,
            queued_s=started_s - self.added_s,
            prefill_s=first_token_s - started_s,
            decode_s=now_s - first_token_s,
            error=error,
        )
