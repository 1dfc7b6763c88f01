"""The platform around a test's endpoint, without Ray."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mars_ray.platform.batches.batch_store import Stores
from mars_ray.platform.batches.row_caller import make_batch_runner
from mars_ray.platform.gateway import Platform
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.platform.responses.response_store import ResponseStore, StoredResponse, Turn
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.platform.usage.ledger import UsageLedger
from mars_ray.platform.usage.ledger_files import usage_folder
from mars_ray.platform.usage.meter import UsageMeter
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.gateway_app import make_gateway_app
from mars_ray.serve.http.models import ControlClient, ModelClients
from mars_ray.serve.middleware.access import AccessMiddleware
from mars_ray.serve.replicas.engine_client import EngineClient
from tests.serve.shared_tokenizer import sharing_tokenizer

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


@dataclass
class Surrounding:
    """What surrounds the core of a test's endpoint."""

    gateway: AccessMiddleware
    store: LocalResponseStore
    meter: UsageMeter | None
    work: Callable[[], Any]
    """Works on the batches of an endpoint that has storage, as the deployment `Batches` does."""


def surround(
    config: PlatformConfig,
    client: EngineClient,
    control: ControlClient,
    folder: Path,
    stored: Path,
) -> Surrounding:
    """The gateway of a model with its platform."""
    store = LocalResponseStore(stored / "responses")
    usage = usage_folder(config.storage) if config.storage else stored / "usage"
    meter = UsageMeter(UsageLedger(usage)) if config.meters_usage else None

    def models(link: GatewayMeter | None) -> ServedModels:
        endpoint = sharing_tokenizer(Endpoint(client, config, folder, link), config, folder)
        return ServedModels(ModelClients(endpoint, control), access=config.access)

    async def work() -> None:
        if (stores := Stores.below(config.storage, config.storage_limits)) is not None:
            link = GatewayMeter(meter, config.prices, name="batches") if meter else None
            served = models(link)
            async with link.running() if link else nullcontext(), served.running():
                await make_batch_runner(served, store, stores, config, meter=link, poll_s=0.05).run()

    link = GatewayMeter(meter, config.prices, name="test") if meter else None
    served = models(link)
    platform = Platform(config, served, link, store, name="test")
    gateway = make_gateway_app(served, config, name="test", extension=platform)
    return Surrounding(gateway, store, meter, work)
