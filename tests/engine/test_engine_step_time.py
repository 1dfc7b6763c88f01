"""The step-time model and the block it recommends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.engine.step_time import FIRST_FIT, FIT_EVERY, STEPS_KEPT, StepTime, StepTimeFit, best_block, fit

PARTS = st.tuples(st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-5))


def steps_of(model: tuple[float, float, float], seed: int, count: int = 64, noise: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    positions, kv_tokens = random.integers(1, 300, count), random.integers(10, 50_000, count)
    seconds = model[0] + model[1] * positions + model[2] * kv_tokens
    return np.column_stack([positions, kv_tokens, seconds * (1 + noise * random.uniform(-1, 1, count))])


def found(steps: np.ndarray) -> tuple[float, float, float]:
    model = fit(steps)
    return model.fixed_s, model.position_s, model.kv_token_s


@given(PARTS, st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_the_parts_of_synthetic_steps_are_recovered(parts: tuple[float, float, float], seed: int) -> None:
    steps = steps_of(parts, seed)
    steps = steps[steps[:, 2] <= 2.9 * np.median(steps[:, 2])]  # a longer one would count as a pause
    assert found(steps) == pytest.approx(parts, rel=1e-3, abs=1e-12)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 10**6), st.floats(1e-6, 1e3)), min_size=1, max_size=40))
@settings(max_examples=80)
def test_no_part_is_ever_negative_or_no_number(steps: list[tuple[int, int, float]]) -> None:
    assert all(0 <= part < np.inf for part in found(np.array(steps)))


@pytest.mark.parametrize("seed", range(5))
def test_pauses_of_the_machine_leave_no_trace(seed: int) -> None:
    parts = (5e-3, 1e-5, 1e-8)
    steps = steps_of(parts, seed)
    paused = steps.copy()
    paused[::7, 2] += 3.0
    assert found(paused) == pytest.approx(parts, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_noise_changes_the_time_of_a_usual_step_but_little(seed: int) -> None:
    model = fit(steps_of((5e-3, 2e-5, 1e-8), seed, count=256, noise=0.1))
    assert model.fixed_s + 100 * model.position_s + 10_000 * model.kv_token_s == pytest.approx(7.1e-3, rel=0.05)


def test_steps_that_took_no_measurable_time_are_no_reason_to_fail() -> None:
    steps = np.array([[4, 100, 0.0]] * 20)
    assert all(0 <= part < np.inf for part in found(steps))
    steps[::2, 2] = 1e-3
    assert all(0 <= part < np.inf for part in found(steps))


def test_a_model_is_there_after_the_first_steps_and_then_follows_the_recent_ones() -> None:
    steps = StepTimeFit()
    for number in range(FIRST_FIT):
        assert steps.model is None
        steps.observe(1 + number, 100, 1e-3)
    assert steps.model is not None and steps.model.fixed_s + 100 * steps.model.kv_token_s == pytest.approx(1e-3)
    for number in range(STEPS_KEPT + FIT_EVERY):
        steps.observe(1 + number % 9, 100, 2e-3)
    assert steps.model.fixed_s + 100 * steps.model.kv_token_s == pytest.approx(2e-3)


def best_by_hand(model: StepTime, gained: list[float], rows: int, drafting: int, kv_tokens: int) -> list[float]:
    """Tokens per second of each block."""
    rates = []
    for masks in range(len(gained) + 1):
        tokens = rows + sum(gained[:masks])
        positions = tokens + drafting * masks
        rates.append(tokens / (model.fixed_s + model.position_s * positions + model.kv_token_s * kv_tokens))
    return rates


@given(PARTS, st.lists(st.floats(0, 1), max_size=7), st.integers(1, 64), st.data(), st.integers(0, 10**5))
def test_the_best_block_is_that_of_trying_all(
    parts: tuple[float, float, float], survival: list[float], rows: int, data: st.DataObject, kv_tokens: int
) -> None:
    drafting = data.draw(st.integers(1, rows))
    gained = sorted((drafting * share for share in survival), reverse=True)
    model = StepTime(*parts)
    block = best_block(model, np.array(gained), rows=rows, drafting=drafting, kv_tokens=kv_tokens)
    rates = best_by_hand(model, gained, rows, drafting, kv_tokens)
    assert 1 <= block <= len(gained) + 1
    assert rates[block - 1] == pytest.approx(max(rates))


@pytest.mark.parametrize("parts", [(0, 1e-3, 0), (1e-3, 1e-3, 0), (1e-3, 0, 1e-6)])
def test_masks_that_gain_nothing_are_not_fed(parts: tuple[float, float, float]) -> None:
    assert best_block(StepTime(*parts), np.zeros(7), rows=4, drafting=4, kv_tokens=100) == 1


def test_masks_that_cost_nothing_are_all_fed() -> None:
    gained = np.array([0.5, 0.25, 0.125, 1e-3])
    assert best_block(StepTime(1e-3, 0, 1e-6), gained, rows=1, drafting=1, kv_tokens=100) == 5


def test_a_larger_batch_never_feeds_more_masks() -> None:
    survival = 0.8 ** np.arange(1, 8)
    model = StepTime(5e-3, 1e-4, 0)
    blocks = [best_block(model, n * survival, rows=n, drafting=n, kv_tokens=0) for n in (1, 4, 16, 64, 256)]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] == 8 and blocks[-1] < blocks[0]
