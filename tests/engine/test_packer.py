"""The index tensors of a forward against the feeds they were made of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.engine.execution.packer import Packed, Packer
from mars_ray.engine.kv.attention import rectangle
from mars_ray.engine.scheduling.scheduler import DECODE_TOKENS, Feed
from tests.engine.engine_parts import sequence_of

MASK = 1016
PACKER = Packer(MASK, 4096, torch.device("cpu"))


def feed(row: int, cached: int, count: int, *, behind: int = 0, drafts: int = 0, masks: int = 0) -> Feed:
    """`count` tokens of a sequence from `cached` on; `behind` further ones are not fed yet."""
    tokens = [(100 * row + number) % MASK for number in range(cached + count + behind)]
    sequence = sequence_of(tokens, cached=cached, row=row, drafts=[900 + row] * drafts)
    return Feed(sequence, count) if behind else Feed(sequence, count, drafts, masks)


@st.composite
def feeds_of_a_step(draw: st.DrawFn) -> tuple[list[Feed], int]:
    """Feeds as the scheduler orders them, in some of the active rows."""
    active = draw(st.integers(1, 6))
    fed = draw(st.lists(st.sampled_from(range(active)), unique=True, min_size=1))
    decoding = draw(st.integers(0, len(fed)))
    feeds = []
    for number, row in enumerate(fed):
        few = st.integers(1, DECODE_TOKENS) if number < decoding else st.integers(DECODE_TOKENS + 1, 40)
        behind = draw(st.sampled_from([0, 0, 5]))
        extra = {"drafts": draw(st.integers(0, 4)), "masks": draw(st.integers(0, 7))} if not behind else {}
        feeds.append(feed(row, draw(st.integers(0, 30)), draw(few), behind=behind, **extra))
    return feeds, active


def fed_by_hand(feeds: list[Feed]) -> list[tuple[int, int, int]]:
    """Row, position and id of everything fed."""
    everything = []
    for each in feeds:
        sequence = each.sequence
        ids = sequence.tokens[sequence.cached :][: each.count] + sequence.drafts[: each.drafts] + [MASK] * each.masks
        everything += [(sequence.row, sequence.cached + offset, token) for offset, token in enumerate(ids)]
    return everything


def rectangles(packed: Packed) -> list[torch.Tensor]:
    return [packed.where_RP] + ([packed.prompts.where_LQ] if packed.prompts else [])


@given(feeds_of_a_step(), st.booleans())
@settings(max_examples=100)
def test_everything_fed_stands_once_in_its_row_at_its_position(step: tuple[list[Feed], int], audit: bool) -> None:
    feeds, active = step
    packed, _ = PACKER.pack(feeds, active, audit=audit)
    stands = list(zip(packed.row_N.tolist(), packed.position_N.tolist(), packed.id_N.tolist(), strict=True))
    assert stands == fed_by_hand(feeds)
    assert len(set(zip(packed.row_N.tolist(), packed.position_N.tolist(), strict=True))) == len(stands)
    assert packed.kv_tokens == sum(each.sequence.cached for each in feeds)


@given(feeds_of_a_step(), st.booleans())
@settings(max_examples=100)
def test_every_packed_position_is_found_again_in_the_rectangles(step: tuple[list[Feed], int], audit: bool) -> None:
    feeds, active = step
    packed, _ = PACKER.pack(feeds, active, audit=audit)
    cells = torch.cat([where.flatten() for where in rectangles(packed)])
    assert cells[packed.back_N].tolist() == list(range(len(packed.id_N)))
    assert ((cells >= 0) & (cells < len(packed.id_N))).all(), "a filler names a position that exists"


@given(feeds_of_a_step())
@settings(max_examples=100)
def test_every_packed_position_is_attended_from_its_own_row_over_all_it_may_see(step: tuple[list[Feed], int]) -> None:
    feeds, active = step
    packed, _ = PACKER.pack(feeds, active, audit=False)
    rows = list(range(active)) + (packed.prompts.row_L.tolist() if packed.prompts else [])
    lines = [line for where in rectangles(packed) for line in where]
    row_of_cell = [row for row, line in zip(rows, lines, strict=True) for _ in line]
    assert [row_of_cell[cell] for cell in packed.back_N.tolist()] == packed.row_N.tolist()
    columns = [len(packed.column_C)] * packed.where_RP.numel()
    columns += [len(packed.prompts.column_C)] * packed.prompts.where_LQ.numel() if packed.prompts else []
    for cell, position in zip(packed.back_N.tolist(), packed.position_N.tolist(), strict=True):
        assert columns[cell] > position
    assert packed.where_RP.shape[0] == active


@given(feeds_of_a_step(), st.booleans())
@settings(max_examples=100)
def test_logits_are_read_from_the_last_token_on_or_from_all_tokens_to_audit(
    step: tuple[list[Feed], int], audit: bool
) -> None:
    feeds, active = step
    packed, slices = PACKER.pack(feeds, active, audit=audit)
    start = 0
    for each, where in zip(feeds, slices, strict=True):
        read = 0
        if each.complete:
            tokens = each.count if audit and each.short else 1
            read = tokens + each.drafts + each.masks
        assert packed.pick_M[where].tolist() == list(range(start + each.length - read, start + each.length))
        start += each.length
    assert len(packed.pick_M) >= 1


def test_a_compiled_step_is_given_more_than_one_pick_unless_it_has_one_position() -> None:
    one, _ = PACKER.pack([feed(0, 5, 1)], 1, audit=False)
    assert one.pick_M.tolist() == [0]
    two, slices = PACKER.pack([feed(0, 5, 2)], 1, audit=False)
    assert two.pick_M.tolist() == [1, 1]
    assert slices == [slice(0, 1)]
    part, slices = PACKER.pack([feed(0, 0, 20, behind=5)], 1, audit=False)
    assert len(part.pick_M) == 2 and slices == [slice(0, 0)]


def test_one_position_of_a_prompt_alone_still_reads_logits_by_whole_numbers() -> None:
    packed, slices = PACKER.pack([feed(0, 0, 1, behind=30)], 1, audit=False)
    assert packed.pick_M.tolist() == [0] and packed.pick_M.dtype == torch.int64
    assert slices == [slice(0, 0)]


def test_prompts_that_would_stretch_the_rectangle_of_the_short_feeds_get_their_own() -> None:
    packed, _ = PACKER.pack([feed(0, 9, 1), feed(2, 9, 2), feed(3, 0, 30), feed(1, 4, 20)], 4, audit=False)
    assert packed.where_RP.shape == (4, 2)
    assert packed.prompts is not None
    assert packed.prompts.row_L.tolist() == [3, 1]
    assert packed.prompts.where_LQ.shape == (2, 30)


def test_prompts_alone_are_read_in_one_rectangle() -> None:
    packed, _ = PACKER.pack([feed(1, 0, 30), feed(0, 4, 20)], 2, audit=False)
    assert packed.prompts is None
    assert packed.where_RP.shape == (2, 30)


def test_prompts_of_some_rows_leave_the_rectangle_of_the_others_to_fillers() -> None:
    packed, _ = PACKER.pack([feed(1, 0, 30)], 8, audit=False)
    assert packed.where_RP.tolist() == [[0]] * 8
    assert packed.prompts is not None


@pytest.mark.parametrize("length", [1, 9])
def test_a_position_sees_its_row_up_to_itself(length: int) -> None:
    packed, _ = PACKER.pack([feed(0, 3, length)], 1, audit=False)
    seen = rectangle(packed.where_RP, packed.position_N, packed.column_C, 1, torch.float32).visible
    assert (seen[0, 0] == 0).sum(dim=1).tolist() == list(range(4, 4 + length))
