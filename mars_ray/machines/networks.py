"""Shapes of networks, which determine how much a step reads and computes."""

from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field


class Network(BaseModel):
    """The shape of a network."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    billion_parameters: float = Field(gt=0, le=10_000)
    layers: int = Field(ge=1, le=10_000)
    key_heads: int = Field(ge=1, le=10_000)
    head_size: int = Field(ge=1, le=10_000)
    max_model_len: int = Field(ge=2, le=100_000_000)
    """Maximum number of tokens in one sequence, prompt and answer together."""
    source: str = ""
    """Address of the network's configuration."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that a token takes in the KV cache, in bf16."""
        return 2 * self.layers * self.key_heads * self.head_size * 2


_HUB = "https://huggingface.co"

NETWORKS = MappingProxyType(
    {
        "qwen2.5-0.5b": Network(
            billion_parameters=0.494,
            layers=24,
            key_heads=2,
            head_size=64,
            max_model_len=32768,
            source=f"{_HUB}/Qwen/Qwen2.5-0.5B-Instruct/blob/main/config.json",
        ),
        "qwen2.5-7b": Network(
            billion_parameters=7.62,
            layers=28,
            key_heads=4,
            head_size=128,
            max_model_len=32768,
            source=f"{_HUB}/Qwen/Qwen2.5-7B-Instruct/blob/main/config.json",
        ),
        "llama-3.1-8b": Network(
            billion_parameters=8.03,
            layers=32,
            key_heads=8,
            head_size=128,
            max_model_len=131072,
            source=f"{_HUB}/meta-llama/Llama-3.1-8B-Instruct/blob/main/config.json",
        ),
        "qwen3-4b": Network(
            billion_parameters=4.02,
            layers=36,
            key_heads=8,
            head_size=128,
            max_model_len=40960,
            source=f"{_HUB}/Qwen/Qwen3-4B/blob/main/config.json",
        ),
    }
)
"""Known networks by name."""
