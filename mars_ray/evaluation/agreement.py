"""Count the tokens of answers that autoregressive decoding would also choose after the same prefix.

The count is exact, because every token is compared. The engine's live audit compares only a sample.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from mars_ray.method.logits import logits_at
from mars_ray.model.network import attention_for
from mars_ray.progress import ProgressLine

Tokens = tuple[int, ...]

POSITIONS_PER_FORWARD = 2048
"""Maximum number of positions in a batch, including padding, unless a single answer is longer."""


def agreed_tokens(
    network: PreTrainedModel, answers: Sequence[tuple[Tokens, Tokens]], mask_id: int, progress: ProgressLine
) -> list[int]:
    """Return, for each (prompt, answer) pair, how many answer tokens are the most likely token at their position."""
    agreed: dict[int, int] = {}
    for counts in agreed_in_batches(network, answers, mask_id):
        agreed |= counts
        progress.update(len(agreed), {})
    return [agreed[number] for number in range(len(answers))]


def agreed_in_batches(
    network: PreTrainedModel, answers: Sequence[tuple[Tokens, Tokens]], mask_id: int
) -> Iterator[dict[int, int]]:
    """Yield the counts of `agreed_tokens` in batches, by the numbers of the answers."""
    for numbers in batches_of_like_length([len(prompt) + len(answer) for prompt, answer in answers]):
        with plain_attention(network):
            counts = _agreed(network, [answers[number] for number in numbers], mask_id)
        yield dict(zip(numbers, counts, strict=True))


@torch.inference_mode()
def _agreed(network: PreTrainedModel, batch: Sequence[tuple[Tokens, Tokens]], mask_id: int) -> list[int]:
    device = network.device
    # Attention is causal, so padding on the right has no effect.
    length = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids_RS = torch.tensor([[*p, *a, *[mask_id] * (length - len(p) - len(a))] for p, a in batch], device=device)
    first_R1 = torch.tensor([[len(prompt)] for prompt, _ in batch], device=device)
    end_R1 = torch.tensor([[len(prompt) + len(answer)] for prompt, answer in batch], device=device)
    slot_S = torch.arange(length, device=device)
    answer_RS = (slot_S >= first_R1) & (slot_S < end_R1)
    logits_MV = logits_at(network, answer_RS.roll(-1, dims=1), input_ids=ids_RS)
    logits_MV[:, mask_id] = -torch.inf
    right_M = logits_MV.argmax(dim=-1) == ids_RS[answer_RS]
    answer_M = answer_RS.nonzero()[:, 0]
    counts: list[int] = (
        torch.zeros(len(batch), dtype=torch.long, device=device).index_add_(0, answer_M, right_M.long()).tolist()
    )
    return counts


def batches_of_like_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of indices; the lengths in a batch are similar and fit into one forward."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[number] > POSITIONS_PER_FORWARD:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@contextmanager
def plain_attention(network: PreTrainedModel) -> Iterator[None]:
    """Let the network use attention without a KV cache inside the `with` block; an engine may have installed
    another."""
    previous = network.config._attn_implementation
    network.set_attn_implementation(attention_for(network.config))
    try:
        yield
    finally:
        network.set_attn_implementation(previous)
