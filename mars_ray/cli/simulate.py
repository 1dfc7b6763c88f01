"""The command `mars-ray simulate`, which simulates a cluster on a trace."""

from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.shared import OutputScale, Slo, TraceSpeed, write_json

Policy = Annotated[str | None, typer.Option(help="'fixed' or 'capacity' (default).")]
Control = Annotated[Path | None, typer.Option(help="YAML file with settings, ceiling and classes.")]
Machine = Annotated[
    str | None,
    typer.Option(
        help="GPU/NETWORK, such as 'h200/qwen2.5-7b', a machine file, or a JSON file with measurements of one engine. "
        "Default: the bundled model."
    ),
]
Autoscale = Annotated[bool, typer.Option("--autoscale", help="Scale replicas with demand.")]
MaxReplicas = Annotated[int | None, typer.Option(help="Upper limit with --autoscale. Default: 4 x --replicas.")]
Mix = Annotated[str | None, typer.Option(help="Shares of requests by class: 'gold:1,batch:3'. Default: equal shares.")]
FrontMs = Annotated[float, typer.Option(help="Latency in ms that is added before the engine, and again after it.")]
Plot = Annotated[Path | None, typer.Option(help="Write a plot to this file: .png, .svg or .pdf.")]
SecondsFile = Annotated[Path | None, typer.Option("--json", help="Write all metrics to this file as JSON.")]


def simulate(
    trace: Annotated[str, typer.Option(help="Azure trace .csv.gz.")],
    replicas: Annotated[int, typer.Option(help="Number of engines at the start.")],
    policy: Policy = None,
    control: Control = None,
    machine: Machine = None,
    autoscale: Autoscale = False,
    min_replicas: Annotated[int, typer.Option(help="Lower limit with --autoscale.")] = 1,
    max_replicas: MaxReplicas = None,
    copies: Annotated[int, typer.Option(help="Copies of each request, spread over a minute.")] = 1,
    speed: TraceSpeed = 1.0,
    prompt_scale: Annotated[float, typer.Option(help="Factor for the prompt lengths in the trace.")] = 1.0,
    output_scale: OutputScale = 1.0,
    duration: Annotated[float | None, typer.Option(help="Number of seconds during which requests arrive.")] = None,
    mix: Mix = None,
    slo: Slo = None,
    front_ms: FrontMs = 0.0,
    ticks: Annotated[int | None, typer.Option(help="Ticks per second; more are slower and more exact.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of routing, classes and copies.")] = 0,
    plot: Plot = None,
    json_file: SecondsFile = None,
) -> None:
    """Simulate a cluster on a trace, using the engine's rules and the real controller."""
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
    write_json(json_file, run_simulation(options, plot))
