"""Batch jobs: their options and their engines; keyword arguments replace fields."""

from pathlib import Path
from typing import Any

from mars_ray.adapter.decoding_model import open_decoding_model
from mars_ray.batch.run.engine_plan import EnginePlan, plan_engines
from mars_ray.batch.run.options import GenerateOptions, WorkerOptions
from mars_ray.engine.request import DecodeParams
from mars_ray.storage.location import AnyPath

ONE_WORKER = WorkerOptions(count=1)


def generate_options(source: AnyPath, output: AnyPath, model: Path | str = "bundled", **fields: Any) -> GenerateOptions:
    usual: dict[str, Any] = {"input": (str(source),), "output": output, "model": str(model), "workers": ONE_WORKER}
    return GenerateOptions(**(usual | fields))


def engines_of(workers: WorkerOptions) -> EnginePlan:
    """Return the engines of a job that has no deadline, with the bundled model."""
    engines, _ = plan_engines(
        open_decoding_model("bundled", None),
        workers=workers,
        decode=DecodeParams(),
        deadline_s=None,
        max_quality_loss=None,
    )
    return engines
