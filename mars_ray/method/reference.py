"""The reference decoder: slow, without a cache, and obviously right. The oracle for every faster one.

Each forward runs over everything: the prompt, what was generated, and the masks behind it. Sliding window
(arXiv 2604.07023, section 3.3): the last token gives the next one, as in autoregressive decoding, the mask k gives
the token k+2 past it; they are accepted left to right while the confidence passes the threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.errors import ConfigError
from mars_ray.method.acceptance import accepted_lengths, confidence
from mars_ray.method.logits import logits_at
from mars_ray.method.metric import Metric, accepts_nothing

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How to decode. Raises `ConfigError` for values out of range."""

    mode: Literal["ar", "threshold"] = "threshold"
    threshold: float = 0.95
    """0..1 for probability and margin (1 is autoregressive); nats, at least 0, for entropy (0 is autoregressive)."""
    metric: Metric = Metric.PROBABILITY
    block: int = 8
    """Tokens proposed per forward: the autoregressive one and block - 1 masks."""
    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    """A sequence ends with the first of these; it is the last of the returned tokens."""

    def __post_init__(self) -> None:
        if self.mode not in ("ar", "threshold"):
            raise ConfigError(f"mode is {self.mode!r}; choose 'ar' or 'threshold'.")
        upper = float("inf") if self.metric is Metric.ENTROPY else 1.0
        if not 0 <= self.threshold <= upper:
            raise ConfigError(f"threshold is {self.threshold}; it must be in 0..{upper} for {self.metric.value}.")
        for name in ("block", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    @property
    def window(self) -> int:
        """Positions looked at per forward."""
        return 1 if self.mode == "ar" or accepts_nothing(self.threshold, self.metric) else self.block


@dataclass(slots=True)
class DecodedSequence:
    """One finished sequence, without its prompt."""

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    """One per token, in the metric asked for."""
    forwards: int = 0
    finish_reason: FinishReason = "length"


@torch.inference_mode()
def decode(
    network: PreTrainedModel, prompts: Sequence[Sequence[int]], options: DecodeOptions, *, mask_id: int
) -> list[DecodedSequence]:
    """Decode every prompt greedily, all together, each at its own pace; a finished one leaves the batch.

    The mask token is never generated. Prompts must not be empty.
    """
    results = [DecodedSequence() for _ in prompts]
    running = list(range(len(prompts)))
    while running:
        prefixes = [[*prompts[row], *results[row].tokens] for row in running]
        left = max(options.max_tokens - len(results[row].tokens) for row in running)
        logits_RWV = window_logits(network, prefixes, min(options.window, left), mask_id)
        token_RW = logits_RWV.argmax(dim=-1)
        confidence_RW = confidence(logits_RWV, options.metric)
        threshold_R = torch.full((len(running),), options.threshold, device=token_RW.device)
        accepted_R = accepted_lengths(confidence_RW, threshold_R, options.metric)
        for row, tokens, confidences, accepted in zip(
            running, token_RW.tolist(), confidence_RW.tolist(), accepted_R.tolist(), strict=True
        ):
            _extend(results[row], tokens[:accepted], confidences[:accepted], options)
        running = [row for row in running if not _is_finished(results[row], options)]
    return results


def window_logits(network: PreTrainedModel, prefixes: list[list[int]], window: int, mask_id: int) -> Tensor:
    """Return the logits after each prefix and at the window - 1 masks behind it: [R, W, V]."""
    device = network.device
    # Attention is causal, so what stands to the right of a row's window (filling, up to the longest) is never seen.
    length = max(map(len, prefixes)) + window - 1
    ids_RS = torch.tensor([prefix + [mask_id] * (length - len(prefix)) for prefix in prefixes], device=device)
    last_R1 = torch.tensor([[len(prefix) - 1] for prefix in prefixes], device=device)
    slot_S = torch.arange(length, device=device)
    where_RS = (slot_S >= last_R1) & (slot_S < last_R1 + window)
    logits_RWV = logits_at(network, where_RS, input_ids=ids_RS).view(len(prefixes), window, -1)
    logits_RWV[..., mask_id] = -torch.inf
    return logits_RWV


def _extend(result: DecodedSequence, tokens: list[int], confidences: list[float], options: DecodeOptions) -> None:
    """Append what one forward gave, up to the first stop token or the length limit."""
    result.forwards += 1
    for token, certainty in zip(tokens, confidences, strict=True):
        result.tokens.append(token)
        result.confidences.append(certainty)
        if token in options.stop_ids:
            result.finish_reason = "stop"
        if _is_finished(result, options):
            return


def _is_finished(result: DecodedSequence, options: DecodeOptions) -> bool:
    return result.finish_reason == "stop" or len(result.tokens) >= options.max_tokens
