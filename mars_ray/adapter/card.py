"""Names of adapters to folders, and the cards in them, for all who decide about an adapter and do not load it.

Never: imports torch: who passes requests on has none.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mars_ray.errors import AdapterError
from mars_ray.model.card import CARD_FILE, CalibrationPoint, Card, read_card
from mars_ray.model.digest import weights_digest
from mars_ray.model.resolve import is_elsewhere, resolve_model

Found = TypeVar("Found")
CONFIG_FILE = "adapter_config.json"
SHIPPED = Path(str(files("mars_ray"))) / "assets" / "adapters"
"""Adapters that come with the package, each in a folder named as the model it is for."""


class AdapterCard(BaseModel):
    """What `mars.json` of an adapter says."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: Literal["adapter"] = "adapter"
    block: Annotated[int, Field(ge=2)]
    """Masks of the longest block it was trained with."""
    objective: dict[str, bool | float | str]
    base_model: str
    base_digest: str
    """`model.digest.weights_digest` of the base."""
    init_digest: str | None = None
    """The same of the adapter that training began with; null where it began with a new one. The counts below leave out
    what that had seen."""
    data: str
    examples: int
    tokens: int
    steps: int
    seed: int
    versions: dict[str, str]
    losses: dict[str, float]
    calibration: tuple[CalibrationPoint, ...] = ()


def is_adapter(folder: Path) -> bool:
    """Return whether `folder` looks like an adapter's."""
    return (folder / CONFIG_FILE).is_file()


def read_adapter_card(folder: Path) -> AdapterCard:
    """Return the card of an adapter. Raises `AdapterError` where there is none, or no valid one."""
    try:
        return AdapterCard.model_validate_json((folder / CARD_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise AdapterError(f"{folder} has no valid {CARD_FILE}: {error}. Give the folder of an adapter.") from error


def shipped_adapters() -> list[str]:
    """Return the names of the adapters that come with the package."""
    return sorted(each.name for each in SHIPPED.iterdir())


def unnamed(adapter: Found | None) -> dict[str | None, Found]:
    """Return the adapters of an engine that has this one alone, for all requests, or none."""
    return {} if adapter is None else {None: adapter}


def resolve_adapter(name: str | None) -> Path | None:
    """Return the folder of the adapter that a caller names: a folder or its URL, a shipped one, or one on a hub.

    A folder that exists comes before a shipped one of its name. Raises `AdapterError` for what is no adapter.
    """
    if name is None:
        return None
    exists, shipped = Path(name).expanduser().exists(), shipped_adapters()
    if not exists and name not in shipped and not is_elsewhere(name):
        known = " or ".join(map(repr, shipped))
        raise AdapterError(f"unknown adapter {name!r}: give {known}, a folder, its URL, or organisation/name of a hub.")
    folder = SHIPPED / name if name in shipped and not exists else resolve_model(name)
    if not is_adapter(folder):
        raise AdapterError(f"{name} is no adapter: it has no {CONFIG_FILE}. Name a model by --model.")
    return folder.absolute()


def check_base(card: AdapterCard, folder: Path, base: Path) -> None:
    """Raise `AdapterError` unless the adapter in `folder` was trained on the model in `base`."""
    digest = weights_digest(base)
    if card.base_digest != digest:
        raise AdapterError(
            f"{folder} is an adapter for {card.base_model} (digest {card.base_digest}); the model in {base} has the "
            f"digest {digest}. Give the model it was trained on, or train an adapter for this one."
        )


def resolve_adapters(adapter: str | None, named: Mapping[str, str]) -> dict[str | None, Path]:
    """Return the folders of the adapter of all requests, if there is one, and of those with names."""
    found = unnamed(resolve_adapter(adapter))
    return found | {name: folder for name, each in named.items() if (folder := resolve_adapter(each))}


def decoding_card(base: Path, adapter: Path | None) -> Card | AdapterCard | None:
    """Return the card that says how far to look ahead and what thresholds give: the adapter's, else the model's."""
    return read_card(base) if adapter is None else read_adapter_card(adapter)
