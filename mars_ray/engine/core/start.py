"""Start the engine that the options name: this package's own, or vLLM with the plug-in of `mars_ray/vllm`."""

from importlib import import_module

from transformers import PreTrainedTokenizerBase

from mars_ray.engine.choose_engine import VLLM, AdapterFolders, choose_engine
from mars_ray.engine.core.decoding_engine import DecodingEngine
from mars_ray.engine.core.load import best_device, load_engine
from mars_ray.engine.options import EngineOptions
from mars_ray.model.folder import ResolvedModel


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
