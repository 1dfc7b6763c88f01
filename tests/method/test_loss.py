"""What the loss adds to the paper's, against sums written out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars_ray.method.loss import StreamLoss, label_weights, training_logits
from mars_ray.method.streams import IGNORE, PackedRows, Streams, mars_streams
from tests.factories.token_rows import MASK_ID, packed

examples = st.lists(st.booleans(), min_size=1, max_size=14)
rows = st.lists(st.lists(examples, min_size=1, max_size=3), min_size=1, max_size=2)


def spots(streams: Streams) -> list[tuple[int, int]]:
    """Row and slot of every label of the noisy stream."""
    return [tuple(spot) for spot in ((streams.label_RS != IGNORE) & streams.noisy_RS).nonzero().tolist()]


def masks_before_by_hand(rows: PackedRows, r: int, t: int, block: int) -> int:
    same = [
        s
        for s in range(t)
        if rows.example_RT[r, s] == rows.example_RT[r, t]
        and rows.position_RT[r, s] // block == rows.position_RT[r, t] // block
    ]
    return sum(bool(rows.response_RT[r, s]) for s in same)


@given(layout=rows, block=st.integers(2, 6), decay=st.sampled_from([1.0, 0.5]))
def test_a_mask_weighs_less_for_each_mask_before_it_in_its_block(
    network: PreTrainedModel, layout: list, block: int, decay: float
) -> None:
    packed_rows = packed(layout)
    streams = mars_streams(packed_rows, block=block, mask_id=MASK_ID, decay=decay)
    first = streams.tokens_RS.shape[1] - packed_rows.tokens_RT.shape[1]
    weights = {
        (r, s): decay ** masks_before_by_hand(packed_rows, r, int(streams.twin_RS[r, s]) - first, block)
        for r, s in spots(streams)
    }
    assert float(label_weights(streams)[0]) == pytest.approx(sum(weights.values()))
    with torch.no_grad():
        logits_MV = training_logits(network, streams, streams.noisy_slot_M).log_softmax(dim=-1)
        log_p = dict(zip(spots(streams), logits_MV, strict=True))
        expected = sum(-float(log_p[spot][streams.label_RS[spot]]) * weight for spot, weight in weights.items())
        assert float(StreamLoss(network)(streams)[0]) == pytest.approx(expected, rel=1e-4)


@given(layout=rows, block=st.integers(2, 6), distill=st.sampled_from([0.25, 1.0]))
def test_the_clean_stream_teaches_the_noisy_one_at_the_same_token(
    network: PreTrainedModel, layout: list, block: int, distill: float
) -> None:
    packed_rows = packed(layout)
    streams = mars_streams(packed_rows, block=block, mask_id=MASK_ID)
    with torch.no_grad():
        everywhere = torch.arange(streams.tokens_RS.numel())
        logits_RSV = training_logits(network, streams, everywhere).view(*streams.tokens_RS.shape, -1)
        expected = 0.0
        for r, s in spots(streams):
            # Its twin is the clean slot of the same example and position.
            [twin] = (
                (~streams.noisy_RS[r])
                & (streams.example_RS[r] == streams.example_RS[r, s])
                & (streams.position_RS[r] == streams.position_RS[r, s])
            ).nonzero()
            log_p_V = logits_RSV[r, s].log_softmax(dim=-1)
            taught = -float((logits_RSV[r, twin].softmax(dim=-1) * log_p_V).sum())
            expected += distill * taught - (1 - distill) * float(log_p_V[streams.label_RS[r, s]])
        assert float(StreamLoss(network, distill)(streams)[0]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_the_teacher_does_not_learn_from_the_noisy_stream(network: PreTrainedModel) -> None:
    streams = mars_streams(packed([[[False] * 3 + [True] * 9]]), block=4, mask_id=MASK_ID)
    states: list[torch.Tensor] = []
    hook = network.get_output_embeddings().register_forward_pre_hook(lambda _, args: states.append(args[0]))
    try:
        mask_loss, _ = StreamLoss(network, distill=1.0)(streams)
    finally:
        hook.remove()
    [gradient] = torch.autograd.grad(mask_loss, states)
    taught_RS = gradient.abs().sum(dim=-1) > 0
    assert torch.equal(taught_RS, (streams.label_RS != IGNORE) & streams.noisy_RS)
