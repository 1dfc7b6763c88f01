"""Download a model from a Hugging Face hub into the cache of huggingface_hub, pinned to one commit.

Only safetensors weights, configuration and tokenizer are downloaded: no pickle and no code. The library itself reads
HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE, resumes interrupted downloads and keeps complete files. Progress
goes to standard error.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import are_progress_bars_disabled
from huggingface_hub.utils import tqdm as HubBar

from mars_ray.errors import ModelError
from mars_ray.model.resolve import HubName, hub_name_of
from mars_ray.model.sources.store import FILES, LEFT_OUT
from mars_ray.progress import ProgressLine

WRITTEN = "huggingface_hub.snapshot_download"
"""Name of the library's progress bar over the written bytes of all files."""
MEGABYTE = 1_000_000


def cached_names() -> list[str]:
    """Return the names of all models in the cache, including incomplete downloads."""
    names = (hub_name_of(folder) for folder in Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*"))
    return sorted({name.repository for name in names if name})


def download(name: HubName, hint: str) -> Path:
    """Return the folder of the model in the cache, after downloading missing files.

    Without a network the cache must be complete. Raises `ModelError` if the download fails; `hint` is appended to the
    message if the model may not exist.
    """
    try:
        folder = Path(
            snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=list(FILES),
                ignore_patterns=list(LEFT_OUT),
                library_name="mars-ray",
                tqdm_class=DownloadBar,
            )
        )
    # The library passes on errors of its HTTP client, which differ between versions.
    except Exception as error:
        raise ModelError(_reason(name, error, hint)) from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name} has no weights in safetensors on {constants.ENDPOINT}. Give another model, or download its .gguf "
            "file and give the path."
        )
    return folder


class DownloadBar(HubBar):  # type: ignore[misc]
    """A `tqdm_class` for `snapshot_download`: shows a bar on a terminal, otherwise prints a line from time to time."""

    def __init__(self, *args: Any, name: str | None = None, **settings: Any) -> None:
        # `disable=None` hides the bar if there is no terminal.
        super().__init__(*args, name=name, **{"disable": None} | settings)
        plain = self.disable and name == WRITTEN and not are_progress_bars_disabled(name)
        self._line = ProgressLine("download, MB", total=None) if plain else None
        self._bytes = 0

    def update(self, n: float | None = 1) -> None:
        """Add `n` bytes or files, and print a line if one is due."""
        super().update(n)
        self._bytes += int(n or 0)
        if self._line is not None:
            self._line.update(self._bytes // MEGABYTE, {}, -(-self.total // MEGABYTE))


def _reason(name: HubName, error: Exception, hint: str) -> str:
    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return f"{name} is gated. Ask for access on {hub}/{name.repository}, then set HF_TOKEN to a token of yours."
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision!r} on {hub}. Give a branch, a tag or a commit of it."
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return f"{hub} has no model {name.repository!r}, or it is private and HF_TOKEN does not open it{hint}"
    if isinstance(error.__cause__, HfHubHTTPError) and isinstance(error, LocalEntryNotFoundError):
        error = error.__cause__  # the hub answered with an error, and the cache lacks the files
    if isinstance(error, IncompleteSnapshotError):
        return f"the cache holds only a part of {name}, and {_offline(hub)}. Run the same command with a network."
    if isinstance(error, LocalEntryNotFoundError):
        return f"{name} is not in the cache {constants.HF_HUB_CACHE}, and {_offline(hub)}{hint}"
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"{hub} refuses {name} ({error.response.status_code}). Set HF_TOKEN to a token that may read it."
    return f"the download of {name} from {hub} failed: {error}. Run the same command again: complete files are kept."


def _offline(hub: str) -> str:
    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
