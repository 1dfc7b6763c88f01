"""A folder in object storage, such as the model `s3://bucket/models/one`: its files come into this machine's cache."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from upath import UPath

from mars_ray.errors import DataError, ModelError
from mars_ray.model.sources.hub import FILES, LEFT_OUT
from mars_ray.model.sources.node_cache import RemoteFile, fetched
from mars_ray.storage.location import AnyPath, check_reachable, locate_url, store_errors

VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified")
"""What stores call that which changes with the content of a file."""


def fetched_from_store(url: str) -> Path:
    """Return the folder, or .gguf file, of this machine that holds what lies at `url`.

    Raises `ConfigError` within half a minute for a store that is out of reach, `ModelError` where no model is.
    """
    place = locate_url(url.rstrip("/"))
    check_reachable(place)
    with store_errors(place, ModelError, "Cannot fetch the model", "Look at its name and at the rights to read it."):
        folder = place.parent if url.endswith(".gguf") else place
        found = {name.rpartition("/")[2]: info for name, info in _below(place).items()}
        wanted = {name: found[name] for name in found if url.endswith(".gguf") or _is_of_model(name)}
        if not wanted:
            raise ModelError(f"{url} holds no model. Give a folder with config.json, *.safetensors and tokenizer.json.")
        here = _fetched(place.name, folder, wanted)
    return here / place.name if url.endswith(".gguf") else here


def folder_here(place: AnyPath) -> Path:
    """Return the folder of this machine that holds the files of the folder `place`; that itself where it is here."""
    if isinstance(place, Path):
        return place
    with store_errors(place, DataError, "Cannot fetch", "Look at its name and at the rights to read it."):
        return _fetched(place.name, place, {name.rpartition("/")[2]: info for name, info in _below(place).items()})


def _fetched(name: str, folder: UPath, found: dict[str, dict[str, Any]]) -> Path:
    def read(name: str, start: int, end: int) -> bytes:
        content: bytes = folder.fs.cat_file((folder / name).path, start=start, end=end)
        return content

    files = [RemoteFile(name=name, size=info["size"], digest=_version(info)) for name, info in found.items()]
    return fetched(name, files, read)


def _below(place: UPath) -> dict[str, dict[str, Any]]:
    """Return what is known of a file, or of the files of a folder."""
    found: dict[str, dict[str, Any]] = place.fs.find(place.path, maxdepth=1, detail=True)
    return found


def _is_of_model(name: str) -> bool:
    return any(fnmatchcase(name, each) for each in FILES) and not any(fnmatchcase(name, each) for each in LEFT_OUT)


def _version(info: dict[str, Any]) -> str:
    return "version:" + " ".join(str(info[name]) for name in VERSIONS if info.get(name) is not None)
