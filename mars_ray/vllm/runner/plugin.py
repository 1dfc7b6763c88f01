"""The entry point of the plug-in: vLLM calls `register` in each of its processes."""

from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from mars_ray.vllm.runner.model_config import MarsModelConfig
from mars_ray.vllm.start_checks import ARCHITECTURE_OF


def register() -> None:
    """Make the architectures known to vLLM. Calling this again changes nothing."""
    for architecture in ARCHITECTURE_OF.values():
        ModelRegistry.register_model(architecture, f"mars_ray.vllm.runner.models:{architecture}")
        MODELS_CONFIG_MAP[architecture] = MarsModelConfig
