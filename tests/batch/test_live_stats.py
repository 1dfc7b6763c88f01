"""What workers report between finished rows, added up."""

from pathlib import Path

import pytest

from mars_ray.batch.output.folder import open_output
from mars_ray.batch.run.job import Job
from mars_ray.batch.run.live_stats import LiveStats, engine_name, worker_of
from mars_ray.control.core.status import ReplicaStatus
from mars_ray.engine.stats.state import ModelledSteps
from tests.control.control_samples import class_state, engine_state
from tests.factories.clock import Clock


def status(engine: str, *, ended: int = 0, running: int = 0, under_way: int = 0, age_s: float = 0.0) -> ReplicaStatus:
    """An engine whose sequences that ended have `ended` tokens, and those that run `under_way`."""
    state = engine_state(class_state(running=running, tokens=ended), tokens_running=under_way)
    return ReplicaStatus(replica=engine, age_s=age_s, state=state)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_tokens_of_sequences_under_way_count_before_any_ended(clock: Clock) -> None:
    stats = LiveStats(clock)
    stats.update([status("a:1", running=4, under_way=40), status("b:1", running=2, under_way=6)])
    assert (stats.tokens, stats.running, stats.tokens_per_s()) == (46, {"a:1": 4, "b:1": 2}, None)


def test_the_rate_is_that_of_the_reports_by_the_time_they_were_made(clock: Clock) -> None:
    stats = LiveStats(clock)
    stats.update([status("a:1", under_way=40, age_s=1.0), status("b:1", under_way=100)])
    clock.now_s += 2
    stats.update([status("a:1", ended=30, under_way=70), status("b:1", under_way=200)])
    assert stats.tokens_per_s("a:1") == 60 / 3
    assert stats.tokens_per_s() == 60 / 3 + 100 / 2


def test_an_engine_that_died_leaves_its_tokens_and_nothing_else(clock: Clock) -> None:
    stats = LiveStats(clock)
    stats.update([status("a:1", running=4, under_way=40)])
    assert stats.restarts == 0
    clock.now_s += 2
    stats.update([status("a:2", running=1, under_way=5)])
    assert stats.restarts == 1
    assert (stats.tokens, stats.running, stats.tokens_per_s()) == (45, {"a:2": 1}, None)


def test_a_preempted_sequence_takes_no_tokens_back(clock: Clock) -> None:
    stats = LiveStats(clock)
    for under_way in (40, 25):
        stats.update([status("a:1", under_way=under_way)])
        clock.now_s += 1
    assert stats.tokens == 40
    assert stats.tokens_per_s() == 0


def test_an_engine_is_known_as_its_worker() -> None:
    assert worker_of(engine_name("host:12", 5)) == "host:12"


def test_a_job_has_figures_before_its_first_row_is_done(clock: Clock, tmp_path: Path) -> None:
    stats = LiveStats(clock)
    with open_output(tmp_path / "out", new=False) as output:
        job = Job(output, total=9, workers=1, settings={}, clock=clock)
        for under_way in (10, 30):
            stats.update([status("host:12:5", running=4, under_way=under_way)])
            clock.now_s += 1
        figures = job.metrics(stats)
    assert (figures.done, figures.running, figures.tokens, figures.tokens_per_s) == (0, 4, 30, 20)
    assert figures.tokens_per_forward is None
    assert [(each.name, each.running, each.tokens_per_s) for each in figures.workers] == [("host:12", 4, 20)]


def test_the_slow_steps_of_engines_that_died_count_in_the_notice(clock: Clock) -> None:
    stats = LiveStats(clock)
    assert stats.notice == ""
    for engine, steps in (("a:1", 40), ("a:2", 60)):
        state = engine_state(steps=steps, modelled=ModelledSteps(name="l4/qwen2.5-0.5b", slow_steps=2))
        stats.update([ReplicaStatus(replica=engine, age_s=0.0, state=state)])
    assert stats.notice == "modelled step time: l4/qwen2.5-0.5b (4 of 100 steps were slower here)"
