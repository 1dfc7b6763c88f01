"""Model how long a network takes for a step on a GPU: a roofline with an efficiency and an overhead.

A step reads all weights and the cache of its sequences once, and computes with every weight at every position. The step
takes as long as the slower of reading and computing, divided by the efficiency, plus an overhead. Attention's own
operations are left out: at 1,000 tokens a sequence they add 3 % to the operations of Qwen2.5-7B.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mars_ray.machines.figures import Efficiency, Gpu, Network

Weights = Literal["bf16", "fp8"]
BYTES = MappingProxyType({"bf16": 2, "fp8": 1})
"""Bytes that one parameter takes."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that weights and cache may fill; the default of vLLM."""


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
        return max(reading_s, computing_s) + self.overhead_s + self.seq_s * num_seqs

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
        return 2 * self.network.billion_parameters * 1e9 / (tflops * 1e12 * self.efficiency.share)

    @property
    def overhead_s(self) -> float:
        """Seconds added to every step."""
        return self.efficiency.overhead_ms / 1000

    @property
    def seq_s(self) -> float:
        """Seconds that each decoding sequence adds to a step."""
        return self.efficiency.seq_ms / 1000

    @property
    def max_kv_tokens(self) -> int:
        """Number of tokens whose cache fits into memory beside the weights; 0 or negative if the weights leave no
        room."""
        free_bytes = self.gpu.memory_gb * 1e9 * MEMORY_SHARE - self.weight_bytes
        return int(free_bytes // self.network.kv_bytes)


def step_notice(name: str) -> str:
    """Return the sentence that goes with every figure that follows from the step times of the model `name`."""
    return f"modelled step time: {name}"
