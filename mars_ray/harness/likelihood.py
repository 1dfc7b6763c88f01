"""Compute the log-likelihood of texts with plain forwards.

The mask token has probability 0, as in the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mars_ray.evaluation.agreement import batches_of_like_length, plain_attention
from mars_ray.method.logits import logits_at
from mars_ray.progress import ProgressLine


@dataclass(frozen=True, slots=True)
class Scored:
    """A text whose last tokens are scored, each given all tokens before it."""

    tokens: tuple[int, ...]
    judged: int
    """Number of scored tokens at the end: at least 1, and never the first token of the text."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Likelihood of the scored tokens of one text."""

    logprob: float
    """Sum of the natural log-probabilities of the tokens."""
    greedy: bool
    """True if each token is the most likely one at its position."""


@torch.inference_mode()
def likelihoods(
    network: PreTrainedModel, texts: Sequence[Scored], mask_id: int, progress: ProgressLine
) -> list[Likelihood]:
    """Return the likelihood of each text, in the same order. Texts of similar length share a forward."""
    results: dict[int, Likelihood] = {}
    with plain_attention(network):
        for numbers in batches_of_like_length([len(text.tokens) for text in texts]):
            results |= zip(numbers, _likelihoods(network, [texts[number] for number in numbers], mask_id), strict=True)
            progress.update(len(results), {})
    return [results[number] for number in range(len(texts))]


def _likelihoods(network: PreTrainedModel, batch: Sequence[Scored], mask_id: int) -> list[Likelihood]:
    device = network.device
    # The last token of a text predicts no scored token, so it is not fed to the model. Attention is causal, so padding
    # to the right of a text has no effect.
    length = max(len(text.tokens) for text in batch) - 1
    ids_RS = torch.tensor([_padded(text.tokens[:-1], length, mask_id) for text in batch], device=device)
    next_RS = torch.tensor([_padded(text.tokens[1:], length, mask_id) for text in batch], device=device)
    end_R1 = torch.tensor([[len(text.tokens) - 1] for text in batch], device=device)
    first_R1 = end_R1 - torch.tensor([[text.judged] for text in batch], device=device)
    slot_S = torch.arange(length, device=device)
    judged_RS = (slot_S >= first_R1) & (slot_S < end_R1)
    logits_MV = logits_at(network, judged_RS, input_ids=ids_RS).float()
    logits_MV[:, mask_id] = -torch.inf
    next_M = next_RS[judged_RS]
    logprob_M = logits_MV.gather(1, next_M[:, None])[:, 0] - logits_MV.logsumexp(dim=1)
    greedy_M = logits_MV.argmax(dim=1) == next_M
    counts = [text.judged for text in batch]
    return [
        # Sum in double precision, so that the order of the summands has no effect.
        Likelihood(logprob=float(logprobs.double().sum()), greedy=bool(greedy.all()))
        for logprobs, greedy in zip(torch.split(logprob_M, counts), torch.split(greedy_M, counts), strict=True)
    ]


def _padded(tokens: tuple[int, ...], length: int, filler: int) -> list[int]:
    return [*tokens, *[filler] * (length - len(tokens))]
