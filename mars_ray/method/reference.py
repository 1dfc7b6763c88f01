"""The reference decoder: slow, without a cache, and simple enough to check by reading. It is the oracle in tests.

Each forward runs over everything: the prompt, the generated tokens, drafts and masks. Decoding uses a sliding window
(arXiv 2604.07023, section 3.3): the last token predicts the next token, as in autoregressive decoding, and the k-th
mask predicts the token k positions further on.

Predictions are accepted from left to right until a confidence falls short of the threshold. That prediction and those
after it become drafts. The next forward verifies the drafts, and takes them as long as each equals the autoregressive
choice. At a threshold that accepts nothing, the output therefore equals autoregressive decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.method.acceptance import confidence
from mars_ray.method.drafts import FIXED_PRICE, masks_behind_drafts
from mars_ray.method.metric import Metric, least_probability, passes

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """Options of `decode`."""

    mode: Literal["ar", "threshold"] = "threshold"
    threshold: float = 0.95
    """0 to 1 for probability and margin, 0 or more nats for entropy. At 1, or 0 nats, every prediction is verified."""
    metric: Metric = Metric.PROBABILITY
    block: int = 8
    """Number of tokens proposed per forward: the autoregressive token and block - 1 tokens at masks."""
    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence; the stop token is the last of the returned tokens."""

    @property
    def masks(self) -> int:
        """Number of masks per forward."""
        return 0 if self.mode == "ar" else self.block - 1


@dataclass(slots=True)
class DecodedSequence:
    """State of a sequence, without its prompt, while it is decoded and afterwards."""

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    """Confidence of each token, in the metric of the options."""
    forwards: int = 0
    finish_reason: FinishReason = "length"
    drafts: list[int] = field(default_factory=list)
    """Predictions that the next forward verifies."""
    likely: list[float] = field(default_factory=list)
    """Probability that each draft is right if all drafts before it are right."""


def decode(
    network: PreTrainedModel, prompts: Sequence[Sequence[int]], options: DecodeOptions, *, mask_id: int
) -> list[DecodedSequence]:
    """Decode every prompt greedily and never generate the mask token. Prompts must not be empty."""
    sequences = [DecodedSequence() for _ in prompts]
    for prompt, sequence in zip(prompts, sequences, strict=True):
        while not is_finished(sequence, options):
            forward(network, prompt, sequence, options, mask_id=mask_id)
    return sequences


@torch.inference_mode()
def forward(
    network: PreTrainedModel, prompt: Sequence[int], sequence: DecodedSequence, options: DecodeOptions, *, mask_id: int
) -> None:
    """Verify the drafts of `sequence`, take the next token, accept tokens at masks, and draft the rest.

    Each draft that may be the last right one has masks after it (`method/drafts`). A decoder with a cache does all this
    in one forward. Here the network runs twice, first over the drafts and then over the right drafts with the masks
    after them, because no other masks are read. The two runs count as one forward.
    """
    sequence.forwards += 1
    prefix = [*prompt, *sequence.tokens]
    drafts = sequence.drafts
    left = options.max_tokens - len(sequence.tokens)
    most = [min(options.masks, left - 1 - index) for index in range(len(drafts) + 1)]
    if drafts and drafts[-1] in options.stop_ids:
        most[-1] = 0  # the last draft ends the sequence
    rows = masks_behind_drafts(sequence.likely, [1.0] * options.masks, FIXED_PRICE, [max(0, masks) for masks in most])
    choices = _choices(network, [*prefix, *drafts], len(drafts) + 1, mask_id, options.metric)
    right = next((index for index, draft in enumerate(drafts) if choices[index][0] != draft), len(drafts))
    masked = [*prefix, *drafts[:right], *[mask_id] * rows[right]]
    ahead = _choices(network, masked, rows[right], mask_id, options.metric) if rows[right] else []
    sequence.drafts, sequence.likely = [], []
    for token, certainty in choices[: right + 1]:
        if is_finished(sequence, options):
            return
        _append(sequence, token, certainty, options)
    _accept_and_draft(sequence, ahead, options)


def _accept_and_draft(
    sequence: DecodedSequence, predictions: Sequence[tuple[int, float]], options: DecodeOptions
) -> None:
    """Accept predictions until one falls short, then draft as long as all drafts are likely to be right."""
    all_right = 1.0
    for token, certainty in predictions:
        if is_finished(sequence, options) or (sequence.drafts[-1:] and sequence.drafts[-1] in options.stop_ids):
            return
        if not sequence.drafts and passes(certainty, options.threshold, options.metric):
            _append(sequence, token, certainty, options)
            continue
        likely = least_probability(certainty, options.metric)
        all_right *= likely
        if all_right < FIXED_PRICE.of_draft(len(sequence.drafts)):
            return
        sequence.drafts.append(token)
        sequence.likely.append(likely)


def _choices(
    network: PreTrainedModel, ids: list[int], count: int, mask_id: int, metric: Metric
) -> list[tuple[int, float]]:
    """Return the most likely token after each of the last `count` ids, and its confidence."""
    logits_WV = last_logits(network, ids, count, mask_id)
    return list(zip(logits_WV.argmax(dim=-1).tolist(), confidence(logits_WV, metric).tolist(), strict=True))


def last_logits(network: PreTrainedModel, ids: list[int], count: int, mask_id: int) -> Tensor:
    """Return the logits after each of the last `count` ids as float32 [W, V]. The mask token has logit -inf."""
    ids_1S = torch.tensor([ids], device=network.device)
    logits_WV: Tensor = network(input_ids=ids_1S, use_cache=False).logits[0, -count:].float()
    logits_WV[:, mask_id] = -torch.inf
    return logits_WV


def _append(sequence: DecodedSequence, token: int, certainty: float, options: DecodeOptions) -> None:
    sequence.tokens.append(token)
    sequence.confidences.append(certainty)
    if token in options.stop_ids:
        sequence.finish_reason = "stop"


def is_finished(sequence: DecodedSequence, options: DecodeOptions) -> bool:
    """Return whether the sequence has reached a stop token or the length limit."""
    return sequence.finish_reason == "stop" or len(sequence.tokens) >= options.max_tokens
