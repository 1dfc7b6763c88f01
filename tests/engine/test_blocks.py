"""How many masks are fed, for what was learned about them."""

from typing import Any

import pytest

from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.drafting.text_drafter import TextDraft
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import LOSSLESS, Acceptance, DecodeParams
from mars_ray.engine.scheduling.sequence import Drafts, Sequence
from mars_ray.engine.stats.block_choice import CHOOSE_EVERY, PROBE_EVERY, PROBE_SHARE, BlockChoice
from mars_ray.engine.stats.mask_readings import CALIBRATED_FORWARDS
from mars_ray.engine.stats.profile import FOLD_FORWARDS, Profile
from mars_ray.engine.stats.step_time import FIRST_FIT, StepTimeFit, StepWork
from mars_ray.method.drafts import PositionPrice
from tests.engine.engine_parts import sequence_of
from tests.factories.engine import MakeEngine, request

BLOCK = 6
SURE, UNSURE = [0.99] * (BLOCK - 1), [0.0] * (BLOCK - 1)


def learned(profile: Profile, confidences: list[float], forwards: int = 2 * FOLD_FORWARDS) -> Profile:
    for _ in range(forwards):
        profile.observe_masks(BLOCK - 1, confidences, PositionPrice(0.05))
    return profile


def of_use_only_where_accepted() -> Profile:
    """Every mask has a confidence of 0.8, and no draft is ever right."""
    profile = learned(Profile(BLOCK), [0.8] * (BLOCK - 1))
    for _ in range(2 * FOLD_FORWARDS):
        profile.observe_drafts([0.8] * (BLOCK - 1), [0.0])
    profile.points()
    return profile


def timed(*, fixed_s: float, position_s: float, masks_s: float = 0.0) -> StepTimeFit:
    steps = StepTimeFit()
    for number in range(128):
        positions, masks = 1 + number // 2 % 50, number % 2 * (number // 2 % 50)
        seconds = fixed_s + position_s * positions + masks_s * (masks > 0)
        steps.observe(StepWork(num_seqs=1, positions=positions, kv_tokens=1000, masks=masks), seconds)
    return steps


def proportional() -> StepTimeFit:
    return timed(fixed_s=0, position_s=1e-3)


def running(count: int = 3, **decode: Any) -> list[Sequence]:
    return [sequence_of([1], decode=DecodeParams(**decode)) for _ in range(count)]


def chosen(blocks: BlockChoice, sequences: list[Sequence], threshold: float = 0.9) -> list[int]:
    def acceptance_of(sequence: Sequence) -> Acceptance | None:
        return sequence.request.decode.acceptance(threshold)

    blocks.next_step(sequences, acceptance_of, (threshold,), 1000)
    return [1 + blocks.masks_for(sequence, acceptance_of(sequence), BLOCK, 4096)[-1] for sequence in sequences]


def test_every_mask_is_fed_before_enough_is_learned_of_what_is_accepted() -> None:
    few = learned(Profile(BLOCK), UNSURE, forwards=CALIBRATED_FORWARDS - 1)
    few.points()
    assert chosen(BlockChoice(few, proportional()), running()) == [BLOCK] * 3


@pytest.mark.parametrize(("text", "rows"), [(None, (0, 0, 5)), (TextDraft([7, 8], [0.5] * 2, [(1.0,)] * 2), (5, 5, 5))])
def test_before_enough_is_learned_one_row_of_masks_follows_drafts_from_masks(
    text: TextDraft | None, rows: tuple[int, ...]
) -> None:
    [sequence] = running(1)
    sequence.drafts = Drafts([7, 8], [0.5, 0.5], text)
    blocks = BlockChoice(Profile(BLOCK), StepTimeFit())
    assert blocks.masks_for(sequence, LOSSLESS, BLOCK, 4096) == rows


def test_sequences_share_the_positions_that_are_cheap() -> None:
    times = StepTimeFit()
    for number in range(512):
        positions = 4 + number % 24
        times.observe(StepWork(4, positions, 100), max(1e-2, 1e-3 * positions))
    ahead = times.ahead(4)
    assert ahead is not None and ahead.cheap >= 4
    assert BlockChoice(Profile(BLOCK), times).text_price(4, 100).cheap == ahead.cheap // 4


def test_large_and_small_blocks_take_turns_before_step_times_are_known() -> None:
    times = StepTimeFit()
    blocks = BlockChoice(learned(Profile(BLOCK), SURE), times)
    assert [chosen(blocks, running(1)) for _ in range(6)] == [[3], [1], [6]] * 2
    for number in range(FIRST_FIT):
        positions = 1 + number % 5
        times.observe(StepWork(num_seqs=1, positions=positions, kv_tokens=1000), 1e-2)
    assert chosen(blocks, running(1)) == [BLOCK], "positions are free"


