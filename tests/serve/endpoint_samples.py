"""A real endpoint without Ray: the gateway behind uvicorn on a port of its own, the engine in its process."""

import asyncio
import gc
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import uvicorn
from openai import OpenAI

from mars_ray.control.cluster_load import Backlog
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.controller import Controller
from mars_ray.control.core.lease import Lease, send_heartbeat
from mars_ray.control.core.live_view import LiveReport, RunningJob
from mars_ray.control.core.status import ClusterStatus
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.installed import HAS_PLATFORM, settings_class
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.serve.deploy.serve_config import parse_config
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.gateway_app import make_gateway_app
from mars_ray.serve.http.models import ModelClients, OneModel
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.replicas.engine_client import EngineClient, LocalEngineClient
from mars_ray.serve.replicas.engine_metrics import EngineMetrics
from tests.serve.shared_tokenizer import sharing_tokenizer
from tests.serve.stalls.stalls import longest_s, watched

MESSAGES = [{"role": "user", "content": "JSON with the keys name, age, city: Oscar, 34, lives in Dallas."}]
ANSWER = '{"name": "Oscar", "age": 34, "city": "Dallas"}'
FOLDER = resolve_model("bundled")

T = TypeVar("T")


class LocalControl:
    """A controller in this process, by a clock that goes a second for each heartbeat."""

    def __init__(self, plan: ControlPlan) -> None:
        self.seconds, self._plan = 0.0, plan
        self.restart()

    def restart(self) -> None:
        """Forget everything, as a controller that was killed."""
        self._controller = Controller(self._plan, clock=self.clock)

    def clock(self) -> float:
        return self.seconds

    async def handle_report(self, report: ReplicaReport) -> Directive:
        return self._controller.handle_report(report)

    async def status(self) -> ClusterStatus:
        return self._controller.status()

    async def live(self, controller: str, after: int) -> LiveReport:
        return self._controller.live(controller, after)

    async def jobs(self) -> list[RunningJob]:
        return []

    async def update_backlog(self, backlog: Backlog, *, paused: bool) -> ClusterStatus:
        return self._controller.update_backlog(backlog, paused=paused)

    async def set_threshold(self, threshold: float, name: str | None, seconds: float | None) -> None:
        self._controller.set_threshold(threshold, name, seconds)

    async def clear_threshold(self, name: str | None) -> None:
        self._controller.clear_threshold(name)


@dataclass
class Served:
    """An endpoint that runs in a thread."""

    url: str
    engine: AsyncEngine
    gateway: AccessMiddleware
    lease: Lease
    control: LocalControl
    loop: asyncio.AbstractEventLoop
    platform: Any
    """What surrounds the core, as `Surrounding`; None with the core alone."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop of the endpoint."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def beat(self) -> None:
        """Let a second pass, the engine report to the controller, and follow it."""
        self.control.seconds += 1
        self.run(send_heartbeat(self.engine, self.lease, self.control.handle_report, within_s=60, awaited=set()))

    def in_flight(self) -> tuple[int, int, int]:
        """Sequences running and waiting in the engine, requests in the gateway."""
        state = self.run(self.engine.state())
        return state.running, state.waiting, sum(self.gateway.admission.in_flight.values())


@dataclass(frozen=True)
class Keyed:
    """An endpoint with the keys of two callers, and OpenAI's client for each."""

    served: Served
    keys: tuple[str, str]
    ada: OpenAI
    bob: OpenAI


def config_of(**fields: Any) -> Any:
    """Settings of an endpoint."""
    return parse_config(settings_class(), fields)


@contextmanager
def served(
    config: Any,
    wrap: Callable[[EngineClient], EngineClient] = lambda client: client,
    *,
    folder: Path = FOLDER,
    **start: Any,
) -> Iterator[Served]:
    """Run an endpoint until the block ends; `wrap` puts something between the gateway and the engine. `start` are
    further arguments of `AsyncEngine.start`."""
    found: list[tuple[Served, uvicorn.Server] | BaseException] = []
    stored = Path(mkdtemp(prefix="served-"))
    up = threading.Event()

    async def main() -> None:
        try:
            engine, facts = await AsyncEngine.start(config.engine_spec(folder), **start)
            metrics = EngineMetrics(model=config.model_name, replica="test")
            client = LocalEngineClient(
                engine,
                ModelInfo(
                    name=config.model_name,
                    created=1,
                    engine=facts,
                    served_names=config.served_model_names,
                    adapters=tuple(config.adapters),
                ),
                metrics,
            )
            plan = config.plan(folder)
            control = LocalControl(plan)
            lease = Lease("test", plan, control.clock, price_per_hour=config.engine.replica_price)
            surrounding: Any = None
            if HAS_PLATFORM:
                from tests.platform.platform_samples import surround

                surrounding = surround(config, wrap(client), control, folder, stored)
                gateway = surrounding.gateway
            else:
                endpoint = sharing_tokenizer(Endpoint(wrap(client), config, folder), config, folder)
                clients = ModelClients(endpoint, control)
                gateway = make_gateway_app(OneModel(clients), config, name="test")
            options = uvicorn.Config(gateway, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=2)
            server = uvicorn.Server(options)
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            working = asyncio.create_task(surrounding.work() if surrounding else asyncio.sleep(0))
            port = server.servers[0].sockets[0].getsockname()[1]
            loop = asyncio.get_running_loop()
            running = Served(f"http://127.0.0.1:{port}", engine, gateway, lease, control, loop, surrounding)
            found.append((running, server))
        except BaseException as error:
            found.append(error)
            raise
        finally:
            up.set()
        await serving
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await client.close()

    stalled: list[str] = []
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert up.wait(120), "the endpoint starts"
    if isinstance(found[0], BaseException):
        raise found[0]
    running, server = found[0]
    gc.freeze()  # as the gateway on Ray does, or it would pay for looking through all that the tests have made
    try:
        with watched(
            lambda seconds, callback: stalled.append(f"{seconds:.3f} s: {callback}"), thread.ident, longest_s()
        ):
            yield running
        assert not stalled, f"the event loop was held up: {stalled}"
    finally:
        server.should_exit = True
        thread.join(60)
        shutil.rmtree(stored)
        assert not thread.is_alive(), "the endpoint stops"
