"""A real endpoint without Ray: the gateway behind uvicorn on a port of its own, the engine in its process."""

import asyncio
import gc
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import uvicorn

from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.controller import Controller
from mars_ray.control.core.live_view import LiveReport, RunningJob
from mars_ray.control.core.status import ClusterStatus
from mars_ray.control.replica.heartbeat import send_heartbeat
from mars_ray.control.replica.lease import Lease
from mars_ray.control.replica_messages import Directive, ReplicaReport
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.serve.deploy.serve_config import ServeConfig, parse_config
from mars_ray.platform.batches.batch_app import make_batch_runner, make_stores
from mars_ray.serve.http.gateway_app import make_endpoint, make_gateway_app
from mars_ray.platform.responses.response_store import ResponseStore, StoredResponse, Turn
from mars_ray.platform.models.served_models import ModelClients, ServedModels
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.replicas.engine_client import EngineClient, LocalEngineClient
from mars_ray.serve.replicas.engine_metrics import EngineMetrics
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.platform.usage.ledger import UsageLedger
from mars_ray.platform.usage.ledger_files import usage_folder
from mars_ray.platform.usage.meter import MeterLink, UsageMeter
from tests.serve.stalls.stalls import longest_s, watched

MESSAGES = [{"role": "user", "content": "JSON with the keys name, age, city: Oscar, 34, lives in Dallas."}]
ANSWER = '{"name": "Oscar", "age": 34, "city": "Dallas"}'
FOLDER = resolve_model("bundled")

T = TypeVar("T")


class LocalResponseStore:
    """A store of responses in this process, in a thread of its own, by a clock that stands."""

    def __init__(self, folder: Path) -> None:
        self.seconds = 1e9
        self.core = ResponseStore(folder, clock=lambda: self.seconds)
        self.calls: list[str] = []
        self._thread = ThreadPoolExecutor(max_workers=1)

    async def put(self, owner: str, stored: StoredResponse) -> bool:
        return await self._run(self.core.put, owner, stored)

    async def get(self, owner: str, id: str) -> str:
        return await self._run(self.core.get, owner, id)

    async def delete(self, owner: str, id: str) -> None:
        await self._run(self.core.delete, owner, id)

    async def chain(self, owner: str, id: str, max_bytes: int) -> list[Turn]:
        return await self._run(self.core.chain, owner, id, max_bytes)

    async def _run(self, method: Callable[..., T], *args: Any) -> T:
        self.calls.append(method.__name__)
        return await asyncio.get_running_loop().run_in_executor(self._thread, method, *args)


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
    store: LocalResponseStore
    loop: asyncio.AbstractEventLoop
    meter: UsageMeter | None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop of the endpoint."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def beat(self) -> None:
        """Let a second pass, the engine report to the controller, and follow it."""
        self.control.seconds += 1
        self.run(send_heartbeat(self.engine, self.lease, self.control.handle_report, within_s=60))

    def in_flight(self) -> tuple[int, int, int]:
        """Sequences running and waiting in the engine, requests in the gateway."""
        state = self.run(self.engine.state())
        return state.running, state.waiting, sum(self.gateway.admission.in_flight.values())


def config_of(**fields: Any) -> ServeConfig:
    """Settings for tests: nothing is compiled."""
    fields["engine"] = {"compiled": False} | fields.get("engine", {})
    return parse_config(fields)


async def run_batches(
    client: EngineClient, config: ServeConfig, folder: Path, store: LocalResponseStore, meter: MeterLink | None
) -> None:
    """Work on the batches of an endpoint that has storage, as the deployment `Batches` does."""
    if (stores := make_stores(config)) is not None:
        link = GatewayMeter(meter, config.prices, name="batches") if meter else None
        models = ServedModels(
            ModelClients(make_endpoint(client, config, folder, link), LocalControl(config.plan(folder)))
        )
        async with models.running():
            await make_batch_runner(models, store, stores, config, poll_s=0.05).run()


@contextmanager
def served(
    config: ServeConfig,
    wrap: Callable[[EngineClient], EngineClient] = lambda client: client,
    *,
    folder: Path = FOLDER,
    wrap_meter: Callable[[MeterLink], MeterLink] = lambda link: link,
) -> Iterator[Served]:
    """Run an endpoint until the block ends; `wrap` puts something between the gateway and the engine, and `wrap_meter`
    between the gateway and the meter of usage."""
    found: list[tuple[Served, uvicorn.Server] | BaseException] = []
    stored = Path(mkdtemp(prefix="served-"))
    up = threading.Event()

    async def main() -> None:
        try:
            engine, facts = await AsyncEngine.start(config.engine_spec(folder))
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
            store = LocalResponseStore(stored / "responses")
            usage = usage_folder(config.storage) if config.storage else stored / "usage"
            meter = UsageMeter(UsageLedger(usage)) if config.meters_usage else None
            link = GatewayMeter(wrap_meter(meter), config.prices, name="test") if meter else None
            models = ServedModels(ModelClients(make_endpoint(wrap(client), config, folder, link), control))
            gateway = make_gateway_app(models, store, config, name="test")
            options = uvicorn.Config(gateway, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=2)
            server = uvicorn.Server(options)
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            working = asyncio.create_task(run_batches(wrap(client), config, folder, store, meter))
            port = server.servers[0].sockets[0].getsockname()[1]
            loop = asyncio.get_running_loop()
            found.append(
                (Served(f"http://127.0.0.1:{port}", engine, gateway, lease, control, store, loop, meter), server)
            )
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
        gc.unfreeze()
        server.should_exit = True
        thread.join(60)
        shutil.rmtree(stored)
        assert not thread.is_alive(), "the endpoint stops"
