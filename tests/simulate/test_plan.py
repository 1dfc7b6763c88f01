"""`mars-ray plan`: the replicas, the price and the largest load of each way of decoding."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mars_ray.control.control_settings import ControlPlan
from mars_ray.errors import EmptyDataError, InputError
from mars_ray.load.record import RequestSlo
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.command import run_plan
from mars_ray.simulate.options import PlanOptions
from mars_ray.simulate.plan import PlannedLoad, busiest_part, decoding_choices, plan_row
from tests.simulate.simulation_samples import machine, poisson

SECONDS = 20.0
LOAD = PlannedLoad(
    arrivals=tuple(poisson(8, SECONDS, prompt=40, output=60)),
    seconds=SECONDS,
    slo=RequestSlo(ttft_ms=2000, tpot_ms=40),
    dollars_per_hour=2.0,
)
CHOICES = {choice.name: choice for choice in decoding_choices(machine(), ControlPlan(accuracy=machine().accuracy))}


def test_every_way_of_decoding_is_planned() -> None:
    assert list(CHOICES) == ["one token at a time", "exact", "threshold 0.9", "threshold 0.3", "capacity"]


def test_more_tokens_per_forward_never_need_more_replicas() -> None:
    rows = [plan_row(LOAD, CHOICES[name]) for name in ("one token at a time", "threshold 0.9", "threshold 0.3")]
    replicas = [row.replicas for row in rows]
    assert None not in replicas
    assert replicas == sorted(replicas, reverse=True)  # type: ignore[type-var]
    assert replicas[0] > replicas[-1]  # type: ignore[operator]


def test_the_price_is_that_of_the_replicas_for_the_tokens_of_the_answers() -> None:
    row = plan_row(LOAD, CHOICES["threshold 0.3"])
    assert row.replicas is not None
    paid = row.replicas * 2.0 * SECONDS / 3600
    assert row.dollars_per_million_tokens == pytest.approx(1e6 * paid / LOAD.output_tokens)


def test_the_replicas_bear_at_least_the_load_of_the_trace() -> None:
    row = plan_row(LOAD, CHOICES["threshold 0.9"])
    assert row.requests_per_s is not None
    assert row.requests_per_s >= len(LOAD.arrivals) / SECONDS


def test_a_constant_threshold_has_its_own_accuracy_even_below_the_calibrated_floor() -> None:
    assert plan_row(LOAD, CHOICES["threshold 0.3"]).accuracy == pytest.approx(machine().accuracy_at(0.3))


def test_capacity_keeps_the_calibrated_floor() -> None:
    row = plan_row(LOAD, CHOICES["capacity"])
    assert row.accuracy is not None
    assert row.accuracy >= 0.99 * machine().accuracy_at(1.0) - 1e-9


def test_a_latency_that_no_number_of_replicas_meets_has_no_figures() -> None:
    row = plan_row(replace(LOAD, slo=RequestSlo(tpot_ms=0.1)), CHOICES["exact"])
    assert row.replicas is row.dollars_per_million_tokens is row.accuracy is None


def test_the_busiest_part_has_the_most_tokens_and_starts_at_0() -> None:
    arrivals = [Arrival(float(second), 10, 10) for second in range(50)]
    arrivals += [Arrival(50 + second, 10, 300) for second in range(10)]
    part = busiest_part(arrivals, 5)
    assert [arrival.arrival_s for arrival in part] == [0, 1, 2, 3, 4]
    assert all(arrival.output_tokens == 300 for arrival in part)


def test_a_plan_has_a_table_and_a_plot_and_says_that_its_step_time_is_modelled(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plan.svg"
    options = PlanOptions(machine="l4/qwen2.5-0.5b", trace=trace, slo=("ttft:1000,tpot:30",), duration=10, plot=plot)
    report = json.loads(json.dumps(run_plan(options)))
    assert [row["replicas"] for row in report["rows"]] == [1] * 9
    assert report["machine"]["modelled_step_time"] == "l4/qwen2.5-0.5b/vllm"
    assert "modelled step time of l4/qwen2.5-0.5b/vllm" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "h300/qwen2.5-7b"}, "gpu 'h300' is unknown"),
        ({"machine": "h200/gpt-5"}, "network 'gpt-5' is unknown"),
        ({"slo": ()}, "slo is missing"),
        ({"price": 0.0}, "price is 0.0"),
        ({"duration": 0.0}, "duration is 0.0"),
        ({"plot": Path("plan.txt")}, "plot is plan.txt"),
        ({"trace": "nowhere.csv.gz"}, "There is no file nowhere.csv.gz"),
        ({"card": Path("nowhere")}, "card is nowhere"),
    ],
)
def test_what_cannot_be_planned_is_one_line(trace: str, changes: dict[str, Any], message: str) -> None:
    given = {"machine": "h200/qwen2.5-7b", "trace": trace, "slo": ("ttft:1000",)} | changes
    with pytest.raises(InputError) as raised:
        run_plan(PlanOptions(**given))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_measured_machine_needs_a_price(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(machine().model_dump_json())
    with pytest.raises(InputError, match="price is missing"):
        run_plan(PlanOptions(machine=str(path), trace=trace, slo=("ttft:1000",)))


def test_a_trace_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv.gz"
    path.write_bytes(gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n"))
    with pytest.raises(EmptyDataError, match="has no requests"):
        run_plan(PlanOptions(machine="h200/qwen2.5-7b", trace=str(path), slo=("ttft:1000",)))
