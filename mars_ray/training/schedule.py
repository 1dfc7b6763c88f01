"""What happens at which step: learning rate, rows and blocks, each a pure function of the step number.

So "step n" is the whole state of a run beside its weights and optimizer, and resuming is exact.
"""

import math

import torch

FIRST_BLOCK = 3
"""Masks in a block at the beginning, where blocks grow: a short one has its first masks more often."""


def learning_rate(step: int, steps: int, *, peak: float, warmup: float) -> float:
    """Linear from peak / n over the n warm-up steps, then a cosine that reaches zero behind the last step."""
    warmup_steps = int(steps * warmup)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps)))


def block_size(step: int, steps: int, *, last: int) -> int:
    """Grow evenly from `FIRST_BLOCK` masks to `last`, which is that of the last step."""
    first = min(FIRST_BLOCK, last)
    return first + round((last - first) * step / max(1, steps - 1))


def step_count(rows: int, *, epochs: float, batch_rows: int) -> int:
    """Return the steps that pass `epochs` times over `rows`; the last batch may begin one more epoch."""
    return math.ceil(rows * epochs / batch_rows)


def row_numbers(step: int, rows: int, *, batch_rows: int, seed: int) -> list[int]:
    """Return the rows of one step: each epoch is its own seeded permutation, and a batch may span two."""
    numbers = []
    for place in range(step * batch_rows, (step + 1) * batch_rows):
        epoch, within = divmod(place, rows)
        numbers.append((epoch, within))
    orders = {epoch: torch.randperm(rows, generator=generator_for(seed, epoch)) for epoch, _ in numbers}
    return [int(orders[epoch][within]) for epoch, within in numbers]


def generator_for(seed: int, number: int) -> torch.Generator:
    """Return a generator that depends on both numbers alone."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)
