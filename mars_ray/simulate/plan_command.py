"""The command `mars-ray plan`: replicas, price and quality for each way of decoding a trace on a machine."""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mars_ray.errors import ConfigError, EmptyDataError
from mars_ray.load.slo import parse_slo
from mars_ray.progress import ProgressLine
from mars_ray.simulate.command import SimulateOptions
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.modelled_machine import open_machine
from mars_ray.simulate.plan import ATTAINED, PlannedLoad, PlanRow, busiest_part, decoding_choices, plan_row
from mars_ray.simulate.plot import check_plot, plot_plan
from mars_ray.usable_cpus import usable_cpus

MAX_PRICE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `mars-ray plan`."""

    machine: str
    trace: str
    slo: tuple[str, ...]
    card: Path | None = None
    """Model folder whose calibration replaces the paper's curve."""
    control: Path | None = None
    """YAML file with the `ControlPlan` that the policy `capacity` follows."""
    price: float | None = None
    """Price of one replica in dollars an hour; None means the price in the table of GPUs."""
    duration: float = 60.0
    """Length in seconds of the busiest part of the trace, which is the part that is planned for."""
    speed: float = 1.0
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    seed: int = 0
    plot: Path | None = None
    """File for a picture of the plan."""

    def __post_init__(self) -> None:
        if self.price is not None and not 0 < self.price <= MAX_PRICE:
            raise ConfigError(f"price is {self.price}; it must be above 0 and at most {MAX_PRICE:g} dollars an hour.")
        if self.plot is not None:
            check_plot(self.plot)
        if not 1 <= self.duration <= 86_400:
            raise ConfigError(f"duration is {self.duration}; it must be in 1..86400 seconds.")


def run_plan(options: PlanOptions) -> dict[str, Any]:
    """Make the plan, print its table, and return the report. Raises an `InputError` for unusable options or files."""
    started_s = time.perf_counter()
    slo = parse_slo(options.slo)
    if slo is None:
        raise ConfigError("slo is missing; give the latency to meet, such as ttft:1000,tpot:30.")
    machine = open_machine(options.machine, options.card)
    source = SimulateOptions(
        trace=options.trace,
        replicas=1,
        control=options.control,
        speed=options.speed,
        prompt_scale=options.prompt_scale,
        output_scale=options.output_scale,
    )
    arrivals = [row for row in source.arrivals() if row.prompt_tokens + row.output_tokens <= machine.max_model_len]
    if not arrivals:
        raise EmptyDataError(f"{options.trace} has no request that fits {machine.max_model_len} tokens.")
    load = PlannedLoad(
        arrivals=busiest_part(arrivals, options.duration),
        seconds=min(options.duration, max(arrivals[-1].arrival_s, 1.0)),
        slo=slo,
        dollars_per_hour=_price(options, machine),
        seed=options.seed,
    )
    choices = decoding_choices(machine, source.plan(slo, machine))
    rows: list[PlanRow] = []
    with (
        ProcessPoolExecutor(min(usable_cpus(), len(choices)), mp_context=get_context("spawn")) as pool,
        ProgressLine("ways of decoding", total=len(choices)) as progress,
    ):
        for row in pool.map(partial(plan_row, load), choices):
            rows.append(row)
            progress.update(len(rows), {})
    took_s = time.perf_counter() - started_s
    _show(options, machine, load, rows)
    if options.plot is not None:
        slo_text = f"{ATTAINED:.0%} of the requests within {', '.join(options.slo)} ms"
        plot_plan(options.plot, f"{_origin(options, machine)}; {slo_text}", rows)
    return {
        "options": {name: value for name, value in asdict(options).items() if not isinstance(value, Path)},
        "machine": machine.measured_on,
        "seconds": load.seconds,
        "requests_per_s": len(load.arrivals) / load.seconds,
        "output_tokens_per_s": load.output_tokens / load.seconds,
        "dollars_per_hour": load.dollars_per_hour,
        "rows": [asdict(row) for row in rows],
        "took_s": took_s,
    }


def _price(options: PlanOptions, machine: Machine) -> float:
    price = options.price or machine.measured_on.get("dollars_per_hour")
    if price is None:
        raise ConfigError(
            f"price is missing; machine {options.machine!r} names none, so give --price, dollars an hour."
        )
    return float(price)


def _origin(options: PlanOptions, machine: Machine) -> str:
    modelled = machine.measured_on.get("modelled_step_time")
    return f"{options.machine}: " + (f"modelled step time of {modelled}" if modelled else "measured step time")


def _show(options: PlanOptions, machine: Machine, load: PlannedLoad, rows: list[PlanRow]) -> None:
    console = Console()
    requests_per_s = len(load.arrivals) / load.seconds
    tokens_per_s = load.output_tokens / load.seconds
    rates = f"{requests_per_s:.2f} requests/s, {tokens_per_s:,.0f} answer tokens/s"
    lines = (
        f"{_origin(options, machine)}, ${load.dollars_per_hour:g} an hour",
        f"tokens per forward and accuracy: {machine.measured_on.get('curve', 'measured')}",
        f"the busiest {load.seconds:g} s of {Path(options.trace).name}: {rates}",
        f"{ATTAINED:.0%} of the requests within {', '.join(options.slo)} in ms, as TTFT and TPOT below",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = Table(pad_edge=False)
    table.add_column("decoding", no_wrap=True)
    headings = (
        "repli-\ncas",
        "$ per\n1M tok.",
        "accu-\nracy",
        "agree-\nment",
        "TTFT\np99",
        "TPOT\np99",
        "up to\nreq./s",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.decoding, *_cells(row))
    console.print(table)


def _cells(row: PlanRow) -> list[str]:
    """Return the cells that follow the name in a row."""
    if row.replicas is None:
        return ["misses", *[""] * 6]
    shares = [f"{share:.1%}" if share is not None else "" for share in (row.accuracy, row.agreement)]
    latencies = [f"{figure:,.0f}" if figure is not None else "" for figure in (row.ttft_p99_ms, row.tpot_p99_ms)]
    price = f"{row.dollars_per_million_tokens:.3f}"
    return [f"{row.replicas:,}", price, *shares, *latencies, f"{row.requests_per_s:,.1f}"]
