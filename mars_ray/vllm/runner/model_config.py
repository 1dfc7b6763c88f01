"""Complete and check vLLM's configuration at start, before anything is loaded."""

from pathlib import Path

import vllm
from vllm.config import VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from mars_ray.vllm.settings import KEY, VllmSettings
from mars_ray.vllm.start_checks import check_start
from mars_ray.vllm.versions import check_version, hooks_of


class UncountedProcessors(list[str]):
    """Logits processors that vLLM calls for each request, and does not count when it chooses the model runner."""

    def __bool__(self) -> bool:
        return False


class MarsModelConfig(VerifyAndUpdateConfig):
    """The hook that vLLM calls for our architectures."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Read the card, refuse what MARS cannot do, and put our scheduler and worker extension in place."""
        model = vllm_config.model_config
        additional = vllm_config.additional_config.get(KEY, {})
        settings = VllmSettings.complete(additional, Path(model.model), model.get_vocab_size())
        if not settings.any_version:
            check_version(vllm.__version__)
        check_start(vllm_config, settings)
        vllm_config.additional_config[KEY] = settings.model_dump()
        # Draft positions without a speculator. vLLM takes a model for a diffusion model by its config.json only.
        vllm_config.diffusion_config = DiffusionConfig(canvas_length=settings.draft_positions)
        vllm_config.scheduler_config.scheduler_cls = "mars_ray.vllm.runner.scheduler.mars_scheduler"
        extension = "mars_ray.vllm.runner.worker_extension.MarsWorkerExtension"
        vllm_config.parallel_config.worker_extension_cls = extension
        checks = "mars_ray.vllm.runner.request_checks:MarsRequestChecks"
        processors = [*(model.logits_processors or ()), checks]
        is_counted = not hooks_of(vllm.__version__).processors_need_v1
        model.logits_processors = processors if is_counted else UncountedProcessors(processors)


def settings_of(vllm_config: VllmConfig) -> VllmSettings:
    """Return the settings of an engine that started."""
    return VllmSettings.read(vllm_config.additional_config[KEY])
