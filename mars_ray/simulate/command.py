"""The commands `mars-ray simulate` and `mars-ray plan`.

`simulate` runs a trace on a simulated cluster, then prints, plots and reports the result. `plan` gives replicas, price
and quality for each way of decoding a trace on a machine.
"""

import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from mars_ray.control.control_settings import ControlPlan, check_policy
from mars_ray.errors import ConfigError, EmptyDataError, first_line, problems_of
from mars_ray.load.arrivals import Poisson, Scales, parse_trace, read_trace
from mars_ray.load.record import RequestSlo, parse_slo
from mars_ray.load.summary import shown_ms
from mars_ray.progress import ProgressLine
from mars_ray.simulate.arrivals import Arrival, Arrivals
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.metrics import SecondMetrics, SimulationMetrics, columns
from mars_ray.simulate.modelled_machine import open_machine
from mars_ray.simulate.options import PlanOptions, SimulateOptions, TraceOptions
from mars_ray.simulate.plan import ATTAINED, PlannedLoad, PlanRow, busiest_part, decoding_choices, plan_row
from mars_ray.simulate.plot import plot, plot_plan
from mars_ray.simulate.replicas import Scaling
from mars_ray.simulate.simulator import Simulation, SimulationOptions, simulate
from mars_ray.storage.location import AnyPath
from mars_ray.usable_cpus import usable_cpus


def run_simulation(options: SimulateOptions) -> dict[str, Any]:
    """Run the simulation, print and plot its result, and return the report."""
    slo = parse_slo(options.slo)
    machine = open_machine(options.machine)
    plan = control_plan(options, machine, slo, options.policy)
    shares = shares_of(options.mix, plan)
    scaling = None
    bounds = {"min_replicas": options.min_replicas, "max_replicas": options.max_replicas}
    if not options.autoscale and (idle := next((name for name, value in bounds.items() if value is not None), None)):
        raise ConfigError(
            f"{idle} is {bounds[idle]}, but without autoscale the number of replicas stays. Add autoscale, or leave "
            f"{idle} out."
        )
    if options.autoscale:
        least = 1 if options.min_replicas is None else options.min_replicas
        most = 4 * options.replicas if options.max_replicas is None else options.max_replicas
        scaling = Scaling(min_replicas=least, max_replicas=most)
    settings = SimulationOptions(
        replicas=options.replicas,
        ticks_per_s=options.ticks,
        scaling=scaling,
        front_s=options.front_ms / 1000,
        slo=slo,
        duration_s=options.duration,
        seed=options.seed,
    )
    arrivals = Arrivals(arrivals_of(options), mix=shares, copies=options.copies, seed=options.seed)
    seconds = min(arrivals.last_s, options.duration or math.inf)
    started_s = time.perf_counter()
    with ProgressLine("seconds", total=math.ceil(seconds)) as progress:

        def show_second(second: SecondMetrics) -> None:
            progress.update(second.second, {"in flight": second.running + second.waiting})

        result = simulate(arrivals, machine, plan, settings, show_second)
    simulated_s = time.perf_counter() - started_s
    title = f"{Path(options.trace).name}, {options.replicas:,} replicas, policy {plan.settings.policy}"
    if modelled := machine.measured_on.get("modelled_step_time"):
        title += f", modelled step time of {modelled}"
    _show_simulation(title, result, simulated_s)
    if options.plot is not None:
        plot(options.plot, title, result.seconds, None if slo is None else slo.e2e_ms)
    return _simulation_report(options, plan, machine, result, simulated_s)


