"""Networks the baselines decode with: random ones in float64, where ties do not happen, and the bundled model."""

from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.decode.workload import bundled_workload
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from tests.samples import VOCABULARY

SHAPE = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 256, "initializer_range": 0.5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}


@pytest.fixture(scope="session")
def exact_network(network: PreTrainedModel) -> PreTrainedModel:
    return deepcopy(network).double()


@pytest.fixture(scope="session")
def other_network() -> PreTrainedModel:
    """Smaller and with other weights: a draft that is often wrong."""
    torch.manual_seed(1)
    config = Qwen2Config(**SHAPE, **HEADS, hidden_size=16, intermediate_size=24)
    return Qwen2ForCausalLM(config).double().eval()


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
    config = Qwen2Config(**SHAPE, **HEADS, hidden_size=VOCABULARY, intermediate_size=24, tie_word_embeddings=True)
    network = Qwen2ForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        network.get_input_embeddings().weight.copy_(torch.eye(VOCABULARY))
    return network


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return load_checkpoint(resolve_model("bundled"), dtype=torch.float64)


@pytest.fixture(scope="session")
def bundled_prompts(bundled: Checkpoint) -> list[list[int]]:
    return [list(prompt) for prompt in bundled_workload(bundled, 4, 0).prompts]
