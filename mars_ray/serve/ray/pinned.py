"""Names of models and adapters that mean the same content on every node and at any time.

A hub branch may move before the next replica starts, and a folder may exist on one node only.
"""

from pathlib import Path
from typing import TypeVar

from mars_ray.adapter.card import resolve_adapter
from mars_ray.model.resolve import is_folder_here, pin, resolve_model
from mars_ray.model.sources.ray_folder import share_folder
from mars_ray.serve.deploy.model_settings import ModelSettings

T = TypeVar("T", bound=ModelSettings)


def pinned_model(settings: T) -> T:
    """Return the settings of a model with pinned names. Raises `ModelError` for an unknown model."""
    folder = resolve_model(settings.model)
    names = {
        "model": _everywhere(settings.model, folder),
        "adapter": settings.adapter and pinned_adapter(settings.adapter),
        "adapters": {name: pinned_adapter(adapter) for name, adapter in settings.adapters.items()},
    }
    return settings.model_copy(update=names)


def pinned_adapter(name: str) -> str:
    """Return the pinned name of an adapter. Raises `AdapterError` for an unknown one."""
    folder = resolve_adapter(name)
    assert folder is not None
    return _everywhere(name, folder)


def _everywhere(name: str, folder: Path) -> str:
    return str(share_folder(folder)) if is_folder_here(name) else pin(name, folder)
