"""The commands `mars-ray bench ...`: what is claimed, measured on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.options import Dtype, JsonFile, OutputScale, Slo, TraceSpeed
from mars_ray.cli.results import write_json
from mars_ray.errors import ConfigError, InterruptedRunError
from mars_ray.usable_cpus import usable_cpus

bench_app = typer.Typer(help="Measure this machine; nothing is claimed that was not measured.", no_args_is_help=True)

URL = "http://127.0.0.1:8000"
Peers = Annotated[
    str | None,
    typer.Option(help="Compare with other engines instead, of 'llama.cpp,openvino'; they are extras."),
]
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


@bench_app.command("decode")
def bench_decode(
    model: Annotated[
        str, typer.Option(help="A model as everywhere, or a shape with random weights: 'shape:100m'.")
    ] = "bundled",
    batch: Annotated[
        str | None,
        typer.Option(help="Requests decoded together, separated by commas; 1,4,16,32 by default, 1,8 with --quick."),
    ] = None,
    dtype: Dtype = "auto",
    peers: Peers = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of everyone with --peers; by default the cores.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests per measurement; 48 by default, 4 with --quick.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Measurements of everyone; 5 by default, 2 with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first look, with fewer and shorter measurements.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Compare the engine with transformers and the decoders of the paper, in turns, on the same requests."""
    batch = batch or ("1,8" if quick else "1,4,16,32")
    requests, repeats = requests or (4 if quick else 48), repeats or (2 if quick else 5)
    if quick:
        typer.echo(f"quick: {requests} requests and {repeats} rounds; without --quick the figures are steadier.")
    command = f"mars-ray bench decode --model {model} --batch {batch} --requests {requests} --repeats {repeats}"
    if peers is not None:
        from mars_ray.bench.peers.bench_peers import bench_peers
        from mars_ray.bench.peers.peer_report import report as report_of_peers
        from mars_ray.bench.peers.peer_report import show

        threads = threads or usable_cpus()
        found = bench_peers(model, peers.split(","), _numbers(batch), requests, repeats, threads)
        show(model, threads, found)
        command += f" --peers {peers} --threads {threads}"
        write_json(json_file, report_of_peers(model, threads, found, command))
        return
    from mars_ray.bench.decode.bench_decode import bench_decode as run
    from mars_ray.bench.decode.bench_decode import report

    results = run(model, _numbers(batch), requests, repeats, dtype)
    write_json(json_file, report(model, results, f"{command} --dtype {dtype}"))


@bench_app.command("floor")
def bench_floor(
    model: Annotated[str, typer.Option(help="A model as everywhere, or a shape with random weights.")] = "bundled",
    batch: Annotated[str, typer.Option(help="Rows of a step, separated by commas.")] = "1,4,16,32",
    dtype: Dtype = "auto",
    json_file: JsonFile = None,
) -> None:
    """Compare a step of the engine with the bytes it must move and the operations it must do."""
    from mars_ray.bench.decode.floor_report import bench_floor as run

    write_json(json_file, run(model, _numbers(batch), dtype))


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
    from mars_ray.bench.load.bench_serve import bench_serve as run
    from mars_ray.bench.load.options import ServeOptions

    options = ServeOptions(
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


@bench_app.command("policy")
def bench_policy(
    trace: Annotated[list[str], typer.Option(help="An Azure trace .csv.gz or its URL; give it once for each.")],
    machine: Annotated[Path | None, typer.Option(help="What a replica can do; the bundled figures by default.")] = None,
    replicas: Annotated[int, typer.Option(help="Engines.")] = 2,
    rows: Annotated[int, typer.Option(help="Sequences each of them decodes together.")] = 16,
    prompt_scale: Annotated[float, typer.Option(help="Times the trace's prompts.")] = 1 / 8,
    output_scale: OutputScale = 1.0,
    slo: Annotated[str, typer.Option(help="The SLO of a request, in ms.")] = "ttft:1000,tpot:30",
    seed: Annotated[int, typer.Option(help="Of routing and of made arrivals.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare policies on simulated clusters: fixed thresholds, others, ours, and one that knows the future."""
    from mars_ray.simulate.compare.bench_policy import PolicyOptions
    from mars_ray.simulate.compare.bench_policy import bench_policy as run
    from mars_ray.storage.location import locate

    options = PolicyOptions(
        traces=tuple(map(locate, trace)),
        machine=machine,
        replicas=replicas,
        rows=rows,
        prompt_scale=prompt_scale,
        output_scale=output_scale,
        slo=(slo,),
        seed=seed,
    )
    write_json(json_file, run(options))


@bench_app.command("overhead")
def bench_overhead(
    url: Annotated[str, typer.Option(help="A running `mars-ray serve` that has nothing else to do.")] = URL,
    model: Annotated[str, typer.Option(help="The model it serves.")] = "bundled",
    clients: Annotated[int, typer.Option(help="Requests in flight.")] = 16,
    requests: Annotated[int, typer.Option(help="Requests per round.")] = 500,
    rounds: Annotated[int, typer.Option(help="Rounds; one more before them warms up.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the order of prompts.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure in turns what a running endpoint delivers and what its engine delivers without one."""
    from mars_ray.bench.load.overhead import bench_overhead as run

    write_json(json_file, run(url, model, clients, requests, rounds, seed))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--batch is {text!r}; give whole numbers separated by commas, such as 1,4,16.") from None
