"""`mars-ray bench serve`: put load on a running OpenAI-compatible endpoint and report measurements.

The report contains every sample, including failed requests. After Ctrl-C, it contains the measurements made so far.
"""

import asyncio
import json
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from mars_ray.data.prompt_file import read_prompts
from mars_ray.errors import ConfigError
from mars_ray.load.arrivals import OutputScale, Poisson, Scales, TraceSpeed, parse_trace, read_trace
from mars_ray.load.client import RESERVED, TIMEOUT_S, ListedModel, Target, find_model, parse_url
from mars_ray.load.generator import run_load
from mars_ray.load.plan import LoadPlan, bundled_prompts, closed_loop, poisson, replay
from mars_ray.load.record import RequestOutcome, RequestRecord, RequestSlo, Slo, parse_slo
from mars_ray.load.summary import samples, show_summary, summarize
from mars_ray.measure import machine
from mars_ray.progress import ProgressLine
from mars_ray.storage.location import AnyPath

REQUESTS = 100
"""Default number of requests, if there is neither a trace file nor a duration."""
MAX_TOKENS = 128
NUMBER_MAX = 1e9
"""Maximum value of a numeric setting; the reciprocal is the minimum. These limits keep results finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of `mars-ray bench serve`, which the command line reads from these fields."""

    url: Annotated[str, typer.Option(help="OpenAI-compatible endpoint.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="Model name. Default: the first model that the endpoint lists.")] = (
        None
    )
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY",
            help="Bearer token. Prefer the environment variable, because other users can see options in ps.",
        ),
    ] = field(default=None, repr=False)
    trace: Annotated[
        str | None,
        typer.Option(help="'poisson:RATE' per second, or an Azure trace .csv.gz. Default: a closed loop of --clients."),
    ] = None
    clients: Annotated[
        int | None, typer.Option(help="Maximum number of requests in flight. Default: 1, or no limit with --trace.")
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            help="Number of requests. Default: all of a trace file; without one, 100 or as --duration allows."
        ),
    ] = None
    duration: Annotated[float | None, typer.Option(help="Number of seconds during which requests are sent.")] = None
    stream: Annotated[bool, typer.Option(help="Stream answers. TTFT is measured only with streaming.")] = True
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL or parquet with 'prompt' or 'messages'. Default: bundled prompts.")
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens per answer. Default: 128, or the lengths in the trace file."),
    ] = None
    extra_body: Annotated[
        str, typer.Option(help="""Additional fields for every request, such as '{"threshold": 0.9}'.""")
    ] = "{}"
    speed: TraceSpeed = 1.0
    prompt_scale: Annotated[
        float,
        typer.Option(
            help="Factor for the prompt lengths in the trace, which count as words. Replies report the true token "
            "counts."
        ),
    ] = 1.0
    output_scale: OutputScale = 1.0
    slo: Slo = ()
    seed: Annotated[int, typer.Option(help="Seed of arrivals and prompts.")] = 0
    timeout: Annotated[float, typer.Option(help="Time limit in seconds for one request.")] = TIMEOUT_S

    def __post_init__(self) -> None:
        for name in ("clients", "requests", "max_tokens"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(f"{name} is {count}; it must be at least 1.")
        for name in ("duration", "timeout", "speed", "prompt_scale", "output_scale"):
            if (value := getattr(self, name)) is not None and not 1 / NUMBER_MAX <= value <= NUMBER_MAX:
                raise ConfigError(f"{name} is {value}; it must be in {1 / NUMBER_MAX:g}..{NUMBER_MAX:g}.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key holds a character that HTTP headers do not allow; give it without line ends.")

    def command(self) -> str:
        """Return the command line for these options, without the API key."""
        words = ["mars-ray", "bench", "serve"]
        for option in fields(self):
            value = getattr(self, option.name)
            flag = f"--{option.name.replace('_', '-')}"
            if option.name == "api_key" or value == option.default:
                continue
            if option.name == "stream":
                words.append("--no-stream")
            elif option.name == "slo":
                words += [flag, ",".join(value)]
            else:
                words += [flag, str(value)]
        return shlex.join(words)

    def limits(self) -> RequestSlo | None:
        """Return the SLO that each request should meet. Raises `ConfigError` for an unusable limit."""
        slo = parse_slo(self.slo)
        if slo is not None and not self.stream and (slo.ttft_ms or slo.tpot_ms):
            raise ConfigError(
                "slo has a limit for ttft or tpot, which only streaming can measure; drop it, or --no-stream."
            )
        return slo

    def body(self) -> dict[str, Any]:
        """Return the additional fields of every request. Raises `ConfigError` for an unusable `extra_body`."""
        try:
            extra = json.loads(self.extra_body)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"extra_body is not JSON ({error}): {self.extra_body[:60]!r}.") from None
        if not isinstance(extra, dict):
            raise ConfigError(
                f"extra_body is {self.extra_body[:60]!r}; give an object, such as '{{\"threshold\": 0.9}}'."
            )
        if conflicts := sorted(extra.keys() & set(RESERVED)):
            raise ConfigError(f"extra_body holds {', '.join(conflicts)}, which the load generator sets; remove it.")
        return extra

    def plan(self) -> LoadPlan:
        """Read prompts and trace, and plan the requests."""
        trace = None if self.trace is None else parse_trace(self.trace)
        if not isinstance(trace, AnyPath):
            for name in ("speed", "prompt_scale", "output_scale"):
                if getattr(self, name) != 1.0:
                    raise ConfigError(
                        f"{name} is {getattr(self, name)}; it applies to a trace file. Give one, or drop it."
                    )
        prompts = read_prompts(self.prompts or bundled_prompts())
        if isinstance(trace, AnyPath):
            scales = Scales(speed=self.speed, prompt=self.prompt_scale, output=self.output_scale)
            rows = read_trace(trace)
            return replay(rows, scales, prompts, self.seed, self.requests, self.duration, self.max_tokens)
        requests = REQUESTS if self.requests is None and self.duration is None else self.requests
        max_tokens = self.max_tokens or MAX_TOKENS
        if isinstance(trace, Poisson):
            return poisson(trace, prompts, self.seed, requests, self.duration, max_tokens)
        return closed_loop(prompts, self.seed, requests, max_tokens)


