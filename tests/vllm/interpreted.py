"""Run vLLM's model runner V2 on a CPU, under Triton's interpreter. Import this before vLLM.

Two things of vLLM are set aside, in this process only. Its kernel for top-k and top-p does not run under the
interpreter, so vLLM's torch version of the kernel runs in its place. On a CPU vLLM always waits for each step, and we
let it schedule asynchronously as on a GPU.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import mars_ray
from tests.vllm import INTERPRETER

os.environ.update(
    TRITON_INTERPRET="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)
assert "vllm" not in sys.modules and "triton" not in sys.modules

sys.path.insert(0, str(INTERPRETER))

import vllm.v1.sample.ops.topk_topp_sampler as top_k_top_p  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

top_k_top_p.HAS_TRITON = False
update_config = CpuPlatform.check_and_update_config


def update_all_but_scheduling(vllm_config: VllmConfig) -> None:
    chosen = vllm_config.scheduler_config.async_scheduling
    update_config(vllm_config)
    vllm_config.scheduler_config.async_scheduling = chosen


CpuPlatform.check_and_update_config = staticmethod(update_all_but_scheduling)

__all__ = ["ASSETS", "BUNDLED", "LLM", "SamplingParams", "engine", "tokens_of"]

ASSETS = Path(mars_ray.__file__).parent / "assets"
BUNDLED = ASSETS / "bundled"


def engine(mars: dict[str, Any] | None = None, folder: Path = BUNDLED, **options: Any) -> LLM:
    """An engine with the model in `folder`: with MARS and these settings, or, without settings, stock."""
    given: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "async_scheduling": False,
        "seed": 0,
    }
    if mars is not None:
        [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
        given |= {"hf_overrides": {"architectures": [f"Mars{architecture}"]}, "additional_config": {"mars": mars}}
    gc.collect()  # the end of an engine ends process groups that an engine needs while it starts
    return LLM(**(given | options))


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]