def test_no_mask_is_fed_where_each_position_costs_and_none_is_accepted() -> None:
    blocks = BlockChoice(learned(Profile(BLOCK), UNSURE), proportional())
    assert chosen(blocks, running()) == [1, 1, 1]
    assert blocks.chosen == 1


def test_every_mask_is_fed_where_positions_are_free_and_masks_accepted() -> None:
    blocks = BlockChoice(learned(Profile(BLOCK), SURE), timed(fixed_s=1e-2, position_s=0))
    assert chosen(blocks, running()) == [BLOCK] * 3


def test_masks_are_fed_as_far_as_they_are_accepted() -> None:
    profile = learned(Profile(BLOCK), [0.99, 0.99, 0.0, 0.0, 0.0])
    assert chosen(BlockChoice(profile, timed(fixed_s=1e-2, position_s=1e-4)), running()) == [3, 3, 3]


@pytest.mark.parametrize(("gain", "block"), [(0.99, 1), (1.03, 1), (1.08, BLOCK)])
def test_masks_are_fed_only_where_they_gain_more_than_predictions_may_be_off(gain: float, block: int) -> None:
    # Almost all masks are accepted, so a forward gains 6 tokens with 11 positions instead of 1 with 1.
    fixed_s = 1e-3 * (11 * gain - 6) / (6 - gain)
    blocks = BlockChoice(learned(Profile(BLOCK), SURE), timed(fixed_s=fixed_s, position_s=1e-3))
    assert chosen(blocks, running(1)) == [block]


@pytest.mark.parametrize(
    ("own", "engine", "block"), [(None, 0.95, 1), (None, 0.7, BLOCK), (0.95, 0.7, 1), (0.7, 0.95, BLOCK)]
)
def test_the_choice_follows_the_threshold_in_force(own: float | None, engine: float, block: int) -> None:
    profile = of_use_only_where_accepted()
    blocks = BlockChoice(profile, timed(fixed_s=1e-2, position_s=1e-4))
    assert chosen(blocks, running(threshold=own), threshold=engine) == [block] * 3


def test_a_new_engine_threshold_is_a_new_choice_at_once() -> None:
    profile = of_use_only_where_accepted()
    blocks = BlockChoice(profile, timed(fixed_s=1e-2, position_s=1e-4))
    assert chosen(blocks, running(), threshold=0.95) == [1] * 3
    assert chosen(blocks, running(), threshold=0.7) == [BLOCK] * 3


def test_a_batch_that_doubles_or_the_first_after_none_is_a_new_choice_at_once() -> None:
    blocks = BlockChoice(of_use_only_where_accepted(), timed(fixed_s=1e-2, position_s=1e-4))
    assert chosen(blocks, running(), threshold=0.7) == [BLOCK] * 3
    assert chosen(blocks, running(6, threshold=0.95), threshold=0.7) == [1] * 6
    assert chosen(blocks, [], threshold=0.7) == []
    assert chosen(blocks, running(6), threshold=0.7) == [BLOCK] * 6


def test_sequences_that_draft_nothing_have_no_say() -> None:
    profile = learned(Profile(BLOCK), UNSURE)
    blocks = BlockChoice(profile, proportional())
    assert chosen(blocks, running(mode=Mode.AR)) == [1] * 3
    assert blocks.chosen == BLOCK, "unchanged"
    assert chosen(blocks, running() + running(mode=Mode.AR)) == [1] * 6


def test_a_request_that_fixes_its_seed_gets_the_full_block_unless_drafts_are_verified() -> None:
    blocks = BlockChoice(learned(Profile(BLOCK), UNSURE), proportional())
    seeded = sequence_of([1])
    seeded.request = request("a", [1], seed=5)
    assert chosen(blocks, [*running(2), seeded]) == [1, 1, BLOCK]
    assert chosen(blocks, [*running(2), seeded], threshold=1.0) == [1, 1, 1]


def test_drafts_that_are_never_right_are_not_made_where_positions_cost() -> None:
    profile = learned(Profile(BLOCK), SURE)
    for _ in range(2 * FOLD_FORWARDS):
        profile.observe_drafts(SURE, [0.0])
    profile.points()
    blocks = BlockChoice(profile, timed(fixed_s=1e-2, position_s=1e-3))
    assert chosen(blocks, running(), threshold=1.0) == [1] * 3
    assert chosen(blocks, running(), threshold=0.9) == [BLOCK] * 3


