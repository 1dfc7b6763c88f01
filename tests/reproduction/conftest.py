"""Networks the baselines decode with: random ones in float64, where ties do not happen, and the bundled model."""

from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.decode.workload import bundled_workload
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import bundled_checkpoint
from tests.factories.networks import network_of_rows
from tests.factories.token_rows import VOCABULARY


@pytest.fixture(scope="session")
def exact_network(network: PreTrainedModel) -> PreTrainedModel:
    return deepcopy(network).double()


@pytest.fixture(scope="session")
def other_network() -> PreTrainedModel:
    """Smaller and with other weights: a draft that is often wrong."""
    return network_of_rows(seed=1, hidden_size=16, intermediate_size=24).double()


@pytest.fixture(scope="session")
def similar_network(exact_network: PreTrainedModel) -> PreTrainedModel:
    """The exact network with some noise: a draft that is often right."""
    torch.manual_seed(2)
    similar = deepcopy(exact_network)
    with torch.no_grad():
        for weight in similar.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return similar


@pytest.fixture(scope="session")
def repeating_network() -> PreTrainedModel:
    """It says the token it last read, whatever stands before."""
    network = network_of_rows(hidden_size=VOCABULARY, intermediate_size=24, tie_word_embeddings=True).double()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        network.get_input_embeddings().weight.copy_(torch.eye(VOCABULARY))
    return network


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return bundled_checkpoint(dtype=torch.float64)


@pytest.fixture(scope="session")
def bundled_prompts(bundled: Checkpoint) -> list[list[int]]:
    return [list(prompt) for prompt in bundled_workload(bundled, 4, 0).prompts]
