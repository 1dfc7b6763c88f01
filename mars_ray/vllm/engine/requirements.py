"""Say why vLLM cannot serve a model with given options, before anything is loaded. vLLM is not imported."""

from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from mars_ray.engine.options import MARS_ONLY, EngineTuning
from mars_ray.errors import AdapterError, ConfigError, InputError, ModelError
from mars_ray.model.folder import ResolvedModel
from mars_ray.vllm.settings import VllmSettings
from mars_ray.vllm.start_checks import ARCHITECTURE_OF
from mars_ray.vllm.versions import check_version


def problems(model: ResolvedModel, tuning: EngineTuning, adapters: Mapping[str | None, Path]) -> Iterator[InputError]:
    """Yield an error for each reason why vLLM cannot serve `model`; yield none if it can."""
    try:
        check_version(installed_version())
        VllmSettings.complete({}, model.folder, model.config.get_text_config().vocab_size)
    except InputError as error:
        yield error
    if (family := model.config.model_type) not in ARCHITECTURE_OF:
        yield ModelError(
            f"{model.folder} has model_type {family}; the engine vllm supports {', '.join(ARCHITECTURE_OF)}. "
            "Set engine to mars."
        )
    for option in MARS_ONLY:
        if (value := getattr(tuning, option)) is not None:
            yield ConfigError(
                f"{option} is {value!r}, which the engine vllm lacks. Leave it out, or set engine to mars."
            )
    if adapters:
        yield AdapterError("adapters need the engine mars. Set engine to mars, or leave the adapter out.")


def installed_version() -> str:
    """Return the version of vLLM in this environment. Raises `ConfigError` without vLLM."""
    distributions = packages_distributions().get("vllm")
    if find_spec("vllm") is None or not distributions:  # a folder of that name may be on the path
        raise ConfigError("vLLM is not installed. Install it (see docs/vllm.md), or set engine to mars.")
    return version(distributions[0])
