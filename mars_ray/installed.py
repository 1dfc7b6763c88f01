"""Tell whether the platform is installed around the core, and return its classes if so."""

from collections.abc import Callable
from importlib.util import find_spec

from mars_ray.serve.deploy.serve_config import ServeConfig

HAS_PLATFORM = find_spec("mars_ray.platform") is not None


def settings_class() -> type[ServeConfig]:
    """Return the class of the settings of endpoints."""
    if not HAS_PLATFORM:
        return ServeConfig
    from mars_ray.platform.platform_config import PlatformConfig

    return PlatformConfig


def clean_up(name: str, delete: Callable[[str], None]) -> None:
    """Remove the objects that the platform leaves after its application was deleted."""
    if HAS_PLATFORM:
        from mars_ray.platform.ray.actors import clean_up

        clean_up(name, delete)
