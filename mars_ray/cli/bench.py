"""The command `mars-ray bench serve`, which puts load on an endpoint."""

from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.shared import JsonFile, OutputScale, Slo, TraceSpeed, write_json
from mars_ray.errors import InterruptedRunError

bench_app = typer.Typer(help="Measure an endpoint.", no_args_is_help=True)

URL = "http://127.0.0.1:8000"
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OPENAI_API_KEY",
        help="Bearer token. Prefer the environment variable, because other users can see options in ps.",
    ),
]
LoadTrace = Annotated[
    str | None,
    typer.Option(help="'poisson:RATE' per second, or an Azure trace .csv.gz. Default: a closed loop of --clients."),
]
Clients = Annotated[
    int | None, typer.Option(help="Maximum number of requests in flight. Default: 1, or no limit with --trace.")
]
Requests = Annotated[
    int | None,
    typer.Option(help="Number of requests. Default: all of a trace file; without one, 100 or as --duration allows."),
]
Duration = Annotated[float | None, typer.Option(help="Number of seconds during which requests are sent.")]
Prompts = Annotated[
    Path | None, typer.Option(help="JSONL or parquet with 'prompt' or 'messages'. Default: bundled prompts.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Maximum number of tokens per answer. Default: 128, or the lengths in the trace file."),
]
ExtraBody = Annotated[str, typer.Option(help="""Additional fields for every request, such as '{"threshold": 0.9}'.""")]
PromptScale = Annotated[
    float,
    typer.Option(
        help="Factor for the prompt lengths in the trace, which count as words. Replies report the true token counts."
    ),
]


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="OpenAI-compatible endpoint.")] = URL,
    model: Annotated[
        str | None, typer.Option(help="Model name. Default: the first model that the endpoint lists.")
    ] = None,
    api_key: ApiKey = None,
    trace: LoadTrace = None,
    clients: Clients = None,
    requests: Requests = None,
    duration: Duration = None,
    stream: Annotated[bool, typer.Option(help="Stream answers. TTFT is measured only with streaming.")] = True,
    prompts: Prompts = None,
    max_tokens: MaxTokens = None,
    extra_body: ExtraBody = "{}",
    speed: TraceSpeed = 1.0,
    prompt_scale: PromptScale = 1.0,
    output_scale: OutputScale = 1.0,
    slo: Slo = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and prompts.")] = 0,
    timeout: Annotated[float, typer.Option(help="Time limit in seconds for one request.")] = 300.0,
    json_file: JsonFile = None,
) -> None:
    """Put load on a running OpenAI-compatible endpoint, and measure latency, throughput and goodput."""
    from mars_ray.load.bench_serve import LoadOptions
    from mars_ray.load.bench_serve import bench_serve as run

    options = LoadOptions(
        url=url,
        model=model,
        api_key=api_key,
        trace=trace,
        clients=clients,
        requests=requests,
        duration=duration,
        stream=stream,
        prompts=prompts,
        max_tokens=max_tokens,
        extra_body=extra_body,
        speed=speed,
        prompt_scale=prompt_scale,
        output_scale=output_scale,
        slo=tuple(slo or ()),
        seed=seed,
        timeout=timeout,
    )
    report = run(options)
    write_json(json_file, report)
    if report["interrupted"]:
        raise InterruptedRunError("Stopped; the figures cover the requests sent so far.")
