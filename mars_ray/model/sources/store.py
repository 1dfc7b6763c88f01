"""Fetch a folder from object storage, such as `s3://bucket/models/one`, into the cache of this machine."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from upath import UPath

from mars_ray.errors import DataError, ModelError
from mars_ray.model.card import CARD_FILE
from mars_ray.model.sources.node_cache import RemoteFile, fetched
from mars_ray.storage.location import AnyPath, check_reachable, locate_url, store_errors

FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",  # shows that the folder is an adapter, which is refused
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    CARD_FILE,
)
"""Files of a model to fetch from a hub or a store."""
LEFT_OUT = ("*/*", "consolidated*.safetensors")
"""Files to leave out: files in subfolders, and second copies of the weights."""
VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified")
"""Fields in the metadata of various stores that change with the content of a file."""


def fetched_from_store(url: str) -> Path:
    """Return the local copy of the folder or .gguf file at `url`.

    Raises `ConfigError` within half a minute if the store is unreachable, and `ModelError` if `url` holds no model.
    """
    path = locate_url(url.rstrip("/"))
    check_reachable(path)
    with store_errors(path, ModelError, "Cannot fetch the model", "Check its name and the rights to read it."):
        folder = path.parent if url.endswith(".gguf") else path
        files = _files(path)
        wanted = {name: files[name] for name in files if url.endswith(".gguf") or _is_of_model(name)}
        if not wanted:
            raise ModelError(f"{url} holds no model. Give a folder with config.json, *.safetensors and tokenizer.json.")
        copy = _fetched(path, folder, wanted)
    return copy / path.name if url.endswith(".gguf") else copy


def folder_here(folder: AnyPath) -> Path:
    """Return a local folder with the files of `folder`: a copy from a store, or `folder` itself."""
    if isinstance(folder, Path):
        return folder
    with store_errors(folder, DataError, "Cannot fetch", "Check its name and the rights to read it."):
        return _fetched(folder, folder, _files(folder))


def _fetched(path: UPath, folder: UPath, infos: dict[str, dict[str, Any]]) -> Path:
    """Return a local copy of the files `infos` in `folder`, which are all or some of those at `path`."""

    def read(name: str, start: int, end: int) -> bytes:
        content: bytes = folder.fs.cat_file((folder / name).path, start=start, end=end)
        return content

    def listed(infos: dict[str, dict[str, Any]]) -> dict[str, RemoteFile]:
        return {name: RemoteFile(name=name, size=info["size"], digest=_version(info)) for name, info in infos.items()}

    def unchanged() -> bool:
        path.fs.invalidate_cache()
        return files.items() <= listed(_files(path)).items()

    files = listed(infos)
    return fetched(path.name, list(files.values()), read, unchanged)


def _files(path: UPath) -> dict[str, dict[str, Any]]:
    """Return the store's metadata of a file, or of each file in a folder, keyed by file name."""
    infos: dict[str, dict[str, Any]] = path.fs.find(path.path, maxdepth=1, detail=True)
    return {name.rpartition("/")[2]: info for name, info in infos.items()}


def _is_of_model(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in FILES) and not any(
        fnmatchcase(name, pattern) for pattern in LEFT_OUT
    )


def _version(info: dict[str, Any]) -> str:
    return "version:" + " ".join(str(info[name]) for name in VERSIONS if info.get(name) is not None)
