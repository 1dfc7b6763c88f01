"""The index tensors of a forward against the batch they were made of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.execution.input_packer import InputPacker
from mars_ray.engine.kv.attention import decoding_rectangle, prefill_rectangle
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.engine.scheduling.scheduler import DECODE_TOKENS, ScheduledSequence
from tests.engine.engine_parts import sequence_of, slot_of

MASK = 1016
PACKER = InputPacker(MASK, 4096, torch.device("cpu"), lambda _: -1)


def scheduled(
    slot: int, computed: int, count: int, *, behind: int = 0, masks: tuple[int, ...] = (0,)
) -> ScheduledSequence:
    """`count` tokens of a sequence from `computed` on; `behind` further ones wait."""
    tokens = [(100 * slot + number) % MASK for number in range(computed + count + behind)]
    sequence = sequence_of(tokens, computed=computed, slot=slot, drafts=[900 + slot] * (len(masks) - 1))
    return ScheduledSequence(sequence, count, masks)


@st.composite
def batch_of_a_step(draw: st.DrawFn) -> tuple[list[ScheduledSequence], int]:
    """Sequences as the scheduler orders them, in some of the active slots."""
    active = draw(st.integers(1, 6))
    fed = draw(st.lists(st.sampled_from(range(active)), unique=True, min_size=1))
    decoding = draw(st.integers(0, len(fed)))
    batch = []
    for number, slot in enumerate(fed):
        few = st.integers(1, DECODE_TOKENS) if number < decoding else st.integers(DECODE_TOKENS + 1, 40)
        behind = draw(st.sampled_from([0, 0, 5]))
        masks = (0,) if behind else tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=5)))
        batch.append(scheduled(slot, draw(st.integers(0, 30)), draw(few), behind=behind, masks=masks))
    return batch, active


def fed_by_hand(batch: list[ScheduledSequence]) -> list[tuple[int, int, int]]:
    """Slot, column and id of everything that goes through the network."""
    everything = []
    for each in batch:
        sequence, computed = each.sequence, each.sequence.num_computed_tokens
        ids = sequence.tokens[computed:][: each.num_tokens]
        ids += sequence.draft_tokens[: each.num_drafts] + [MASK] * each.num_masks
        everything += [(slot_of(sequence), computed + offset, token) for offset, token in enumerate(ids)]
    return everything


def seen_at(packed: ForwardBatch, place: int) -> set[int]:
    """Columns that a packed position attends to, by what the kernels are told."""
    prefix, behind = int(packed.prefix_N[place]), int(packed.behind_N[place])
    return {*range(prefix), *(prefix + bit for bit in range(63) if behind >> bit & 1)}


def seen_by_hand(packed: ForwardBatch) -> list[set[int]]:
    """Columns that each packed position attends to through torch."""
    lines = []
    for rectangle in (decoding_rectangle(packed, 1, torch.float32), prefill_rectangle(packed, 1, torch.float32)):
        if rectangle is not None:
            cells = rectangle.visible.flatten(0, 2)
            lines += [{*line.isfinite().nonzero().flatten().tolist()} for line in cells]
    return [lines[cell] for cell in packed.back_N.tolist()]


def rectangles(packed: ForwardBatch) -> list[torch.Tensor]:
    return [packed.where_RP] + ([packed.prefill.where_LQ] if packed.prefill else [])


@given(batch_of_a_step(), st.booleans())
def test_everything_scheduled_stands_once_in_its_slot_at_its_position(
    step: tuple[list[ScheduledSequence], int], audit: bool
) -> None:
    batch, active = step
    packed, _ = PACKER.pack(batch, active, audit=audit)
    stands = list(zip(packed.slot_N.tolist(), packed.target_N.tolist(), packed.id_N.tolist(), strict=True))
    assert stands == fed_by_hand(batch)
    assert len(set(zip(packed.slot_N.tolist(), packed.target_N.tolist(), strict=True))) == len(stands)
    assert packed.kv_tokens == sum(each.sequence.num_computed_tokens for each in batch)


@given(batch_of_a_step(), st.booleans())
def test_every_packed_position_is_found_again_in_the_rectangles(
    step: tuple[list[ScheduledSequence], int], audit: bool
) -> None:
    batch, active = step
    packed, _ = PACKER.pack(batch, active, audit=audit)
    cells = torch.cat([where.flatten() for where in rectangles(packed)])
    assert cells[packed.back_N].tolist() == list(range(len(packed.id_N)))
    assert ((cells >= 0) & (cells < len(packed.id_N))).all(), "a filler names a position that exists"


@given(batch_of_a_step())
def test_every_packed_position_is_attended_from_its_own_slot_over_all_it_may_see(
    step: tuple[list[ScheduledSequence], int],
) -> None:
    batch, active = step
    packed, _ = PACKER.pack(batch, active, audit=False)
    rows = list(range(active)) + (packed.prefill.slot_L.tolist() if packed.prefill else [])
    lines = [line for where in rectangles(packed) for line in where]
    row_of_cell = [row for row, line in zip(rows, lines, strict=True) for _ in line]
    assert [row_of_cell[cell] for cell in packed.back_N.tolist()] == packed.slot_N.tolist()
    columns = [len(packed.column_C)] * packed.where_RP.numel()
    columns += [len(packed.prefill.column_C)] * packed.prefill.where_LQ.numel() if packed.prefill else []
    for cell, column in zip(packed.back_N.tolist(), packed.target_N.tolist(), strict=True):
        assert columns[cell] > column
    assert packed.where_RP.shape[0] == active


@given(batch_of_a_step(), st.booleans())
def test_logits_are_read_from_the_last_token_on_or_from_all_tokens_to_audit(
    step: tuple[list[ScheduledSequence], int], audit: bool
) -> None:
    batch, active = step
    packed, slices = PACKER.pack(batch, active, audit=audit)
    start = 0
    for each, where in zip(batch, slices, strict=True):
        read = 0
        if each.has_logits:
            tokens = each.num_tokens if audit and each.is_decode else 1
            read = tokens + each.num_drafts + each.num_masks
        assert packed.pick_M[where].tolist() == list(
            range(start + each.num_positions - read, start + each.num_positions)
        )
        start += each.num_positions
    assert len(packed.pick_M) >= 1


def test_a_compiled_step_is_given_more_than_one_pick_unless_it_has_one_position() -> None:
    one, _ = PACKER.pack([scheduled(0, 5, 1)], 1, audit=False)
    assert one.pick_M.tolist() == [0]
    two, slices = PACKER.pack([scheduled(0, 5, 2)], 1, audit=False)
    assert two.pick_M.tolist() == [1, 1]
    assert slices == [slice(0, 1)]
    part, slices = PACKER.pack([scheduled(0, 0, 20, behind=5)], 1, audit=False)
    assert len(part.pick_M) == 2 and slices == [slice(0, 0)]


def test_one_position_of_a_prompt_alone_still_reads_logits_by_whole_numbers() -> None:
    packed, slices = PACKER.pack([scheduled(0, 0, 1, behind=30)], 1, audit=False)
    assert packed.pick_M.tolist() == [0] and packed.pick_M.dtype == torch.int64
    assert slices == [slice(0, 0)]


def test_prompts_that_would_stretch_the_rectangle_of_the_decoding_sequences_get_their_own() -> None:
    packed, _ = PACKER.pack(
        [scheduled(0, 9, 1), scheduled(2, 9, 2), scheduled(3, 0, 30), scheduled(1, 4, 20)], 4, audit=False
    )
    assert packed.where_RP.shape == (4, 2)
    assert packed.prefill is not None
    assert packed.prefill.slot_L.tolist() == [3, 1]
    assert packed.prefill.where_LQ.shape == (2, 30)


def test_prompts_alone_are_read_in_one_rectangle() -> None:
    packed, _ = PACKER.pack([scheduled(1, 0, 30), scheduled(0, 4, 20)], 2, audit=False)
    assert packed.prefill is None
    assert packed.where_RP.shape == (2, 30)


def test_prompts_in_some_slots_leave_the_rectangle_of_the_others_to_fillers() -> None:
    packed, _ = PACKER.pack([scheduled(1, 0, 30)], 8, audit=False)
    assert packed.where_RP.tolist() == [[0]] * 8
    assert packed.prefill is not None


@pytest.mark.parametrize("length", [1, 9])
def test_a_position_sees_its_slot_up_to_itself(length: int) -> None:
    packed, _ = PACKER.pack([scheduled(0, 3, length)], 1, audit=False)
    assert [len(columns) for columns in seen_by_hand(packed)] == list(range(4, 4 + length))


@given(batch_of_a_step())
def test_a_mask_stands_behind_its_draft_and_sees_that_and_its_own_row_alone(
    step: tuple[list[ScheduledSequence], int],
) -> None:
    batch, active = step
    packed, _ = PACKER.pack(batch, active, audit=False)
    start = 0
    for each in batch:
        first = each.sequence.num_computed_tokens
        end = each.num_tokens + each.num_drafts
        for right, masks in enumerate(each.masks):
            kept = each.num_tokens + right
            for number in range(masks):
                place = start + end + number
                assert packed.position_N[place] == first + kept + number
                assert seen_at(packed, place) == {*range(first + kept), *range(first + end, first + end + number + 1)}
            end += masks
        start += each.num_positions


@given(batch_of_a_step())
def test_attention_through_torch_sees_what_the_numbers_say(step: tuple[list[ScheduledSequence], int]) -> None:
    batch, active = step
    packed, _ = PACKER.pack(batch, active, audit=False)
    for place, columns in enumerate(seen_by_hand(packed)):
        assert columns == seen_at(packed, place)
