"""A place by path or URL: `data/rows.jsonl`, `s3://bucket/rows.jsonl`, `gs://`, `abfs://`, `hdfs://`, `file://`.

A path is a `pathlib.Path`, a URL a `UPath` (universal_pathlib), which has the same methods and speaks through fsspec.
Credentials and endpoints are those that the client of a store takes by itself: `AWS_ACCESS_KEY_ID` and
`AWS_ENDPOINT_URL`, `~/.aws`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_CONNECTION_STRING`, or fsspec's own
configuration.

Why fsspec and not `pyarrow.fs`: it creates an object only where there is none, which `generate` needs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from upath import UPath

from mars_ray.errors import ConfigError, MarsRayError
from mars_ray.storage.wait_at_most import wait_at_most

AnyPath = Path | UPath
"""A path on this machine, or a place in a store."""

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "abfs": "abfs", "abfss": "abfs", "az": "abfs"}
"""The extra of the package that brings the client of a store."""
NO_STALE_LISTINGS = {"use_listings_cache": False}
S3_OPTIONS: dict[str, Any] = NO_STALE_LISTINGS | {
    # A store that is away for a minute, or says SlowDown, is waited for.
    "config_kwargs": {"retries": {"mode": "adaptive", "max_attempts": 12}, "connect_timeout": 5, "read_timeout": 30},
}
FILE_URL = "file://"
ANSWER_S = 20.0
"""A store that has not answered its first request by then is said to be out of reach."""


def locate(given: str | AnyPath) -> AnyPath:
    """Return the place that a path or URL names. Raises `ConfigError` for a URL of an unknown kind."""
    if isinstance(given, Path | UPath):
        return given
    return locate_url(given) if is_url(given) else Path(given.removeprefix(FILE_URL))


def locate_url(url: str) -> UPath:
    """Return the place in a store that `url` names. Raises `ConfigError` for a URL of an unknown kind."""
    scheme = url.partition("://")[0]
    extra = EXTRAS.get(scheme)
    options = {"s3": S3_OPTIONS, None: {}}.get(extra, NO_STALE_LISTINGS)
    try:
        place: UPath = UPath(url, **options)
        place.fs  # noqa: B018  # makes the client
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs a client: pip install 'mars-ray[{extra}]' ({error}).") from error
    except Exception as error:  # clients have errors of their own
        raise ConfigError(f"{url} cannot be used: {_first_line(error)}.") from error
    return place


def is_url(given: str) -> bool:
    """Return whether `given` names a place in a store rather than a path on this machine."""
    return "://" in given and not given.startswith(FILE_URL)


def check_reachable(place: AnyPath) -> None:
    """Raise `ConfigError` within `ANSWER_S` when the store of `place` does not answer or lets nobody in.

    Whether anything lies there does not matter.
    """
    if isinstance(place, Path):
        return
    late = ConfigError(f"{place} is out of reach: its store gave no answer in {ANSWER_S:g} s. Check its endpoint.")
    try:
        wait_at_most(ANSWER_S, lambda: place.fs.info(place.path), late)
    except FileNotFoundError:
        return
    except Exception as error:
        if error is late:
            raise
        raise ConfigError(f"{place} is out of reach: {_first_line(error)}. Check credentials and endpoint.") from error


@contextmanager
def store_errors(place: AnyPath, kind: type[MarsRayError], what: str, advice: str) -> Iterator[None]:
    """Turn what a disk or the client of a store raises into `kind`: "`what` `place`: reason. `advice`"."""
    try:
        yield
    except MarsRayError:
        raise
    except OSError as error:
        raise kind(f"{what} {place}: {error.strerror or _first_line(error)}. {advice}") from error
    except Exception as error:
        if isinstance(place, Path):
            raise
        raise kind(f"{what} {place}: {_first_line(error)}. {advice}") from error  # clients have errors of their own


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")
