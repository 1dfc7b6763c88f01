"""A simulated cluster keeps every request, obeys the arithmetic of its machine, and is controlled as a real one."""

from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.policy import bounds_of
from mars_ray.engine.service_class import STANDARD
from mars_ray.errors import ConfigError, EmptyDataError
from mars_ray.installed import settings_class
from mars_ray.model.resolve import resolve_model
from mars_ray.serve.deploy.serve_config import parse_config
from mars_ray.simulate.arrivals import SPREAD_S, Arrival, Arrivals
from mars_ray.simulate.modelled_machine import open_machine
from mars_ray.simulate.replicas import Scaling
from mars_ray.simulate.simulator import REPORTING, SimulationOptions, simulate
from tests.simulate.simulation_samples import FIXED, SURVIVAL, in_ticks, machine, poisson, run

CLASSES = ControlPlan.model_validate({"classes": [{"name": "gold", "priority": 1}, {"name": "batch"}]})
CAPACITY = ControlPlan.model_validate({"settings": {"policy": "capacity", "recover_s": 5}, "classes": [{"floor": 0.9}]})
AUTOREGRESSIVE = ControlPlan.model_validate({"settings": {"policy": "fixed"}, "ceiling": 1.0})

arrivals = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 900), st.integers(1, 300)), min_size=1, max_size=60).map(
    lambda drawn: [Arrival(*each) for each in sorted(drawn)]
)


@given(
    arrivals=arrivals,
    replicas=st.integers(1, 5),
    rows=st.integers(1, 4),
    queue=st.integers(1, 40),
    ticks=st.sampled_from([1, 7, 50]),
    plan=st.sampled_from([FIXED, CLASSES, CAPACITY]),
    fleet=st.sampled_from([nullcontext, in_ticks]),
)
def test_every_request_ends_or_is_refused_and_every_token_of_it_is_written(
    arrivals: list[Arrival],
    replicas: int,
    rows: int,
    queue: int,
    ticks: int,
    plan: ControlPlan,
    fleet: type[AbstractContextManager[Any]],
) -> None:
    with fleet():
        found = run(
            arrivals, plan, machine(max_num_seqs=rows, max_waiting_seqs=queue), replicas=replicas, ticks_per_s=ticks
        ).metrics
    assert found.requests == len(arrivals)
    assert found.ended + found.refused == len(arrivals)
    assert found.in_flight == found.too_long == 0
    if not found.refused:
        assert found.tokens == pytest.approx(sum(each.output_tokens for each in arrivals))


def test_what_runs_when_time_is_up_is_in_flight() -> None:
    found = run([Arrival(0.0, 10, 1_000_000)], on=machine(max_model_len=2_000_000), ticks_per_s=2).metrics
    assert (found.requests, found.ended, found.in_flight) == (1, 0, 1)


def test_a_request_beyond_the_positions_is_refused_as_too_long() -> None:
    found = run([Arrival(0.0, 4000, 200), Arrival(1.0, 10, 10)]).metrics
    assert (found.too_long, found.refused, found.ended) == (1, 0, 1)


@pytest.mark.parametrize(("ticks", "within"), [(20, 0.03), (200, 0.003), (2000, 0.0003)])
@pytest.mark.parametrize("fleet", [nullcontext, in_ticks])
def test_one_request_alone_takes_what_its_steps_take(
    ticks: int, within: float, fleet: type[AbstractContextManager[Any]]
) -> None:
    with fleet():
        found = run([Arrival(0.5, 1200, 100)], AUTOREGRESSIVE, ticks_per_s=ticks).metrics
    reading_s = ceil(1200 / 512) * (0.01 + 0.002) + 1200 * 0.00005
    decoding_s = 99 * (0.01 + 0.001 + 0.0002)
    assert found.ttft_ms is not None and found.e2e_ms is not None
    assert found.ttft_ms.mean == pytest.approx(1000 * reading_s)
    assert found.e2e_ms.mean == pytest.approx(1000 * (reading_s + decoding_s), rel=within)


def test_tokens_ahead_make_as_many_steps_fewer() -> None:
    found = run([Arrival(0.0, 10, 30_000)], on=machine(max_model_len=40_000)).metrics
    per_step = 1 + sum(SURVIVAL[0.95])
    step_s = 0.01 + 0.001 + 0.0002 * (per_step + 3)
    assert found.tpot_ms is not None
    assert found.tpot_ms.mean == pytest.approx(1000 * step_s / per_step, rel=0.02)


