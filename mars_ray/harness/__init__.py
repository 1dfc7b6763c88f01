"""The model "mars-ray" for lm-evaluation-harness, which decodes with this package's engine in any mode.

The rest of the package never imports this folder, because the harness is an optional dependency.
"""

from mars_ray.errors import ConfigError

MODEL_NAME = "mars-ray"


def register() -> None:
    """Register `MODEL_NAME` with lm-evaluation-harness in this process; a second call is a no-op.

    The call is needed because the harness has no entry points for models. Raises `ConfigError` if the harness is not
    installed.
    """
    try:
        import lm_eval.models  # noqa: F401  # registers the harness's models; it skips them if any model is registered
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"lm-evaluation-harness is not installed ({error}). Install mars-ray with the extra 'lm-eval'."
        ) from None
    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target="mars_ray.harness.model:HarnessModel")