def bench_serve(options: LoadOptions, keep: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Run the load, call `keep` with the report, print a summary, and return the report.

    Raises an `InputError` for unusable options, and a `RunError` if the endpoint is unreachable.
    """
    url = parse_url(options.url)
    slo = options.limits()
    extra_body = options.body()
    plan = options.plan()
    records, model, stopped = asyncio.run(_measure(options, url, extra_body, plan))
    summary = summarize(records, slo)
    loop = f"closed loop, {options.clients or 1} clients" if options.trace is None else options.trace
    notice = f", {model.notice}" if model.notice else ""
    report = {
        "command": options.command(),
        "machine": machine(),
        "seed": options.seed,
        "model": model.name,
        "notice": model.notice,
        "planned": plan.total,
        "interrupted": stopped,
        "summary": asdict(summary),
        "samples": samples(records),
    }
    keep(report)  # first, because the reader of the summary may be gone
    show_summary(f"{model.name} at {url}: {loop}{notice}", summary)
    return report


async def _measure(
    options: LoadOptions, url: str, extra_body: dict[str, Any], plan: LoadPlan
) -> tuple[list[RequestRecord], ListedModel, bool]:
    """Return the records, the model, and True if Ctrl-C ended the load."""
    model = await find_model(url, options.api_key, options.model)
    target = Target(
        url=url,
        model=model.name,
        api_key=options.api_key,
        stream=options.stream,
        timeout_s=options.timeout,
        extra_body=extra_body,
    )
    with ProgressLine("requests", total=plan.total) as progress, _ctrl_c() as stop:
        counts = Counter[RequestOutcome]()

        def show_progress(record: RequestRecord) -> None:
            counts[record.outcome] += 1
            progress.update(counts.total(), {outcome.value: count for outcome, count in counts.items()})

        records = await run_load(
            target,
            plan.requests,
            clients=options.clients or (1 if options.trace is None else None),
            duration_s=options.duration,
            stop=stop,
            on_record=show_progress,
        )
    return records, model, stop.is_set()


@contextmanager
def _ctrl_c() -> Iterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C sets; the second Ctrl-C interrupts as usual."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def stop_load() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop_load)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
