"""Figures of GPUs, networks and engines, from which the time of a step is modelled.

The known ones are listed in `figures.yaml`, each with its source.
"""

from importlib.resources import files
from types import MappingProxyType

import yaml
from pydantic import BaseModel, ConfigDict, Field


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Gpu(_Figures):
    """A GPU, described by the figures in its data sheet."""

    memory_gb: float = Field(gt=0, le=10_000)
    bandwidth_gb_per_s: float = Field(gt=0, le=1_000_000)
    bf16_tflops: float = Field(gt=0, le=1_000_000)
    """Rate for 16-bit weights in 10^12 operations per second, without sparsity."""
    fp8_tflops: float | None = Field(None, gt=0, le=1_000_000)
    """Rate for 8-bit weights in 10^12 operations per second, without sparsity; None if the GPU has no such rate."""
    dollars_per_hour: float = Field(gt=0, le=100_000)
    """Price of one hour. Sellers differ, so this is only a default: the middle of the range of prices in mid-2026."""
    source: str = ""
    """Address of the data sheet."""


class Network(_Figures):
    """The shape of a network."""

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


class Efficiency(_Figures):
    """The share of a GPU's speed that an engine reaches, and the time that the engine adds to a step."""

    share: float = Field(gt=0, le=1)
    """Share of the GPU's bandwidth and rate that a step reaches."""
    overhead_ms: float = Field(ge=0, le=10_000)
    """Milliseconds added to every step."""
    seq_ms: float = Field(ge=0, le=1_000)
    """Milliseconds that each decoding sequence adds to a step."""
    source: str = ""
    """Measurements that the figures were fitted to."""


class _Known(_Figures):
    """The content of `figures.yaml`, by name."""

    gpus: dict[str, Gpu]
    networks: dict[str, Network]
    efficiencies: dict[str, Efficiency]


_KNOWN = _Known.model_validate(yaml.safe_load((files("mars_ray") / "machines" / "figures.yaml").read_text()))
GPUS = MappingProxyType(_KNOWN.gpus)
NETWORKS = MappingProxyType(_KNOWN.networks)
EFFICIENCIES = MappingProxyType(_KNOWN.efficiencies)
