"""Usage of one HTTP request: tokens, forwards, thresholds, finish reasons.

In:    the chunks, as they arrive.
Out:   the usage as callers see it; the figures for the log and the metrics.
Never: keeps text.
"""

from dataclasses import dataclass, field

from openai.types.completion_usage import CompletionUsage, PromptTokensDetails

from mars_ray.engine.chunk import Chunk


@dataclass(slots=True)
class ResponseUsage:
    """Totals over the sequences of one HTTP request. A prompt with several answers counts once in `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    queued_s: float = 0.0
    """Longest time in seconds that any of the sequences waited for a slot."""
    reasons: list[str] = field(default_factory=list)
    """The finish reason of each sequence."""
    threshold_low: float | None = None
    threshold_high: float | None = None
    accepted: dict[float, int] = field(default_factory=dict)
    """Number of tokens that were accepted without verification, by the threshold in force."""
    max_tokens: int | None = None
    """Maximum tokens of an answer, if lowered below the value in the request."""
    migrations: int = 0
    """Number of times that a begun stream moved to another engine."""

    def add(self, chunk: Chunk) -> None:
        """Add a chunk to the totals."""
        self.tokens += len(chunk.tokens)
        for threshold, tokens in chunk.accepted:
            self.accepted[threshold] = self.accepted.get(threshold, 0) + tokens
        if chunk.tokens:
            low = self.threshold_low
            high = self.threshold_high
            self.threshold_low = chunk.threshold if low is None else min(low, chunk.threshold)
            self.threshold_high = chunk.threshold if high is None else max(high, chunk.threshold)
        if chunk.finished:
            self.forwards += chunk.finished.forwards
            self.queued_s = max(self.queued_s, chunk.finished.queued_s)
            self.reasons.append(chunk.finished.reason)
            if chunk.index == 0:
                self.cached_tokens += chunk.finished.cached_tokens

    @property
    def threshold_range(self) -> str:
        """Range of the thresholds in force, for a header: "0.95", or "0.9-0.95" if they changed."""
        if self.threshold_low is None or self.threshold_low == self.threshold_high:
            return f"{1.0 if self.threshold_low is None else self.threshold_low:g}"
        return f"{self.threshold_low:g}-{self.threshold_high:g}"

    def usage(self, *, ended: bool = True) -> CompletionUsage:
        """Return OpenAI's usage object, extended by `threshold_low` and `threshold_high`, by `tokens_per_forward` once
        all answers have `ended`, whose last chunks say their forwards, and by `max_tokens` if it was lowered."""
        return CompletionUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            total_tokens=self.prompt_tokens + self.tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            threshold_low=self.threshold_low,
            threshold_high=self.threshold_high,
            **({"tokens_per_forward": round(self.tokens / max(1, self.forwards), 3)} if ended else {}),
            **({} if self.max_tokens is None else {"max_tokens": self.max_tokens}),
        )
