"""Options that several commands share."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mars_ray.engine.options import Quantize
from mars_ray.model.dtype import DtypeOrAuto

if TYPE_CHECKING:
    from mars_ray.batch.run.options import WorkerOptions

MODEL_HELP = (
    "'bundled', 'smollm2', a folder, a .gguf file, a URL of either, or organisation/name of a hub, "
    "with @revision or without."
)
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
ADAPTER_HELP = (
    "'smollm2', a folder or a hub name: an adapter for the model, which looks ahead with it and stays itself."
)
AdapterOption = Annotated[str | None, typer.Option("--adapter", help=ADAPTER_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="End with one machine-readable line.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every sample here.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TemperatureOrModel = Annotated[
    float | None,
    typer.Option(
        help="0 takes the most likely token; by default what the model's generation_config.json says, else 0."
    ),
]
Slo = Annotated[list[str] | None, typer.Option(help="What a good request keeps, in ms: 'ttft:200,tpot:20,e2e:2000'.")]
TraceSpeed = Annotated[float, typer.Option(help="Times as fast as the trace was recorded.")]
OutputScale = Annotated[float, typer.Option(help="Times the trace's answers.")]

Workers = Annotated[
    int | None, typer.Option(help="Engines, each in a process of its own; by default as many as use every CPU well.")
]
Cpus = Annotated[
    float | None, typer.Option(help="CPUs and threads of each worker; by default they share what there is.")
]
Gpus = Annotated[float, typer.Option(help="GPUs of each worker.")]
Dtype = Annotated[
    DtypeOrAuto,
    typer.Option(help="'auto': bfloat16 for large checkpoints of 16 bits, where the machine is fast at it."),
]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option("--quantize", help="Round the weights to 8 or 4 bits when the engine starts; on a CPU."),
]
Compiled = Annotated[bool, typer.Option(help="Compile the decoding step in the background.")]

WITH_ERRORS = 3
"""Exit code of a job that is complete, but for rows with errors."""


def with_worker_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `workers` of a command, a `WorkerOptions`, by one command-line option for each field."""
    own = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "workers"]
    of_workers = inspect.signature(_worker_options).parameters
    parameters = [*own, *of_workers.values()]

    @wraps(command)
    def run(**arguments: Any) -> None:
        chosen = {name: arguments.pop(name) for name in of_workers}
        command(**arguments, workers=_worker_options(**chosen))

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _worker_options(
    workers: Workers = None,
    cpus: Cpus = None,
    gpus: Gpus = 0.0,
    dtype: Dtype = "auto",
    quantize: QuantizeOption = None,
    compiled: Compiled = True,
) -> "WorkerOptions":
    from mars_ray.batch.run.options import WorkerOptions

    return WorkerOptions(count=workers, cpus=cpus, gpus=gpus, dtype=dtype, quantize=quantize, compiled=compiled)
