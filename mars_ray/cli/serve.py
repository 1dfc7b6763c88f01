"""The command `mars-ray serve`, which serves a model at an OpenAI-compatible endpoint."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.shared import (
    ADAPTER_HELP,
    MODEL_HELP,
    EngineOption,
    QuantizeOption,
    Rehearse,
    TensorParallelSize,
    VllmArg,
    vllm_options,
)

SEVERAL = " Repeat NAME=DIR to serve several; callers choose one by using its name as the model."


def serve(
    config: Annotated[Path | None, typer.Option(help="Ray Serve config file; see serve_configs/.")] = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    adapter: Annotated[list[str] | None, typer.Option(help=ADAPTER_HELP + SEVERAL)] = None,
    quantize: QuantizeOption = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads and CPUs per engine. Default: engines share the CPUs of this machine."),
    ] = None,
    rehearse: Rehearse = None,
    engine: EngineOption = None,
    tensor_parallel_size: TensorParallelSize = None,
    vllm_arg: VllmArg = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Without API keys, it must be a loopback address.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535)] = None,
) -> None:
    """Serve a model to OpenAI clients on Ray Serve."""
    from tempfile import TemporaryDirectory

    from mars_ray.installed import clean_up, settings_class
    from mars_ray.serve.deploy.deploy_file import read_deploy_file, share_cpus
    from mars_ray.serve.deploy.environment import set_environment

    settings = settings_class()
    fields = read_deploy_file(
        settings,
        config,
        model=model,
        adapters=adapter or (),
        engine={
            "quantize": quantize,
            "threads": threads,
            "rehearse": rehearse,
            "engine": engine,
            **vllm_options(tensor_parallel_size, vllm_arg),
        },
        host=host,
        port=port,
    )
    with TemporaryDirectory(prefix="mars-ray-") as folder:
        set_environment(Path(folder), fields["http_options"])  # set before the imports below, which make Ray read it
        from mars_ray.serve.ray.run_endpoint import run
        from mars_ray.serve.ray.schema import schema_of

        source = str(config or "the command line")
        schema = schema_of(fields, source)
        if "RAY_ADDRESS" not in os.environ:
            schema = schema_of(share_cpus(settings, fields), source)
        run(schema, settings, clean_up)
