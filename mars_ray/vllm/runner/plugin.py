"""The entry point of the plug-in: vLLM calls `register` in each of its processes."""

import vllm
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from mars_ray.vllm.runner.model_config import MarsModelConfig
from mars_ray.vllm.start_checks import check_version

ARCHITECTURES = ("MarsLlamaForCausalLM", "MarsQwen2ForCausalLM", "MarsQwen3ForCausalLM")
"""Names for `--hf-overrides`. Under its own name, a checkpoint is served by stock vLLM."""


def register() -> None:
    """Make the architectures known to vLLM. Calling this again changes nothing."""
    check_version(vllm.__version__)
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"mars_ray.vllm.runner.models:{architecture}")
        MODELS_CONFIG_MAP[architecture] = MarsModelConfig
