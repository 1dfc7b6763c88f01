"""Fixtures the tests share."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from samples import VOCABULARY

# Fixtures are networks that no test changes, and two busy cores keep no deadline.
settings.register_profile("mars", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("mars")


@pytest.fixture(scope="session")
def network() -> PreTrainedModel:
    """A two-layer Qwen2 with random weights, large enough that its logits differ."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config).eval()
