"""How many threads a step has: all on a quiet machine, fewer where other work makes fewer faster."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.execution.step_threads import FASTER, LOST_PER_S, QUOTA_S, StepThreads, lost_cores

Times = Callable[[int], float]
"""Seconds of a step with one position, by the number of threads."""


def quiet(threads: int) -> float:
    return 0.01 / threads


@dataclass
class Steps:
    """An engine whose threads lose cores, and whose clock runs while it steps."""

    most: int = 2
    times: Times = quiet
    lost_per_s: float = 0.0
    cpus: int = 64
    now_s: float = 0.0
    lost: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.threads = StepThreads(self.most, cpus=lambda: self.cpus, clock=lambda: self.now_s)

    def run(self, seconds: float, sizes: tuple[int, ...] = (1,)) -> list[int]:
        """Step for some seconds, and return the number of threads of each step."""
        ends_s, begin = self.now_s + seconds, len(self.counts)
        while self.now_s < ends_s:
            count = self.threads.count
            positions = sizes[len(self.counts) % len(sizes)]
            step_s = positions * self.times(count)
            self.now_s += step_s
            lost_before = int(self.lost)
            self.lost += self.lost_per_s * step_s
            self.counts.append(count)
            self.threads.took(positions, step_s, int(self.lost) - lost_before)
        return self.counts[begin:]


def contested(threads: int) -> float:
    return 0.01 * threads


@given(most=st.integers(1, 8), lost_per_s=st.floats(0, LOST_PER_S / 2))
def test_a_quiet_machine_always_runs_all_threads(most: int, lost_per_s: float) -> None:
    assert set(Steps(most=most, lost_per_s=lost_per_s).run(5)) == {most}


@given(st.lists(st.sampled_from([1, 2, 7, 8, 40]), min_size=1, max_size=5))
def test_beside_other_work_fewer_threads_run_where_they_are_faster(sizes: list[int]) -> None:
    steps = Steps(times=contested, lost_per_s=200)
    steps.run(30, tuple(sizes))
    counts = steps.run(100, tuple(sizes))
    assert counts.count(1) > 0.8 * len(counts)


def test_beside_other_work_all_threads_run_where_they_are_faster() -> None:
    counts = Steps(lost_per_s=200).run(60)
    assert counts.count(2) > 0.95 * len(counts)


def test_a_thread_that_saves_little_is_left_out() -> None:
    steps = Steps(times=lambda threads: 0.01 if threads == 1 else 0.01 * (FASTER + 0.01), lost_per_s=200)
    assert steps.run(1)[-1] == 1


def test_all_threads_come_back_once_the_other_work_has_ended() -> None:
    steps = Steps(times=contested, lost_per_s=200)
    assert steps.run(60)[-1] == 1
    steps.times, steps.lost_per_s = quiet, 0
    steps.run(10)
    assert set(steps.run(10)) == {2}


def test_one_thread_at_a_time_leaves_and_the_best_number_stays() -> None:
    steps = Steps(most=6, times=lambda threads: 0.01 * abs(threads - 3) + 0.01, lost_per_s=200)
    steps.run(60)
    counts = steps.run(60)
    assert counts.count(3) > 0.8 * len(counts)


@pytest.mark.parametrize("later", [1, 3])
def test_threads_follow_a_quota_that_changes(later: int) -> None:
    steps = Steps(most=4, cpus=2)
    assert set(steps.run(1)) == {2}
    steps.cpus = later
    steps.run(QUOTA_S)
    assert set(steps.run(1)) == {later}


def test_a_thread_that_goes_on_while_others_want_its_core_loses_it() -> None:
    assert lost_cores() >= 0
