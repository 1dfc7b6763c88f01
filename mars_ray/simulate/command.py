"""The command `mars-ray simulate`: run a trace on a simulated cluster, then print, plot and report the result."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from mars_ray.control.control_settings import ControlPlan, check_policy
from mars_ray.engine.checked_fields import Texts, check_fields
from mars_ray.errors import ConfigError
from mars_ray.load.arrivals import Poisson, parse_trace, read_trace
from mars_ray.load.slo import RequestSlo, parse_slo
from mars_ray.progress import ProgressLine
from mars_ray.simulate.arrivals import Arrival, Arrivals
from mars_ray.simulate.machine import Machine
from mars_ray.simulate.metrics import SecondMetrics, SimulationMetrics, columns
from mars_ray.simulate.modelled_machine import open_machine
from mars_ray.simulate.plot import check_plot, plot
from mars_ray.simulate.scaling import Scaling
from mars_ray.simulate.simulator import Simulation, SimulationOptions, simulate
from mars_ray.storage.location import AnyPath, PathOrUrl

REPLICAS_MAX = 10_000
NUMBER_MAX = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `mars-ray simulate`."""

    trace: str
    replicas: int
    policy: str | None = None
    """Name of the policy; None means the one in the control file, or else the default."""
    control: PathOrUrl | None = None
    """YAML file of a `ControlPlan`."""
    machine: str | None = None
    """Name such as h200/qwen2.5-7b, or a file; None means the bundled model as measured."""
    autoscale: bool = False
    min_replicas: int = 1
    max_replicas: int | None = None
    """Maximum number of replicas; None means four times the number at the start."""
    copies: int = 1
    speed: float = 1.0
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    duration: float | None = None
    mix: str | None = None
    """Share of requests by class, such as "gold:1,batch:3"; None means equal shares."""
    slo: Texts = ()
    front_ms: float = 0.0
    ticks: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise ConfigError(f"replicas is {self.replicas}; it must be in 1..{REPLICAS_MAX}.")
        if self.max_replicas is not None and self.max_replicas > REPLICAS_MAX:
            raise ConfigError(f"max_replicas is {self.max_replicas}; it must be at most {REPLICAS_MAX}.")
        for name in ("speed", "prompt_scale", "output_scale"):
            if not 1 / NUMBER_MAX <= (value := getattr(self, name)) <= NUMBER_MAX:
                raise ConfigError(f"{name} is {value}; it must be in {1 / NUMBER_MAX:g}..{NUMBER_MAX:g}.")

    def plan(self, slo: RequestSlo | None, machine: Machine) -> ControlPlan:
        """Return the controller's plan, which includes the calibration of the machine. Raises `ConfigError`."""
        control = _yaml(self.control)
        settings = control.get("settings") or {}
        if not isinstance(settings, dict):
            raise ConfigError(f"{self.control}: settings must be a mapping.")
        if self.policy is not None:
            try:
                check_policy(self.policy)
            except ValueError as error:
                raise ConfigError(f"{error}.") from None
            settings = settings | {"policy": self.policy}
        if slo is not None and "slo" not in settings:
            settings = settings | {"slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}}
        try:
            calibration = {"accuracy": machine.accuracy, "agreement": machine.agreement}
            return ControlPlan.model_validate(calibration | control | {"settings": settings})
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the plan"
            raise ConfigError(f"{self.control}: {field}: {first['msg']}.") from None

    def arrivals(self) -> list[Arrival]:
        """Read and scale the trace. It keeps prompts longer than the model's context, which the cluster refuses."""
        trace = parse_trace(self.trace)
        if isinstance(trace, Poisson):
            raise ConfigError(f"trace is {self.trace!r}; give a file that ends in .csv.gz.")
        return [
            Arrival(
                row.arrival_s / self.speed,
                max(1, math.floor(row.context_tokens * self.prompt_scale + 0.5)),
                max(1, math.floor(row.generated_tokens * self.output_scale + 0.5)),
            )
            for row in read_trace(trace)
        ]

    def shares(self, plan: ControlPlan) -> list[float]:
        """Return the share of requests of each class of the plan. Raises `ConfigError`."""
        names = [service_class.name for service_class in plan.classes]
        if self.mix is None:
            return [1.0] * len(names)
        shares = dict.fromkeys(names, 0.0)
        for part in self.mix.split(","):
            name, _, text = part.strip().partition(":")
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if name not in shares or not 0 <= value < math.inf:
                raise ConfigError(f"mix {part!r} is not valid; give CLASS:SHARE, with one of {', '.join(names)}.")
            shares[name] = value
        if not sum(shares.values()):
            raise ConfigError(f"mix is {self.mix!r}; give at least one class a share above 0.")
        return list(shares.values())

    def scaling(self) -> Scaling | None:
        """Return the settings of autoscaling; None if it is off."""
        if not self.autoscale:
            return None
        return Scaling(min_replicas=self.min_replicas, max_replicas=self.max_replicas or 4 * self.replicas)


def run_simulation(options: SimulateOptions, plot_file: Path | None = None) -> dict[str, Any]:
    """Run the simulation, print and plot its result, and return the report."""
    if plot_file is not None:
        check_plot(plot_file)
    slo = parse_slo(options.slo)
    machine = open_machine(options.machine)
    plan = options.plan(slo, machine)
    shares = options.shares(plan)
    settings = SimulationOptions(
        replicas=options.replicas,
        ticks_per_s=options.ticks,
        scaling=options.scaling(),
        front_s=options.front_ms / 1000,
        slo=slo,
        duration_s=options.duration,
        seed=options.seed,
    )
    arrivals = Arrivals(options.arrivals(), mix=shares, copies=options.copies, seed=options.seed)
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
    _show(title, result, simulated_s)
    if plot_file is not None:
        plot(plot_file, title, result.seconds, None if slo is None else slo.e2e_ms)
    return _report(options, plan, machine, result, simulated_s)


def _yaml(path: AnyPath | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        control = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(control, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, ceiling, classes.")
    return control


def _report(
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


def _show(title: str, result: Simulation, simulated_s: float) -> None:
    console = Console()
    table = Table(show_header=False)
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    for name, value in _rows(result.metrics).items():
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
            latencies.add_row(label, *map(_format, (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)))
    console.print(latencies)


def _format(figure: float) -> str:
    return f"{figure:,.2f}" if figure < 100 else f"{figure:,.0f}"


def _rows(metrics: SimulationMetrics) -> dict[str, str]:
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
