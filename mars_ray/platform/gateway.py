"""Extension of a gateway by the platform: accounts, usage, files and batches, stored responses, Anthropic's form, and
models that come and go.

In:    settings, the meter of the gateway, a client of the store of responses.
Out:   an `Extension` of the core's app.
Never: imports Ray.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext

from fastapi import APIRouter

from mars_ray.errors import UnavailableError
from mars_ray.openai_api.responses_protocol import RESPONSES_PATH
from mars_ray.platform.accounts.account_store import open_account_store, open_audit_log
from mars_ray.platform.accounts.admin_routes import Administration, admin_routes
from mars_ray.platform.accounts.callers import AccountCallers
from mars_ray.platform.anthropic.api_form import PATH
from mars_ray.platform.anthropic.messages import messages_routes
from mars_ray.platform.api_forms import api_of
from mars_ray.platform.batches.batch_app import make_stores
from mars_ray.platform.batches.batch_figures import BatchFigures
from mars_ray.platform.batches.batch_routes import Stores, batch_routes
from mars_ray.platform.metrics import PlatformMetrics
from mars_ray.platform.models.model_routes import model_routes
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.platform.responses.response_store import ResponseStoreClient
from mars_ray.platform.responses.routes import responses_routes
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.platform.usage.usage_routes import usage_routes
from mars_ray.serve.http.extension import Extension, Meter
from mars_ray.serve.http.routes import STREAM
from mars_ray.serve.middleware.api_form import ApiForm, Uploads
from mars_ray.serve.middleware.key_store import LiveKeys

UPLOAD_PATH = "/v1/files"


class Platform(Extension):
    """The platform of one gateway, which is called `name`. Without a `meter`, usage is not counted."""

    tokenizer_paths = frozenset({f"{PATH}/count_tokens"})
    measured_paths = frozenset({PATH, f"{PATH}/count_tokens", RESPONSES_PATH, "/v1/usage"})

    def __init__(
        self,
        config: PlatformConfig,
        models: ServedModels,
        meter: GatewayMeter | None,
        responses: ResponseStoreClient,
        *,
        name: str,
    ) -> None:
        """Read the keys. Raises `DataError` for keys that cannot be used, `ConfigError` for a bad storage."""
        self._models = models
        self._meter = meter
        self.meter = meter or Meter()
        self._responses = responses
        self._stores = make_stores(config)
        self.uploads = (
            Uploads(UPLOAD_PATH, config.storage_limits.file_bytes, config.storage_limits.uploads)
            if config.storage
            else None
        )
        self._classes = config.class_names
        self.audit = open_audit_log(config.storage)
        self._store = open_account_store(config.keys, config.storage, self.audit) if config.keys else None
        self._keys = LiveKeys(self._store, classes=self._classes) if self._store else None
        if self._keys or config.oidc:
            self.callers = AccountCallers(self._keys, config.oidc, classes=self._classes)
        self._metrics = PlatformMetrics(model=config.model_name, gateway=name)

    def routes(self) -> Sequence[APIRouter]:
        """Return the routes of the platform."""
        return [
            responses_routes(self._models, self._responses, STREAM),
            batch_routes(self._stores),
            messages_routes(self._models),
            admin_routes(Administration(self._keys, self._store, self.audit, self._classes)),
            model_routes(self._models),
            usage_routes(self._meter),
        ]

    def api_of(self, path: str) -> ApiForm:
        """Return the form of the API that a path belongs to."""
        return api_of(path)

    async def metrics(self) -> Sequence[str]:
        """Return the metrics of usage and batches."""
        return [self._metrics.text(self._meter, await asyncio.to_thread(batch_figures, self._stores))]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the connection to the meter within the block."""
        async with self._meter.running() if self._meter else nullcontext():
            yield


def batch_figures(stores: Stores | None) -> BatchFigures | None:
    """Return the figures of batches; None without storage, or if the storage does not answer."""
    try:
        return stores.figures.read(time.time()) if stores else None
    except UnavailableError:
        return None
