"""The command `mars-ray bench serve`: load on an endpoint."""

from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.options import JsonFile, OutputScale, Slo, TraceSpeed
from mars_ray.cli.results import write_json
from mars_ray.errors import InterruptedRunError

bench_app = typer.Typer(help="Measure an endpoint.", no_args_is_help=True)

URL = "http://127.0.0.1:8000"
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="OPENAI_API_KEY",
        help="Sent as a bearer token. Other users of this machine see it in ps: better set the variable.",
    ),
]
LoadTrace = Annotated[
    str | None,
    typer.Option(help="'poisson:RATE' per second or an Azure trace .csv.gz; without one, clients take turns."),
]
Clients = Annotated[
    int | None, typer.Option(help="Requests under way at most; 1 by default, with --trace without bound.")
]
Requests = Annotated[
    int | None, typer.Option(help="Requests sent; by default the trace, or 100 where no --duration is given.")
]
Duration = Annotated[float | None, typer.Option(help="Seconds in which requests are sent.")]
Prompts = Annotated[
    Path | None, typer.Option(help="JSONL or parquet with 'prompt' or 'messages'; bundled ones by default.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Tokens per answer at most; 128 by default, in a trace file what it says.")
]
ExtraBody = Annotated[str, typer.Option(help="""Further fields of each request: '{"threshold": 0.9}'.""")]
PromptScale = Annotated[
    float, typer.Option(help="Times the trace's prompts; a word counts as a token, usage says the truth.")
]


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="An OpenAI-compatible endpoint that runs.")] = URL,
    model: Annotated[str | None, typer.Option(help="By default the first that the endpoint lists.")] = None,
    api_key: ApiKey = None,
    trace: LoadTrace = None,
    clients: Clients = None,
    requests: Requests = None,
    duration: Duration = None,
    stream: Annotated[bool, typer.Option(help="Ask for chunks; without them there is no TTFT.")] = True,
    prompts: Prompts = None,
    max_tokens: MaxTokens = None,
    extra_body: ExtraBody = "{}",
    speed: TraceSpeed = 1.0,
    prompt_scale: PromptScale = 1.0,
    output_scale: OutputScale = 1.0,
    slo: Slo = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and of the order of prompts.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 300.0,
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
        raise InterruptedRunError("Stopped; the figures are those of the requests sent by then.")
