"""Load a model on the best device of this machine, into this package's engine or into vLLM with the plug-in."""

from importlib import import_module

import torch
from transformers import PreTrainedTokenizerBase

from mars_ray.adapter.folder import AdapterLoader
from mars_ray.engine.choose_engine import VLLM, AdapterFolders, choose_engine
from mars_ray.engine.core.decoding_engine import DecodingEngine
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.model.checkpoint import Checkpoint, load_model
from mars_ray.model.folder import ResolvedModel
from mars_ray.usable_cpus import usable_cpus


def best_device() -> str:
    """Return "cuda" if this process can use a GPU, otherwise "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_engine(
    model: ResolvedModel, options: EngineOptions, adapters: AdapterFolders | None = None
) -> tuple[Engine, Checkpoint]:
    """Return an engine on `best_device`, and its checkpoint, whose network only the engine may use.

    Raises `ModelError` for weights that cannot be loaded, `AdapterError` for an adapter that does not fit, and
    `ConfigError` for invalid sizes in `options`.
    """
    if torch.get_num_threads() > usable_cpus():  # torch ignores CPU quotas
        torch.set_num_threads(usable_cpus())
    loader = AdapterLoader(model.folder)
    loaded = {name: loader.load(folder) for name, folder in (adapters or {}).items()}
    checkpoint = load_model(model, device=best_device())
    return Engine(checkpoint, options, adapters=loaded, consume=True), checkpoint


def start_engine(
    model: ResolvedModel, options: EngineOptions, adapters: AdapterFolders
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
