"""What workers do before their engines can report, told through the cluster's key-value store (shell)."""

from contextlib import suppress

from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from mars_ray.control.core.ray_controller import NAMESPACE


def publish_startup_status(app: str, status: str) -> None:
    """Publish what a worker of the job does now; the last one counts. A store that does not answer is let pass."""
    with suppress(RuntimeError, RayError):
        _internal_kv_put(_key(app), status, overwrite=True, namespace=NAMESPACE)


def read_startup_status(app: str) -> str | None:
    """Return what a worker published last, if any did."""
    with suppress(RuntimeError, RayError):
        if found := _internal_kv_get(_key(app), namespace=NAMESPACE):
            return str(found.decode())
    return None


def clear_startup_status(app: str) -> None:
    """Remove what was published."""
    _internal_kv_del(_key(app), namespace=NAMESPACE)


def _key(app: str) -> str:
    return f"startup:{app}"
