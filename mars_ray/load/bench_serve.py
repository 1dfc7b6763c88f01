"""`mars-ray bench serve`: load on a running OpenAI-compatible endpoint, and what it made of it.

It speaks HTTP to whatever is there, and reports every sample, failed ones too. Ctrl-C ends the load, and what was
measured by then is shown and returned.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mars_ray.load.client import Target
from mars_ray.load.generator import run_load
from mars_ray.load.options import ServeOptions
from mars_ray.load.plan import LoadPlan
from mars_ray.load.probe import find_model, parse_url
from mars_ray.load.record import RequestOutcome, RequestRecord
from mars_ray.load.report import samples, show, summary_json
from mars_ray.load.summary import summarize
from mars_ray.measure import machine
from mars_ray.progress import ProgressLine


def bench_serve(options: ServeOptions) -> dict[str, Any]:
    """Measure and print; returns the report. Raises an `InputError`, or a `RunError` when nobody answers."""
    url, slo, extra_body, plan = parse_url(options.url), options.limits(), options.body(), options.plan()
    records, model, stopped = asyncio.run(_measure(options, url, extra_body, plan))
    summary = summarize(records, slo)
    loop = f"closed loop, {options.clients or 1} clients" if options.trace is None else options.trace
    show(f"{model} at {url}: {loop}", summary)
    return {
        "command": options.command(),
        "machine": machine(),
        "seed": options.seed,
        "model": model,
        "planned": plan.total,
        "interrupted": stopped,
        "summary": summary_json(summary),
        "samples": samples(records),
    }


async def _measure(
    options: ServeOptions, url: str, extra_body: dict[str, Any], plan: LoadPlan
) -> tuple[list[RequestRecord], str, bool]:
    """Return the records, the model they are of, and whether Ctrl-C ended them."""
    model = await find_model(url, options.api_key, options.model)
    target = Target(
        url=url,
        model=model,
        api_key=options.api_key,
        stream=options.stream,
        timeout_s=options.timeout,
        extra_body=extra_body,
    )
    with ProgressLine("requests", total=plan.total) as progress, _ctrl_c() as stop:
        shown = _Shown(progress)
        records = await run_load(
            target,
            plan.requests,
            clients=options.clients or (1 if options.trace is None else None),
            duration_s=options.duration,
            stop=stop,
            on_record=shown.update,
        )
    return records, model, stop.is_set()


class _Shown:
    """Says how many requests ended, and how."""

    def __init__(self, progress: ProgressLine) -> None:
        self._progress, self._counts = progress, Counter[RequestOutcome]()

    def update(self, record: RequestRecord) -> None:
        """Count one more."""
        self._counts[record.outcome] += 1
        self._progress.update(self._counts.total(), {each.value: count for each, count in self._counts.items()})


@contextmanager
def _ctrl_c() -> Iterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C sets; the second is an ordinary one."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def first() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
