"""Model how long a network takes for a step on a GPU: a roofline with an efficiency and an overhead.

A step reads all weights and the cache of its sequences once, and computes with every weight at every position. The step
takes as long as the slower of reading and computing, divided by the efficiency, plus an overhead, but at least as long
as the processor works on it, which plans a step while the GPU computes another. Attention's own
operations are left out: at 1,000 tokens a sequence they add 3 % to the operations of Qwen2.5-7B. The known GPUs,
networks and efficiencies are listed in `figures.yaml`, each with its source.
"""

from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field

PAPER_BLOCK = 4
PAPER_SOURCE = "arXiv 2604.07023, Qwen2.5-7B, block 4, GSM8K"
Weights = Literal["bf16", "fp8"]
BYTES = MappingProxyType({"bf16": 2, "fp8": 1})
"""Bytes that one parameter takes."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that weights and cache may fill; the default of vLLM."""


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
    """Share of the GPU's bandwidth that a step reaches, and of its rate unless `compute_share` says otherwise."""
    compute_share: float | None = Field(None, gt=0, le=1)
    """Share of the GPU's rate that a step reaches."""
    overhead_ms: float = Field(ge=0, le=10_000)
    """Milliseconds added to every step."""
    seq_ms: float = Field(ge=0, le=1_000)
    """Milliseconds that each decoding sequence adds to a step."""
    host_ms: float = Field(0, ge=0, le=10_000)
    """Milliseconds that the processor works on a step while the GPU computes another: the shortest step."""
    host_seq_ms: float = Field(0, ge=0, le=1_000)
    """Milliseconds that each decoding sequence adds to the processor's work."""
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


class PaperPoint(NamedTuple):
    """Published figures at one threshold."""

    threshold: float
    tokens_per_forward: float
    """Measured without verification: a forward gives one token, plus the tokens at masks whose confidence reaches the
    threshold."""
    accuracy: float


PAPER_CURVE = (
    PaperPoint(1.0, 1.00, 0.732),
    PaperPoint(0.95, 1.79, 0.710),
    PaperPoint(0.9, 1.96, 0.703),
    PaperPoint(0.8, 2.19, 0.677),
    PaperPoint(0.7, 2.37, 0.638),
    PaperPoint(0.6, 2.55, 0.603),
    PaperPoint(0.5, 2.77, 0.560),
)
"""Published figures, from the highest threshold downwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The modelled step times of one network on one GPU."""

    name: str
    gpu: Gpu
    network: Network
    efficiency: Efficiency
    weights: Weights = "bf16"

    def seconds(self, *, num_seqs: int, positions: int, kv_tokens: int, prompt_tokens: int) -> float:
        """Return the time of a step.

        `positions` counts the tokens, drafts and masks of the `num_seqs` decoding sequences. `kv_tokens` counts the
        cached tokens that all sequences together attend to. `prompt_tokens` counts the prompt tokens that other
        sequences read.
        """
        reading_s = self.weights_s + self.kv_token_s * kv_tokens
        computing_s = self.position_s * (positions + prompt_tokens)
        gpu_s = max(reading_s, computing_s) + self.overhead_s + self.seq_s * num_seqs
        return max(gpu_s, self.host_s + self.host_seq_s * num_seqs)

    @property
    def notice(self) -> str:
        """Sentence that goes with every figure that follows from these step times."""
        return step_notice(self.name)

    @property
    def weight_bytes(self) -> float:
        """Bytes that all weights take."""
        return self.network.billion_parameters * 1e9 * BYTES[self.weights]

    @property
    def weights_s(self) -> float:
        """Seconds that reading all weights takes."""
        return self.weight_bytes / (self.gpu.bandwidth_gb_per_s * 1e9 * self.efficiency.share)

    @property
    def kv_token_s(self) -> float:
        """Seconds that reading the cache entry of one token takes."""
        return self.network.kv_bytes / (self.gpu.bandwidth_gb_per_s * 1e9 * self.efficiency.share)

    @property
    def position_s(self) -> float:
        """Seconds that computing one position takes, at two operations per parameter."""
        tflops = self.gpu.bf16_tflops if self.weights == "bf16" else self.gpu.fp8_tflops or self.gpu.bf16_tflops
        share = self.efficiency.compute_share or self.efficiency.share
        return 2 * self.network.billion_parameters * 1e9 / (tflops * 1e12 * share)

    @property
    def overhead_s(self) -> float:
        """Seconds added to every step."""
        return self.efficiency.overhead_ms / 1000

    @property
    def seq_s(self) -> float:
        """Seconds that each decoding sequence adds to a step."""
        return self.efficiency.seq_ms / 1000

    @property
    def host_s(self) -> float:
        """Seconds that the processor works on a step without sequences."""
        return self.efficiency.host_ms / 1000

    @property
    def host_seq_s(self) -> float:
        """Seconds that each decoding sequence adds to the processor's work."""
        return self.efficiency.host_seq_ms / 1000

    @property
    def max_kv_tokens(self) -> int:
        """Number of tokens whose cache fits into memory beside the weights; 0 or negative if the weights leave no
        room."""
        free_bytes = self.gpu.memory_gb * 1e9 * MEMORY_SHARE - self.weight_bytes
        return int(free_bytes // self.network.kv_bytes)


def step_notice(name: str) -> str:
    """Return the sentence that goes with every figure that follows from the step times of the model `name`."""
    return f"modelled step time: {name}"
