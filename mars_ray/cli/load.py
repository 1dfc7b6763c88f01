"""The commands that put load on an endpoint (`bench serve`) or on a simulated cluster (`simulate` and `plan`)."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.shared import with_options, write_json
from mars_ray.errors import InterruptedRunError
from mars_ray.load.bench_serve import LoadOptions
from mars_ray.load.bench_serve import bench_serve as run_load
from mars_ray.simulate.options import PlanOptions, SimulateOptions

bench_app = typer.Typer(help="Measure an endpoint.", no_args_is_help=True)
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures and samples to this file as JSON.")]


@bench_app.command("serve")
@with_options(options=LoadOptions)
def bench_serve(options: LoadOptions, json_file: JsonFile = None) -> None:
    """Put load on a running OpenAI-compatible endpoint, and measure latency, throughput and goodput."""
    report = run_load(options, partial(write_json, json_file))
    if report["interrupted"]:
        raise InterruptedRunError("Stopped; the figures cover the requests sent so far.")


@with_options(options=SimulateOptions)
def simulate(options: SimulateOptions, json_file: JsonFile = None) -> None:
    """Simulate a cluster on a trace, using the engine's rules and the real controller."""
    from mars_ray.simulate.command import run_simulation

    write_json(json_file, run_simulation(options))


@with_options(options=PlanOptions)
def plan(options: PlanOptions, json_file: JsonFile = None) -> None:
    """Find out by simulation how many replicas a trace needs, and their price and quality, for each way of decoding."""
    from mars_ray.simulate.command import run_plan

    write_json(json_file, run_plan(options))