def control_plan(
    options: TraceOptions, machine: Machine, slo: RequestSlo | None, policy: str | None = None
) -> ControlPlan:
    """Return the controller's plan, which includes the calibration of the machine. Raises `ConfigError`."""
    control = _yaml(options.control)
    settings = control.get("settings") or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{options.control}: settings must be a mapping.")
    if policy is not None:
        try:
            check_policy(policy)
        except ValueError as error:
            raise ConfigError(f"{error}.") from None
        settings = settings | {"policy": policy}
    if settings.get("policy") == "deadline":
        raise ConfigError("policy is 'deadline', which is for jobs; use 'capacity' or 'fixed'.")
    if slo is not None and "slo" not in settings:
        settings = settings | {"slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}}
    try:
        calibration = {"accuracy": machine.accuracy, "agreement": machine.agreement}
        return ControlPlan.model_validate(calibration | control | {"settings": settings})
    except ValidationError as error:
        raise ConfigError(f"{options.control}: {problems_of(error)}.") from None


def arrivals_of(options: TraceOptions) -> list[Arrival]:
    """Read and scale the trace. It keeps prompts longer than the model's context, which the cluster refuses."""
    trace = parse_trace(options.trace)
    if isinstance(trace, Poisson):
        raise ConfigError(f"trace is {options.trace!r}; give a file that ends in .csv.gz.")
    scales = Scales(speed=options.speed, prompt=options.prompt_scale, output=options.output_scale)
    rows = [row.scaled(scales) for row in read_trace(trace)]
    return [Arrival(row.arrival_s, row.context_tokens, row.generated_tokens) for row in rows]


def shares_of(mix: str | None, plan: ControlPlan) -> list[float]:
    """Return the share of requests of each class of the plan. Raises `ConfigError`."""
    names = [service_class.name for service_class in plan.classes]
    if mix is None:
        return [1.0] * len(names)
    shares = dict.fromkeys(names, 0.0)
    for part in mix.split(","):
        name, _, text = part.strip().partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if name not in shares or not 0 <= value < math.inf:
            raise ConfigError(f"mix {part!r} is not valid; give CLASS:SHARE, with one of {', '.join(names)}.")
        shares[name] = value
    if not sum(shares.values()):
        raise ConfigError(f"mix is {mix!r}; give at least one class a share above 0.")
    return list(shares.values())


def _yaml(path: AnyPath | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        control = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {first_line(error)}.") from None
    if not isinstance(control, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, ceiling, classes.")
    return control


def _simulation_report(
    options: SimulateOptions, plan: ControlPlan, machine: Machine, result: Simulation, simulated_s: float
) -> dict[str, Any]:
    return {
        "options": {name: value for name, value in asdict(options).items() if not isinstance(value, Path)},
        "plan": plan.model_dump(),
        "machine": machine.model_dump(exclude={"profile"}),
        "took_s": simulated_s,
        "reporting_replicas": result.reporting,
        "metrics": asdict(result.metrics),
        "seconds": columns(result.seconds),
    }


def _show_simulation(title: str, result: Simulation, simulated_s: float) -> None:
    console = Console()
    table = Table(show_header=False)
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    for name, value in _simulation_rows(result.metrics).items():
        table.add_row(name, value)
    table.add_row("simulated in", f"{simulated_s:.1f} s")
    console.print(table)
    latencies = Table(title="Latency of completed requests, in milliseconds")
    for column in ("", "mean", "median", "p90", "p95", "p99"):
        latencies.add_column(column, justify="right" if column else "left")
    for label, spread in (
        ("TTFT", result.metrics.ttft_ms),
        ("TPOT", result.metrics.tpot_ms),
        ("E2E", result.metrics.e2e_ms),
    ):
        if spread is not None:
            latencies.add_row(label, *map(shown_ms, (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)))
    console.print(latencies)


def _simulation_rows(metrics: SimulationMetrics) -> dict[str, str]:
    rows = {"requests": f"{metrics.requests:,}"}
    for name in ("refused", "too_long", "in_flight"):
        if count := getattr(metrics, name):
            rows[name.replace("_", " ")] = f"{count:,}"
    rows["duration"] = f"{metrics.duration_s:,.1f} s"
    rows["output tokens/s"] = f"{metrics.tokens_per_s:,.1f}"
    shares = {"met the SLO": metrics.good, "agreement": metrics.agreement, "accuracy": metrics.accuracy}
    rows |= {name: f"{share:.2%}" for name, share in shares.items() if share is not None}
    if metrics.threshold is not None:
        rows["threshold, mean over tokens"] = f"{metrics.threshold:.4f}"
    rows["threshold changes"] = f"{metrics.threshold_changes_per_minute:.2f} a minute"
    rows["replica-minutes"] = f"{metrics.replica_minutes:,.1f}"
    return rows


def run_plan(options: PlanOptions) -> dict[str, Any]:
    """Make the plan, print its table, and return the report. Raises an `InputError` for unusable options or files."""
    started_s = time.perf_counter()
    slo = parse_slo(options.slo)
    if slo is None:
        raise ConfigError("slo is missing; give the latency to meet, such as ttft:1000,tpot:30.")
    machine = open_machine(options.machine, options.card)
    arrivals = [row for row in arrivals_of(options) if row.prompt_tokens + row.output_tokens <= machine.max_model_len]
    if not arrivals:
        raise EmptyDataError(f"{options.trace} has no request that fits {machine.max_model_len} tokens.")
    load = PlannedLoad(
        arrivals=busiest_part(arrivals, options.duration),
        seconds=min(options.duration, max(arrivals[-1].arrival_s - arrivals[0].arrival_s, 1.0)),
        slo=slo,
        dollars_per_hour=_price(options, machine),
        seed=options.seed,
    )
    choices = decoding_choices(machine, control_plan(options, machine, slo))
    rows: list[PlanRow] = []
    with (
        ProcessPoolExecutor(min(usable_cpus(), len(choices)), mp_context=get_context("spawn")) as pool,
        ProgressLine("ways of decoding", total=len(choices)) as progress,
    ):
        for row in pool.map(partial(plan_row, load), choices):
            rows.append(row)
            progress.update(len(rows), {})
    took_s = time.perf_counter() - started_s
    _show_plan(options, machine, load, rows)
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


def _show_plan(options: PlanOptions, machine: Machine, load: PlannedLoad, rows: list[PlanRow]) -> None:
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
        table.add_row(row.decoding, *_plan_cells(row))
    console.print(table)


def _plan_cells(row: PlanRow) -> list[str]:
    """Return the cells that follow the name in a row."""
    if row.replicas is None:
        return ["misses", *[""] * 6]
    shares = [f"{share:.1%}" if share is not None else "" for share in (row.accuracy, row.agreement)]
    latencies = [f"{figure:,.0f}" if figure is not None else "" for figure in (row.ttft_p99_ms, row.tpot_p99_ms)]
    price = f"{row.dollars_per_million_tokens:.3f}"
    return [f"{row.replicas:,}", price, *shares, *latencies, f"{row.requests_per_s:,.1f}"]
