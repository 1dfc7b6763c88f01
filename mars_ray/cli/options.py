"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from mars_ray.engine.options import Quantize
from mars_ray.model.dtype import DtypeOrAuto

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

# Options of every command that runs a job, as in `batch.run.options.WorkerOptions`.
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

WITH_ERRORS = 3
"""Exit code of a job that is complete, but for rows with errors."""
