"""Find the folder of an adapter by name, and read its card.

Never: imports torch, because processes that only forward requests must not load it.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mars_ray.errors import AdapterError, InputError, problems_of
from mars_ray.model.card import CARD_FILE, CalibrationPoint, Card, read_card
from mars_ray.model.digest import vocabulary_digest
from mars_ray.model.resolve import as_name, exists, is_elsewhere, resolve_model

AdapterT = TypeVar("AdapterT")
CONFIG_FILE = "adapter_config.json"
SHIPPED = Path(str(files("mars_ray"))) / "assets" / "adapters"
"""Folder of the adapters that come with the package; each is named after its model."""


class AdapterCard(BaseModel):
    """The content of `mars.json` in the folder of an adapter."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Literal["adapter"] = "adapter"
    block: Annotated[int, Field(ge=2)]
    """Maximum block size in training, in tokens."""
    objective: dict[str, bool | float | str]
    base_model: str
    base_digest: str
    """Digest of the weights of the base model (`model.digest.weights_digest`)."""
    base_vocabulary: str
    """Digest of the vocabulary of the base model (`model.digest.vocabulary_digest`)."""
    init_digest: str | None = None
    """Digest of the adapter that training started from; null for a new adapter. The counts below do not include the
    training of that adapter."""
    data: str
    examples: int
    tokens: int
    steps: int
    seed: int
    versions: dict[str, str]
    losses: dict[str, float]
    calibration: tuple[CalibrationPoint, ...] = ()


def is_adapter(folder: Path) -> bool:
    """Return whether `folder` looks like the folder of an adapter."""
    return (folder / CONFIG_FILE).is_file()


def read_adapter_card(folder: Path) -> AdapterCard:
    """Return the card of an adapter. Raises `AdapterError` for a missing or invalid card."""
    try:
        return AdapterCard.model_validate_json((folder / CARD_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        reason = problems_of(error) if isinstance(error, ValidationError) else error
        raise AdapterError(f"{folder} has no valid {CARD_FILE}: {reason}. Give the folder of an adapter.") from error


def shipped_adapters() -> list[str]:
    """Return the names of the adapters that come with the package."""
    return sorted(folder.name for folder in SHIPPED.iterdir())


def unnamed(adapter: AdapterT | None) -> dict[str | None, AdapterT]:
    """Return the dict of an engine's adapters: `adapter` alone under the name None, or no entries if it is None."""
    return {} if adapter is None else {None: adapter}


def resolve_adapter(name: str | Path | None) -> Path | None:
    """Return the folder of an adapter; `name` is a folder, a URL, an adapter in the package, or a name on a hub.

    An existing folder has precedence over an adapter in the package. Raises `AdapterError` for an unknown name.
    """
    if name is None:
        return None
    name = cast(str, as_name(name))
    if not isinstance(name, str):
        raise AdapterError(
            f"the adapter is {shortened(name)}: give its folder, its URL, or organisation/name of a hub."
        )
    is_here = exists(Path(name).expanduser())
    shipped = shipped_adapters()
    if not is_here and name not in shipped and not is_elsewhere(name):
        names = ", ".join(map(repr, shipped))
        raise AdapterError(f"unknown adapter {name!r}: give {names}, a folder, its URL, or organisation/name of a hub.")
    folder = SHIPPED / name if name in shipped and not is_here else resolve_model(name)
    if not is_adapter(folder):
        raise AdapterError(f"{name} is not an adapter: it has no {CONFIG_FILE}. Give a model with --model.")
    return folder.absolute()


def check_vocabulary(card: AdapterCard, folder: Path, base: Path) -> None:
    """Raise `AdapterError` unless the adapter in `folder` was trained with the vocabulary of the model in `base`."""
    if card.base_vocabulary != vocabulary_digest(base):
        raise AdapterError(
            f"{folder} is an adapter for {card.base_model}, and the model in {base} has other tokens. Give the model "
            "it was trained on, another quantisation or a fine-tune of it, or train an adapter for this one."
        )


def resolve_adapters(adapter: str | Path | None, named: Mapping[str, str | Path]) -> dict[str | None, Path]:
    """Return the folders of the named adapters, keyed by name, and of the default adapter, if any, under the key None.

    Raises `AdapterError` with the name of the first adapter that is not found.
    """
    folders = unnamed(resolve_adapter(adapter))
    if not isinstance(named, Mapping):
        raise AdapterError(f"adapters is {shortened(named)}, must map names to folders, URLs or names on a hub.")
    for name, value in named.items():
        try:
            folder = resolve_adapter(value)
        except InputError as error:
            raise AdapterError(f"adapter {name!r}: {error}", adapter=name) from error
        if folder is None:
            raise AdapterError(f"adapter {name!r} is None: give its folder, its URL, or organisation/name of a hub.")
        folders[name] = folder
    return folders


def decoding_card(base: Path, adapter: Path | None) -> Card | AdapterCard | None:
    """Return the card that holds the block size and the calibration: the adapter's card, or the model's card if there
    is no adapter."""
    return read_card(base) if adapter is None else read_adapter_card(adapter)
