"""Measure the cost of counting usage and of limits, per request: three gateways around one engine, in turns.

    python -m benchmarks.usage_cost --requests 200 --clients 8 --json usage.json

Every request is a completion of one token. `--storage` is a folder or a URL; by default it is a temporary folder. With
`--ray`, the meter is an actor on a local Ray cluster, as in a real endpoint.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
from rich.console import Console
from rich.table import Table

from benchmarks.report import command_line, write_report
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.measure import spread
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.platform.accounts.account_store import UsageLimits
from mars_ray.platform.accounts.callers import AccountCaller
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.platform.usage.ledger import UsageLedger
from mars_ray.platform.usage.ledger_files import usage_folder
from mars_ray.platform.usage.meter import MeterLink, UsageMeter
from mars_ray.program import run_program
from mars_ray.serve.deploy.serve_config import ServeConfig, parse_config
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.extension import Extension, Meter
from mars_ray.serve.http.gateway_app import make_gateway_app
from mars_ray.serve.http.models import ModelClients, OneModel
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.replicas.engine_client import LocalEngineClient
from mars_ray.serve.replicas.engine_metrics import EngineMetrics

OFF, COUNTED, LIMITED = "off", "counted", "counted and limited"
BODY = {"model": "bundled", "prompt": "Ann", "max_tokens": 1}
HUGE = UsageLimits(requests_per_minute=10**9, tokens_per_minute=10**12, tokens_per_month=10**15)


class LimitedMeter(GatewayMeter):
    """A meter of an endpoint whose callers all have limits that are never reached."""

    async def admit(self, exchange: Exchange, model: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Admit a request with limits."""
        exchange.caller = AccountCaller(
            key="bench",
            owner="bench",
            role="use",
            service_class=None,
            limits={"key:bench": HUGE, "account:bench": HUGE},
        )
        await super().admit(exchange, model, prompt_tokens, answer_tokens)


def link_to(storage: str, use_ray: bool) -> MeterLink:
    """Return the link of a gateway to a meter."""
    if not use_ray:
        return UsageMeter(UsageLedger(usage_folder(storage)))
    from mars_ray.platform.ray.actors import RayMeter
    from mars_ray.ray_cluster import connect

    connect()
    return RayMeter("usage-cost", storage)


async def gateways(stack: AsyncExitStack, link: MeterLink) -> Mapping[str, httpx2.AsyncClient]:
    """Return a client of each gateway; all gateways share one engine."""
    config = parse_config(ServeConfig, {})
    folder = resolve_model("bundled")
    engine, facts = await AsyncEngine.start(config.engine_spec(folder))
    info = ModelInfo(name=config.model_name, created=1, engine=facts)
    client = LocalEngineClient(engine, info, EngineMetrics(model="bundled", replica="none"))
    stack.push_async_callback(client.close)
    meters = {
        OFF: None,
        COUNTED: GatewayMeter(link, None, name=COUNTED),
        LIMITED: LimitedMeter(link, None, name=LIMITED),
    }
    return {name: await _client(stack, client, config, folder, meter) for name, meter in meters.items()}


async def _client(
    stack: AsyncExitStack, client: LocalEngineClient, config: ServeConfig, folder: Path, meter: GatewayMeter | None
) -> httpx2.AsyncClient:
    unused: Any = None
    models = OneModel(ModelClients(Endpoint(client, config, folder, meter), unused))
    if meter:
        await stack.enter_async_context(meter.running())
    await stack.enter_async_context(models.running())
    extension = Extension()
    extension.meter = meter or Meter()
    app: AccessMiddleware = make_gateway_app(models, config, name="bench", extension=extension)
    transport = httpx2.ASGITransport(app=app)
    return await stack.enter_async_context(httpx2.AsyncClient(transport=transport, base_url="http://localhost"))


async def run_once(client: httpx2.AsyncClient, requests: int, clients: int) -> list[float]:
    """Return the milliseconds of each request."""
    times_ms: list[float] = []
    left = requests

    async def call() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            began_s = time.perf_counter()
            (await client.post("/v1/completions", json=BODY)).raise_for_status()
            times_ms.append(1000 * (time.perf_counter() - began_s))

    await asyncio.gather(*(call() for _ in range(clients)))
    return times_ms


async def measure(requests: int, clients: int, rounds: int, storage: str, use_ray: bool) -> dict[str, Any]:
    """Return the median and the 95th percentile of each gateway, in milliseconds, for each round."""
    samples: dict[str, list[list[float]]] = {OFF: [], COUNTED: [], LIMITED: []}
    async with AsyncExitStack() as stack:
        apps = await gateways(stack, link_to(storage, use_ray))
        names = list(apps)
        for turn in range((rounds + 1) * len(names)):
            number, position = divmod(turn, len(names))
            name = names[(number + position) % len(names)]
            times_ms = await run_once(apps[name], requests, clients)
            if number:  # the first round warms up
                samples[name].append(sorted(times_ms))
    return {
        "p50_ms": {name: [run[len(run) // 2] for run in runs] for name, runs in samples.items()},
        "p95_ms": {name: [run[int(0.95 * len(run))] for run in runs] for name, runs in samples.items()},
    }


def show(results: dict[str, Any]) -> None:
    """Print the medians of the rounds with their ranges."""
    table = Table("", "p50 ms", "p95 ms", title=command_line())
    for name in results["p50_ms"]:
        spreads = [spread(results[figure][name]) for figure in ("p50_ms", "p95_ms")]
        table.add_row(name, *(f"{each.median:.2f} ({each.min:.2f}-{each.max:.2f})" for each in spreads))
    Console().print(table)


def main() -> None:
    """Measure, print, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="requests per round")
    parser.add_argument("--clients", type=int, default=1, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    parser.add_argument("--storage", help="folder or URL of the usage")
    parser.add_argument("--ray", action="store_true", help="the meter is an actor")
    parser.add_argument("--json", type=Path, help="file for every sample")
    options = parser.parse_args()
    counts = (options.requests, options.clients, options.rounds)
    with TemporaryDirectory(prefix="usage-cost-") as folder:
        results = asyncio.run(measure(*counts, options.storage or folder, options.ray))
    show(results)
    write_report(options.json, results)


if __name__ == "__main__":
    run_program("usage_cost", main)
