"""`mars-ray simulate` reads what it is given, and says in one line what is wrong with it."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mars_ray.errors import ConfigError, DataError, InputError
from mars_ray.simulate.command import arrivals_of, control_plan, run_simulation, shares_of
from mars_ray.simulate.machine import read_machine
from mars_ray.simulate.options import SimulateOptions
from tests.simulate.simulation_samples import machine


@pytest.fixture
def machine_file(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(machine().model_dump_json())
    return path


def test_a_trace_gives_figures_series_and_a_plot(trace: str, machine_file: Path, tmp_path: Path) -> None:
    options = SimulateOptions(trace=trace, replicas=2, machine=str(machine_file), policy="fixed", slo=("e2e:60000",))
    options = replace(options, plot=tmp_path / "plot.png")
    report = json.loads(json.dumps(run_simulation(options)))
    assert report["metrics"]["ended"] == 20
    assert report["metrics"]["good"] == 1
    assert report["plan"]["settings"]["policy"] == "fixed"
    assert sum(report["seconds"]["arrived"]) == 20
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_scales_and_speed_change_the_trace(trace: str, machine_file: Path) -> None:
    options = SimulateOptions(trace=trace, replicas=1, speed=2, prompt_scale=0.5, output_scale=3)
    third = arrivals_of(options)[2]
    assert third == (2.0, 22, 72, -1)


def test_classes_come_from_the_control_file_in_their_mix(trace: str, machine_file: Path, tmp_path: Path) -> None:
    control = tmp_path / "control.yaml"
    control.write_text("classes: [{name: gold, share: 3}, {name: batch}]\n")
    options = SimulateOptions(trace=trace, replicas=1, machine=str(machine_file), control=control, mix="gold:1,batch:3")
    assert shares_of(options.mix, control_plan(options, machine(), None)) == [1, 3]
    assert run_simulation(options)["metrics"]["ended"] == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "capcity"}, "policy is 'capcity'"),
        ({"policy": "slo"}, "policy is 'slo'; use 'capacity'"),
        ({"replicas": 0}, "replicas is 0"),
        ({"trace": "nowhere.csv.gz"}, "There is no file nowhere.csv.gz"),
        ({"trace": "poisson:3"}, "give a file"),
        ({"copies": 0}, "copies is 0"),
        ({"speed": 0.0}, "speed is 0.0"),
        ({"mix": "silver:1"}, "mix 'silver:1'"),
        ({"slo": ("p99:3",)}, "slo 'p99:3'"),
        ({"autoscale": True, "max_replicas": 1}, "replicas is 2"),
        ({"autoscale": True, "max_replicas": 0}, "max_replicas 0"),
        ({"min_replicas": 5}, "min_replicas is 5, but without autoscale"),
        ({"machine": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"control": Path("nowhere.yaml")}, "nowhere.yaml cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    trace: str, machine_file: Path, changes: dict[str, Any], message: str
) -> None:
    given = {"trace": trace, "replicas": 2, "machine": str(machine_file)} | changes
    with pytest.raises(InputError) as raised:
        run_simulation(SimulateOptions(**given))  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_plot_of_no_known_kind_is_refused_before_any_work(trace: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plot is .*\.txt"):
        SimulateOptions(trace=trace, replicas=2, plot=tmp_path / "plot.txt")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"step_time": {"fixed_s": 0.0}}, "fixed_s of step_time must be above 0"),
        ({"profile": [{"threshold": 1.0, "tokens": [1.0], "positions": [1.0]}] * 2}, "must fall"),
        ({"rwos": 4}, "rwos"),
    ],
)
def test_a_machine_file_that_cannot_be_is_named(tmp_path: Path, change: dict[str, Any], place: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(machine().model_dump() | change))
    with pytest.raises(ConfigError, match=place):
        read_machine(path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("max_num_seqs: 4")
    with pytest.raises(ConfigError, match="not a machine file"):
        read_machine(path)


def test_the_bundled_machine_is_one() -> None:
    found = read_machine(None)
    tokens = [found.lookahead(threshold).tokens_B[-1] for threshold in (0.99, 0.95, 0.9, 0.7)]
    assert tokens == sorted(tokens)
    assert 1 < found.lookahead(1.0).tokens_B[-1] < tokens[-1]
    assert found.measured_on["model"] == "bundled"


def test_a_trace_with_a_wrong_line_is_named(tmp_path: Path, machine_file: Path) -> None:
    path = tmp_path / "bad.csv.gz"
    path.write_bytes(gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n"))
    with pytest.raises(DataError, match="line 2"):
        run_simulation(SimulateOptions(trace=str(path), replicas=1, machine=str(machine_file)))


def test_the_controller_knows_the_calibration_of_the_machine_unless_the_file_names_one(tmp_path: Path) -> None:
    options, on = SimulateOptions(trace="x.csv.gz", replicas=1), machine()
    assert control_plan(options, on, None).accuracy == on.accuracy
    assert control_plan(options, on, None).agreement == on.agreement
    (tmp_path / "plan.yaml").write_text("accuracy: [[1.0, 0.9], [0.5, 0.8]]")
    named = SimulateOptions(trace="x.csv.gz", replicas=1, control=tmp_path / "plan.yaml")
    assert control_plan(named, on, None).accuracy == ((1.0, 0.9), (0.5, 0.8))
