"""Build networks of realistic size with reproducible random weights, to measure speed."""

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from mars_ray.errors import ConfigError

PREFIX = "shape:"
SEED = 0

SIZES: dict[str, dict[str, int | float]] = {
    # 100.7 M parameters: 12 layers of 6.3 M and an embedding of 25 M, tied.
    "shape:100m": {
        "vocab_size": 32768,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    # Qwen2.5-0.5B: 494 M parameters, of which the tied embedding is 136 M.
    "shape:0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
}


def resolve_shape(
    name: str, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Return the network called `name`. Raises a `ConfigError` that lists the known names."""
    if name not in SIZES:
        raise ConfigError(f"unknown shape {name!r}; choose one of {', '.join(SIZES)}.")
    config = Qwen2Config(
        **SIZES[name],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        # Build in the dtype, because a later cast would round the rotary frequencies, which must stay float32.
        network: PreTrainedModel = Qwen2ForCausalLM._from_config(config, dtype=dtype)
    assert all(buffer.dtype == torch.float32 for buffer in network.buffers())
    return network.to(device).eval()
