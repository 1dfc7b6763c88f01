"""The command line: arguments -> config -> one call; nothing else.

Results go to standard output, progress and errors to standard error. An error a user can mend is one line, and the
exit code says which kind it was (see `errors` and `program`).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from mars_ray.cli.control import status, threshold_app
from mars_ray.cli.evaluate import evaluate
from mars_ray.cli.generate import generate
from mars_ray.cli.keys import keys_app
from mars_ray.errors import ConfigError, InterruptedRunError, OutputError
from mars_ray.program import run_program

app = typer.Typer(
    help="Fine-tune instruction models to decode several tokens at a time, and use them, on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(help="Measure this machine; nothing is claimed that was not measured.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(keys_app, name="keys")
app.add_typer(threshold_app, name="threshold")
app.command()(status)
app.command()(generate)
app.command()(evaluate)

Json = Annotated[bool, typer.Option("--json", help="End with one machine-readable line.")]
Dtype = Annotated[str, typer.Option(help="'float32' or 'bfloat16'.")]
Model = Annotated[str, typer.Option(help="'bundled' or a model folder.")]


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML of the run; see pipelines/.")], as_json: Json = False
) -> None:
    """Fine-tune a model on Ray Train; the same command goes on with a run that was stopped."""
    from mars_ray.training.config import read_config
    from mars_ray.training.ray_trainer import train as run
    from mars_ray.training.run_folder import RunFolder

    settings = read_config(config)
    last = asdict(run(settings))
    show("trained", last | {"model": str(RunFolder(settings.output).model)}, as_json)


@app.command()
def prepare(
    input_file: Annotated[Path, typer.Option("--input", help="JSONL (plain, gz, zst) or parquet of conversations.")],
    output: Annotated[Path, typer.Option(help="Folder for the packed rows.")],
    model: Model = "bundled",
    length: Annotated[int, typer.Option(min=8, help="Tokens per packed row.")] = 512,
    overlong: Annotated[Literal["drop", "truncate"], typer.Option()] = "drop",
    bad_records: Annotated[Literal["error", "drop"], typer.Option()] = "error",
    as_json: Json = False,
) -> None:
    """Tokenise and pack training data, and report what became of it; `train` does this by itself."""
    from mars_ray.data.ray_prepare import PrepareOptions
    from mars_ray.data.ray_prepare import prepare as run
    from mars_ray.model.resolve import resolve_model
    from mars_ray.progress import ProgressLine
    from mars_ray.ray_cluster import connect

    options = PrepareOptions(length=length, overlong=overlong, bad_records=bad_records)
    folder = resolve_model(model).absolute()
    connect()
    with ProgressLine(f"tokenise {input_file.name}", total=None) as progress:
        report = run(input_file, output, folder, options, progress)
    show("prepared", asdict(report), as_json)


@app.command()
def calibrate(
    model: Model = "bundled",
    data: Annotated[
        Path | None,
        typer.Option(help="JSONL or parquet with 'prompt' or 'messages'; by default the built-in task families."),
    ] = None,
    examples: Annotated[
        int | None, typer.Option(help="Per seed: of each family, 100 by default; of --data, by default all.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Samples the spread is over; --data is split into so many parts.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer at most.")] = 256,
    as_json: Json = False,
) -> None:
    """Measure speed, agreement and accuracy at each threshold, and write them into the model's mars.json."""
    from mars_ray.evaluation.calibration.calibrate import CalibrateOptions
    from mars_ray.evaluation.calibration.calibrate import calibrate as run
    from mars_ray.evaluation.calibration.curve_text import print_curve
    from mars_ray.model.resolve import resolve_model

    options = CalibrateOptions(data=data, examples=examples, seeds=seeds, max_tokens=max_tokens)
    folder = resolve_model(model)
    curve = run(folder, options)
    print_curve(curve, f"calibrated {folder}")
    if as_json:
        print(json.dumps({"model": str(folder), "calibration": [point.model_dump() for point in curve]}))


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="Ray Serve config file; see serve_configs/.")] = None,
    model: Annotated[str | None, typer.Option(help="'bundled' or a model folder.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; without API keys this machine's own.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535)] = None,
) -> None:
    """Serve a model to OpenAI clients on Ray Serve."""
    from tempfile import TemporaryDirectory

    from mars_ray.serve.deploy.deploy_file import read_deploy_file
    from mars_ray.serve.deploy.environment import set_environment

    fields = read_deploy_file(config, model=model, host=host, port=port)
    with TemporaryDirectory(prefix="mars-ray-") as folder:
        set_environment(Path(folder))
        from mars_ray.serve.ray.schema import schema_of  # Ray reads its environment when it is imported
        from mars_ray.serve.ray.serve import run

        run(schema_of(fields, str(config or "the command line")))


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the rows; made anew.")] = Path("out/demo"),
    as_json: Json = False,
) -> None:
    """Generate rows with the bundled model one token at a time, exactly but sooner, and at threshold 0.95; compare."""
    from mars_ray.cli.ray_demo import demo as run
    from mars_ray.cli.ray_demo import demo_json, show_demo

    done = run(output)
    show_demo(done, output)
    if as_json:
        print(demo_json(done))


