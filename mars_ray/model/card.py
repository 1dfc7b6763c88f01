"""The card of a checkpoint, `mars.json`: its training, and its speed and accuracy at each threshold.

An unknown or missing field is an error. Readers never see a half-written card.
"""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mars_ray.errors import ModelError, OutputError, problems_of
from mars_ray.storage.whole_file import replace_file

CARD_FILE = "mars.json"

Count = Annotated[int, Field(ge=0)]


class _Frozen(BaseModel):
    # JSON has no NaN or infinity. Refuse them; otherwise they would be written as null.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FamilyPoint(_Frozen):
    """Results of one task family at one threshold."""

    examples: Count
    tokens_per_forward: float
    accuracy: float


class CalibrationPoint(_Frozen):
    """Results at one threshold on all examples, with greedy decoding.

    Each `*_std` is the standard deviation over the samples, null for a single sample.
    """

    threshold: float
    tokens_per_forward: float
    """All tokens divided by all forwards."""
    tokens_per_forward_std: float | None
    agreement: float
    """Share of the tokens that autoregressive decoding would also choose, given the tokens before them, as a multiple
    of that at threshold 1."""
    agreement_std: float | None
    accuracy: float | None
    """Mean over task families of the share of right answers; null for data without verifiers."""
    accuracy_std: float | None
    examples: Count
    """Number of examples; like the other counts, it covers all samples together."""
    tokens: Count
    seeds: Annotated[int, Field(ge=1)]
    """Number of samples: seeds of held-out examples, or parts of a data file."""
    data: str
    by_family: dict[str, FamilyPoint]
    """Results for each task family; empty if the data are not task families."""


class Card(_Frozen):
    """The content of `mars.json`. A checkpoint trained with method "ar" has a null `block` and an empty `objective`."""

    method: Literal["ar", "mars"]
    block: Annotated[int, Field(ge=1)] | None
    """Maximum number of tokens predicted per forward in training, including the autoregressive token."""
    objective: dict[str, bool | float | str]
    """Other settings of the training objective, keyed by their names in the configuration."""
    mask_token: str
    mask_token_id: Count
    data: str
    examples: Count
    tokens: Count
    steps: Count
    seed: int
    versions: dict[str, str]
    losses: dict[str, float]
    base_model: str | None = None
    """Model that training started from: `organisation/name@commit` for a model from a hub; null if unknown."""
    calibration: tuple[CalibrationPoint, ...] = ()

    @model_validator(mode="after")
    def _mars_has_a_block(self) -> Self:
        if self.method == "mars" and self.block is None:
            raise ValueError('method "mars" needs a block')
        return self


def gains(points: Sequence[CalibrationPoint]) -> dict[float, tuple[float, float]]:
    """Return the tokens per forward and the agreement at each threshold."""
    return {point.threshold: (point.tokens_per_forward, point.agreement) for point in points}


def agreements(points: Sequence[CalibrationPoint]) -> tuple[tuple[float, float], ...]:
    """Return the agreement at each threshold."""
    return tuple((point.threshold, point.agreement) for point in points)


def accuracies(points: Sequence[CalibrationPoint]) -> tuple[tuple[float, float], ...]:
    """Return the accuracy at each threshold that has one."""
    return tuple((point.threshold, point.accuracy) for point in points if point.accuracy is not None)


def read_card(folder: Path) -> Card | None:
    """Return the card in `folder`, or None if there is no card. Raises `ModelError` for an invalid card."""
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    try:
        return Card.model_validate_json(path.read_bytes())
    except ValidationError as error:
        reasons = problems_of(error)
        raise ModelError(f"{path} is not a valid card: {reasons}. Restore the file or remove it.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error


def write_card(card: BaseModel, folder: Path) -> None:
    """Durably write `mars.json` of a model or an adapter into an existing folder. Several processes may call it."""
    try:
        replace_file(folder / CARD_FILE, [card.model_dump_json(indent=2).encode() + b"\n"])
    except OSError as error:
        raise OutputError(f"Cannot write {folder / CARD_FILE}: {error}.") from error


def library_versions() -> dict[str, str]:
    """Return the versions of torch, transformers, mars-ray and python."""
    return {name: _installed(name) for name in ("torch", "transformers", "mars-ray")} | {
        "python": platform.python_version()
    }


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # imported from a source tree
        return "not installed"
