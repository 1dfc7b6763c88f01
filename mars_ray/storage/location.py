"""Open files and folders by path or URL: `data/rows.jsonl`, `s3://bucket/rows.jsonl`, `gs://`, `abfs://`, `hdfs://`.

A path becomes a `pathlib.Path`. A URL becomes a `UPath` of universal_pathlib, with the same methods, based on fsspec.
The client of a store finds its credentials and endpoint by itself, in `AWS_ACCESS_KEY_ID` and `AWS_ENDPOINT_URL`,
`~/.aws`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_CONNECTION_STRING`, or fsspec's configuration.

This module uses fsspec instead of `pyarrow.fs`, because fsspec can create an object on condition that none exists.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import PlainSerializer, PlainValidator
from upath import UPath

from mars_ray.errors import ConfigError, MarsRayError, first_line

T = TypeVar("T")
AnyPath = Path | UPath
"""A local path, or a path in a store."""

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "abfs": "abfs", "abfss": "abfs", "az": "abfs"}
"""Package extra that installs the client of a store, by URL scheme."""
NO_STALE_LISTINGS = {"use_listings_cache": False}
S3_OPTIONS: dict[str, Any] = NO_STALE_LISTINGS | {
    # Retry for about a minute, including after SlowDown responses.
    "config_kwargs": {"retries": {"mode": "adaptive", "max_attempts": 12}, "connect_timeout": 5, "read_timeout": 30},
}
FILE_URL = "file://"
ANSWER_S = 20.0
"""Seconds without an answer after which a store counts as unreachable."""


def locate(name: str | AnyPath) -> AnyPath:
    """Return the path for a file name or URL. Raises `ConfigError` for a URL that cannot be used."""
    if isinstance(name, Path | UPath):
        return name
    return locate_url(name) if is_url(name) else Path(name.removeprefix(FILE_URL))


def _located(value: object) -> AnyPath:
    if not isinstance(value, str | Path | UPath) or not str(value):
        raise ValueError("must be a path or URL")
    return locate(value)


PathOrUrl = Annotated[AnyPath, PlainValidator(_located), PlainSerializer(str)]
"""A file or folder, as a path or URL; a field of settings."""


def locate_url(url: str) -> UPath:
    """Return the path for a URL. Raises `ConfigError` for a URL that cannot be used."""
    scheme = url.partition("://")[0]
    extra = EXTRAS.get(scheme)
    options = {"s3": S3_OPTIONS, None: {}}.get(extra, NO_STALE_LISTINGS)
    try:
        path: UPath = UPath(url, **options)
        path.fs  # noqa: B018  # creates the client
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs a client ({error}). Install mars-ray with the extra {extra!r}."
        ) from error
    except Exception as error:  # clients raise errors of any class
        raise ConfigError(f"{url} cannot be used: {first_line(error)}.") from error
    return path


def is_url(name: str) -> bool:
    """Return whether `name` is the URL of a store rather than a local path."""
    return "://" in name and not name.startswith(FILE_URL)


def check_reachable(path: AnyPath) -> None:
    """Raise `ConfigError` if the store of `path` denies access or does not answer within `ANSWER_S` seconds.

    The path itself need not exist.
    """
    if isinstance(path, Path):
        return
    timeout = ConfigError(f"{path} cannot be reached: its store did not answer in {ANSWER_S:g} s. Check its endpoint.")
    try:
        wait_at_most(ANSWER_S, lambda: path.fs.info(path.path), timeout)
    except FileNotFoundError:
        return
    except Exception as error:
        if error is timeout:
            raise
        raise ConfigError(f"{path} cannot be reached: {first_line(error)}. Check credentials and endpoint.") from error


@contextmanager
def store_errors(path: AnyPath, kind: type[MarsRayError], action: str, advice: str) -> Iterator[None]:
    """Convert errors of a disk or a store into `kind`, with the message "`action` `path`: reason. `advice`"."""
    try:
        yield
    except MarsRayError:
        raise
    except OSError as error:
        raise kind(f"{action} {path}: {error.strerror or first_line(error)}. {advice}") from error
    except Exception as error:
        if isinstance(path, Path):
            raise
        raise kind(f"{action} {path}: {first_line(error)}. {advice}") from error


def wait_at_most(seconds: float, call: Callable[[], T], timeout: Exception) -> T:
    """Return the result of `call`, or raise its error. Raises `timeout` after `seconds`, while `call` continues."""
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise timeout
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # without an error, `call` has returned
