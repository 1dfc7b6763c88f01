"""Count the tokens of answers that autoregressive decoding would have chosen, given what stands before them.

The count is exact: every token is compared, where the engine's live audit takes a sample.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from mars_ray.method.logits import logits_at
from mars_ray.progress import ProgressLine

Tokens = tuple[int, ...]

POSITIONS_PER_FORWARD = 2048
"""Positions of all rows together, fillers included, unless one row alone is longer."""


@torch.inference_mode()
def agreed_tokens(
    network: PreTrainedModel,
    answers: Sequence[tuple[Tokens, Tokens]],
    mask_id: int,
    progress: ProgressLine,
    done: int = 0,
) -> list[int]:
    """Return for each prompt and its answer how many tokens of the answer are the most likely ones.

    `done` of what the progress shows were compared before.
    """
    agreed = [0] * len(answers)
    with plain_attention(network):
        for numbers in batches_of_like_length([len(prompt) + len(answer) for prompt, answer in answers]):
            for number, count in zip(numbers, _agreed(network, [answers[n] for n in numbers], mask_id), strict=True):
                agreed[number] = count
            done += len(numbers)
            progress.update(done, {})
    return agreed


def _agreed(network: PreTrainedModel, batch: Sequence[tuple[Tokens, Tokens]], mask_id: int) -> list[int]:
    device = network.device
    # Attention is causal, so fillers to the right of a row are never seen.
    length = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids_RS = torch.tensor([[*p, *a, *[mask_id] * (length - len(p) - len(a))] for p, a in batch], device=device)
    first_R1 = torch.tensor([[len(prompt)] for prompt, _ in batch], device=device)
    end_R1 = torch.tensor([[len(prompt) + len(answer)] for prompt, answer in batch], device=device)
    slot_S = torch.arange(length, device=device)
    answer_RS = (slot_S >= first_R1) & (slot_S < end_R1)
    logits_MV = logits_at(network, answer_RS.roll(-1, dims=1), input_ids=ids_RS)
    logits_MV[:, mask_id] = -torch.inf
    right_M = logits_MV.argmax(dim=-1) == ids_RS[answer_RS]
    row_M = answer_RS.nonzero()[:, 0]
    counts: list[int] = (
        torch.zeros(len(batch), dtype=torch.long, device=device).index_add_(0, row_M, right_M.long()).tolist()
    )
    return counts


def batches_of_like_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of rows of like length, as many as one forward takes."""
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
    """Lend the network an attention that needs no cache: an engine has put its own in."""
    before = network.config._attn_implementation
    network.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        network.set_attn_implementation(before)
