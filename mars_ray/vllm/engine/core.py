"""The part of an engine that vLLM provides: it decodes sequences that it was given, and knows of no classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mars_ray.engine.core.limits import EngineLimits
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.vllm.forward_log import LoggedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOutput:
    """Output of a step for one sequence."""

    key: str
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """Log-probabilities of each token's candidates by token id: the chosen token, then the most likely ones. Empty
    unless the request asks for them."""
    cached_tokens: int
    """Prompt tokens whose keys were already in the cache."""
    finish_reason: str | None
    """vLLM's reason for the end of the sequence; None while it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLoad:
    """Use of vLLM's KV cache."""

    kv_cache_usage: float
    """Share of the cache in use."""
    preemptions: int
    """Number of preemptions so far."""


class DecodingCore(Protocol):
    """The part of vLLM that `VllmEngine` uses. Calls raise vLLM's own errors, except where an error is named here."""

    limits: EngineLimits
    block: int
    """Most tokens per step."""

    def check(self, sequence: Sequence) -> None:
        """Raise `RequestError` for sampling parameters that vLLM refuses."""

    def add(self, key: str, sequence: Sequence) -> None:
        """Start a sequence, which `key` names."""

    def abort(self, key: str) -> None:
        """End a sequence; its output of steps in flight is dropped."""

    def step(self) -> list[CoreOutput]:
        """Run a step, and return the output that is ready."""

    def set_thresholds(self, by_class: Mapping[str, float]) -> None:
        """Set the thresholds of some classes from the next step on."""

    def record(self) -> Mapping[str, Any]:
        """Return the counts of the plug-in (`mars_record`)."""

    def forwards(self) -> list[LoggedForward]:
        """Return the forwards of single requests since the last call (`mars_forwards`)."""

    def load(self) -> CoreLoad:
        """Return the use of the KV cache."""

    def close(self) -> None:
        """Stop vLLM."""
