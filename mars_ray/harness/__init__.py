"""A model of lm-evaluation-harness: its tasks, decoded by our engine in any of its modes.

`register` makes the model "mars-ray" known to the harness. No other part imports this one: the harness is an extra that
need not be installed.
"""

from mars_ray.errors import ConfigError

MODEL_NAME = "mars-ray"


def register() -> None:
    """Make `MODEL_NAME` a model of lm-evaluation-harness in this process; a second time changes nothing.

    The harness has no entry points to find models by. Raises `ConfigError` where it is not installed.
    """
    try:
        import lm_eval.models  # noqa: F401  # registers its own models, which it leaves out when it finds one already
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"lm-evaluation-harness is not installed ({error}): pip install 'mars-ray[lm-eval]'"
        ) from None
    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target="mars_ray.harness.model:HarnessModel")
