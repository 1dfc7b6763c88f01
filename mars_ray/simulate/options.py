"""Options of the commands `mars-ray simulate` and `mars-ray plan`, which the command line reads from their fields."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mars_ray.engine.checked_fields import check_fields
from mars_ray.errors import ConfigError
from mars_ray.load.arrivals import OutputScale, TraceSpeed
from mars_ray.load.record import Slo

REPLICAS_MAX = 10_000
NUMBER_MAX = 1e9
MAX_PRICE = 1e6
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The trace to replay, and the settings of its replay."""

    trace: Annotated[str, typer.Option(help="Azure trace .csv.gz.")]
    control: Annotated[
        Path | None, typer.Option(help="YAML file with settings, ceiling and classes; a plan's policy is 'capacity'.")
    ] = None
    slo: Slo = ()
    speed: TraceSpeed = 1.0
    prompt_scale: Annotated[float, typer.Option(help="Factor for the prompt lengths in the trace.")] = 1.0
    output_scale: OutputScale = 1.0
    seed: Annotated[int, typer.Option(help="Seed of routing, classes and copies.")] = 0
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this file: .png, .svg or .pdf.")] = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("speed", "prompt_scale", "output_scale"):
            if not 1 / NUMBER_MAX <= (value := getattr(self, name)) <= NUMBER_MAX:
                raise ConfigError(f"{name} is {value}; it must be in {1 / NUMBER_MAX:g}..{NUMBER_MAX:g}.")
        if self.plot is not None and self.plot.suffix not in PLOT_SUFFIXES:
            raise ConfigError(f"plot is {self.plot}; give a file that ends in {', '.join(PLOT_SUFFIXES)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(TraceOptions):
    """Options of `mars-ray simulate`."""

    replicas: Annotated[int, typer.Option(help="Number of engines at the start.")]
    policy: Annotated[str | None, typer.Option(help="'fixed' or 'capacity' (default).")] = None
    """Name of the policy; None means the one in the control file, or else the default."""
    machine: Annotated[
        str | None,
        typer.Option(
            help="GPU/NETWORK, such as 'h200/qwen2.5-7b', a machine file, or a JSON file with measurements of one "
            "engine. Default: the bundled model."
        ),
    ] = None
    autoscale: Annotated[bool, typer.Option("--autoscale", help="Scale replicas with demand.")] = False
    min_replicas: Annotated[int | None, typer.Option(help="Lower limit with --autoscale. Default: 1.")] = None
    max_replicas: Annotated[int | None, typer.Option(help="Upper limit with --autoscale. Default: 4 x --replicas.")] = (
        None
    )
    copies: Annotated[int, typer.Option(help="Copies of each request, spread over a minute.")] = 1
    duration: Annotated[float | None, typer.Option(help="Number of seconds during which requests arrive.")] = None
    mix: Annotated[
        str | None, typer.Option(help="Shares of requests by class: 'gold:1,batch:3'. Default: equal shares.")
    ] = None
    front_ms: Annotated[
        float, typer.Option(help="Latency in ms that is added before the engine, and again after it.")
    ] = 0.0
    ticks: Annotated[int | None, typer.Option(help="Ticks per second; more are slower and more exact.")] = None

    def __post_init__(self) -> None:
        TraceOptions.__post_init__(self)
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise ConfigError(f"replicas is {self.replicas}; it must be in 1..{REPLICAS_MAX}.")
        if self.max_replicas is not None and self.max_replicas > REPLICAS_MAX:
            raise ConfigError(f"max_replicas is {self.max_replicas}; it must be at most {REPLICAS_MAX}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(TraceOptions):
    """Options of `mars-ray plan`."""

    machine: Annotated[
        str,
        typer.Option(help="GPU/NETWORK, such as 'h200/qwen2.5-7b', a machine file, or a file with measurements."),
    ]
    card: Annotated[Path | None, typer.Option(help="Model folder whose calibration replaces the paper's curve.")] = None
    price: Annotated[
        float | None, typer.Option(help="Dollars an hour of one replica. Default: from the table of GPUs.")
    ] = None
    duration: Annotated[float, typer.Option(help="Seconds of the busiest part of the trace, which is planned for.")] = (
        60.0
    )

    def __post_init__(self) -> None:
        TraceOptions.__post_init__(self)
        if self.price is not None and not 0 < self.price <= MAX_PRICE:
            raise ConfigError(f"price is {self.price}; it must be above 0 and at most {MAX_PRICE:g} dollars an hour.")
        if not 1 <= self.duration <= 86_400:
            raise ConfigError(f"duration is {self.duration}; it must be in 1..86400 seconds.")