def test_a_fleet_in_ticks_has_the_rates_and_times_of_one_step_by_step() -> None:
    arrivals = poisson(9, 60)
    stepped = run(arrivals, replicas=3).metrics
    with in_ticks():
        in_all = run(arrivals, replicas=3).metrics
    assert in_all.tokens_per_s == pytest.approx(stepped.tokens_per_s, rel=0.02)
    for fluid, exact in ((in_all.e2e_ms, stepped.e2e_ms), (in_all.ttft_ms, stepped.ttft_ms)):
        assert fluid is not None and exact is not None
        assert fluid.mean == pytest.approx(exact.mean, rel=0.08)


def test_the_front_adds_its_time_on_both_sides() -> None:
    plain, behind = (run([Arrival(0.5, 10, 20)], front_s=front_s).metrics for front_s in (0.0, 0.05))
    assert plain.e2e_ms is not None and behind.e2e_ms is not None
    assert behind.e2e_ms.mean == pytest.approx(plain.e2e_ms.mean + 100, rel=1e-3)


def test_the_last_request_reaches_an_engine_that_has_nothing_else_to_do() -> None:
    assert run([Arrival(0.98, 10, 20)], front_s=0.05).metrics.requests == 1


def test_waiting_follows_the_law_of_a_queue_with_one_server() -> None:
    """One row, equal requests, Poisson arrivals: M/D/1, where the mean wait is u s / 2 (1 - u)."""
    one = machine(max_num_seqs=1, max_waiting_seqs=10_000)
    alone = run([Arrival(0.0, 10, 20)], AUTOREGRESSIVE, one).metrics.e2e_ms
    assert alone is not None
    service_s, load = alone.mean / 1000, 0.5
    many = [Arrival(each.arrival_s, 10, 20) for each in poisson(load / service_s, 800)]
    found = run(many, AUTOREGRESSIVE, one, ticks_per_s=25).metrics.e2e_ms
    assert found is not None
    assert found.mean / 1000 == pytest.approx(service_s + load * service_s / (2 * (1 - load)), rel=0.08)


