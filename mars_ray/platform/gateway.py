"""Extension of a gateway by the platform: accounts, usage, files and batches, stored responses, Anthropic's form, and
models that come and go.

In:    settings, the meter of the gateway, a client of the store of responses.
Out:   an `Extension` of the core's app.
Never: imports Ray.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Gauge

from mars_ray.errors import UnavailableError
from mars_ray.platform.accounts.account_store import open_account_store, open_audit_log
from mars_ray.platform.accounts.admin_routes import Administration, admin_routes
from mars_ray.platform.accounts.callers import AccountCallers
from mars_ray.platform.anthropic.messages import ANTHROPIC, PATH, messages_routes, uses_messages_api
from mars_ray.platform.batches.batch_routes import batch_routes
from mars_ray.platform.batches.batch_store import BatchFigures, BatchStore, Stores
from mars_ray.platform.models.model_routes import model_routes
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.platform.responses.protocol import RESPONSES_PATH
from mars_ray.platform.responses.response_store import ResponseStoreClient
from mars_ray.platform.responses.routes import response_form, responses_routes
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.platform.usage.usage_routes import USAGE_PATH, usage_routes
from mars_ray.serve.http.extension import Extension, Meter
from mars_ray.serve.middleware.api_form import ApiForm, Uploads
from mars_ray.serve.middleware.key_store import LiveKeys
from mars_ray.serve.replicas.engine_metrics import openmetrics_text
from mars_ray.storage.audit_log import AuditWriter

UPLOAD_PATH = "/v1/files"
FIGURES_S = 1.0
"""Maximum seconds that a scrape of the metrics waits for the storage."""


class Platform(Extension):
    """The platform of one gateway, which is called `name`. Without a `meter`, usage is not counted."""

    tokenizer_paths = frozenset({f"{PATH}/count_tokens"})
    measured_paths = frozenset({PATH, f"{PATH}/count_tokens", RESPONSES_PATH, USAGE_PATH})

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
        self._stores = Stores.below(config.storage, config.storage_limits)
        self.uploads = (
            Uploads(UPLOAD_PATH, config.storage_limits.file_bytes, config.storage_limits.uploads)
            if config.storage
            else None
        )
        self._classes = config.class_names
        self._audit_log = open_audit_log(config.storage)
        self.audit = AuditWriter(self._audit_log)
        self._store = open_account_store(config.keys, config.storage, self.audit) if config.keys else None
        self._keys = LiveKeys(self._store, classes=self._classes) if self._store else None
        if self._keys or config.oidc:
            self.callers = AccountCallers(self._keys, config.oidc, classes=self._classes)
        self._metrics = PlatformMetrics(model=config.model_name, gateway=name)
        self._figures = FiguresReader(self._stores.batches) if self._stores else None

    def routes(self) -> Sequence[APIRouter]:
        """Return the routes of the platform."""
        return [
            responses_routes(self._models, self._responses),
            batch_routes(self._stores),
            messages_routes(self._models),
            admin_routes(Administration(self._keys, self._store, self._audit_log, self._classes)),
            model_routes(self._models),
            usage_routes(self._meter),
        ]

    def api_of(self, path: str) -> ApiForm:
        """Return the form of the API that a path belongs to."""
        return ANTHROPIC if uses_messages_api(path) else response_form(path)

    async def metrics(self) -> Sequence[str]:
        """Return the metrics of usage and batches."""
        figures = await self._figures.newest() if self._figures else None
        return [self._metrics.text(self._meter, figures)]

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run the connection to the meter within the block."""
        return self._meter.running() if self._meter else nullcontext()


class FiguresReader:
    """Reader of the figures of batches for one gateway, whose storage may be away. Use it within one event loop.

    `clock` returns the Unix time in seconds.
    """

    def __init__(self, batches: BatchStore, clock: Callable[[], float] = time.time) -> None:
        self._batches = batches
        self._clock = clock
        self._last: BatchFigures | None = None
        self._reading: asyncio.Task[None] | None = None

    async def newest(self) -> BatchFigures | None:
        """Return the figures, or the last ones if the storage does not answer within `FIGURES_S`.

        Returns None if no runner has published any, or if they are stale.
        """
        if self._reading is None or self._reading.done():  # one read at a time, because a read may hang for a minute
            self._reading = asyncio.create_task(asyncio.to_thread(self._read))
        await asyncio.wait([self._reading], timeout=FIGURES_S)
        return None if self._last is None or self._last.are_stale(self._clock()) else self._last

    def _read(self) -> None:
        with suppress(UnavailableError):
            self._last = self._batches.figures(self._clock())


class PlatformMetrics:
    """Metrics of usage and batches in one gateway, whose labels no caller determines.

    Metrics of batches lack the name of a gateway, because every gateway shows the same figures.
    """

    def __init__(self, *, model: str, gateway: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._gateway = gateway

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"mars:{name}", text, ["model_name", *labels], registry=self._registry)

        records = "Usage records of requests that the meter has not confirmed."
        self._records_waiting = gauge("usage_records_waiting", records, "gateway")
        refused = "Requests so far that a limit of their key or account refused, by limit."
        self._refused = gauge("usage_refused", refused, "gateway", "limit")
        self._batches = gauge("batches", "Batches that have not ended, by status.", "status")
        self._ended = gauge("batches_ended", "Batches that ended since their runner started, by status.", "status")
        self._rows = gauge("batch_rows", "Rows done since the runner started: completed or failed.", "outcome")
        self._rows_left = gauge("batch_rows_left", "Rows of checked batches that are not done.")
        self._deadline = gauge("batch_deadline_timestamp_seconds", "Unix time of the earliest deadline of a batch.")
        self._bytes = gauge("batch_file_bytes", "Bytes of all files in the storage, results included.")

    def text(self, meter: GatewayMeter | None, batches: BatchFigures | None) -> str:
        """Return all metrics. What is None has no sample."""
        if meter:
            self._records_waiting.labels(self._model, self._gateway).set(meter.records_waiting)
            for limit, count in meter.refused.items():
                self._refused.labels(self._model, self._gateway, limit).set(count)
        for gauge in (self._batches, self._ended, self._rows, self._rows_left, self._deadline, self._bytes):
            gauge.clear()
        if batches:
            self._show(batches)
        return openmetrics_text(self._registry)

    def _show(self, batches: BatchFigures) -> None:
        counted = ((self._batches, batches.unfinished), (self._ended, batches.ended), (self._rows, batches.rows))
        for gauge, counts in counted:
            for label, count in counts.items():
                gauge.labels(self._model, label).set(count)
        self._rows_left.labels(self._model).set(batches.rows_left)
        self._bytes.labels(self._model).set(batches.file_bytes)
        if batches.deadline_unix_s is not None:
            self._deadline.labels(self._model).set(batches.deadline_unix_s)
