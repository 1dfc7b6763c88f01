"""The step-time model and the block it recommends."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mars_ray.engine.stats.step_time import (
    FIRST_FIT,
    FIT_EVERY,
    STEPS_KEPT,
    AheadTime,
    StepTime,
    StepTimeFit,
    StepWork,
    block_rates,
    fit,
    fit_ahead,
)

PARTS = st.tuples(st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-5), st.floats(0, 1e-2))
MODELS = st.builds(
    StepTime,
    fixed_s=st.floats(1e-3, 1e-1),
    seq_s=st.floats(1e-5, 1e-3),
    position_s=st.floats(1e-6, 1e-4),
    kv_token_s=st.floats(1e-8, 1e-6),
    prompt_s=st.floats(1e-3, 1e-1),
    prompt_token_s=st.floats(1e-6, 1e-4),
    masks_s=st.floats(1e-4, 1e-2),
)
USUAL = StepTime(fixed_s=5e-3, seq_s=1e-4, position_s=2e-5, kv_token_s=1e-8, prompt_s=2e-3, prompt_token_s=1e-5)


def decode_only(fixed_s: float, position_s: float, kv_token_s: float, masks_s: float = 0.0) -> StepTime:
    return StepTime(fixed_s=fixed_s, position_s=position_s, kv_token_s=kv_token_s, masks_s=masks_s)


def steps_of(seed: int, count: int = 128) -> list[StepWork]:
    """Steps in which everything varies by itself; in every other one prompts are read."""
    random = np.random.default_rng(seed)
    rows = random.integers(1, 64, count)
    masks = rows * random.integers(0, 5, count)
    positions = rows * random.integers(1, 5, count) + masks
    kv_tokens, prompt_tokens = random.integers(10, 50_000, count), random.integers(17, 513, count)
    prompt_tokens[::2] = 0
    columns = (rows, positions, kv_tokens, prompt_tokens, masks)
    return [StepWork(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]


def seconds_of(model: StepTime, steps: list[StepWork]) -> np.ndarray:
    return np.array([model.seconds(work) for work in steps])


@given(MODELS, st.integers(0, 2**32 - 1))
def test_all_parts_of_synthetic_steps_are_recovered(model: StepTime, seed: int) -> None:
    steps = steps_of(seed)
    assert astuple(fit(steps, seconds_of(model, steps))) == pytest.approx(astuple(model), rel=1e-3)


@given(
    st.lists(
        st.tuples(
            st.builds(
                StepWork,
                num_seqs=st.integers(0, 500),
                positions=st.integers(0, 5000),
                kv_tokens=st.integers(0, 10**6),
                prompt_tokens=st.integers(0, 10**4),
            ),
            st.floats(0, 1e3),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_no_part_is_ever_negative_or_no_number(steps: list[tuple[StepWork, float]]) -> None:
    found = fit([work for work, _ in steps], np.array([seconds for _, seconds in steps]))
    assert all(0 <= part < np.inf for part in astuple(found))


@given(MODELS, st.integers(0, 2**32 - 1), st.floats(100, 10_000))
def test_pauses_of_the_machine_leave_no_trace(model: StepTime, seed: int, times: float) -> None:
    steps = steps_of(seed)
    seconds = seconds_of(model, steps)
    seconds[::7] += times * seconds.max()
    assert astuple(fit(steps, seconds)) == pytest.approx(astuple(model), rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_noise_changes_the_time_of_a_usual_step_but_little(seed: int) -> None:
    steps, noise = steps_of(seed, count=256), np.random.default_rng(seed).uniform(0.9, 1.1, 256)
    model = fit(steps, seconds_of(USUAL, steps) * noise)
    for work in (
        StepWork(num_seqs=8, positions=8, kv_tokens=10_000),
        StepWork(8, 64, 10_000),
        StepWork(8, 64, 10_000, 256),
    ):
        assert model.seconds(work) == pytest.approx(USUAL.seconds(work), rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_others_on_the_same_cores_make_all_blocks_slower_and_none_more_than_another(seed: int) -> None:
    random, usual = np.random.default_rng(seed), StepTime(fixed_s=6e-3, position_s=0.5e-3)
    steps = [StepWork(num_seqs=1, positions=positions, kv_tokens=170) for positions in (1, 4, 7, 12)] * 12
    held_up = np.where(random.random(len(steps)) < 0.3, 1 + random.exponential(4, len(steps)), 1)
    model = fit(steps, seconds_of(usual, steps) * held_up)
    one, seven = (StepWork(num_seqs=1, positions=positions, kv_tokens=170) for positions in (1, 7))
    longer = usual.seconds(seven) / usual.seconds(one)
    assert model.seconds(seven) / model.seconds(one) == pytest.approx(longer, rel=0.1)


def test_steps_that_took_no_measurable_time_are_no_reason_to_fail() -> None:
    steps, seconds = [StepWork(num_seqs=1, positions=4, kv_tokens=100)] * 20, np.zeros(20)
    assert all(0 <= part < np.inf for part in astuple(fit(steps, seconds)))
    seconds[::2] = 1e-3
    assert all(0 <= part < np.inf for part in astuple(fit(steps, seconds)))


def test_steps_that_feed_no_decoding_sequence_are_no_reason_to_fail() -> None:
    model = fit([StepWork(num_seqs=0, positions=0, kv_tokens=0, prompt_tokens=100)] * 20, np.full(20, 1e-3))
    assert model.seconds(StepWork(num_seqs=0, positions=0, kv_tokens=0, prompt_tokens=100)) == pytest.approx(1e-3)


def test_a_model_is_there_after_the_first_steps_and_then_follows_the_recent_ones() -> None:
    steps, usual = StepTimeFit(), StepWork(num_seqs=1, positions=4, kv_tokens=100)
    for number in range(FIRST_FIT):
        assert steps.model is None
        steps.observe(StepWork(num_seqs=1, positions=1 + number, kv_tokens=100), 1e-3)
    assert steps.model is not None and steps.model.seconds(usual) == pytest.approx(1e-3)
    for number in range(STEPS_KEPT + FIT_EVERY):
        steps.observe(StepWork(num_seqs=1, positions=1 + number % 9, kv_tokens=100), 2e-3)
    assert steps.model.seconds(usual) == pytest.approx(2e-3)


def at_block(block: int, number: int) -> StepWork:
    rows = 1 + number % 16
    return StepWork(num_seqs=rows, positions=rows * block, kv_tokens=1000 + number % 300)


def test_block_1_is_still_predicted_after_thousands_of_steps_at_block_8() -> None:
    steps = StepTimeFit()
    for number in range(FIT_EVERY):
        steps.observe(at_block(1, number), USUAL.seconds(at_block(1, number)))
    for number in range(STEPS_KEPT - 2 * FIT_EVERY):
        steps.observe(at_block(8, number), USUAL.seconds(at_block(8, number)))
    assert steps.model is not None
    for number in range(16):
        for block in (1, 8):
            work = at_block(block, number)
            assert steps.model.seconds(work) == pytest.approx(USUAL.seconds(work), rel=1e-3)


def test_a_moment_in_which_the_machine_is_slow_makes_no_kind_of_step_look_slower_than_another() -> None:
    plain, ahead = StepWork(1, 1, 200), StepWork(1, 3, 200, masks=1)
    times = StepTimeFit()
    for number in range(512):
        work = plain if number % 20 == 0 else ahead
        slow = 3 if number >= 512 - 15 else 1
        times.observe(work, slow * (0.025 if work is plain else 0.028))
    assert times.model is not None
    assert times.model.seconds(ahead) / times.model.seconds(plain) == pytest.approx(28 / 25, rel=0.05)


def test_what_was_seen_too_long_ago_counts_no_more() -> None:
    steps = StepTimeFit()
    for number in range(FIT_EVERY):
        steps.observe(at_block(1, number), 1.0)
    for number in range(STEPS_KEPT + FIT_EVERY):
        steps.observe(at_block(8, number), USUAL.seconds(at_block(8, number)))
    assert steps.model is not None
    assert steps.model.seconds(at_block(8, 3)) == pytest.approx(USUAL.seconds(at_block(8, 3)), rel=1e-3)


def together(gained_K: NDArray[np.float64], rows: int, drafting: int) -> tuple[NDArray[np.float64], ...]:
    """Tokens and positions of all rows, of which some look ahead, by block."""
    tokens_B = rows + np.concatenate([[0.0], gained_K.cumsum()])
    return tokens_B, tokens_B + drafting * np.arange(len(gained_K) + 1)


def best_by_hand(model: StepTime, gained: list[float], rows: int, drafting: int, kv_tokens: int) -> list[float]:
    """Tokens per second of each block."""
    rates = []
    for masks in range(len(gained) + 1):
        tokens = rows + sum(gained[:masks])
        positions = tokens + drafting * masks
        seconds = model.fixed_s + model.position_s * positions + model.kv_token_s * kv_tokens
        rates.append(tokens / (seconds + (model.masks_s if masks else 0)))
    return rates


@given(PARTS, st.lists(st.floats(0, 1), max_size=7), st.integers(1, 64), st.data(), st.integers(0, 10**5))
def test_the_block_rates_is_that_of_trying_all(
    parts: tuple[float, float, float, float], survival: list[float], rows: int, data: st.DataObject, kv_tokens: int
) -> None:
    drafting = data.draw(st.integers(1, rows))
    gained = sorted((drafting * share for share in survival), reverse=True)
    model = decode_only(*parts)
    found = block_rates(
        model, AheadTime.linear(model), *together(np.array(gained), rows, drafting), num_seqs=rows, kv_tokens=kv_tokens
    )
    rates = best_by_hand(model, gained, rows, drafting, kv_tokens)
    assert found.tolist() == pytest.approx(rates)


@pytest.mark.parametrize("parts", [(0, 1e-3, 0), (1e-3, 1e-3, 0), (1e-3, 0, 1e-6), (1e-3, 0, 0, 1e-3)])
def test_masks_that_gain_nothing_are_not_fed(parts: tuple[float, ...]) -> None:
    model = decode_only(*parts)
    assert (
        block_rates(model, AheadTime.linear(model), *together(np.zeros(7), 4, 4), num_seqs=4, kv_tokens=100).argmax()
        == 0
    )


def test_masks_that_cost_nothing_are_all_fed() -> None:
    gained = np.array([0.5, 0.25, 0.125, 1e-3])
    model = decode_only(1e-3, 0, 1e-6)
    assert block_rates(model, AheadTime.linear(model), *together(gained, 1, 1), num_seqs=1, kv_tokens=100).argmax() == 4


def test_a_larger_batch_never_feeds_more_masks() -> None:
    survival = (0.8 ** np.arange(1, 8)).astype(np.float64)
    model = decode_only(5e-3, 1e-4, 0)
    blocks = [
        1
        + int(
            block_rates(model, AheadTime.linear(model), *together(n * survival, n, n), num_seqs=n, kv_tokens=0).argmax()
        )
        for n in (1, 4, 16, 64, 256)
    ]
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[0] == 8 and blocks[-1] < blocks[0]


def convex_s(work: StepWork) -> float:
    """Positions are free until the time of the weights has passed."""
    return max(5e-3, 1e-3 * work.positions) + 1e-7 * work.kv_tokens


def observed(rows: list[int], most: int) -> StepTimeFit:
    """Steps of these numbers of sequences with up to `most` drafts, in turn."""
    times = StepTimeFit()
    for number in range(8 * len(rows) * (most + 1)):
        count = rows[number % len(rows)]
        work = StepWork(count, count + number // len(rows) % (most + 1), 100 + number)
        times.observe(work, convex_s(work))
    return times


def test_the_first_positions_may_take_no_time_and_the_others_cost_what_they_add() -> None:
    times = observed([1, 8], most=12)
    alone, eight = times.ahead(1), times.ahead(8)
    assert alone is not None and eight is not None
    assert (alone.cheap, eight.cheap) == (4, 0)
    assert alone.cheap_s == pytest.approx(0, abs=1e-5)
    assert alone.position_s == pytest.approx(1e-3, rel=0.05)
    assert eight.position_s == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_the_first_positions_may_take_a_part_of_the_time_of_the_others(seed: int) -> None:
    def seconds(ahead: int) -> float:
        return 17e-3 + 2.5e-3 * min(ahead, 2) + 6.5e-3 * max(0, ahead - 2)

    random, times = np.random.default_rng(seed), StepTimeFit()
    for number in range(FIT_EVERY * 8):
        ahead = (0, 0, 0, 1, 2, 3, 5, 7)[number % 8]
        times.observe(StepWork(1, 1 + ahead, 100), seconds(ahead) * random.uniform(0.9, 1.1))
    found = times.ahead(1)
    assert times.model is not None and found is not None
    for ahead in range(6):
        assert found.seconds(times.model, 1, 100, ahead, masks=False) == pytest.approx(seconds(ahead), rel=0.05)


def test_a_size_with_too_few_steps_has_the_times_of_the_linear_model() -> None:
    times = observed([1, 8], most=12)
    assert times.model is not None
    assert times.ahead(64) == AheadTime.linear(times.model)


def test_what_masks_add_once_is_told_from_what_each_position_adds() -> None:
    times = StepTimeFit()
    for number in range(8 * FIT_EVERY):
        ahead = number % 8
        work = StepWork(1, 1 + ahead, 100, masks=ahead * (number // 8 % 2))
        times.observe(work, 1e-2 + 1e-3 * ahead + 3e-3 * (work.masks > 0))
    found = times.ahead(1)
    assert found is not None
    assert found.cheap == 0
    assert (found.position_s, found.masks_s) == pytest.approx((1e-3, 3e-3), rel=0.02)


def test_steps_that_were_all_pauses_have_the_times_of_the_linear_model() -> None:
    model = decode_only(1e-3, 1e-4, 0.0)
    steps = [StepWork(1, 1 + number % 3, 100) for number in range(30)]
    assert fit_ahead(model, [(work, 1.0) for work in steps]) == AheadTime.linear(model)


def test_rare_steps_that_were_interrupted_do_not_make_masks_look_dear() -> None:
    model = StepTime(
        fixed_s=0.0, seq_s=0.017, position_s=0.0, kv_token_s=0.0, prompt_s=0.0, prompt_token_s=0.0, masks_s=0.0
    )
    plain = [(StepWork(1, 1, 100), 0.017)] * 12
    with_mask = [(StepWork(1, 3, 100, masks=1), 0.045 if number % 3 == 0 else 0.021) for number in range(12)]
    times = fit_ahead(model, [*plain, *with_mask])
    assert times.seconds(model, 1, 100, 2, masks=True) == pytest.approx(0.021, rel=0.02)


@pytest.mark.parametrize("seed", range(10))
def test_noise_makes_few_positions_cheap_that_are_not(seed: int) -> None:
    random, times = np.random.default_rng(seed), StepTimeFit()
    for number in range(FIT_EVERY * 4):
        work = StepWork(1, 1 + number % 16, 100)
        times.observe(work, (6e-3 + 0.5e-3 * work.positions) * random.uniform(0.9, 1.1))
    ahead = times.ahead(1)
    assert ahead is not None
    assert ahead.cheap <= 2 and ahead.position_s == pytest.approx(0.5e-3, rel=0.3)


def test_the_time_of_a_position_is_unknown_while_each_sequence_takes_one() -> None:
    times = StepTimeFit()
    for number in range(FIRST_FIT):
        times.observe(StepWork(1 + number, 1 + number, 100), 1e-3 * (5 + number))
    assert times.model is not None and times.ahead(4) is None
    for number in range(FIRST_FIT):
        times.observe(StepWork(4, 5 + number, 100), 1e-3 * (8 + number))
    assert times.ahead(4) is not None


@given(
    st.floats(1e-4, 1e-1),
    st.floats(1e-7, 1e-2),
    st.lists(st.tuples(st.integers(1, 600), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 2000),
)
def test_no_step_takes_longer_than_the_bound_of_its_size(
    fixed_s: float, position_s: float, measured: list[tuple[int, bool]], positions: int
) -> None:
    found = StepTimeFit()
    assert found.longest_s(positions) is None
    for size, is_prompt in measured:
        work = StepWork(0, 0, 0, prompt_tokens=size) if is_prompt else StepWork(1, size, 0)
        found.observe(work, fixed_s + position_s * size)
    bound_s = found.longest_s(positions)
    assert bound_s is not None
    assert bound_s >= fixed_s + position_s * positions


def test_the_bound_is_close_once_a_step_of_that_size_was_measured() -> None:
    found = StepTimeFit()
    found.observe(StepWork(1, 1, 0), 0.01)
    assert found.longest_s(512) == pytest.approx(2 * 5.12)
    found.observe(StepWork(0, 0, 0, prompt_tokens=512), 0.1)
    assert found.longest_s(512) == pytest.approx(2 * 0.1)
