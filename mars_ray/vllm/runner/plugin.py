"""The entry point of the plug-in: vLLM calls `register` in each of its processes."""

import logging

import vllm
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from mars_ray.errors import ConfigError
from mars_ray.vllm.runner.model_config import MarsModelConfig
from mars_ray.vllm.start_checks import ARCHITECTURE_OF, check_version


def register() -> None:
    """Make the architectures known to vLLM, if its version is a known one. Calling this again changes nothing.

    Other versions serve stock models as before, because mars-ray may be installed for another purpose.
    """
    try:
        check_version(vllm.__version__)
    except ConfigError as error:
        logging.getLogger(__name__).warning("The architectures of MARS are not registered: %s", error)
        return
    for architecture in ARCHITECTURE_OF.values():
        ModelRegistry.register_model(architecture, f"mars_ray.vllm.runner.models:{architecture}")
        MODELS_CONFIG_MAP[architecture] = MarsModelConfig