def test_the_same_seed_gives_the_same() -> None:
    many = poisson(20, 20)
    first, second, other = (run(many, CLASSES, replicas=3, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first != other


@pytest.mark.parametrize("rate", [8, 16, 25])
def test_ticks_half_as_long_change_little(rate: float) -> None:
    many = poisson(rate, 60)
    coarse, fine = (run(many, replicas=2, ticks_per_s=ticks).metrics for ticks in (50, 100))
    assert coarse.e2e_ms is not None and fine.e2e_ms is not None
    assert coarse.e2e_ms.mean == pytest.approx(fine.e2e_ms.mean, rel=0.05)
    assert coarse.tokens_per_s == pytest.approx(fine.tokens_per_s, rel=0.03)


def test_overload_lowers_the_threshold_and_it_comes_back() -> None:
    calm, storm = poisson(1, 120), [Arrival(40 + each.arrival_s, *each[1:]) for each in poisson(30, 10)]
    seconds = run(sorted(calm + storm), CAPACITY).seconds
    by_second = {each.second: each.threshold for each in seconds}
    assert by_second[39] == pytest.approx(1.0)
    assert min(by_second[second] or 1.0 for second in range(41, 60)) < 0.93
    assert by_second[115] == pytest.approx(1.0)


def test_what_ships_lowers_its_threshold_on_an_overloaded_gpu_and_returns_to_lossless_answers() -> None:
    plan = parse_config(settings_class(), {}).plan(resolve_model("bundled"))
    bounds = bounds_of(plan, [])[STANDARD]
    assert (bounds.ceiling, bounds.floor, bounds.operator_floor) == (1.0, 0.9, 0.9)
    # On the measured machine, a lower threshold gains too little to pay for the accuracy.
    gpu = open_machine("l4/qwen2.5-7b", resolve_model("bundled")).model_copy(update={"max_num_seqs": 16})
    arrivals = poisson(4, 30) + [Arrival(30 + each.arrival_s, *each[1:]) for each in poisson(60, 40)]
    seconds = run(arrivals + [Arrival(90 + each.arrival_s, *each[1:]) for each in poisson(4, 100)], plan, gpu).seconds
    by_second = {each.second: each.threshold for each in seconds}
    assert by_second[29] == pytest.approx(1.0)
    assert min(by_second[second] or 1.0 for second in range(31, 90)) == pytest.approx(0.9)
    assert by_second[180] == pytest.approx(1.0)


def test_a_fixed_threshold_stays() -> None:
    found = run(poisson(30, 20)).metrics
    assert found.threshold == pytest.approx(0.95)
    assert found.threshold_changes_per_minute == 0


def test_quality_is_that_of_the_thresholds_in_force() -> None:
    found = run(poisson(30, 30), CAPACITY).metrics
    assert found.threshold is not None and 0.9 < found.threshold < 0.95
    assert found.agreement == pytest.approx(1 - (1 - found.threshold) / 4)


def test_replicas_come_after_delay_and_start_and_go_when_they_are_empty() -> None:
    many = poisson(20, 100) + [Arrival(100 + each.arrival_s, *each[1:]) for each in poisson(0.2, 200)]
    scaling = Scaling(min_replicas=1, max_replicas=4, upscale_delay_s=10, downscale_delay_s=60, startup_s=5)
    found = run(many, CAPACITY, machine(max_waiting_seqs=2000), scaling=scaling)
    up = [each.replicas for each in found.seconds]
    assert set(up[:14]) == {1}
    assert max(up[20:100]) > 1
    assert min(up[100:155]) > 1
    assert up[-1] == 1
    assert found.metrics.ended == len(many)


def test_replica_minutes_count_what_there_is() -> None:
    found = run([Arrival(float(second), 5, 5) for second in range(60)], replicas=4)
    assert found.metrics.replica_minutes == pytest.approx(4, rel=0.05)


def test_a_large_cluster_decides_by_some_of_its_replicas() -> None:
    found = run(poisson(30 * 40, 8), CAPACITY, replicas=40)
    assert found.reporting == REPORTING
    assert found.seconds[-1].threshold is None or found.seconds[7].threshold == pytest.approx(0.9, abs=0.03)


def test_more_replicas_of_the_same_load_do_not_change_it() -> None:
    few = run(poisson(16, 60), replicas=2).metrics
    many = run(poisson(16 * 8, 60), replicas=16, ticks_per_s=100).metrics
    assert few.tokens_per_s * 8 == pytest.approx(many.tokens_per_s, rel=0.1)
    assert few.e2e_ms is not None and many.e2e_ms is not None
    assert few.e2e_ms.mean == pytest.approx(many.e2e_ms.mean, rel=0.2)


def test_copies_come_all_within_a_minute_of_their_request() -> None:
    coming = Arrivals([Arrival(5.0, 10, 20), Arrival(30.0, 11, 21)], copies=50)
    parts = [coming.until(second / 2) for second in range(1, 2 * int(30 + SPREAD_S) + 2)]
    times = [float(at_s) for part in parts for at_s in part.arrival_s]
    assert len(times) == 100
    assert times == sorted(times)
    assert min(times) >= 5 and max(times) <= 30 + SPREAD_S
    assert sum(float(part.prompt.sum()) for part in parts) == 50 * 21


def test_one_copy_comes_when_the_trace_says() -> None:
    assert Arrivals([Arrival(5.25, 1, 1), Arrival(7.5, 1, 1)]).until(60.0).arrival_s.tolist() == [5.25, 7.5]


@pytest.mark.parametrize(
    "options", [{"replicas": 0}, {"replicas": 1, "ticks_per_s": 0}, {"replicas": 1, "front_s": -1.0}]
)
def test_options_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SimulationOptions(**options)  # type: ignore[arg-type]


def test_no_arrivals_are_no_load() -> None:
    with pytest.raises(EmptyDataError):
        Arrivals([])


def test_what_is_told_each_second_is_what_is_returned() -> None:
    told: list[object] = []
    done = simulate(Arrivals(poisson(5, 5)), machine(), FIXED, SimulationOptions(replicas=2), told.append)
    assert tuple(told) == done.seconds
    assert sum(each.tokens for each in done.seconds) == pytest.approx(done.metrics.tokens)
