"""Download a model from a Hugging Face hub into the cache of huggingface_hub, pinned to one commit.

Weights in safetensors, configuration and tokenizer are taken, and nothing else: no pickle, no code. The library itself
goes by HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE, goes on within a file whose connection broke, and keeps
whole files from one call to the next. Progress goes to standard error.
"""

import re
from dataclasses import dataclass
from pathlib import Path

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

from mars_ray.errors import ModelError
from mars_ray.model.card import CARD_FILE
from mars_ray.model.sources.download_bar import DownloadBar

FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",  # an adapter is refused by this file
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
"""The files of a model that are downloaded."""
LEFT_OUT = ("*/*", "consolidated*.safetensors")
"""Files that are not: those in folders, and the same weights a second time."""

_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on a hub, as `organisation/name`, and a branch, tag or commit of it; None is the newest."""

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_hub_name(name: str) -> HubName | None:
    """Return what `organisation/name` or `organisation/name@revision` names; None for what is not of that form."""
    found = _NAME.fullmatch(name)
    return HubName(found["repository"], found["revision"]) if found else None


def hub_name_of(folder: Path) -> HubName | None:
    """Return the model and the commit whose files lie in `folder` of the cache; None for any other folder."""
    snapshots, repository = folder.parent, folder.parent.parent.name.split("--")
    if snapshots.name != "snapshots" or repository[0] != "models" or len(repository) < 3:
        return None
    return HubName(f"{repository[1]}/{'--'.join(repository[2:])}", folder.name)


def cached_names() -> list[str]:
    """Return the models in the cache, whole or in part."""
    found = (hub_name_of(folder) for folder in Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*"))
    return sorted({name.repository for name in found if name})


def download(name: HubName, hint: str) -> Path:
    """Return the folder in the cache that holds the model, downloading what is missing.

    Without a network the cache must hold all of it. Raises a `ModelError` that says what to do; where there may be no
    such model it ends with `hint`.
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
    # The library lets errors of its transport through, which is another one from time to time.
    except Exception as error:
        raise ModelError(_reason(name, error, hint)) from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name} has no weights in safetensors on {constants.ENDPOINT}. Give a model that has; "
            "of one in GGUF download the .gguf file and give its path."
        )
    return folder


def _reason(name: HubName, error: Exception, hint: str) -> str:
    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return f"{name} is gated. Ask for access on {hub}/{name.repository}, then set HF_TOKEN to a token of yours."
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision!r} on {hub}. Give a branch, a tag or a commit of it."
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return f"{hub} has no model {name.repository!r}, or it is private and HF_TOKEN does not open it{hint}"
    if isinstance(error.__cause__, HfHubHTTPError) and isinstance(error, LocalEntryNotFoundError):
        error = error.__cause__  # the hub answered, and the cache could not stand in for it
    if isinstance(error, IncompleteSnapshotError):
        return f"the cache holds only a part of {name}, and {_offline(hub)}. Run the same again with a network."
    if isinstance(error, LocalEntryNotFoundError):
        return f"{name} is not in the cache {constants.HF_HUB_CACHE}, and {_offline(hub)}{hint}"
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"{hub} refuses {name} ({error.response.status_code}). Set HF_TOKEN to a token that may read it."
    return f"the download of {name} from {hub} broke off: {error}. Run the same again: whole files are kept."


def _offline(hub: str) -> str:
    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
