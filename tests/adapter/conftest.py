"""A tiny network with an adapter that says something."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import GatedLoRA, new_adapter


@pytest.fixture
def adapted(network: PreTrainedModel) -> tuple[PreTrainedModel, GatedLoRA]:
    """A network of its own, and an adapter on it with random weights."""
    base = copy.deepcopy(network)
    adapter = new_adapter(base, rank=3, alpha=6.0, masks=3, names=None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return base, adapter
