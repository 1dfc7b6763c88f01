"""What workers do before their engines can report, told through the cluster's key-value store (shell)."""

from contextlib import suppress

from ray.exceptions import RayError

from mars_ray.ray_private import kv_delete, kv_get, kv_put


def publish_startup_status(app: str, status: str) -> None:
    """Publish what a worker of the job does now; the last one counts. A store that does not answer is let pass."""
    with suppress(RuntimeError, RayError):
        kv_put(_key(app), status)


def read_startup_status(app: str) -> str | None:
    """Return what a worker published last, if any did."""
    with suppress(RuntimeError, RayError):
        if found := kv_get(_key(app)):
            return str(found.decode())
    return None


def clear_startup_status(app: str) -> None:
    """Remove what was published."""
    kv_delete(_key(app))


def _key(app: str) -> str:
    return f"startup:{app}"
