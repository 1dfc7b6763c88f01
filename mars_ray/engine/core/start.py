"""Start the engine that the options name: this package's own, or vLLM with the plug-in of `mars_ray/vllm`."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mars_ray.engine.core.decoding_engine import DecodingEngine
from mars_ray.engine.core.load import best_device, load_engine
from mars_ray.engine.options import EngineName, EngineOptions, EngineTuning
from mars_ray.errors import ConfigError
from mars_ray.model.folder import ResolvedModel

VLLM = "mars_ray.vllm.engine"
"""Package of the engine over vLLM. It builds on this one, so it is imported by name, and only where it is used."""

AdapterFolders = Mapping[str | None, Path]
"""Adapter folders by the names that requests use; None is the key of the default adapter."""


def choose_engine(
    model: ResolvedModel, tuning: EngineTuning, adapters: AdapterFolders | None = None, *, device: str
) -> EngineName:
    """Return the engine that serves `model` on `device`, before anything is loaded.

    Raises `ConfigError` or `ModelError` if the options name an engine that cannot serve the model with them.
    """
    if tuning.engine != "mars" and (tuning.engine == "vllm" or device == "cuda"):
        problems = import_module(f"{VLLM}.requirements").problems(model, tuning, adapters or {})
        problem = next(problems, None)
        if problem is None:
            return "vllm"
        if tuning.engine == "vllm":
            raise problem
    for option in _of_vllm(tuning):
        raise ConfigError(f"{option} needs the engine vllm. Set engine to vllm, or leave {option} out.")
    return "mars"


def _of_vllm(tuning: EngineTuning) -> Iterator[str]:
    """Yield the options that only vLLM has and that are set."""
    if tuning.tensor_parallel_size > 1:
        yield "tensor_parallel_size"
    if tuning.vllm_args:
        yield "vllm_args"


def start_engine(
    model: ResolvedModel, options: EngineOptions, adapters: AdapterFolders | None = None
) -> tuple[DecodingEngine, PreTrainedTokenizerBase]:
    """Load `model` into the engine of `choose_engine` on this machine's best device, and return its tokenizer, too.

    Raises the errors of `choose_engine` and of `load_engine`.
    """
    if choose_engine(model, options, adapters, device=best_device()) == "vllm":
        engine: DecodingEngine
        engine, tokenizer = import_module(f"{VLLM}.load").load_engine(model, options)
        return engine, tokenizer
    engine, checkpoint = load_engine(model, options, adapters)
    return engine, checkpoint.tokenizer
