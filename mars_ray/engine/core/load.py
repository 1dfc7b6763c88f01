"""Load a model folder into an engine, on the best device of this machine."""

from collections.abc import Mapping
from pathlib import Path

import torch

from mars_ray.adapter.folder import load_adapter
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.dtype import DtypeOrAuto, ResolvedDtype, resolve_dtype
from mars_ray.model.folder import check_folder
from mars_ray.usable_cpus import usable_cpus


def load_engine(
    folder: Path, dtype: DtypeOrAuto, options: EngineOptions, adapters: Mapping[str | None, Path] | None = None
) -> tuple[Engine, Checkpoint, ResolvedDtype]:
    """Return an engine, the checkpoint it decodes with, whose network is the engine's alone, and the dtype and why.

    `adapters` are folders by the name that requests know them by; None is that of requests that name none.
    Raises `ModelError` for a folder that cannot be loaded, `AdapterError` for an adapter of another
    model, and `ConfigError` for sizes the engine cannot have.
    """
    if torch.get_num_threads() > usable_cpus():  # torch counts the CPUs of the machine, whatever a quota pays for
        torch.set_num_threads(usable_cpus())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_folder(folder)
    resolved = resolve_dtype(dtype, folder, device)
    found = {name: load_adapter(each, folder) for name, each in (adapters or {}).items()}
    checkpoint = load_checkpoint(folder, dtype=getattr(torch, resolved.name), device=device)
    return Engine(checkpoint, options, adapters=found, consume=True), checkpoint, resolved