def test_trials_take_a_small_part_of_the_time_however_dear_masks_are() -> None:
    blocks = BlockChoice(learned(Profile(BLOCK), UNSURE), proportional())
    sequences, extra = running(2), 0
    for _ in range(10_000):
        extra += sum(chosen(blocks, sequences)) - len(sequences)
    assert 0 < extra <= 2.2 * PROBE_SHARE * 10_000 * len(sequences), "probes of one sequence, and whole steps"


def test_now_and_then_each_sequence_in_turn_gets_the_full_block() -> None:
    blocks = BlockChoice(learned(Profile(BLOCK), UNSURE), timed(fixed_s=1e-1, position_s=1e-4))
    sequences = running(3)
    steps = [chosen(blocks, sequences) for _ in range(3 * PROBE_EVERY)]
    probed = [step.index(BLOCK) for step in steps if BLOCK in step]
    assert sorted(probed) == [0, 1, 2]
    assert all(step.count(BLOCK) <= 1 for step in steps)


def test_now_and_then_a_step_has_no_masks_and_more_often_where_that_might_be_better() -> None:
    profile = learned(Profile(BLOCK), SURE)
    near = BlockChoice(profile, timed(fixed_s=1.5e-3, position_s=1e-3))
    steps = [chosen(near, running(1)) for _ in range(400)]
    assert near.chosen > 1 and steps.count([1]) == 400 // PROBE_EVERY
    far = BlockChoice(profile, timed(fixed_s=1e-2, position_s=1e-4))
    assert 0 < [chosen(far, running(1)) for _ in range(400)].count([1]) < 400 // PROBE_EVERY / 4


def test_now_and_then_a_step_has_masks_for_all_where_that_might_be_better() -> None:
    profile = learned(Profile(BLOCK), [0.95, *UNSURE[1:]])
    near = BlockChoice(profile, timed(fixed_s=1e-3, position_s=1.2e-3))
    steps = [chosen(near, running()) for _ in range(400)]
    assert near.chosen == 1 and 4 <= steps.count([2, 2, 2]) <= 400 // PROBE_EVERY


def test_what_any_masks_cost_is_a_reason_to_feed_none_and_not_to_feed_few() -> None:
    times = timed(fixed_s=1e-2, position_s=1e-5, masks_s=1.2e-2)
    assert chosen(BlockChoice(learned(Profile(BLOCK), SURE), times), running(1)) == [BLOCK]
    one_is_sure = learned(Profile(BLOCK), [0.95, *UNSURE[1:]])
    assert chosen(BlockChoice(one_is_sure, times), running(1)) == [1]


def test_where_all_masks_are_fed_or_none_runs_there_is_no_probe() -> None:
    blocks = BlockChoice(learned(Profile(BLOCK), UNSURE), proportional())
    assert [chosen(blocks, []) for _ in range(2 * PROBE_EVERY)] == [[]] * (2 * PROBE_EVERY)


def test_the_choice_is_made_anew_after_some_steps_as_more_is_learned() -> None:
    profile = learned(Profile(BLOCK), SURE)
    blocks = BlockChoice(profile, timed(fixed_s=1e-2, position_s=1e-4))
    sequences = running()
    assert chosen(blocks, sequences) == [BLOCK] * 3
    learned(profile, UNSURE, forwards=400 * FOLD_FORWARDS)
    for _ in range(CHOOSE_EVERY):
        chosen(blocks, sequences)
    assert blocks.chosen == 1


def test_a_request_that_fixes_its_block_keeps_it_in_every_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    learned(engine.profile, [0.0] * (engine.block - 1))
    for number in range(64):
        positions = 1 + number % 50
        engine.step_time.observe(StepWork(num_seqs=1, positions=positions, kv_tokens=1000), 1e-3 * positions)
    engine.add(request("fixed", [20, 30, 40], DecodeParams(block=3), max_tokens=12, ignore_eos=True))
    engine.add(request("free", [20, 30, 41], max_tokens=12, ignore_eos=True))
    masks: dict[str, list[int]] = {"fixed": [], "free": []}
    for chunks in run_steps(engine):
        for chunk in chunks:
            masks[chunk.request_id].append(chunk.masks)
    assert min(masks["fixed"][:-2]) == 2, "and more where masks stand behind drafts, too"
    assert masks["free"].count(0) >= len(masks["free"]) - 2, "all but the first, and one trial"
