"""The vLLM engines that the measurements compare: their names and their options."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from mars_ray.errors import ConfigError

MAX_MODEL_LEN = 1024
NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4}
GRAPHS: dict[str, dict[str, Any]] = {
    "compiled": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL", "mode": 0}},
    "decode": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}},
    "off": {"enforce_eager": True},
}
"""How vLLM runs its network: compiled and as graphs, as it does by default; with graphs of all steps; with graphs of
decoding steps alone, which starts soonest; and operation by operation."""
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class EngineKind(NamedTuple):
    """An engine to measure."""

    name: str
    """`stock`, `ngram`, or `mars-K` for the plug-in with K masks."""
    masks: int
    """0 without the plug-in."""

    @classmethod
    def of(cls, name: str) -> "EngineKind":
        """Return the engine of this name. Raises `ConfigError` for another name."""
        if name in ("stock", "ngram"):
            return cls(name, 0)
        masks = name.removeprefix("mars-")
        if masks == name or not masks.isdecimal() or not 1 <= int(masks) <= 63:
            raise ConfigError(f"engine is {name!r}; choose stock, ngram or mars-K with K masks, such as mars-7.")
        return cls(name, int(masks))

    @property
    def positions(self) -> int:
        """Positions that a decoding request takes in a step."""
        return 1 + 2 * self.masks


def engine_options(
    kind: EngineKind, folder: Path, *, device: str, graphs: str, max_num_seqs: int, adapter: str | None = None
) -> dict[str, Any]:
    """Return the options of vLLM's `LLM`, and set the variables that it reads."""
    os.environ.update(ENVIRONMENT)
    options: dict[str, Any] = {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(4096, 16 * max_num_seqs),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.8,
        "seed": 0,
    }
    if kind.name == "ngram":
        options["speculative_config"] = NGRAM
    if kind.masks:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        options["hf_overrides"] = {"architectures": [f"Mars{config.architectures[0]}"]}
        options["additional_config"] = {"mars": {"block": kind.masks + 1} | ({"adapter": adapter} if adapter else {})}
    if device == "cuda":
        return options | GRAPHS[graphs]
    return options | {"dtype": "float32", "enforce_eager": True}
