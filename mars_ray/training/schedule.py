"""Learning rate, rows and block size of each step, as pure functions of the step number.

Apart from weights and optimizer, the step number is therefore the whole state of a run, and resuming is exact.
"""

import math

import torch

FIRST_BLOCK = 3
"""Masks per block in the first step, if blocks grow. Short blocks train the first masks more often."""


def learning_rate(step: int, steps: int, *, peak: float, warmup: float) -> float:
    """Return the learning rate: linear from peak / n over n warm-up steps, then a cosine to zero at the end."""
    warmup_steps = int(steps * warmup)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps)))


def block_size(step: int, steps: int, *, last: int) -> int:
    """Return the number of masks per block, which grows evenly from `FIRST_BLOCK` to `last` at the last step."""
    first = min(FIRST_BLOCK, last)
    return first + round((last - first) * step / max(1, steps - 1))


def step_count(rows: int, *, epochs: float, batch_rows: int) -> int:
    """Return the number of steps in `epochs` passes over `rows`; the last batch may reach into one more epoch."""
    return math.ceil(round(rows * epochs, 6) / batch_rows)  # 30 * 1.1 is a little more than 33


def row_numbers(step: int, rows: int, *, batch_rows: int, seed: int) -> list[int]:
    """Return the row numbers of one step. Each epoch has its own seeded order, and a batch may span two epochs."""
    positions = [divmod(index, rows) for index in range(step * batch_rows, (step + 1) * batch_rows)]
    orders = {epoch: torch.randperm(rows, generator=generator_for(seed, epoch)) for epoch, _ in positions}
    return [int(orders[epoch][index]) for epoch, index in positions]


def generator_for(seed: int, number: int) -> torch.Generator:
    """Return a generator whose state depends only on these two numbers."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)
