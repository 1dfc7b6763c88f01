"""The command `mars-ray plan`, which says how many replicas a trace needs and what they cost."""

from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.shared import OutputScale, Slo, TraceSpeed, write_json

Machine = Annotated[
    str, typer.Option(help="GPU/NETWORK, such as 'h200/qwen2.5-7b', a machine file, or a file with measurements.")
]
Card = Annotated[Path | None, typer.Option(help="Model folder whose calibration replaces the paper's curve.")]
Control = Annotated[Path | None, typer.Option(help="YAML file with settings and classes, for the policy 'capacity'.")]
Price = Annotated[float | None, typer.Option(help="Dollars an hour of one replica. Default: from the table of GPUs.")]
Duration = Annotated[float, typer.Option(help="Seconds of the busiest part of the trace, which is planned for.")]
Plot = Annotated[Path | None, typer.Option(help="Write a plot to this file: .png, .svg or .pdf.")]
ReportFile = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file as JSON.")]


def plan(
    machine: Machine,
    trace: Annotated[str, typer.Option(help="Azure trace .csv.gz.")],
    slo: Slo = None,
    card: Card = None,
    control: Control = None,
    price: Price = None,
    duration: Duration = 60.0,
    speed: TraceSpeed = 1.0,
    prompt_scale: Annotated[float, typer.Option(help="Factor for the prompt lengths in the trace.")] = 1.0,
    output_scale: OutputScale = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of routing and classes.")] = 0,
    plot: Plot = None,
    json_file: ReportFile = None,
) -> None:
    """Find out by simulation how many replicas a trace needs, and their price and quality, for each way of decoding."""
    from mars_ray.simulate.plan_command import PlanOptions, run_plan

    options = PlanOptions(
        machine=machine,
        trace=trace,
        slo=tuple(slo or ()),
        card=card,
        control=control,
        price=price,
        duration=duration,
        speed=speed,
        prompt_scale=prompt_scale,
        output_scale=output_scale,
        seed=seed,
        plot=plot,
    )
    write_json(json_file, run_plan(options))
