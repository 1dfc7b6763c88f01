"""Small networks with random weights; keyword arguments replace fields of the configuration."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.factories.token_rows import VOCABULARY


def tiny_network(architecture: str = "qwen2", *, seed: int = 7, **fields: Any) -> PreTrainedModel:
    """Return a network of two layers for `tiny_tokenizer`."""
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": 2,
    } | fields
    sizes.setdefault("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes)).eval()


def network_of_rows(*, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Return a network for rows of `packed`, whose logits differ clearly."""
    usual: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }
    return tiny_network(seed=seed, **(usual | fields))