@app.command()
def simulate(
    trace: Annotated[str, typer.Option(help="An Azure trace .csv.gz.")],
    replicas: Annotated[int, typer.Option(help="Engines, at the start.")],
    policy: Annotated[
        str | None, typer.Option(help="'fixed', 'load', 'slo' or 'capacity', which is the default.")
    ] = None,
    control: Annotated[Path | None, typer.Option(help="YAML with settings, ceiling and classes.")] = None,
    machine: Annotated[Path | None, typer.Option(help="What one engine can do; by default as measured here.")] = None,
    autoscale: Annotated[bool, typer.Option("--autoscale", help="Let replicas follow demand.")] = False,
    min_replicas: Annotated[int, typer.Option(help="With --autoscale.")] = 1,
    max_replicas: Annotated[int | None, typer.Option(help="With --autoscale; 4 x --replicas by default.")] = None,
    copies: Annotated[int, typer.Option(help="How often each request comes, within a minute.")] = 1,
    speed: Annotated[float, typer.Option(help="Times as fast as the trace was recorded.")] = 1.0,
    prompt_scale: Annotated[float, typer.Option(help="Times the trace's prompts.")] = 1.0,
    output_scale: Annotated[float, typer.Option(help="Times the trace's answers.")] = 1.0,
    duration: Annotated[float | None, typer.Option(help="Seconds in which requests come.")] = None,
    mix: Annotated[str | None, typer.Option(help="Requests by class: 'gold:1,batch:3'; equal by default.")] = None,
    slo: Annotated[
        list[str] | None, typer.Option(help="What a good request keeps, in ms: 'ttft:200,tpot:20,e2e:2000'.")
    ] = None,
    front_ms: Annotated[float, typer.Option(help="What lies before the engine, and once more behind it.")] = 0.0,
    ticks: Annotated[int | None, typer.Option(help="Per second; more are slower and more exact.")] = None,
    seed: Annotated[int, typer.Option(help="Of routing, classes and copies.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw it here: .png, .svg or .pdf.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures and every second here.")] = None,
) -> None:
    """Run a trace through a simulated cluster that has the engine's rules and the real controller."""
    from mars_ray.simulate.command import SimulateOptions, run_simulation

    options = SimulateOptions(
        trace=trace,
        replicas=replicas,
        policy=policy,
        control=control,
        machine=machine,
        autoscale=autoscale,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        copies=copies,
        speed=speed,
        prompt_scale=prompt_scale,
        output_scale=output_scale,
        duration=duration,
        mix=mix,
        slo=tuple(slo or ()),
        front_ms=front_ms,
        ticks=ticks,
        seed=seed,
    )
    _write_json(json_file, run_simulation(options, plot))


@bench.command("decode")
def bench_decode(
    model: Annotated[
        str, typer.Option(help="'bundled', a folder, or a shape with random weights: 'shape:100m'.")
    ] = "bundled",
    batch: Annotated[str, typer.Option(help="Requests decoded together, separated by commas.")] = "1,4,16,32",
    dtype: Dtype = "float32",
    requests: Annotated[int, typer.Option(help="Requests per measurement.")] = 48,
    repeats: Annotated[int, typer.Option(help="Measurements of everyone.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every sample here.")] = None,
) -> None:
    """Compare the engine with transformers and the decoders of the paper, in turns, on the same requests."""
    from mars_ray.bench.decode.bench_decode import bench_decode as run
    from mars_ray.bench.decode.bench_decode import report

    results = run(model, _numbers(batch), requests, repeats, dtype)
    command = f"mars-ray bench decode --model {model} --batch {batch} --dtype {dtype}"
    command += f" --requests {requests} --repeats {repeats}"
    _write_json(json_file, report(model, dtype, results, command))


