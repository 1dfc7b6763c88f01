"""Find the folder of a model by name, from a command line or a config.

An existing folder has precedence over a name on a hub. `check_folder` checks the contents of the folder.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, cast

from pydantic import BeforeValidator
from upath import UPath

from mars_ray.errors import ModelError, did_you_mean
from mars_ray.model.sources.node_cache import NODE_URL
from mars_ray.model.sources.store import fetched_from_store
from mars_ray.storage.location import FILE_URL, AnyPath, is_url

BUNDLED = "bundled"
SMOLLM2 = "smollm2"
WHAT_TO_GIVE = (
    f"{BUNDLED!r}, {SMOLLM2!r}, a folder, a .gguf file, a URL of either, "
    "or organisation/name of a hub, optionally with @revision"
)
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on a hub: `organisation/name`, and a branch, tag or commit, where None means the newest commit."""

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_hub_name(name: str) -> HubName | None:
    """Parse `organisation/name` or `organisation/name@revision`; return None for any other text."""
    match = _NAME.fullmatch(name)
    return HubName(match["repository"], match["revision"]) if match else None


def hub_name_of(folder: Path) -> HubName | None:
    """Return the model and commit of a folder in the cache, or None for any other folder."""
    snapshots = folder.parent
    repository = snapshots.parent.name.split("--")
    if snapshots.name != "snapshots" or repository[0] != "models" or len(repository) < 3:
        return None
    return HubName(f"{repository[1]}/{'--'.join(repository[2:])}", folder.name)


def as_name(value: object) -> object:
    """Return a path as the text that names it, and other values as they are.

    A `Path` is always a path: Path("bundled") becomes "./bundled", which is not the packaged model.
    """
    if isinstance(value, Path):
        return str(value) if value.is_absolute() else f"./{value}"
    return str(value) if isinstance(value, UPath) else value


Name = Annotated[str, BeforeValidator(as_name)]
"""Name of a model or an adapter, or its path."""


def resolve_model(name: str | AnyPath) -> Path:
    """Return the folder of the model called `name`, after downloading or converting it if needed.

    "bundled" is always the packaged model; write "./bundled" for a folder of this name. Raises `ModelError` for an
    unknown name.
    """
    name = cast(str, as_name(name))
    if not isinstance(name, str):
        raise ModelError(f"the model is {shortened(name)}: give {WHAT_TO_GIVE}.")
    if name == BUNDLED:
        return Path(str(files("mars_ray"))) / "assets" / "bundled"
    if name.startswith(NODE_URL):
        from mars_ray.model.sources.ray_folder import parse_shared_folder  # imports Ray

        return parse_shared_folder(name).here()
    path = fetched_from_store(name) if is_url(name) else Path(name.removeprefix(FILE_URL)).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelError(f"the model {shortened(name)} cannot be read: {error.strerror}.") from error
    if is_folder:
        return path
    if is_file:
        from mars_ray.model.sources.gguf import converted  # slow to import

        return converted(path)
    if name == SMOLLM2:
        from mars_ray.model.sources.smollm2 import smollm2_folder

        return smollm2_folder()
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise ModelError(f"unknown model {name!r}: give {WHAT_TO_GIVE}{_hint(path)}")
    from mars_ray.model.sources.hub import cached_names, download

    # The name may be a misspelt folder, so the hint also considers folders.
    return download(hub_name, _hint(path, cached_names()))


def pin(name: str | AnyPath, folder: Path) -> str:
    """Return `name`, followed by the downloaded commit if the model is from a hub; `folder` is the model's folder."""
    name = str(as_name(name))
    hub_name = hub_name_of(folder.absolute()) if is_hub_name(name) else None
    return str(hub_name or name)


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form of a name on a hub, and no folder or file has this name."""
    return parse_hub_name(name) is not None and not exists(Path(name))


def is_elsewhere(name: str) -> bool:
    """Return whether `name` is in a store, on another node or on a hub."""
    return is_url(name) or is_hub_name(name)


def is_folder_here(name: str) -> bool:
    """Return whether `name` is a folder or file on this machine, which other machines may lack."""
    return name != BUNDLED and not is_url(name) and exists(Path(name.removeprefix(FILE_URL)).expanduser())


def model_label(name: str, folder: Path) -> str:
    """Return the name of a model for reports: `organisation/name@commit`, or its short name."""
    # On a machine that did not download the model, only `name` contains the commit.
    hub_name = hub_name_of(folder.absolute()) or (parse_hub_name(name) if is_hub_name(name) else None)
    return str(hub_name) if hub_name else short_name(name)


def short_name(name: str) -> str:
    """Return the last part of a model's name, without revision and suffix, and without reading a file."""
    hub_name = parse_hub_name(name)
    last = hub_name.repository.split("/")[1] if hub_name else Path(name).expanduser().absolute().name
    return last.removesuffix(".gguf")


def exists(path: Path) -> bool:
    """Return whether there is a file or folder; a path that cannot be looked up has none."""
    try:
        return path.exists()
    except OSError:
        return False


def _hint(missing: Path, cached: Sequence[str] = ()) -> str:
    try:
        models = [path for path in missing.parent.iterdir() if path.is_dir() or path.suffix == ".gguf"]
        siblings = [str(missing.parent / path.name) for path in models]
    except OSError:
        siblings = []
    names = [BUNDLED, SMOLLM2] if missing.parent == Path() else []
    return f".{did_you_mean(str(missing), [*siblings, *names, *cached])}"
