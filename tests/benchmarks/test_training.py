"""The benchmark of training steps measures memory as the most that torch holds at once."""

import torch

from benchmarks.training import allocated_peak


def test_the_peak_counts_memory_that_is_held_at_once_and_not_what_was_freed() -> None:
    def one_after_another() -> None:
        for _ in range(3):
            torch.zeros(1_000_000)

    def at_once() -> None:
        [torch.zeros(1_000_000) for _ in range(3)]

    assert 4e6 <= allocated_peak(one_after_another) < 5e6
    assert 12e6 <= allocated_peak(at_once) < 13e6