@bench.command("floor")
def bench_floor(
    model: Annotated[str, typer.Option(help="'bundled', a folder, or a shape with random weights.")] = "bundled",
    batch: Annotated[str, typer.Option(help="Rows of a step, separated by commas.")] = "1,4,16,32",
    dtype: Dtype = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare a step of the engine with the bytes it must move and the operations it must do."""
    from mars_ray.bench.decode.floor_report import bench_floor as run

    _write_json(json_file, run(model, _numbers(batch), dtype))


@bench.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="An OpenAI-compatible endpoint that runs.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="By default the first that the endpoint lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="'poisson:RATE' per second or an Azure trace .csv.gz; without one, clients take turns."),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Requests under way at most; 1 by default, with --trace without bound.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests sent; by default the trace, or 100 where no --duration is given.")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds in which requests are sent.")] = None,
    stream: Annotated[bool, typer.Option(help="Ask for chunks; without them there is no TTFT.")] = True,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL or parquet with 'prompt' or 'messages'; bundled ones by default.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens per answer at most; 128 by default, in a trace file what it says.")
    ] = None,
    extra_body: Annotated[str, typer.Option(help="""Further fields of each request: '{"threshold": 0.9}'.""")] = "{}",
    speed: Annotated[float, typer.Option(help="Times as fast as the trace was recorded.")] = 1.0,
    prompt_scale: Annotated[
        float, typer.Option(help="Times the trace's prompts; a word counts as a token, usage says the truth.")
    ] = 1.0,
    output_scale: Annotated[float, typer.Option(help="Times the trace's answers.")] = 1.0,
    slo: Annotated[
        list[str] | None, typer.Option(help="What a good request keeps, in ms: 'ttft:200,tpot:20,e2e:2000'.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and of the order of prompts.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 300.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every sample here.")] = None,
) -> None:
    """Put load on a running OpenAI-compatible endpoint, and measure latency, throughput and goodput."""
    from mars_ray.bench.load.bench_serve import bench_serve as run
    from mars_ray.bench.load.options import ServeOptions

    report = run(
        ServeOptions(
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
    )
    _write_json(json_file, report)
    if report["interrupted"]:
        raise InterruptedRunError("Stopped; the figures are those of the requests sent by then.")


@bench.command("policy")
def bench_policy(
    trace: Annotated[list[Path], typer.Option(help="An Azure trace .csv.gz; give it once for each.")],
    machine: Annotated[Path | None, typer.Option(help="What a replica can do; the bundled figures by default.")] = None,
    replicas: Annotated[int, typer.Option(help="Engines.")] = 2,
    rows: Annotated[int, typer.Option(help="Sequences each of them decodes together.")] = 16,
    prompt_scale: Annotated[float, typer.Option(help="Times the trace's prompts.")] = 1 / 8,
    output_scale: Annotated[float, typer.Option(help="Times the trace's answers.")] = 1.0,
    slo: Annotated[str, typer.Option(help="What callers are promised, in ms.")] = "ttft:1000,tpot:30",
    seed: Annotated[int, typer.Option(help="Of routing and of made arrivals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure here.")] = None,
) -> None:
    """Compare policies on simulated clusters: fixed thresholds, others' laws, ours, and one that knows the future."""
    from mars_ray.simulate.compare.bench_policy import PolicyOptions
    from mars_ray.simulate.compare.bench_policy import bench_policy as run

    options = PolicyOptions(
        traces=tuple(trace),
        machine=machine,
        replicas=replicas,
        rows=rows,
        prompt_scale=prompt_scale,
        output_scale=output_scale,
        slo=(slo,),
        seed=seed,
    )
    _write_json(json_file, run(options))


@bench.command("overhead")
def bench_overhead(
    url: Annotated[str, typer.Option(help="A running `mars-ray serve` that has nothing else to do.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str, typer.Option(help="The model it serves: 'bundled' or a folder.")] = "bundled",
    clients: Annotated[int, typer.Option(help="Requests in flight.")] = 16,
    requests: Annotated[int, typer.Option(help="Requests per round.")] = 500,
    rounds: Annotated[int, typer.Option(help="Rounds; one more before them warms up.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the order of prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every sample here.")] = None,
) -> None:
    """Measure in turns what a running endpoint delivers and what its engine delivers without one."""
    from mars_ray.bench.load.overhead import bench_overhead as run

    _write_json(json_file, run(url, model, clients, requests, rounds, seed))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--batch is {text!r}; give whole numbers separated by commas, such as 1,4,16.") from None


def _write_json(path: Path | None, figures: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line for each figure, and all samples on one: whoever reads a diff reads the figures.
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in figures.items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error


def show(title: str, figures: dict[str, Any], as_json: bool) -> None:
    """Print figures as a table and, when asked, as one JSON line."""
    table = Table(title=title, show_header=False)
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if as_json:
        print(json.dumps(figures))


def main() -> None:
    """Run the command line; a user's error is one line and an exit code."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    run_program("mars-ray", app)
