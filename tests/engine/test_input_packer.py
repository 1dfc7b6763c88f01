"""The index tensors of a forward against the batch they were made of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.execution.input_packer import InputPacker
from mars_ray.engine.execution.model_runner import Picks
from mars_ray.engine.kv.attention import slot_views
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.engine.scheduling.scheduler import DECODE_TOKENS, ScheduledSequence
from tests.engine.engine_parts import sequence_of, slot_of

MASK = 1016
PACKER = InputPacker(MASK, torch.device("cpu"), lambda _: -1)


def scheduled(
    slot: int, computed: int, count: int, *, behind: int = 0, masks: tuple[int, ...] = (0,)
) -> ScheduledSequence:
    """`count` tokens of a sequence from `computed` on; `behind` further ones wait."""
    tokens = [(100 * slot + number) % MASK for number in range(computed + count + behind)]
    sequence = sequence_of(tokens, computed=computed, slot=slot, drafts=[900 + slot] * (len(masks) - 1))
    return ScheduledSequence(sequence, count, masks)


@st.composite
def batch_of_a_step(draw: st.DrawFn) -> list[ScheduledSequence]:
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
    return batch


def fed_by_hand(batch: list[ScheduledSequence]) -> list[tuple[int, int, int]]:
    """Slot, column and id of everything that goes through the network."""
    everything = []
    for each in batch:
        sequence, computed = each.sequence, each.sequence.num_computed_tokens
        ids = sequence.tokens[computed:][: each.num_tokens]
        ids += sequence.drafts.tokens[: each.num_drafts] + [MASK] * each.num_masks
        everything += [(slot_of(sequence), computed + offset, token) for offset, token in enumerate(ids)]
    return everything


def seen_at(packed: ForwardBatch, place: int) -> set[int]:
    """Columns that a packed position attends to, by what the kernels are told."""
    prefix, behind = int(packed.prefix_N[place]), int(packed.behind_N[place])
    return {*range(prefix), *(prefix + bit for bit in range(63) if behind >> bit & 1)}


def seen_through_torch(packed: ForwardBatch) -> list[set[int]]:
    """Columns that each packed position attends to through torch."""
    lines = [line for view in slot_views(packed, torch.float32) for line in view.visible_PC]
    return [{*line.isfinite().nonzero().flatten().tolist()} for line in lines]


@given(batch_of_a_step(), st.booleans())
def test_everything_scheduled_stands_once_in_its_slot_at_its_position(
    batch: list[ScheduledSequence], audit: bool
) -> None:
    packed, _ = PACKER.pack(batch, audit=audit)
    stands = list(zip(packed.slot_N.tolist(), packed.target_N.tolist(), packed.id_N.tolist(), strict=True))
    assert stands == fed_by_hand(batch)
    assert len(set(zip(packed.slot_N.tolist(), packed.target_N.tolist(), strict=True))) == len(stands)
    assert packed.kv_tokens == sum(each.sequence.num_computed_tokens for each in batch)


@given(batch_of_a_step())
def test_the_spans_cover_all_positions_in_their_own_slots(batch: list[ScheduledSequence]) -> None:
    packed, _ = PACKER.pack(batch, audit=False)
    slots = [span.slot for span in packed.spans for _ in range(span.positions)]
    columns = [span.columns for span in packed.spans for _ in range(span.positions)]
    assert slots == packed.slot_N.tolist()
    assert all(target < count for target, count in zip(packed.target_N.tolist(), columns, strict=True))


@given(batch_of_a_step())
def test_tokens_and_drafts_have_spans_without_the_columns_of_masks_that_an_adapter_decodes(
    batch: list[ScheduledSequence],
) -> None:
    packed, _ = InputPacker(MASK, torch.device("cpu"), lambda _: 0).pack(batch, audit=False)
    start = 0
    for span in packed.spans:
        here = slice(start, start := start + span.positions)
        of_masks = {*(packed.offset_N[here] >= 0).tolist()}
        assert len(of_masks) == 1, "a span has masks only, or none"
        assert span.columns == int(packed.target_N[here].max()) + 1


@given(batch_of_a_step(), st.booleans())
def test_logits_are_read_from_the_last_token_on_or_from_all_tokens_to_audit(
    batch: list[ScheduledSequence], audit: bool
) -> None:
    packed, picks = PACKER.pack(batch, audit=audit)
    start = 0
    for each, read in zip(batch, picks, strict=True):
        end = start + each.num_positions
        before = each.num_tokens - 1 if each.has_logits and audit and each.is_decode else 0
        drafts_and_masks = [each.num_drafts + 1, *each.masks] if each.has_logits else []
        parts = [read.before, *([read.verifying] if read.verifying else []), *read.masks]
        assert [len(part) for part in parts] == [before, *drafts_and_masks]
        where = [pick for part in parts for pick in part]
        assert packed.pick_M[where].tolist() == list(range(end - sum(drafts_and_masks) - before, end))[: len(where)]
        start = end
    assert len(packed.pick_M) >= 1


def test_one_position_of_a_prompt_alone_still_reads_logits_by_whole_numbers() -> None:
    packed, picks = PACKER.pack([scheduled(0, 0, 1, behind=30)], audit=False)
    assert packed.pick_M.tolist() == [0] and packed.pick_M.dtype == torch.int64
    assert picks == [Picks(range(0))]


@pytest.mark.parametrize("length", [1, 9])
def test_a_position_sees_its_slot_up_to_itself(length: int) -> None:
    packed, _ = PACKER.pack([scheduled(0, 3, length)], audit=False)
    assert [len(columns) for columns in seen_through_torch(packed)] == list(range(4, 4 + length))


@given(batch_of_a_step())
def test_a_mask_stands_behind_its_draft_and_sees_that_and_its_own_row_alone(
    batch: list[ScheduledSequence],
) -> None:
    packed, _ = PACKER.pack(batch, audit=False)
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


@pytest.mark.parametrize("adapter", [-1, 0])
@given(batch_of_a_step())
def test_attention_through_torch_sees_what_the_numbers_say(adapter: int, batch: list[ScheduledSequence]) -> None:
    packed, _ = InputPacker(MASK, torch.device("cpu"), lambda _: adapter).pack(batch, audit=False)
    for place, columns in enumerate(seen_through_torch(packed)):
        assert columns == seen_at(packed, place)
