"""Everything a step needs follows from its number."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.training.schedule import FIRST_BLOCK, block_size, learning_rate, row_numbers, step_count


@given(rows=st.integers(1, 40), batch_rows=st.integers(1, 20), epochs=st.integers(1, 3), seed=st.integers(0, 9))
def test_every_epoch_holds_every_row_once(rows: int, batch_rows: int, epochs: int, seed: int) -> None:
    steps = step_count(rows, epochs=epochs, batch_rows=batch_rows)
    order = [n for step in range(steps) for n in row_numbers(step, rows, batch_rows=batch_rows, seed=seed)]
    assert len(order) - rows * epochs in range(batch_rows)
    for epoch in range(epochs):
        assert Counter(order[epoch * rows : (epoch + 1) * rows]) == Counter(range(rows))


def test_a_part_of_an_epoch_adds_no_step_by_rounding() -> None:
    assert step_count(30, epochs=1.1, batch_rows=11) == 3


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(row_numbers(step, 50, batch_rows=50, seed=seed)) for step in range(3) for seed in range(3)}
    assert len(orders) == 9


@given(steps=st.integers(1, 500), warmup=st.floats(0, 0.99))
def test_the_learning_rate_rises_to_its_peak_and_falls_towards_zero(steps: int, warmup: float) -> None:
    rates = [learning_rate(step, steps, peak=2.0, warmup=warmup) for step in range(steps)]
    top = int(steps * warmup)
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert math.isclose(rates[top], 2.0)


@given(steps=st.integers(2, 300), last=st.integers(2, 64))
def test_blocks_grow_evenly_to_their_full_size(steps: int, last: int) -> None:
    sizes = [block_size(step, steps, last=last) for step in range(steps)]
    assert (sizes[0], sizes[-1]) == (min(FIRST_BLOCK, last), last)
    assert sizes == sorted(sizes)
    even = (last - sizes[0]) / (steps - 1)
    assert all(abs(size - sizes[0] - even * step) <= 0.5 + 1e-9 for step, size in enumerate(sizes))
