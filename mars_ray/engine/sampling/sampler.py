"""Choose tokens from logits: apply bans, bias and penalties, truncate the distribution, and draw.

The sampler keeps no state between calls: the draw at a position depends only on the seed and the position.

A draw is one uniform number per (seed, position). The inverse of the cumulative distribution, with the most likely
token first, turns it into a token. In exact mode a draft and its verification share the draw, so they agree whenever
their distributions do, and the engine returns the token that autoregressive decoding draws with the same seed. The
rejection rule of arXiv 2211.17192 would accept slightly more drafts, but its samples would change with block, batch and
load.

If a grammar allows the chosen token, the token keeps its confidence. Otherwise the token is drawn again with a second
uniform number, among the allowed tokens only. The set of allowed tokens is therefore computed only where the model
would leave the grammar.
"""

import math
import struct
from collections import abc
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mars_ray.engine.request import SamplingParams
from mars_ray.engine.sampling.verify import Proposal
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.errors import StepError
from mars_ray.method.acceptance import confidence
from mars_ray.method.metric import Metric

SECOND_DRAW = 2**63
"""Offset added to a token's position to seed a second draw for the token."""


def is_greedy(sequence: Sequence) -> bool:
    """Return whether decoding needs only the most likely token and its probability, not the logits."""
    sampling = sequence.request.sampling
    return (
        sampling.temperature == 0
        and sequence.request.decode.confidence_metric is Metric.PROBABILITY
        and not sampling.logit_bias
        and not has_penalties(sampling)
        and sequence.num_output_tokens >= sampling.min_tokens
    )


def has_penalties(sampling: SamplingParams) -> bool:
    """Return whether the request sets a penalty, so that a choice depends on earlier choices of the same step."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


@dataclass(frozen=True, slots=True)
class SamplingPosition:
    """Inputs, besides the logits, to the choice of a token at one position."""

    sampling: SamplingParams
    metric: Metric
    uniform: float
    """Draw at this position, in [0, 1)."""


def uniform(seed: int, number: int) -> float:
    """Return the draw for output token `number` of a sequence with this seed, in [0, 1)."""
    digest = blake2b(struct.pack("<QQ", seed, number), digest_size=8).digest()
    return int(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def positions_of(sequence: Sequence, count: int, ahead: int) -> list[SamplingPosition]:
    """Return `count` positions of a sequence. The first is `ahead` positions after the sequence's next position."""
    sampling = sequence.request.sampling
    metric = sequence.request.decode.confidence_metric
    first = sequence.num_output_tokens + ahead
    draws = sampling.temperature > 0
    return [
        SamplingPosition(sampling, metric, uniform(sequence.seed, first + number) if draws else 0.0)
        for number in range(count)
    ]


def process_logits(logits_WV: Tensor, sequence: Sequence, ahead: int, taken: abc.Sequence[int] = ()) -> None:
    """Apply penalties, bias and the ban on early stop tokens in place.

    The first row of the logits is `ahead` positions after the next token. `taken` holds the tokens already taken in
    this step.
    """
    sampling = sequence.request.sampling
    if has_penalties(sampling):
        _apply_penalties(logits_WV, sampling, [*sequence.tokens, *taken], sequence.num_prompt_tokens)
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits_WV.device)
        logits_WV[:, ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits_WV.device)
    early = sampling.min_tokens - sequence.num_output_tokens - ahead - 1
    if early >= 0 and sequence.stop_ids:
        logits_WV[: early + 1, torch.tensor(list(sequence.stop_ids), device=logits_WV.device)] = -torch.inf


def sample(logits_WV: Tensor, best_W: abc.Sequence[int], positions: abc.Sequence[SamplingPosition]) -> list[Proposal]:
    """Choose a token at every position. `best_W` holds the most likely tokens by the raw logits of the model."""
    sampling_W = [position.sampling for position in positions]
    tokens = draw(logits_WV, sampling_W, [position.uniform for position in positions]).tolist()
    certainty = [0.0] * len(positions)
    for metric in {position.metric for position in positions}:
        rows = [row for row, position in enumerate(positions) if position.metric is metric]
        unsure = math.inf if metric is Metric.ENTROPY else 0.0  # for logits that are no numbers
        sure_W = confidence(logits_WV[rows], metric).nan_to_num(nan=unsure)
        for row, value in zip(rows, sure_W.tolist(), strict=True):
            certainty[row] = value
    return [Proposal(token, sure, token == best) for token, sure, best in zip(tokens, certainty, best_W, strict=True)]


def sample_allowed(
    logits_1V: Tensor, best: int, sequence: Sequence, taken: abc.Sequence[int], allowed_V: NDArray[np.bool_]
) -> Proposal:
    """Choose among the tokens that are allowed after `taken`. Changes the logits in place."""
    process_logits(logits_1V, sequence, len(taken), taken)
    logits_1V.masked_fill_(torch.from_numpy(~allowed_V).to(logits_1V.device), -torch.inf)
    if logits_1V.amax() == -torch.inf:
        raise StepError("the grammar and the sampling parameters leave no token to choose.")
    request = sequence.request
    second = uniform(sequence.seed, SECOND_DRAW + sequence.num_output_tokens + len(taken))
    position = SamplingPosition(request.sampling, request.decode.confidence_metric, second)
    return sample(logits_1V, [best], [position])[0]


