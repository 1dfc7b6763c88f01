"""Complete and check vLLM's configuration at start, before anything is loaded."""

from pathlib import Path

from vllm.config import VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from mars_ray.vllm.settings import KEY, VllmSettings
from mars_ray.vllm.start_checks import check_start


class MarsModelConfig(VerifyAndUpdateConfig):
    """The hook that vLLM calls for our architectures."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Read the card, refuse what MARS cannot do, and put our scheduler and worker extension in place."""
        model = vllm_config.model_config
        additional = vllm_config.additional_config.get(KEY, {})
        settings = VllmSettings.complete(additional, Path(model.model), model.get_vocab_size())
        check_start(vllm_config, settings)
        vllm_config.additional_config[KEY] = settings.model_dump()
        # Draft positions without a speculator. vLLM takes a model for a diffusion model by its config.json only.
        vllm_config.diffusion_config = DiffusionConfig(canvas_length=settings.draft_positions)
        vllm_config.scheduler_config.scheduler_cls = "mars_ray.vllm.runner.scheduler.mars_scheduler"
        extension = "mars_ray.vllm.runner.worker_extension.MarsWorkerExtension"
        vllm_config.parallel_config.worker_extension_cls = extension
        checks = "mars_ray.vllm.runner.request_checks:MarsRequestChecks"
        model.logits_processors = [*(model.logits_processors or ()), checks]


def settings_of(vllm_config: VllmConfig) -> VllmSettings:
    """Return the settings of an engine that started."""
    return VllmSettings.read(vllm_config.additional_config[KEY])
