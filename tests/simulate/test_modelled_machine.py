"""Simulated machines from a modelled step: their roofline, the linear model they report, and their curves."""

from pathlib import Path

import numpy as np
import pytest

from mars_ray.control.control_settings import ControlPlan
from mars_ray.engine.stats.step_time import StepTime, StepWork
from mars_ray.errors import ConfigError
from mars_ray.machines.registry import step_model
from mars_ray.machines.step_model import PAPER_CURVE
from mars_ray.model.resolve import resolve_model
from mars_ray.simulate.arrivals import Arrival
from mars_ray.simulate.modelled_machine import open_machine, roofline, visited_steps
from tests.simulate.simulation_samples import machine, poisson, run

NAMES = ["h200/qwen2.5-7b", "h200/qwen2.5-7b/paper", "l4/qwen2.5-0.5b", "a100-80g/llama-3.1-8b"]
FIXED = ControlPlan.model_validate({"settings": {"policy": "fixed"}})


@pytest.mark.parametrize("name", NAMES)
def test_the_longer_line_is_the_modelled_step(name: str) -> None:
    model = step_model(name)
    for work in visited_steps(256):
        longer = max(line.seconds(work) for line in roofline(model))
        assert longer == pytest.approx(work.modelled_s(model), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_reported_linear_model_is_off_by_16_percent_on_average_and_by_38_at_most(name: str) -> None:
    model = step_model(name)
    opened = open_machine(name)
    steps = list(visited_steps(opened.max_num_seqs))
    errors = np.array([opened.step_time.seconds(work) / work.modelled_s(model) - 1 for work in steps])
    assert np.abs(errors).mean() < 0.165
    assert np.abs(errors).max() < 0.385


def test_a_roofline_of_two_equal_lines_simulates_the_single_line() -> None:
    times = StepTime(fixed_s=0.01, seq_s=0.001, position_s=0.0002, prompt_s=0.002, prompt_token_s=0.00005)
    arrivals = poisson(3, 60)
    single = run(arrivals, on=machine(step_time=times))
    double = run(arrivals, on=machine(step_time=times, roofline=(times, times)))
    assert single.metrics == double.metrics


def test_a_sequence_alone_decodes_at_the_modelled_step_time() -> None:
    opened = open_machine("h200/qwen2.5-7b").without_lookahead()
    metrics = run(poisson(0.05, 300, prompt=100, output=400), FIXED, opened).metrics
    step_s = StepWork(num_seqs=1, positions=1, kv_tokens=300).modelled_s(step_model("h200/qwen2.5-7b"))
    assert metrics.tpot_ms is not None
    assert metrics.tpot_ms.p50 == pytest.approx(1000 * step_s, rel=0.03)


def test_prompts_that_computing_hides_behind_reading_cost_nothing() -> None:
    times = StepTime(fixed_s=0.01)
    computing = StepTime(fixed_s=1e-9, prompt_token_s=1e-5)
    arrivals = poisson(3, 60, prompt=100)
    hidden = run(arrivals, on=machine(step_time=times, roofline=(times, computing))).metrics
    free = run(arrivals, on=machine(step_time=times)).metrics
    assert hidden == free


def test_computing_limits_a_step_with_many_prompt_tokens() -> None:
    times = StepTime(fixed_s=0.01)
    computing = StepTime(fixed_s=1e-9, prompt_token_s=1e-3)
    arrivals = [Arrival(5.0 * number, 100, 20) for number in range(10)]
    slow = run(arrivals, on=machine(step_time=times, roofline=(times, computing))).metrics
    assert slow.ttft_ms is not None
    assert slow.ttft_ms.mean == pytest.approx(100, rel=0.1)


def test_tokens_per_forward_rise_and_quality_falls_with_the_threshold_on_the_curve_of_the_paper() -> None:
    opened = open_machine("h200/qwen2.5-7b")
    thresholds = [point.threshold for point in PAPER_CURVE]
    tokens = [opened.lookahead(threshold).tokens_B[-1] for threshold in thresholds]
    agreement = [opened.agreement_at(threshold) for threshold in thresholds]
    assert tokens == sorted(tokens)
    assert agreement == sorted(agreement, reverse=True)
    assert agreement[0] == 1
    for point, gained in zip(PAPER_CURVE, tokens, strict=True):
        assert opened.accuracy_at(point.threshold) == point.accuracy
        assert point.tokens_per_forward - 0.01 <= gained <= 4


def test_a_card_gives_its_own_curve() -> None:
    opened = open_machine("l4/qwen2.5-0.5b", resolve_model("bundled"))
    assert opened.measured_on["curve"] == "the card's calibration"
    assert opened.accuracy_at(1.0) > 0.97
    assert opened.masks == 15


def test_a_machine_file_and_a_measured_file_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text('{"gpu": "l4", "network": "qwen2.5-0.5b"}')
    (tmp_path / "measured.json").write_text(machine().model_dump_json())
    assert open_machine(str(tmp_path / "gpu.json")).roofline is not None
    assert open_machine(str(tmp_path / "measured.json")) == machine()


def test_a_card_without_calibration_and_one_for_a_measured_machine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must have a calibration"):
        open_machine("l4/qwen2.5-0.5b", tmp_path)
    with pytest.raises(ConfigError, match="Leave out card"):
        open_machine(None, tmp_path)


def test_a_small_memory_limits_the_sequences() -> None:
    assert open_machine("h200/qwen2.5-7b").max_num_seqs == 256
    assert open_machine("l4/qwen2.5-7b").max_num_seqs < 128