def draw(logits_MV: Tensor, sampling_M: abc.Sequence[SamplingParams], uniform_M: abc.Sequence[float]) -> Tensor:
    """Return the chosen tokens as a tensor [M]: the most likely ones at temperature 0, otherwise drawn ones."""
    token_M = logits_MV.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(sampling_M) if sampling.temperature > 0]
    if drawn:
        which_D = torch.tensor(drawn, device=logits_MV.device)
        p_DV = probabilities(logits_MV[which_D], [sampling_M[row] for row in drawn])
        u_D = torch.tensor([uniform_M[row] for row in drawn], dtype=torch.float64, device=logits_MV.device)
        token_M[which_D] = _invert(p_DV, u_D)
    return token_M


def probabilities(logits_DV: Tensor, sampling_D: abc.Sequence[SamplingParams]) -> Tensor:
    """Return the distributions after temperature, top-k, top-p and min-p, in this order, as unnormalised float64."""
    # In float32 the smallest temperatures and shares that a request may set would round to 0.
    logits_DV = logits_DV.double()
    temperature_D1 = _column(logits_DV, [sampling.temperature for sampling in sampling_D])
    # Shift the largest logit to 0 first; otherwise a tiny temperature would overflow.
    p_DV = ((logits_DV - logits_DV.amax(dim=-1, keepdim=True)) / temperature_D1).softmax(dim=-1)
    size = p_DV.shape[-1]
    k_D = [min(sampling.top_k or size, size) for sampling in sampling_D]
    if min(k_D) < size:
        ranked_DK = p_DV.topk(max(k for k in k_D if k < size), dim=-1).values
        for row, k in enumerate(k_D):
            if k < size:
                p_DV[row].masked_fill_(p_DV[row] < ranked_DK[row, k - 1], 0)
    if any(sampling.top_p < 1 for sampling in sampling_D):
        top_p_D1 = _column(p_DV, [sampling.top_p for sampling in sampling_D])
        ranked_DV = p_DV.sort(dim=-1, descending=True).values
        before_DV = ranked_DV.cumsum(dim=-1) - ranked_DV
        within_DV = before_DV < top_p_D1 * ranked_DV.sum(dim=-1, keepdim=True)
        least_D1 = ranked_DV.masked_fill(~within_DV, torch.inf).amin(dim=-1, keepdim=True)
        p_DV = p_DV.masked_fill((p_DV < least_D1) & (top_p_D1 < 1), 0)
    if any(sampling.min_p > 0 for sampling in sampling_D):
        min_p_D1 = _column(p_DV, [sampling.min_p for sampling in sampling_D])
        p_DV = p_DV.masked_fill(p_DV < min_p_D1 * p_DV.amax(dim=-1, keepdim=True), 0)
    return p_DV


def draft_ratio(logits_V: Tensor, sampling: SamplingParams, draft: int) -> float:
    """Return the probability of `draft` divided by that of the most likely token; 0 for a token that is never drawn."""
    ratio = float(((logits_V[draft] - logits_V.amax()).double() / (sampling.temperature or 1)).exp())
    truncates = sampling.top_k or sampling.top_p < 1 or sampling.min_p
    if ratio and sampling.temperature and truncates:
        return ratio * bool(probabilities(logits_V[None], [sampling])[0, draft])
    return ratio


def _column(like: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _invert(p_DV: Tensor, u_D: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution passes u. The most likely token comes first."""
    best_D1 = p_DV.argmax(dim=-1, keepdim=True)
    point_D1 = u_D[:, None] * p_DV.sum(dim=-1, keepdim=True)
    p_best_D1 = p_DV.gather(1, best_D1)
    rest_DV = p_DV.scatter(1, best_D1, 0)
    sum_DV = rest_DV.cumsum(dim=-1)
    # Rounding may put the point past the end, where no token has any probability.
    reachable_D1 = torch.minimum(point_D1 - p_best_D1, sum_DV[:, -1:] * (1 - 1e-12))
    other_D1 = torch.searchsorted(sum_DV, reachable_D1, right=True).clamp_(max=p_DV.shape[-1] - 1)
    return torch.where((point_D1 < p_best_D1) | (sum_DV[:, -1:] == 0), best_D1, other_D1).squeeze(1)


def _apply_penalties(
    logits_WV: Tensor, sampling: SamplingParams, tokens: abc.Sequence[int], prompt_length: int
) -> None:
    device = logits_WV.device
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(tokens)), device=device)
        before = logits_WV[:, seen]
        factor = sampling.repetition_penalty
        logits_WV[:, seen] = torch.where(before > 0, before / factor, before * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        output = torch.tensor(tokens[prompt_length:], dtype=torch.long, device=device)
        count_V = torch.bincount(output, minlength=logits_WV.shape[-1])
        logits_WV -= sampling.frequency_penalty * count_V + sampling.presence_penalty * (count_V > 0)
