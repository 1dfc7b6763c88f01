"""Run vLLM's model runner V2 on a CPU, under Triton's interpreter. Import this before vLLM."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mars_ray

os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1",
    TRITON_INTERPRET="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)
assert "vllm" not in sys.modules

from triton.backends import backends  # noqa: E402


class InterpreterDriver:
    """Makes vLLM find an active Triton driver; the interpreter needs none."""

    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = SimpleNamespace(compiler=None, driver=InterpreterDriver)  # type: ignore[assignment]

from vllm import LLM, SamplingParams  # noqa: E402

__all__ = ["ASSETS", "BUNDLED", "LLM", "SamplingParams", "engine"]

ASSETS = Path(mars_ray.__file__).parent / "assets"
BUNDLED = ASSETS / "bundled"


def engine(mars: dict[str, Any] | None = None, **options: Any) -> LLM:
    """The bundled model in an engine: with MARS and these settings, or, without settings, stock."""
    given: dict[str, Any] = {
        "model": str(BUNDLED),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "seed": 0,
    }
    if mars is not None:
        given |= {"hf_overrides": {"architectures": ["MarsQwen2ForCausalLM"]}, "additional_config": {"mars": mars}}
    return LLM(**(given | options))
