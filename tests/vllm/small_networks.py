"""Small networks with random weights whose drafts are right at times, and prompts for them."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.factories.networks import tiny_network
from tests.vllm.interpreted import LLM, SamplingParams, engine, tokens_of

VOCABULARY = 288
MASK = VOCABULARY - 1
BLOCK = 4
MAX_TOKENS = 24


def small_network(architecture: str) -> PreTrainedModel:
    """A network whose tokens have much in common, so that what follows a mask resembles what follows a token."""
    network = tiny_network(
        architecture,
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_attention_heads=2,  # of 32 dimensions, the least that vLLM has on a CPU
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.6,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    with torch.no_grad():
        network.get_input_embeddings().weight += 0.6 * torch.randn(64, generator=torch.Generator().manual_seed(1))
        network.get_output_embeddings().weight[MASK] = 0  # stock vLLM would choose the mask token
    return network


def small_engine(folder: Path, mars: dict[str, Any] | None, **options: Any) -> LLM:
    usual = {"skip_tokenizer_init": True, "max_model_len": 128, "enable_prefix_caching": False}
    return engine(mars, folder, **(usual | options))


@cache
def prompts() -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(MASK) for _ in range(chance.randint(1, 40))] for _ in range(24)]


def decode(llm: LLM, extra: dict[str, Any] | None = None, **sampling: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, detokenize=False, extra_args=extra, **sampling)
    return tokens_of(llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False))
