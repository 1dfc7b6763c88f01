"""Attention by tiles and the loss in chunks, against the dense mask and plain cross-entropy."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars_ray.method import loss, tiles
from mars_ray.method.loss import StreamLoss, mask_losses, training_logits
from mars_ray.method.streams import PADDING, Streams, clean_stream, mars_streams, random_phases
from mars_ray.method.tiles import ATTENTION, lay_out
from tests.factories.token_rows import MASK_ID, packed

examples = st.lists(st.booleans(), min_size=1, max_size=14)
rows = st.lists(st.lists(examples, min_size=1, max_size=4), min_size=1, max_size=2)


@pytest.fixture(scope="module")
def tiled(network: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(network)
    other.set_attn_implementation(ATTENTION)
    return other


@pytest.fixture(params=[(4, 3, 2048), (100, 256, 2048), (4, 3, 0)], ids=["cut small", "whole", "by SDPA"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("TILE_SLOTS", "PIECE_QUERIES", "KEYS_HELD"), request.param, strict=True):
        monkeypatch.setattr(tiles, name, value)


def gradients(network: PreTrainedModel, streams: Streams) -> list[torch.Tensor]:
    mask_loss, ar_loss = StreamLoss(network, distill=0.5)(streams)
    found = torch.autograd.grad(mask_loss + 0.3 * ar_loss, list(network.parameters()), allow_unused=True)
    return [mask_loss, ar_loss, *(torch.zeros(()) if each is None else each for each in found)]


@pytest.mark.parametrize("noisy", [True, False])
def test_losses_and_gradients_are_those_of_the_dense_mask(
    network: PreTrainedModel, tiled: PreTrainedModel, sizes: None, noisy: bool
) -> None:
    marks = [[[False] * 3 + [True] * 11, [False, True] * 4, [True]], [[False] * 2 + [True] * 9]]
    packed_rows = packed(marks)
    phase_RT = random_phases(packed_rows, 4, torch.Generator().manual_seed(1))
    streams = (
        mars_streams(packed_rows, block=4, mask_id=MASK_ID, phase_RT=phase_RT) if noisy else clean_stream(packed_rows)
    )
    for mine, dense in zip(gradients(tiled, streams), gradients(network, streams), strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-3, atol=1e-4)


@given(layout=rows, block=st.integers(2, 6))
def test_logits_are_those_of_the_dense_mask_at_every_slot(
    network: PreTrainedModel, tiled: PreTrainedModel, layout: list, block: int
) -> None:
    streams = mars_streams(packed(layout), block=block, mask_id=MASK_ID)
    real_M = (streams.example_RS != PADDING).flatten().nonzero()[:, 0]
    with torch.no_grad():
        torch.testing.assert_close(
            training_logits(tiled, streams, real_M), training_logits(network, streams, real_M), rtol=1e-4, atol=1e-4
        )


@given(layout=rows)
def test_every_slot_that_holds_a_token_has_one_place(layout: list) -> None:
    streams = mars_streams(packed(layout), block=4, mask_id=MASK_ID)
    laid = lay_out(streams, torch.float32)
    real = (streams.example_RS.flatten() != PADDING).nonzero()[:, 0]
    assert sorted(laid.slot_P.tolist()) == real.tolist()
    assert laid.place_RS.flatten()[laid.slot_P].tolist() == list(range(len(real)))
    assert sum(piece.queries for tile in laid.tiles for piece in tile.pieces) == len(real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("total_variation", [0.0, 0.9, 1.0])
def test_losses_in_chunks_are_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, share: float, total_variation: float
) -> None:
    monkeypatch.setattr(loss, "CHUNK_NUMBERS", 3 * 50)
    generator = torch.Generator().manual_seed(0)
    logits_MV = torch.randn(11, 50, generator=generator).to(dtype).requires_grad_()
    label_M, weight_M = torch.randint(50, (11,), generator=generator), torch.rand(11, generator=generator)
    teacher_M = torch.tensor([7, 2, 0, 9, 10])
    mine_M = mask_losses(logits_MV, label_M, teacher_M, share, total_variation=total_variation)
    [mine] = torch.autograd.grad(mine_M @ weight_M, logits_MV)
    wide_MV = logits_MV.detach().float().requires_grad_()
    target_MV = F.one_hot(label_M, 50).float()
    taught_MV = wide_MV.detach()[teacher_M].softmax(-1)
    target_MV[:5] = (1 - share) * target_MV[:5] + share * taught_MV
    plain_M = F.cross_entropy(wide_MV, target_MV, reduction="none")
    distance_M = (wide_MV[:5].softmax(-1) - taught_MV).abs().sum(-1) / 2
    plain_M = torch.cat([torch.lerp(plain_M[:5], distance_M, total_variation), plain_M[5:]])
    [plain] = torch.autograd.grad(plain_M @ weight_M, wide_MV)
    torch.testing.assert_close(mine_M, plain_M)
    torch.testing.assert_close(mine, plain.to(dtype))
