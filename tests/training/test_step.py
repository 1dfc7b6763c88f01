"""One optimizer step against slow and plain versions."""

import copy

import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from mars_ray.errors import DivergedError
from mars_ray.method.loss import StreamLoss
from mars_ray.method.streams import mars_streams
from mars_ray.training.step import StepLosses, train_step
from tests.factories.token_rows import MASK_ID, packed

ROWS = packed([[[False, True, True, True, True]], [[False] * 4 + [True]], [[False, True]] * 2], seed=5)


def step(network: PreTrainedModel, cuts: list[list[int]], ar_weight: float = 1.0) -> tuple[StepLosses, torch.Tensor]:
    loss = StreamLoss(copy.deepcopy(network))
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    batches = [mars_streams(ROWS.select(cut), block=2, mask_id=MASK_ID) for cut in cuts]
    losses = train_step(loss, optimizer, batches, Accelerator(cpu=True), ar_weight=ar_weight, clip_norm=1e9)
    return losses, torch.cat([parameter.detach().flatten() for parameter in loss.parameters()])


def test_cutting_a_step_into_micro_batches_changes_neither_losses_nor_update(network: PreTrainedModel) -> None:
    whole, whole_weights = step(network, [[0, 1, 2]])
    for cuts in ([[0], [1], [2]], [[0, 1], [2]]):
        losses, weights = step(network, cuts)
        assert (losses.mask_loss, losses.ar_loss) == pytest.approx((whole.mask_loss, whole.ar_loss), rel=1e-5)
        torch.testing.assert_close(weights, whole_weights, rtol=1e-4, atol=1e-6)


def test_without_weight_the_autoregressive_loss_moves_nothing(network: PreTrainedModel) -> None:
    _, with_it = step(network, [[0, 1, 2]], ar_weight=1.0)
    _, without = step(network, [[0, 1, 2]], ar_weight=0.0)
    assert not torch.allclose(with_it, without)


def test_a_loss_that_is_not_finite_is_an_error_and_leaves_the_weights(network: PreTrainedModel) -> None:
    loss = StreamLoss(copy.deepcopy(network))
    with torch.no_grad():
        loss.network.lm_head.weight[3] = torch.nan
    before = [parameter.clone() for parameter in loss.parameters()]
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    streams = mars_streams(ROWS, block=2, mask_id=MASK_ID)
    with pytest.raises(DivergedError, match="nan"):
        train_step(loss, optimizer, [streams], Accelerator(cpu=True), ar_weight=1.0, clip_norm=1.0)
    for parameter, old in zip(loss.parameters(), before, strict=True):
        assert torch.equal(parameter.nan_to_num(), old.nan_to_num())
