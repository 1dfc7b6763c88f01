"""The stores of files and batches, and the runner of batches, from the settings of an endpoint.

In:    settings, the models of an endpoint.
Out:   stores for the routes; a runner whose rows are answered like callers' requests.
Never: imports Ray.
"""

from collections.abc import Awaitable, Callable

from mars_ray.control.cluster_load import Backlog
from mars_ray.engine.service_class import BATCH_CLASS
from mars_ray.platform.accounts.account_store import open_account_store
from mars_ray.platform.accounts.callers import AccountCallers
from mars_ray.platform.batches.batch_figures import FiguresFile
from mars_ray.platform.batches.batch_routes import Stores
from mars_ray.platform.batches.batch_run import POLL_S, BatchTools
from mars_ray.platform.batches.batch_store import BatchStore
from mars_ray.platform.batches.file_store import FileStore
from mars_ray.platform.batches.row_caller import RowCaller
from mars_ray.platform.batches.row_calls import RowCalls
from mars_ray.platform.batches.runner import BatchRunner
from mars_ray.platform.batches.storage_paths import BatchFolders
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.platform.responses.response_store import ResponseStoreClient
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.serve.middleware.exchange import Exchange, log_exchange
from mars_ray.serve.middleware.key_store import LiveKeys


def make_stores(config: PlatformConfig) -> Stores | None:
    """Return the stores of files and batches; None without storage. Raises `ConfigError` for a bad URL."""
    if config.storage is None:
        return None
    folders = BatchFolders.below(config.storage)
    files = FileStore(folders, config.storage_limits)
    return Stores(files, BatchStore(folders, files, config.storage_limits), FiguresFile(folders))


def batch_class(config: PlatformConfig) -> str:
    """Return the class of service of batch rows: `batch`, or the first class if there is none of this name."""
    names = config.class_names
    return BATCH_CLASS if BATCH_CLASS in names else names[0]


def make_batch_runner(
    models: ServedModels,
    responses: ResponseStoreClient,
    stores: Stores,
    config: PlatformConfig,
    *,
    meter: GatewayMeter | None = None,
    report: Callable[[Backlog], Awaitable[None]] | None = None,
    observe: Callable[[Exchange], None] = log_exchange,
    poll_s: float = POLL_S,
) -> BatchRunner:
    """Return the runner of the batches in `stores`. The models must run as long as the runner does."""
    store_of_keys = open_account_store(config.keys, config.storage) if config.keys else None
    callers = AccountCallers(LiveKeys(store_of_keys) if store_of_keys else None)
    caller = RowCaller(models, responses, batch_class(config), callers, meter, observe)
    tools = BatchTools(
        files=stores.files,
        batches=stores.batches,
        calls=RowCalls(caller),
        max_rows=config.storage_limits.rows,
        max_body_bytes=config.limits.body_bytes,
        poll_s=poll_s,
    )
    return BatchRunner(tools, report, stores.figures)
