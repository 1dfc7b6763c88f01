"""Fine-tune a language model to decode several tokens at a time, and trade quality for speed with one threshold.

The names in `__all__` are the public API, and their meaning does not change; everything else may change. A name is
imported when it is first used, so importing the package loads neither torch nor Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mars_ray.batch.ray.generate_files import generate_files
    from mars_ray.batch.run.options import GenerateOptions, WorkerOptions
    from mars_ray.engine.chunk import Chunk
    from mars_ray.engine.core.engine import Engine
    from mars_ray.engine.mode import Mode
    from mars_ray.engine.options import EngineOptions
    from mars_ray.engine.process.async_engine import AsyncEngine
    from mars_ray.engine.request import DecodeParams, Request, SamplingParams
    from mars_ray.errors import InputError, MarsRayError, RunError
    from mars_ray.evaluation.calibration import CalibrateOptions, calibrate
    from mars_ray.evaluation.prepare import EvaluateOptions
    from mars_ray.evaluation.ray_evaluate import evaluate
    from mars_ray.llm.async_llm import AsyncLLM
    from mars_ray.llm.llm import LLM
    from mars_ray.llm.outputs import CompletionOutput, RequestOutput
    from mars_ray.training.config import TrainConfig
    from mars_ray.training.ray_trainer import train

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncLLM",
    "CalibrateOptions",
    "Chunk",
    "CompletionOutput",
    "DecodeParams",
    "Engine",
    "EngineOptions",
    "EvaluateOptions",
    "GenerateOptions",
    "InputError",
    "MarsRayError",
    "Mode",
    "Request",
    "RequestOutput",
    "RunError",
    "SamplingParams",
    "TrainConfig",
    "WorkerOptions",
    "calibrate",
    "evaluate",
    "generate_files",
    "train",
]

_MODULES = {
    "LLM": "llm.llm",
    "AsyncEngine": "engine.process.async_engine",
    "AsyncLLM": "llm.async_llm",
    "CalibrateOptions": "evaluation.calibration",
    "Chunk": "engine.chunk",
    "CompletionOutput": "llm.outputs",
    "DecodeParams": "engine.request",
    "Engine": "engine.core.engine",
    "EngineOptions": "engine.options",
    "EvaluateOptions": "evaluation.prepare",
    "GenerateOptions": "batch.run.options",
    "InputError": "errors",
    "MarsRayError": "errors",
    "Mode": "engine.mode",
    "Request": "engine.request",
    "RequestOutput": "llm.outputs",
    "RunError": "errors",
    "SamplingParams": "engine.request",
    "TrainConfig": "training.config",
    "WorkerOptions": "batch.run.options",
    "calibrate": "evaluation.calibration",
    "evaluate": "evaluation.ray_evaluate",
    "generate_files": "batch.ray.generate_files",
    "train": "training.ray_trainer",
}
"""Module that defines each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
