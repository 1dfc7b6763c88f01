"""Choose between this package's engine and vLLM. This module loads neither torch nor vLLM by itself."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from mars_ray.engine.options import EngineName, EngineTuning
from mars_ray.errors import ConfigError, InputError
from mars_ray.model.folder import ResolvedModel

VLLM = "mars_ray.vllm.engine"
"""Package of the engine over vLLM. It builds on this one, so it is imported by name, and only where it is used."""

AdapterFolders = Mapping[str | None, Path]
"""Adapter folders by the names that requests use; None is the key of the default adapter."""


def check_engine(model: ResolvedModel, tuning: EngineTuning, adapters: AdapterFolders) -> None:
    """Raise an `InputError` if the engine that `tuning` names cannot serve `model` with the other options."""
    if tuning.engine == "vllm":
        for problem in _problems_of_vllm(model, tuning, adapters):
            raise problem
        return
    for option, is_set in (
        ("tensor_parallel_size", tuning.tensor_parallel_size > 1),
        ("vllm_args", bool(tuning.vllm_args)),
    ):
        if is_set:
            raise ConfigError(f"{option} needs the engine vllm. Set engine to vllm, or leave {option} out.")


def choose_engine(model: ResolvedModel, tuning: EngineTuning, adapters: AdapterFolders, *, device: str) -> EngineName:
    """Return the engine that serves `model` on `device`. Raises the errors of `check_engine`."""
    check_engine(model, tuning, adapters)
    if tuning.engine is not None:
        return tuning.engine
    if device == "cuda" and not any(True for _ in _problems_of_vllm(model, tuning, adapters)):
        return "vllm"
    return "mars"


def _problems_of_vllm(model: ResolvedModel, tuning: EngineTuning, adapters: AdapterFolders) -> Iterator[InputError]:
    problems: Iterator[InputError] = import_module(f"{VLLM}.requirements").problems(model, tuning, adapters)
    return problems
