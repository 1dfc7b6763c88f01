"""`mars-ray serve` as a user starts it: a real Ray cluster, a real proxy, replicas that can be killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml

from mars_ray.serve.deploy.environment import free_ports

STALLS = Path(__file__).with_name("stalls")
COMMAND = Path(sys.executable).with_name("mars-ray")
GATEWAY, ENGINE, CONTROLLER = "ray::ServeReplica:mars:Gateway", "ray::ServeReplica:mars:Engine", "ray::ServeController"
WORKER, TOKENIZER = "mars-ray-engine", "mars_ray.serve.http.tokenizer_worker"
STEP_SECONDS = 90
CEILING = 0.99
CLASSES = [{"name": "standard", "floor": 0.5}]
SOON = {"lease_s": 3, "recover_s": 3}
"""Times of the controller, so that a test need not wait for what comes of them."""
REQUESTS_MAX = 48
"""In flight at a gateway."""


def deploy_file(path: Path, args: dict[str, Any], *, gateways: int = 1, **engine: Any) -> Path:
    """Write a config with short waits, so that what is broken is found and what ends is gone soon."""
    soon = {"health_check_period_s": 1, "health_check_timeout_s": 3, "graceful_shutdown_wait_loop_s": 0.5}
    fields = {
        "applications": [
            {
                "name": "mars",
                "route_prefix": "/",
                "import_path": "mars_ray.ray_serve:build_openai_app",
                "args": args,
                "deployments": [
                    {"name": "Engine", **soon, **engine},
                    {"name": "Gateway", "num_replicas": gateways, **soon},
                ],
            }
        ]
    }
    path.write_text(yaml.safe_dump(fields))
    return path


@dataclass
class Cluster:
    """A running `mars-ray serve`."""

    url: str
    process: "subprocess.Popen[str]"
    stalls: Path
    """What `stalls/sitecustomize` noted, a file for each process."""

    def stalls_of(self, name: str) -> str:
        """What held up the event loops of the processes of that name, since the cluster was ready."""
        noted = [self.stalls / str(each.pid) for each in self.processes(name)]
        return "".join(path.read_text() for path in noted if path.exists())

    def processes(self, name: str) -> list[psutil.Process]:
        """Processes of this cluster whose name is `name`, or whose command line holds it."""
        found = []
        for each in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if name == each.name() or name in " ".join(each.cmdline()):
                    found.append(each)
            except psutil.Error:
                continue
        return found

    def kill(self, name: str) -> int:
        """kill -9 the first process of that name; return its pid."""
        victim = self.processes(name)[0]
        os.kill(victim.pid, signal.SIGKILL)
        return int(victim.pid)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=STEP_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ask(self, **body: Any) -> tuple[int, dict[str, Any]]:
        """A whole chat answer to `content`."""
        content = body.pop("content", "Ann, Bob: put them in a numbered list.")
        fields = {"model": "bundled", "messages": [{"role": "user", "content": content}], "temperature": 0} | body
        request = urllib.request.Request(
            self.url + "/v1/chat/completions", json.dumps(fields).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=STEP_SECONDS) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metric(self, name: str) -> dict[str, float]:
        """Values of a metric by its labels."""
        _, text = self.get("/metrics")
        return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.M)}

    def until_idle(self) -> None:
        """Wait until no sequence runs or waits on any replica; fails when that does not come."""
        ends_s = time.monotonic() + STEP_SECONDS
        while True:
            busy = [
                *self.metric("vllm:num_requests_running").values(),
                *self.metric("vllm:num_requests_waiting").values(),
            ]
            if busy and not any(busy):
                return
            assert time.monotonic() < ends_s, f"still busy: {busy}"

    def until_engines(self, count: int, besides: int | None = None) -> None:
        """Wait until `count` engine replicas answer, none of them the process `besides`."""
        ends_s = time.monotonic() + STEP_SECONDS
        while True:
            alive = {each.pid for each in self.processes(ENGINE)} - {besides}
            if len(alive) >= count and len(self.metric("vllm:num_requests_running")) == count:
                return
            assert time.monotonic() < ends_s, f"{alive}, {self.metric('vllm:num_requests_running')}"


@contextmanager
def cluster(*arguments: str, port: int | None = None, environment: dict[str, str] | None = None) -> Iterator[Cluster]:
    """Start `mars-ray serve` and wait for its ready line; afterwards nothing of it may live on."""
    port = port or next(free_ports())
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (
        TemporaryDirectory(prefix="stalls-", ignore_cleanup_errors=True) as stalls,
        _running(arguments, port, Path(stalls), inherited | (environment or {})) as started,
    ):
        yield started


@contextmanager
def _running(arguments: Sequence[str], port: int, stalls: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    watched = {
        "MARS_STALLS": str(stalls),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(STALLS), environment.get("PYTHONPATH")))),
        "RAY_USE_UVLOOP": "0",  # callbacks can be timed on asyncio's own loop only
    }
    with subprocess.Popen(
        [str(COMMAND), "serve", "--port", str(port), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment | watched,
    ) as process:
        assert process.stdout is not None
        said: list[str] = []
        family: list[psutil.Process] = []
        """Everything of it, taken down before it ends: afterwards nobody could tell whose they were."""
        try:
            for line in process.stdout:
                said.append(line)
                if line.startswith("ready"):
                    break
            assert said and said[-1].startswith("ready"), "".join(said)
            family = psutil.Process(process.pid).children(recursive=True)
            for noted in stalls.iterdir():
                noted.unlink()  # imports and the like, before anybody asked for anything
            yield Cluster(f"http://127.0.0.1:{port}", process, stalls)
        finally:
            if process.poll() is None:
                family += psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGTERM)
                try:
                    process.communicate(timeout=STEP_SECONDS)
                finally:
                    process.kill()  # else leaving this block waits for ever
            _, alive = psutil.wait_procs(family, timeout=STEP_SECONDS)
            for left in alive:
                left.kill()
            assert not alive, f"left behind: {alive}"
