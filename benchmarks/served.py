"""An endpoint in processes of its own, its reports, and loads for it."""

import asyncio
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import yaml

from mars_ray.load.client import Target
from mars_ray.load.generator import run_load
from mars_ray.load.plan import LoadPlan
from mars_ray.load.record import PlannedRequest, RequestRecord, RequestSlo

URL = "http://127.0.0.1:8123"


@contextmanager
def endpoint(args: dict[str, Any], engine: dict[str, Any]) -> Iterator[None]:
    """Run `mars-ray serve` with these arguments and this deployment of engines until the block ends.

    The block begins once all engines have reported.
    """
    application = {
        "name": "mars",
        "route_prefix": "/",
        "import_path": "mars_ray.ray_serve:build_openai_app",
        "args": args,
        "deployments": [{"name": "Gateway"}, {"name": "Engine"} | engine],
    }
    host, port = URL.removeprefix("http://").split(":")
    fields = {"http_options": {"host": host, "port": int(port)}, "applications": [application]}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(fields))
        command = [str(Path(sys.executable).with_name("mars-ray")), "serve", "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            assert process.stdout is not None
            if not any(line.startswith("ready") for line in process.stdout):
                raise SystemExit("the endpoint did not start")
            while len(replicas()) < engine["num_replicas"]:
                time.sleep(0.5)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=180)


def policy_args(policy: dict[str, Any], slo: RequestSlo, lowest: float) -> dict[str, Any]:
    """Return the arguments of an endpoint with one class, whose threshold a policy lowers to `lowest` at most."""
    return {
        "threshold": policy["threshold"],
        "classes": [{"name": "standard", "floor": min(lowest, policy["threshold"])}],
        "control": {"policy": policy["policy"], "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}},
        "limits": {"requests": 512, "requests_per_key": 512},
    }


def replicas() -> list[dict[str, Any]]:
    """Return the last reports of the engines."""
    reports: list[dict[str, Any]] = httpx2.get(f"{URL}/control", timeout=30).json()["replicas"]
    return reports


def send(plan: LoadPlan, clients: int | None = None, body: dict[str, Any] | None = None) -> list[RequestRecord]:
    """Send a load, greedy unless `body` says otherwise, and return the records of its requests."""
    served = httpx2.get(f"{URL}/v1/models", timeout=30).json()["data"][0]["id"]
    target = Target(url=URL, model=served, extra_body={"temperature": 0} | (body or {}))
    return asyncio.run(run_load(target, plan.requests, clients=clients))


def closed_loop_rate(warm_up: Sequence[PlannedRequest], counted: Sequence[PlannedRequest], clients: int) -> float:
    """Return the answers per second at threshold 1 to the counted requests, after those of the warm-up."""
    for requests in (warm_up, counted):
        records = send(LoadPlan(iter(requests), len(requests)), clients, {"threshold": 1.0})
    return len(records) / max(record.end_s for record in records)


class Sampler:
    """Reads each second what the engines have generated and at which threshold, until its block ends."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._tokens = _generated()[1]
        self.seconds: list[tuple[float, float]] = []
        """Mean threshold, and tokens generated, in each second."""

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._read()  # what came after the last whole second

    def _sample(self) -> None:
        while not self._ended.wait(1.0):
            with suppress(httpx2.HTTPError):  # the next second counts these tokens
                self._read()

    def _read(self) -> None:
        threshold, tokens = _generated()
        if threshold is None:
            return  # the next second counts these tokens
        self.seconds.append((threshold, tokens - self._tokens))
        self._tokens = tokens


def _generated() -> tuple[float | None, float]:
    """Return the mean threshold, None while no replica has reported lately, and the tokens generated so far."""
    lines = httpx2.get(f"{URL}/metrics", timeout=30).text.splitlines()
    thresholds = [float(line.split()[-1]) for line in lines if line.startswith("mars:threshold{")]
    tokens = [float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total")]
    return sum(thresholds) / len(thresholds) if thresholds else None, sum(tokens)
