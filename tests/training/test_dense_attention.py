"""Training with a dense mask, as on a GPU, equals training in tiles, as on a CPU: the loss and every gradient."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import new_adapter
from mars_ray.adapter.loss import AdapterLoss
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.method import tiles
from mars_ray.method.loss import StreamLoss
from mars_ray.method.streams import Streams, mars_streams, random_phases
from tests.factories.networks import network_of_rows
from tests.factories.token_rows import MASK_ID, packed

NETWORKS: dict[str, dict[str, Any]] = {
    "two tables": {},
    "one table": {"tie_word_embeddings": True},
    "window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}
CLOSE = 1e-5
"""Largest difference of a gradient, relative to the largest gradient."""
examples = st.lists(st.booleans(), min_size=1, max_size=30)
rows = st.lists(st.lists(examples, min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.fixture(scope="module", params=[*NETWORKS.values()], ids=[*NETWORKS])
def both(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same network with a dense mask and in tiles."""
    dense = network_of_rows(initializer_range=0.2, **request.param)
    tiled = copy.deepcopy(dense)
    tiled.set_attn_implementation(tiles.ATTENTION)
    return dense, tiled


def adapter_loss(network: PreTrainedModel, distill: float) -> AdapterLoss:
    """Return the loss of an adapter with random weights, the same for the same network."""
    own = copy.deepcopy(network)
    adapter = new_adapter(own, rank=3, alpha=6.0, masks=3, names=None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return AdapterLoss(own, adapter, distill)


def assert_equal_steps(dense: nn.Module, tiled: nn.Module, wide: Streams, narrow: Streams) -> None:
    """Compare both losses and every gradient; `wide` are the streams of `narrow` with padding."""
    figures: list[tuple[Tensor, list[Tensor]]] = []
    for loss, streams in ((dense, wide), (tiled, narrow)):
        sums = torch.stack(loss(streams))
        total = sums @ torch.tensor([1.0, 0.3])
        some = torch.autograd.grad(total, list(loss.parameters()), allow_unused=True)
        figures.append((sums.detach(), [torch.zeros(()) if one is None else one for one in some]))
    [(sums, gradients), (expected_sums, expected)] = figures
    torch.testing.assert_close(sums, expected_sums, rtol=CLOSE, atol=CLOSE)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for gradient, other in zip(gradients, expected, strict=True):
        assert float((gradient - other).abs().max()) <= CLOSE * largest


@given(
    layout=rows,
    block=st.integers(1, 6),
    seed=st.integers(0, 9),
    multiple_of=st.sampled_from([1, 8]),
    distill=st.sampled_from([0.0, 0.5, 1.0]),
    adapter=st.booleans(),
)
def test_a_dense_mask_gives_the_losses_and_gradients_of_tiles(
    both: tuple[PreTrainedModel, PreTrainedModel],
    layout: list,
    block: int,
    seed: int,
    multiple_of: int,
    distill: float,
    adapter: bool,
) -> None:
    packed_rows = packed(layout, seed=seed)
    phase_RT = random_phases(packed_rows, block, torch.Generator().manual_seed(seed))
    common: dict[str, Any] = {"phase_RT": phase_RT, "decay": 0.9}

    def streams(multiple_of: int) -> Streams:
        if adapter:
            return mask_streams(packed_rows, masks=block, multiple_of=multiple_of, **common)
        return mars_streams(packed_rows, block=block, mask_id=MASK_ID, multiple_of=multiple_of, **common)

    make = adapter_loss if adapter else StreamLoss
    dense, tiled = (make(network, distill) for network in both)
    assert_equal_steps(dense, tiled, streams(multiple_of), streams(1))
