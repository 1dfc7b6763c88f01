"""What workers do before their engines can report, said through the cluster's key-value store (shell)."""

from contextlib import suppress

from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from mars_ray.control.core.ray_controller import NAMESPACE


def say_phase(app: str, phase: str) -> None:
    """Say what a worker of the job does now; what was said last counts. A store that does not answer is let pass."""
    with suppress(RuntimeError, RayError):
        _internal_kv_put(_key(app), phase, overwrite=True, namespace=NAMESPACE)


def phase_of(app: str) -> str | None:
    """Return what a worker said last, if any did."""
    with suppress(RuntimeError, RayError):
        if said := _internal_kv_get(_key(app), namespace=NAMESPACE):
            return str(said.decode())
    return None


def forget_phase(app: str) -> None:
    """Remove what was said."""
    _internal_kv_del(_key(app), namespace=NAMESPACE)


def _key(app: str) -> str:
    return f"phase:{app}"
