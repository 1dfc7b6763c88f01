"""Read how far a request looks ahead from its sampling parameters and its `vllm_xargs`.

The keys are `mode`, `threshold`, `threshold_floor` and `block`, with the meaning they have in mars-ray's own engine.
Other keys belong to others and are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams

FIELDS = {"mode": "mode", "threshold": "threshold", "threshold_floor": "floor", "block": "block"}
"""Fields of `DecodeParams`, keyed by their names in `vllm_xargs`."""


class VllmSampling(Protocol):
    """The fields of vLLM's `SamplingParams` that decide about lookahead."""

    extra_args: dict[str, Any] | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_tokens: int
    logprobs: int | None
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bad_words: list[str] | None
    structured_outputs: Any


class RequestLookahead(NamedTuple):
    """Lookahead of one request."""

    masks: int
    """Masks per step; 0 decodes one token at a time."""
    threshold: float | None
    """Confidence at which a token at a mask is kept unverified, or with an adapter the ratio at which a draft is kept
    (see `Acceptance`); None follows the engine."""
    floor: float
    """Lower bound on the engine's threshold."""
    temperature: float
    """Temperature of draws; 1 without draws."""
    is_refused: bool
    """Whether the request asked for lookahead, and another parameter rules it out."""


def decode_params(extra_args: Mapping[str, Any] | None) -> DecodeParams:
    """Return the decoding parameters in `vllm_xargs`. Raises `RequestError` for wrong ones."""
    fields = {field: extra_args[name] for name, field in FIELDS.items() if extra_args and name in extra_args}
    return DecodeParams(**fields)


def class_index(sampling: VllmSampling | None, classes: Sequence[str]) -> int:
    """Return the index of a request's service class in `classes`. Requests of other classes belong to the first."""
    name = (sampling.extra_args or {}).get("service_class") if sampling else None
    return classes.index(name) if name in classes else 0


def lookahead_of(sampling: VllmSampling | None, block: int, *, lenient: bool) -> RequestLookahead:
    """Return the lookahead of a request in an engine whose full block is `block`.

    `lenient` says that thresholds apply to drafts.
    """
    params = decode_params(sampling.extra_args if sampling else None)
    masks = 0 if params.mode is Mode.AR else min(block, params.block or block) - 1
    threshold = 1.0 if params.mode is Mode.EXACT else params.threshold
    if sampling is None:
        return RequestLookahead(masks, threshold, params.floor or 0.0, 1.0, is_refused=False)
    temperature = sampling.temperature or 1.0
    if sampling.structured_outputs is not None:  # a draft could leave the grammar
        return RequestLookahead(0, threshold, 0.0, temperature, is_refused=masks > 0)
    if _depends_on_earlier_tokens(sampling):
        threshold = 1.0  # vLLM counts the tokens at all known positions; with every token verified there is one
    if lenient and _excludes_tokens(sampling):
        threshold = 1.0  # vLLM's sampler does not say which drafts it would never draw, nor their log-probabilities
    return RequestLookahead(masks, threshold, params.floor or 0.0, temperature, is_refused=False)


def _depends_on_earlier_tokens(sampling: VllmSampling) -> bool:
    """Return whether the logits of a token depend on the tokens taken before it in the same step."""
    penalties = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    budget = getattr(sampling, "thinking_token_budget", None)
    return bool(penalties or sampling.bad_words or budget is not None)


def _excludes_tokens(sampling: VllmSampling) -> bool:
    """Return whether some tokens are never taken, or the answer brings the sampler's log-probabilities."""
    truncates = sampling.temperature and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p)
    changes = sampling.min_tokens or sampling.logit_bias or sampling.allowed_token_ids
    return bool(truncates or changes or sampling.logprobs is not None)
