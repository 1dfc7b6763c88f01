"""The two streams against constructions written out by hand, one slot at a time."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars_ray.method.loss import StreamLoss, label_weights, training_logits
from mars_ray.method.streams import (
    IGNORE,
    PADDING,
    PackedRows,
    Streams,
    clean_stream,
    mars_streams,
    masks_before,
    random_phases,
)
from mars_ray.method.visibility import dense_mask
from tests.factories.token_rows import MASK_ID, packed

examples = st.lists(st.booleans(), min_size=1, max_size=14)
rows = st.lists(st.lists(examples, min_size=1, max_size=3), min_size=1, max_size=2)
blocks = st.integers(2, 6)


def phases(packed_rows: PackedRows, block: int, seed: int) -> torch.Tensor:
    return random_phases(packed_rows, block, torch.Generator().manual_seed(seed))


def whole_noisy_stream(packed_rows: PackedRows, block: int, phase_RT: torch.Tensor) -> Streams:
    """The textbook `[noisy | clean]`: every position is in the noisy stream, none is left out."""
    clean = clean_stream(packed_rows)
    block_RT = (packed_rows.position_RT + phase_RT) // block
    masked = packed_rows.tokens_RT.masked_fill(packed_rows.response_RT, MASK_ID)
    label_RT = clean.label_RS.masked_fill(~packed_rows.response_RT, IGNORE)
    return Streams.of(
        noisy=clean.tokens_RS.shape[1],
        tokens_RS=torch.cat([masked, packed_rows.tokens_RT], 1),
        position_RS=packed_rows.position_RT.repeat(1, 2),
        example_RS=packed_rows.example_RT.repeat(1, 2),
        block_RS=block_RT.repeat(1, 2),
        label_RS=torch.cat([label_RT, clean.label_RS], 1),
        twin_RS=clean.twin_RS.repeat(1, 2) + clean.twin_RS.shape[1],
        weight_RS=clean.weight_RS.repeat(1, 2),
    )


def with_labels(streams: Streams, label_RS: torch.Tensor) -> Streams:
    """Return the streams with other labels."""
    derived = ("label_RS", "noisy_slot_M", "clean_slot_M")
    fields = {name: getattr(streams, name) for name in Streams.__slots__ if name not in derived}
    return Streams.of(label_RS=label_RS, **fields)


def may_attend_by_hand(streams: Streams, r: int, q: int, k: int) -> bool:
    """The table of the paper, as ifs."""
    if streams.example_RS[r, q] != streams.example_RS[r, k]:
        return False
    q_pos, k_pos = int(streams.position_RS[r, q]), int(streams.position_RS[r, k])
    q_block, k_block = int(streams.block_RS[r, q]), int(streams.block_RS[r, k])
    if not streams.noisy_RS[r, q]:
        return not streams.noisy_RS[r, k] and k_pos <= q_pos
    if streams.noisy_RS[r, k]:
        return q_block == k_block and k_pos <= q_pos
    return k_block < q_block


@given(layout=rows, block=blocks, seed=st.integers(0, 99))
def test_the_dense_mask_equals_the_table_of_the_paper(layout: list, block: int, seed: int) -> None:
    packed_rows = packed(layout)
    streams = mars_streams(packed_rows, block=block, mask_id=MASK_ID, phase_RT=phases(packed_rows, block, seed))
    mask = dense_mask(streams)
    R, S = streams.tokens_RS.shape
    for r, q, k in product(range(R), range(S), range(S)):
        assert bool(mask[r, 0, q, k]) == may_attend_by_hand(streams, r, q, k)


@given(layout=rows, block=blocks, seed=st.integers(0, 99), multiple_of=st.sampled_from([1, 4]))
def test_leaving_out_blocks_without_a_response_leaves_the_loss_as_it_is(
    network: PreTrainedModel, layout: list, block: int, seed: int, multiple_of: int
) -> None:
    packed_rows = packed(layout)
    phase_RT = phases(packed_rows, block, seed)
    short = mars_streams(packed_rows, block=block, mask_id=MASK_ID, phase_RT=phase_RT, multiple_of=multiple_of)
    whole = whole_noisy_stream(packed_rows, block, phase_RT)
    assert short.tokens_RS.shape[1] <= whole.tokens_RS.shape[1]
    torch.testing.assert_close(label_weights(short), label_weights(whole))
    with torch.no_grad():
        torch.testing.assert_close(StreamLoss(network)(short), StreamLoss(network)(whole), rtol=1e-4, atol=1e-4)


@given(layout=rows, block=blocks, seed=st.integers(0, 99))
def test_first_tokens_count_among_the_masks_as_the_clean_stream_says_them(
    network: PreTrainedModel, layout: list, block: int, seed: int
) -> None:
    packed_rows = packed(layout)
    phase_RT = phases(packed_rows, block, seed)
    block_RT = (packed_rows.position_RT + phase_RT) // block
    without = mars_streams(packed_rows, block=block, mask_id=MASK_ID, phase_RT=phase_RT)
    with_first = mars_streams(packed_rows, block=block, mask_id=MASK_ID, phase_RT=phase_RT, first=True)
    first_RT = ~packed_rows.response_RT & (masks_before(packed_rows, block_RT) == 0)
    N = without.tokens_RS.shape[1] - first_RT.shape[1]
    clean_labels = without.label_RS.clone()
    clean_labels[:, :N] = IGNORE
    clean_labels[:, N:][~first_RT] = IGNORE
    with torch.no_grad():
        more = StreamLoss(network)(with_labels(without, clean_labels))[1]
        mask, ar = StreamLoss(network)(without)
        torch.testing.assert_close(StreamLoss(network)(with_first), (mask + more, ar), rtol=1e-4, atol=1e-4)


@given(layout=rows, block=blocks, seed=st.integers(0, 99))
def test_packing_gives_the_sum_of_the_examples_alone(
    network: PreTrainedModel, layout: list, block: int, seed: int
) -> None:
    packed_rows = packed(layout)
    phase_RT = phases(packed_rows, block, seed)
    together = mars_streams(packed_rows, block=block, mask_id=MASK_ID, phase_RT=phase_RT)
    sums = torch.zeros(2)
    with torch.no_grad():
        for r, row in enumerate(layout):
            start = 0
            for marks in row:
                cut = slice(start, start + len(marks))
                alone = PackedRows(
                    tokens_RT=packed_rows.tokens_RT[r : r + 1, cut],
                    response_RT=torch.tensor([marks]),
                    example_RT=torch.zeros(1, len(marks), dtype=torch.long),
                    position_RT=torch.arange(len(marks))[None],
                )
                streams = mars_streams(alone, block=block, mask_id=MASK_ID, phase_RT=phase_RT[r : r + 1, cut])
                sums += torch.stack(StreamLoss(network)(streams))
                start += len(marks)
        torch.testing.assert_close(torch.stack(StreamLoss(network)(together)), sums, rtol=1e-4, atol=1e-4)


@given(marks=examples, block=blocks, phase=st.integers(0, 5))
def test_training_sees_exactly_what_decoding_will_ask(
    network: PreTrainedModel, marks: list[bool], block: int, phase: int
) -> None:
    """At every block start s: the logits at its masks are those of a causal forward over clean[:s] + the masks."""
    packed_rows = packed([[marks]])
    phase %= block
    streams = mars_streams(packed_rows, block=block, mask_id=MASK_ID, phase_RT=phase)
    with torch.no_grad():
        noisy_RS = streams.noisy_RS & (streams.example_RS != PADDING)
        logits_MV = training_logits(network, streams, noisy_RS.flatten().nonzero()[:, 0])
        positions = streams.position_RS[streams.noisy_RS].tolist()
        by_position = dict(zip(positions, logits_MV, strict=True))
        clean = packed_rows.tokens_RT[0].tolist()
        block_of = [(position + phase) // block for position in range(len(marks))]
        for number in set(block_of):
            inside = [position for position in range(len(marks)) if block_of[position] == number]
            if not any(marks[position] for position in inside):
                continue
            asked = clean[: inside[0]] + [MASK_ID if marks[position] else clean[position] for position in inside]
            expected = network(input_ids=torch.tensor([asked]), use_cache=False).logits[0]
            for position in inside:
                torch.testing.assert_close(by_position[position], expected[position], rtol=1e-4, atol=1e-4)


@given(layout=rows)
def test_the_clean_stream_is_plain_causal_training(network: PreTrainedModel, layout: list) -> None:
    """Its summed loss is that of Hugging Face on each example alone."""
    packed_rows = packed(layout)
    expected = 0.0
    with torch.no_grad():
        for r, row in enumerate(layout):
            start = 0
            for marks in row:
                ids = packed_rows.tokens_RT[r, start : start + len(marks)][None]
                labels = ids.masked_fill(~torch.tensor([marks]), IGNORE)
                if any(marks[1:]):
                    mean = network(input_ids=ids, labels=labels, use_cache=False).loss
                    expected += float(mean) * sum(marks[1:])
                start += len(marks)
        mask_sum, ar_sum = StreamLoss(network)(clean_stream(packed_rows))
    assert float(mask_sum) == 0
    torch.testing.assert_close(float(ar_sum), expected, rtol=1e-4, atol=1e-4)


@given(layout=rows, block=blocks, seed=st.integers(0, 99))
def test_a_random_phase_is_one_number_for_each_example(layout: list, block: int, seed: int) -> None:
    packed_rows = packed(layout)
    phase_RT = phases(packed_rows, block, seed)
    for r, row in enumerate(layout):
        for number in range(len(row)):
            of_example = phase_RT[r][packed_rows.example_RT[r] == number]
            assert len(of_example.unique()) == 1
            assert 0 <= int(of_example[0]) < block


def test_random_phases_reach_every_offset() -> None:
    packed_rows = packed([[[True]] * 200])
    assert set(phases(packed_rows, 4, 0)[0].tolist()) == {0, 1, 2, 3}
