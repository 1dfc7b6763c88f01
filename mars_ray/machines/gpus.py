"""Figures of GPUs from their data sheets (memory, bandwidth and dense rates), and a price for each."""

from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field


class Gpu(BaseModel):
    """A GPU, described by the figures in its data sheet."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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


_NVIDIA = "https://www.nvidia.com/en-us/data-center"

GPUS = MappingProxyType(
    {
        "h200": Gpu(
            memory_gb=141,
            bandwidth_gb_per_s=4800,
            bf16_tflops=989,
            fp8_tflops=1979,
            dollars_per_hour=3.25,
            source=f"{_NVIDIA}/h200/",
        ),
        "h100": Gpu(
            memory_gb=80,
            bandwidth_gb_per_s=3350,
            bf16_tflops=989,
            fp8_tflops=1979,
            dollars_per_hour=2.75,
            source=f"{_NVIDIA}/h100/",
        ),
        "a100-80g": Gpu(
            memory_gb=80, bandwidth_gb_per_s=2039, bf16_tflops=312, dollars_per_hour=1.60, source=f"{_NVIDIA}/a100/"
        ),
        "a100-40g": Gpu(
            memory_gb=40, bandwidth_gb_per_s=1555, bf16_tflops=312, dollars_per_hour=1.25, source=f"{_NVIDIA}/a100/"
        ),
        "l40s": Gpu(
            memory_gb=48,
            bandwidth_gb_per_s=864,
            bf16_tflops=362,
            fp8_tflops=733,
            dollars_per_hour=1.05,
            source=f"{_NVIDIA}/l40s/",
        ),
        "l4": Gpu(
            memory_gb=24,
            bandwidth_gb_per_s=300,
            bf16_tflops=121,
            fp8_tflops=242,
            dollars_per_hour=0.60,
            source=f"{_NVIDIA}/l4/",
        ),
    }
)
"""Known GPUs by name."""
