"""The command `mars-ray simulate`: a trace on a cluster that is not there."""

from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.options import OutputScale, Slo, TraceSpeed
from mars_ray.cli.results import write_json

Policy = Annotated[str | None, typer.Option(help="'fixed', 'load', 'slo' or 'capacity', which is the default.")]
Control = Annotated[Path | None, typer.Option(help="YAML with settings, ceiling and classes.")]
Machine = Annotated[Path | None, typer.Option(help="What one engine can do; by default as measured here.")]
Autoscale = Annotated[bool, typer.Option("--autoscale", help="Let replicas follow demand.")]
MaxReplicas = Annotated[int | None, typer.Option(help="With --autoscale; 4 x --replicas by default.")]
Mix = Annotated[str | None, typer.Option(help="Requests by class: 'gold:1,batch:3'; equal by default.")]
FrontMs = Annotated[float, typer.Option(help="What lies before the engine, and once more behind it.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it here: .png, .svg or .pdf.")]
SecondsFile = Annotated[Path | None, typer.Option("--json", help="Write metrics and every second here.")]


def simulate(
    trace: Annotated[str, typer.Option(help="An Azure trace .csv.gz.")],
    replicas: Annotated[int, typer.Option(help="Engines, at the start.")],
    policy: Policy = None,
    control: Control = None,
    machine: Machine = None,
    autoscale: Autoscale = False,
    min_replicas: Annotated[int, typer.Option(help="With --autoscale.")] = 1,
    max_replicas: MaxReplicas = None,
    copies: Annotated[int, typer.Option(help="How often each request comes, within a minute.")] = 1,
    speed: TraceSpeed = 1.0,
    prompt_scale: Annotated[float, typer.Option(help="Times the trace's prompts.")] = 1.0,
    output_scale: OutputScale = 1.0,
    duration: Annotated[float | None, typer.Option(help="Seconds in which requests come.")] = None,
    mix: Mix = None,
    slo: Slo = None,
    front_ms: FrontMs = 0.0,
    ticks: Annotated[int | None, typer.Option(help="Per second; more are slower and more exact.")] = None,
    seed: Annotated[int, typer.Option(help="Of routing, classes and copies.")] = 0,
    plot: Plot = None,
    json_file: SecondsFile = None,
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
    write_json(json_file, run_simulation(options, plot))
